"""From weights and a learning rate, from a trace, or from numbers to what a step weighs and how long it takes on a link."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse import codec
from pulse.analysis.counts import DTypeCounts
from pulse.analysis.entropy import x_log_x
from pulse.analysis.figures import computed_in
from pulse.analysis.numbers import class_count, class_of_pattern, magnitude_of_pattern, ulp
from pulse.analysis.sequences import History
from pulse.bits import DTYPES, TensorBits
from pulse.economics import SPEEDS, WHOLE, Choice, Speeds, break_even, expected_sizes, fastest
from pulse.errors import NoPath
from pulse.patch import Patch, TensorPatch, diff_tensor

UPDATE = 0.33  # mean |step| of Adam over the learning rate that explains the densities of two real runs: docs/analysis.md
LINKS = (1e7, 1e8, 1e9, 1e10, 1e11)
RAW = "int32 + bits"
_OVERHEAD = 1.03  # of a contextual patch over its reference entropy, container included


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of training is expected to be. sizes: encoding -> bytes, `whole` included; how: where the numbers come from."""

    units: int
    changes: float
    width: float
    sizes: Mapping[str, float]
    how: str

    @property
    def density(self) -> float:
        """The share of weights that change."""
        return self.changes / self.units if self.units else 0.0

    @property
    def raw(self) -> float:
        """Bytes as a 4-byte index and the new bits of each change, uncompressed."""
        return self.changes * (4 + self.width)


def from_numbers(units: int, density: float, width: int = 2, encodings: Iterable[str] = codec.ENCODINGS) -> Step:
    """A step of which only the density is known."""
    changes = units * density
    return Step(units, changes, width, expected_sizes(encodings, units, changes, width), "as given; B per change as on other runs")


def visible_share(counts: DTypeCounts, update: float) -> NDArray[np.float64]:
    """P(visible) of each pattern's weights for steps of that mean size: min(1, |step| / ulp). (65536,) float64, 0 for NaN and infinities.

    Holds where masters are spread evenly over the cell of their rounded value.
    """
    found: NDArray[np.float64] = np.minimum(1.0, update / _ulps(counts.dtype.name))
    return found


@cache
def _ulps(name: str) -> NDArray[np.float64]:
    """The ulp, in the dtype of the forward pass, of each pattern of a dtype. (65536,) float64, infinite for NaN and infinities."""
    values = magnitude_of_pattern(name)
    finite = np.isfinite(values)
    found = np.full(values.size, np.inf)
    found[finite] = ulp(values[finite], computed_in(name))
    return found


def expected_density(by_dtype: Mapping[str, DTypeCounts], update: float) -> float:
    """The share of all weights that steps of that mean size change visibly. What is no float does not change."""
    units = sum(int(counts.patterns.sum()) for counts in by_dtype.values())
    changes = sum(float(counts.patterns @ visible_share(counts, update)) for name, counts in by_dtype.items() if DTYPES[name].is_float)
    return changes / units if units else 0.0


def calibrated(by_dtype: Mapping[str, DTypeCounts], density: float) -> float:
    """The mean size of a step that makes the expected density the given one; 0 or infinite where no size does."""
    low, high = 0.0, 1.0
    while expected_density(by_dtype, high) < density:
        high *= 2
        if high > 1e38:
            return math.inf
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_density(by_dtype, middle) < density else (low, middle)
    return high


def from_weights(by_dtype: Mapping[str, DTypeCounts], nbytes: int, update: float, encodings: Iterable[str] = codec.ENCODINGS) -> Step:
    """A step on known weights. update: the mean |step| of the optimizer."""
    units = sum(int(counts.patterns.sum()) for counts in by_dtype.values())
    changes = expected_density(by_dtype, update) * units
    width = nbytes / units if units else 2.0
    sizes = expected_sizes(encodings, units, changes) | {WHOLE: float(nbytes)}
    if "contextual" in sizes:
        sizes["contextual"] = _OVERHEAD * sum(_class_bits(counts, update) for counts in by_dtype.values() if counts.dtype.is_float) / 8
    how = f"P(visible) = min(1, |step| / ulp) with a mean |step| of {update:.3g}"
    return Step(units, changes, width, {name: min(size, float(nbytes)) for name, size in sizes.items()}, how)


def _class_bits(counts: DTypeCounts, update: float) -> float:
    """The reference entropy that is to be expected: n H(k/n) per class, and for a step of up to m numbers either way 1 + log2 m bits."""
    classes, shares = class_of_pattern(counts.dtype.name), visible_share(counts, update)
    size = class_count(counts.dtype)
    units = np.bincount(classes, counts.patterns, size)
    changed = np.bincount(classes, counts.patterns * shares, size)
    numbers = np.maximum(1.0, 2 * update / _ulps(counts.dtype.name))
    steps = float(counts.patterns @ (shares * (1 + np.log2(numbers))))
    return x_log_x(units) - x_log_x(changed) - x_log_x(units - changed) + steps


def from_trace(history: History, encodings: Sequence[str] = codec.ENCODINGS) -> Step:
    """The mean of the steps of a history, each of them encoded in every way."""
    changes, count = 0, 0
    sizes = dict.fromkeys(encodings, 0.0)
    for patch, base in history.patches():
        count += 1
        changes += patch.changed if not patch.whole else _changed(patch, base)
        for name in encodings:
            sizes[name] += len(codec.encode(patch, base, encoding=name))  # type: ignore[arg-type]
    if not count:
        raise NoPath(f"{history.labels[0]} alone is no trace: two moments are needed to see what changes")
    units = sum(spec.units for spec in history.specs.values())
    nbytes = sum(spec.nbytes for spec in history.specs.values())
    means = {name: size / count for name, size in sizes.items()} | {WHOLE: float(nbytes)}
    return Step(units, changes / count, nbytes / max(units, 1), means, f"measured on {count} step{'s' if count != 1 else ''}")


def _changed(patch: Patch, base: Mapping[str, TensorBits]) -> int:
    """The changes in a patch that carries tensors whole."""
    whole = sum(int(np.count_nonzero(base[name].flat != bits.flat)) for name, bits in patch.whole.items())
    return whole + sum(change.positions.size for change in patch.changes)


@dataclass(frozen=True, slots=True)
class OnLink:
    """A step on a link. seconds, busy: by encoding, until it has arrived, and the link's share of the interval; choice: the fastest."""

    link: float
    seconds: Mapping[str, float]
    busy: Mapping[str, float] | None
    useful: float | None
    choice: Choice


def on_link(step: Step, link: float, *, interval: float | None = None, workers: int = 1, speeds: Mapping[str, Speeds] = SPEEDS) -> OnLink:
    """A step on a link of so many bit/s, which `workers` receivers share; each encoding of which the speeds are known.

    interval: seconds of training between two steps. busy: the part of it in which the link is used; useful: the share of all time that
    is training if the trainer waits for the fastest way, interval / (interval + seconds).
    """
    known = {name: size * workers for name, size in step.sizes.items() if name in speeds}
    choice = fastest(known, step.units, step.changes, link, speeds)
    busy = None if interval is None else {name: 8 * size / link / interval for name, size in known.items()}
    useful = None if interval is None else interval / (interval + choice.seconds[choice.encoding])
    return OnLink(link, choice.seconds, busy, useful, choice)


def borders(step: Step, workers: int = 1, speeds: Mapping[str, Speeds] = SPEEDS) -> list[tuple[float, str, str]]:
    """Where one way stops being the fastest and another one starts: (bit/s, the way below, the way above), slowest link first."""
    sizes = {name: size * workers for name, size in step.sizes.items() if name in speeds}
    order = sorted(sizes, key=lambda name: (speeds[name].seconds(step.units, step.changes), sizes[name]))  # that of infinite bandwidth
    found: list[tuple[float, str, str]] = []
    now = order[0]
    while smaller := [name for name in order if sizes[name] < sizes[now]]:
        link, below = max((break_even(name, now, sizes, step.units, step.changes, speeds), name) for name in smaller)
        found.insert(0, (link, below, now))
        now = below
    return found


def measured_speeds(encodings: Sequence[str] = codec.ENCODINGS, units: int = 1 << 20) -> dict[str, Speeds]:
    """The speeds of this machine, from one synthetic BF16 tensor at two densities; takes under a second once kernels are compiled."""
    rng = np.random.default_rng(0)
    flat = (rng.standard_normal(units).astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    old = TensorBits("BF16", (units,), flat)
    times = {name: [] for name in encodings}  # type: dict[str, list[tuple[int, float, float]]]
    for density in (0.002, 0.02):
        new = TensorBits("BF16", (units,), flat + (rng.random(units) < density).astype(np.uint16))
        changes = int((new.flat != flat).sum())
        for name in encodings:
            times[name].append((changes, *_timed(name, old, new)))
    found = {
        name: Speeds(*_line(units, [(n, t) for n, t, _ in seen]), *_line(units, [(n, t) for n, _, t in seen]))
        for name, seen in times.items()
    }
    return found | {WHOLE: SPEEDS[WHOLE]}


def _timed(encoding: str, old: TensorBits, new: TensorBits) -> tuple[float, float]:
    """Seconds to compare and encode, and to decode and apply; the best of three."""

    def encode() -> bytes:
        change = diff_tensor("w", old, new)
        changes = (change,) if isinstance(change, TensorPatch) else ()
        return codec.encode(Patch(changes), {"w": old}, encoding=encoding)  # type: ignore[arg-type]

    def apply() -> None:
        for change in codec.decode(blob, {"w": old}).changes:
            target.flat[change.located] = change.values

    blob, target = encode(), old.copy()
    return _best(encode), _best(apply)


def _best(function: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _line(units: int, points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The ns per weight and per change of the line through two measurements; never below zero."""
    (few, quick), (many, slow) = points
    change = max(0.0, (slow - quick) / (many - few))
    return max(0.0, (quick - change * few) / units) * 1e9, change * 1e9


def break_evens(step: Step, workers: int = 1, speeds: Mapping[str, Speeds] = SPEEDS) -> list[tuple[float, str, str]]:
    """For every two ways: (bit/s, the smaller one, the larger one), the link below which the smaller one arrives first; may be infinite."""
    sizes = {name: size * workers for name, size in step.sizes.items() if name in speeds}
    order = sorted(sizes, key=lambda name: sizes[name])
    return [(break_even(a, b, sizes, step.units, step.changes, speeds), a, b) for a, b in combinations(order, 2)]
