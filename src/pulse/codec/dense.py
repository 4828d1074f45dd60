"""Dense payloads: every entry of a pseudo-gradient, as FP32 or as small whole numbers with one scale per group.

What others send, for comparison. FP32 as it is; or `bits` 8 or 4: groups of 256 values, each with an FP32 scale, the largest magnitude
over 127 or 7, rounded so that no number stands for more than it; numbers round to nearest even. Two 4-bit numbers share a byte, the first
in its low half.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.canonical import fields, natural
from pulse.codec import container
from pulse.errors import BaseMismatch, FormatError

GROUP = 256
BITS = (32, 8, 4)


def encode(values: NDArray[np.float32], bits: int, facts: Mapping[str, Any] | None = None) -> tuple[bytes, NDArray[np.float32]]:
    """The payload, and the values that it really carries. values: (n,) float32, finite, or `ValueError`."""
    if bits not in BITS:
        raise ValueError(f"{bits} bits; known are {BITS}")
    if not np.isfinite(values).all():
        raise ValueError("a pseudo-gradient that is not finite cannot be sent")
    header = {"kind": "dense", "facts": dict(facts or {}), "units": values.size, "bits": bits}
    if bits == 32:
        return container.write(header, [values.astype("<f4", copy=False).tobytes()]), values
    scales, numbers = _quantised(values, bits)
    stored = numbers.view(np.uint8)
    if bits == 4:
        stored = np.pad(stored, (0, stored.size % 2))
        stored = (stored[::2] & np.uint8(15)) | (stored[1::2] << np.uint8(4))
    return container.write(header, [scales.tobytes(), stored.tobytes()]), _restored(scales, numbers)


def decode(blob: bytes | memoryview, units: int) -> NDArray[np.float32]:
    """The values, (units,). Raises `FormatError` for bytes that are no dense payload, `BaseMismatch` for another number of weights."""
    raw, sections = container.read(blob)
    if raw.pop("kind", None) != "dense" or not isinstance(raw.pop("facts", None), dict):
        raise FormatError("this is no dense payload of a round: its header does not say so")
    numbers = fields(raw, units=natural, bits=natural)
    if numbers["units"] != units:
        raise BaseMismatch(f"the payload is for {numbers['units']} weights, here are {units}")
    groups = -(-units // GROUP)
    sizes = {32: [4 * units], 8: [4 * groups, units], 4: [4 * groups, -(-units // 2)]}.get(numbers["bits"])
    if sizes is None or [len(section) for section in sections] != sizes:
        raise FormatError("dense payload: the sections do not fit the weights")
    if numbers["bits"] == 32:
        values: NDArray[np.float32] = np.frombuffer(sections[0], "<f4")
    else:
        stored = np.frombuffer(sections[1], np.uint8)
        if numbers["bits"] == 4:
            stored = np.stack((stored << np.uint8(4), stored & np.uint8(0xF0)), axis=1).reshape(-1)[:units]
        whole = stored.view(np.int8) >> np.int8(4) if numbers["bits"] == 4 else stored.view(np.int8)
        with np.errstate(invalid="ignore", over="ignore"):
            values = _restored(np.frombuffer(sections[0], "<f4"), whole)
    if not np.isfinite(values).all():
        raise FormatError("the payload holds a value that is not finite")
    return values


def _quantised(values: NDArray[np.float32], bits: int) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    most = np.float32((1 << (bits - 1)) - 1)
    grouped = np.pad(values, (0, -values.size % GROUP)).reshape(-1, GROUP)
    largest = np.abs(grouped).max(axis=1, initial=0)
    scales = largest / most
    beyond = scales.astype(np.float64) * most > largest
    scales[beyond] = np.nextafter(scales[beyond], np.float32(0))
    divisors = np.where(scales > 0, scales, np.float32(1))[:, None]
    numbers = np.clip(np.rint(grouped / divisors), -most, most).astype(np.int8)
    return scales, numbers.reshape(-1)[: values.size]


def _restored(scales: NDArray[np.float32], numbers: NDArray[np.int8]) -> NDArray[np.float32]:
    restored: NDArray[np.float32] = numbers.astype(np.float32) * np.repeat(scales, GROUP)[: numbers.size]
    return restored
