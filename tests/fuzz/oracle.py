"""What may come of spoiled bytes: a refusal in our own words, or something sound. `Unsound` and every other exception is a bug."""

import tracemalloc
from contextlib import suppress
from dataclasses import replace

import numpy as np

from pulse import codec
from pulse.codec import payload
from pulse.errors import BaseMismatch, FormatError, PulseError, WeightsMismatch
from pulse.patch import apply_bits

REFUSALS = (FormatError, WeightsMismatch, BaseMismatch)
MAX_BYTES = 1 << 23
MEMORY = 64 << 20  # a header of a megabyte takes about 25 of them as objects


class Unsound(AssertionError):
    """It decodes, to something that cannot be."""


def patch_outcome(sample):
    """The name of the refusal, or "decoded"; raises for what must not be."""
    with suppress(FormatError):
        codec.read_header(sample.blob)
    _alone(sample.blob)
    try:
        patch = codec.decode(sample.blob, sample.base, max_bytes=MAX_BYTES, threads=1)
    except REFUSALS as refusal:
        return type(refusal).__name__
    _check_form(patch)
    header = codec.inspect(sample.blob)
    again = codec.encode(patch, sample.base, encoding=header.encoding, block=header.block, threads=1)
    if codec.decode(again, sample.base, threads=1) != patch:
        raise Unsound("what decodes does not survive a round trip")
    with suppress(PulseError):
        apply_bits(replace(patch, base=None, result=None), sample.base)
    return "decoded"


def payload_outcome(sample):
    """The same for a payload."""
    with suppress(FormatError):
        payload.read(sample.blob)
    try:
        (entries,) = payload.decode([sample.blob], sample.anchor, threads=1)
    except REFUSALS as refusal:
        return type(refusal).__name__
    at = entries.positions.astype(np.int64)
    if at.size and (at[0] < 0 or at[-1] >= sample.anchor.units or not (np.diff(at) > 0).all()):
        raise Unsound("positions that do not ascend inside the anchor")
    if entries.values.shape != at.shape or not np.isfinite(entries.values).all():
        raise Unsound("values that do not fit the positions, or are not finite")
    again = payload.encode(entries, sample.anchor, block=payload.read(sample.blob)[0].block, threads=1).blob
    (found,) = payload.decode([again], sample.anchor, threads=1)
    if not all(np.array_equal(left.view(np.uint32), right.view(np.uint32)) for left, right in zip(found, entries, strict=True)):
        raise Unsound("what decodes does not survive a round trip")
    return "decoded"


def _alone(blob):
    """Without a base."""
    try:
        _check_form(codec.decode(blob, max_bytes=MAX_BYTES, threads=1))
    except FormatError:
        return
    except ValueError:
        if codec.inspect(blob).encoding != "contextual":
            raise


def _check_form(patch):
    for change in patch.changes:
        at = change.positions.astype(np.int64)
        if at.size and (at[0] < 0 or at[-1] >= change.part.units or not (np.diff(at) > 0).all()):
            raise Unsound(f"positions that do not ascend inside {change.part}")
        if change.values.shape != at.shape or (patch.values == "steps" and not change.values.all()):
            raise Unsound(f"values that do not fit the positions of {change.part}")


def document_outcome(data, read):
    """The same for a manifest, a late anchor, an index or a hint."""
    try:
        found = read(data)
    except FormatError as refusal:
        return type(refusal).__name__
    if hasattr(found, "to_bytes") and not isinstance(found, int) and found.to_bytes() != data:
        raise Unsound("what is read is not what is written")
    return "decoded"


def memory_of(work, *arguments):
    """What `work` returns; `Unsound` if it held too much memory."""
    tracemalloc.start()
    try:
        found = work(*arguments)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > MEMORY:
        raise Unsound(f"{peak} bytes of memory held at a time")
    return found
