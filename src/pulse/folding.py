"""Several patches in a row as one, with bits for values: what a subscriber that was away for a while applies in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.bits import advance, dtype_of
from pulse.patch import Patch, Positions, TensorPatch, compose

Gather = Callable[[str, Positions], NDArray[Any]]  # a tensor's name and positions -> the bits that are there now


def fold(patches: Sequence[Patch], gather: Gather) -> Patch:
    """One absolute patch that does what `patches` do in turn, reading the weights only where something is written.

    Patches of one kind of values compose without the weights, so they are first folded in runs of one kind.
    """
    total = Patch()
    for _, run in groupby(patches, key=lambda patch: patch.values):
        folded = _composed(list(run))
        if folded.values == "steps":
            folded = replace(folded, changes=tuple(_with_bits(change, total, gather) for change in folded.changes), values="bits")
        total = compose(replace(total, base=None, result=None), replace(folded, base=None, result=None))
    return total


def _composed(patches: Sequence[Patch]) -> Patch:
    """Pair by pair, so that n patches cost log n passes."""
    while len(patches) > 1:
        pairs = [compose(patches[i], patches[i + 1]) for i in range(0, len(patches) - 1, 2)]
        patches = pairs + list(patches[len(pairs) * 2 :])
    return patches[0]


def _with_bits(change: TensorPatch, earlier: Patch, gather: Gather) -> TensorPatch:
    """One change's steps as bits: over what `earlier` will have written, or else over the bits that are there now."""
    name, positions = change.part.name, change.located
    if name in earlier.whole:
        before = earlier.whole[name].flat[positions]
    else:
        before = gather(name, positions)
        for other in (other for other in earlier.changes if other.part.name == name):
            at = other.located
            where = np.minimum(np.searchsorted(at, positions), max(at.size - 1, 0))
            hit = at[where] == positions if at.size else np.zeros(positions.size, bool)
            before[hit] = other.values[where[hit]]
    return replace(change, values=advance(before, change.values, dtype_of(change.part.spec.dtype)))
