"""Bytes of one step in every layout, ours and others', beside the reference entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pulse
from bench.rivals import PAPER, RIVALS
from bench.steps import Step
from pulse.analysis import reference_bits
from pulse.codec import ENCODINGS, Encoding
from pulse.patch import Patch

WHOLE, REFERENCE = "whole BF16", "reference entropy"


@dataclass(frozen=True, slots=True)
class Row:
    """One layout of one step. kind: ours, other, or bound (not a layout). exact: ours was decoded and applied, bit for bit."""

    layout: str
    kind: str
    nbytes: float
    per_change: float
    times_smaller: float
    to_paper: float
    to_reference: float
    exact: bool | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The table of one step, and what its figures depend on."""

    step: str
    lr: str
    regime: str
    median: float
    units: int
    changed: int
    density: float
    rows: tuple[Row, ...]


def ours(step: Step, patch: Patch, encoding: Encoding) -> tuple[int, bool]:
    """Size of the step in one of our encodings, and whether it gives back the same bits."""
    blob = pulse.encode(patch, base=step.old, encoding=encoding)
    return len(blob), pulse.apply(pulse.decode(blob, base=step.old), step.old) == step.new


def measure(step: Step, say: Callable[[str], None]) -> Sizes:
    """Every layout of one step. Nothing is taken on trust: ours are decoded again here, the others in tests/bench."""
    if not step.changed:
        raise ValueError(f"{step.name}: nothing changed, so there is nothing to compare")
    found: list[tuple[str, str, float, bool | None]] = [(WHOLE, "bound", step.nbytes, None)]
    for name, layout in RIVALS.items():
        say(f"{step.name}: {name}")
        found.append((name, "other", len(layout(step.changes)), None))
    patch = pulse.diff(step.old, step.new)
    for encoding in ENCODINGS:
        say(f"{step.name}: {encoding}")
        nbytes, exact = ours(step, patch, encoding)
        found.append((f"pulse, {encoding}", "ours", nbytes, exact))
    say(f"{step.name}: {REFERENCE}")
    reference = (reference_bits(step.old, step.new) or math.nan) / 8
    found.append((REFERENCE, "bound", reference, None))
    paper = next(nbytes for name, _, nbytes, _ in found if name == PAPER)
    rows = tuple(
        Row(name, kind, nbytes, nbytes / step.changed, step.nbytes / nbytes, nbytes / paper, nbytes / reference, exact)
        for name, kind, nbytes, exact in sorted(found, key=lambda entry: -entry[2])
    )
    return Sizes(step.name, step.lr, step.regime, step.median, step.units, step.changed, step.changed / step.units, rows)
