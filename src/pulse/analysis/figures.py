"""Counts as the figures that people and programs read: plain numbers in dicts and lists, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.analysis.counts import Counts, DTypeCounts
from pulse.analysis.layers import KINDS, kind_of
from pulse.analysis.numbers import LAYOUTS, magnitude_of_pattern
from pulse.bits import DTYPES

Row = dict[str, Any]
WORST = 10  # |step| of Adam over the learning rate at most, with betas of 0.9 and 0.999: sqrt((1 - 0.9) / (1 - 0.999))


def share(part: float, whole: float) -> float:
    """`part` of `whole`, 0 of nothing."""
    return float(part) / float(whole) if whole else 0.0


def figures(counts: Counts, learning_rate: float | None = None) -> Row:
    """Everything that `pulse analyze` reports. Shares are of 1, sizes in bytes."""
    specs = counts.history.specs
    units = sum(spec.units for spec in specs.values())
    changed = sum(counts.changed.values(), np.zeros(counts.steps, np.int64))
    return {
        "labels": list(counts.history.labels),
        "steps": counts.steps,
        "tensors": len(specs),
        "weights": units,
        "bytes": sum(spec.nbytes for spec in specs.values()),
        "dtypes": {name: sum(spec.units for spec in specs.values() if spec.dtype == name) for name in counts.by_dtype},
        "changed": int(changed.sum()),
        "share": share(changed.sum(), units * counts.steps),
        "per_step": _per_step(counts, changed, units),
        "over_k_steps": [_over(k, counts.windows[k][k - 1 :], units) for k in counts.windows],
        "per_tensor": (per_tensor := _per_tensor(counts)),
        "per_kind": _per_kind(per_tensor, counts.steps),
        "per_class": [row for by_dtype in counts.by_dtype.values() for row in _per_class(by_dtype)],
        "step_sizes": list(_step_sizes(counts.sizes.sum(axis=0))),
        "directions": _directions(counts),
        "magnitudes": magnitudes(counts.by_dtype),
        "critical": None if learning_rate is None else [_critical(found, learning_rate) for found in _floats(counts.by_dtype)],
        "views": _views(counts) if counts.views else None,
    }


def _per_step(counts: Counts, changed: NDArray[np.int64], units: int) -> list[Row]:
    labels, sizes = counts.history.labels, counts.history.nbytes
    return [
        {
            "from": labels[step],
            "to": labels[step + 1],
            "changed": int(changed[step]),
            "share": share(changed[step], units),
            "steps_of_1": share(counts.sizes[step][0], changed[step]),
            "upwards": share(counts.up[step], changed[step]),
            "again": int(counts.again[step]),
            "same_direction": share(counts.same[step], counts.again[step]) if counts.again[step] else None,
            "reference_bytes": None if bits is None else bits / 8,
            "reference_bytes_per_change": bits / 8 / int(changed[step]) if bits is not None and changed[step] else None,
            "published_bytes": sizes[step + 1],
        }
        for step, bits in enumerate(counts.reference_bits())
    ]


def _over(k: int, differ: NDArray[np.int64], units: int) -> Row:
    shares = [share(count, units) for count in differ.tolist()]
    return {"k": k, "windows": len(shares), "share": sum(shares) / len(shares), "lowest": min(shares), "highest": max(shares)}


def _per_tensor(counts: Counts) -> list[Row]:
    return [
        {
            "name": name,
            "kind": kind_of(name),
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "weights": spec.units,
            "changed": int(counts.changed[name].sum()),
            "share": share(counts.changed[name].sum(), spec.units * counts.steps),
            "changed_per_step": counts.changed[name].tolist(),
        }
        for name, spec in counts.history.specs.items()
    ]


def _per_kind(tensors: list[Row], steps: int) -> list[Row]:
    rows = []
    for kind in KINDS:
        group = [row for row in tensors if row["kind"] == kind]
        weights, changed = (sum(row[key] for row in group) for key in ("weights", "changed"))
        if group:
            row = {"kind": kind, "tensors": len(group), "weights": weights, "changed": changed, "share": share(changed, weights * steps)}
            rows.append(row)
    return rows


def _per_class(counts: DTypeCounts) -> Iterator[Row]:
    """One row per exponent class that occurs. weights: their number before each step, added up over the steps."""
    if not counts.dtype.is_float:
        return
    layout = LAYOUTS[counts.dtype.name]
    units, changed = counts.units().sum(axis=0), counts.left.sum(axis=0)
    for exponent in np.flatnonzero(units).tolist():
        yield {
            "dtype": counts.dtype.name,
            "class": exponent,
            "from": 0.0 if exponent == 0 else _power(exponent - layout.bias),
            "weights": int(units[exponent]),
            "changed": int(changed[exponent]),
            "share": share(changed[exponent], units[exponent]),
        }


def _power(exponent: int) -> float | None:
    """2^exponent, None where a Python float has no such number."""
    return math.ldexp(1.0, exponent) if exponent < 1024 else None


def _step_sizes(sizes: NDArray[np.int64]) -> Iterator[Row]:
    for size in range(int(np.flatnonzero(sizes).max(initial=-1)) + 1):
        first, last = (1 << (size - 1)) + 1 if size else 1, 1 << size
        yield {"from": first, "to": last, "changes": int(sizes[size]), "share": share(sizes[size], sizes.sum())}


def _directions(counts: Counts) -> Row:
    rows = [
        {"steps_since": gap, "changes": int(other + same), "same_direction": share(same, other + same)}
        for gap, (other, same) in enumerate(counts.since.tolist())
        if other + same
    ]
    again, same = int(counts.again.sum()), int(counts.same.sum())
    return {"again": again, "same": same, "same_direction": share(same, again) if again else None, "since": rows}


def _floats(by_dtype: Mapping[str, DTypeCounts]) -> list[DTypeCounts]:
    return [counts for name, counts in by_dtype.items() if DTYPES[name].is_float]


def magnitudes(by_dtype: Mapping[str, DTypeCounts]) -> Row:
    """|w| at the start, by powers of two. The median is the lower one, and of F32 and F64 known to 7 and 4 bits after the first."""
    found = _floats(by_dtype)
    values = np.concatenate([magnitude_of_pattern(counts.dtype.name) for counts in found] or [np.zeros(0)])
    numbers = np.concatenate([counts.patterns for counts in found] or [np.zeros(0, np.int64)])
    finite = np.isfinite(values)
    plain, of = values[finite], numbers[finite]
    powers = np.frexp(plain)[1].astype(np.int64) - 1
    rows = []
    for power in np.unique(powers[(of > 0) & (plain > 0)]).tolist():
        count = int(of[(powers == power) & (plain > 0)].sum())
        rows.append({"from": math.ldexp(1.0, power), "power": power, "weights": count, "share": share(count, of.sum())})
    return {
        "weights": int(numbers.sum()),
        "median": _median(plain, of),
        "zero": int(of[plain == 0].sum()),
        "not_finite": int(numbers[~finite].sum()),
        "binades": rows,
    }


def _median(values: NDArray[np.float64], numbers: NDArray[np.int64]) -> float | None:
    """The lower median of values that occur so often; None of nothing."""
    order = np.argsort(values, kind="stable")
    up_to = np.cumsum(numbers[order])
    if not up_to.size or up_to[-1] == 0:
        return None
    return float(values[order][np.searchsorted(up_to, (up_to[-1] + 1) // 2)])


def computed_in(dtype: str) -> str:
    """The dtype whose rounding decides what is visible: that of the forward pass, BF16 where tensors are wider."""
    return dtype if DTYPES[dtype].width == 1 or dtype == "F16" else "BF16"


def _critical(counts: DTypeCounts, learning_rate: float) -> Row:
    """Below which |w| a step of that size reaches half a ulp at least: ulp(w) <= |w| 2^-m, so |w| = 2^(m + 1) steps."""
    view = computed_in(counts.dtype.name)
    factor = 2 ** (LAYOUTS[view].mantissa + 1)
    values = magnitude_of_pattern(counts.dtype.name)
    row: Row = {"dtype": counts.dtype.name, "view": view, "learning_rate": learning_rate}
    for name, limit in (("", factor * learning_rate), ("worst_", WORST * factor * learning_rate)):
        below = int(counts.patterns[values < limit].sum())
        row |= {f"{name}magnitude": limit, f"{name}below": below, f"{name}share": share(below, counts.patterns.sum())}
    return row


def _views(counts: Counts) -> list[Row]:
    rows = []
    for name, found in counts.by_dtype.items():
        units = int(found.patterns.sum())
        own = found.left.sum(axis=1)
        for view, changed in [(name, own), *found.visible.items()] if found.visible else []:
            shares = [share(count, units) for count in changed.tolist()]
            mean = sum(shares) / len(shares) if shares else 0.0
            rows.append({"dtype": name, "view": view, "weights": units, "share": mean, "share_per_step": shares})
    return rows
