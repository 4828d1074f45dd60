"""Several patches in a row as one, with bits for values: what a subscriber that was away for a while applies in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pulse.bits import TensorBits, advance, dtype_of
from pulse.patch import Patch, Positions, TensorPatch, compose, scatter

Read = Callable[[str], TensorBits]  # a tensor's name -> all bits that are there now
Step = TypeVar("Step")
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


def fold_in_turn(steps: Iterable[Step], load: Callable[[Step, Ahead], Patch], names: Iterable[str], read: Read, gather: Gather) -> Patch:
    """`fold`, of patches that are loaded one after the other, each beside what the ones before it will have written."""
    loaded: list[Patch] = []
    for step in steps:
        base = Ahead(names, read, gather, loaded)
        patch = load(step, base)
        loaded = [base.folded, patch] if base.was_read else [*loaded, patch]
    return fold(loaded, gather)


class Ahead(Mapping[str, TensorBits]):
    """The weights as they will be after some patches, read one tensor at a time, and only if somebody asks."""

    def __init__(self, names: Iterable[str], read: Read, gather: Gather, patches: Sequence[Patch]) -> None:
        self._names = frozenset(names)
        self._read = read
        self._gather = gather
        self._patches = patches

    @property
    def was_read(self) -> bool:
        """Whether anybody asked."""
        return "folded" in self.__dict__

    @cached_property
    def folded(self) -> Patch:
        """The patches as one."""
        return fold(self._patches, self._gather)

    @cached_property
    def _changes(self) -> dict[str, list[TensorPatch]]:
        by_name: dict[str, list[TensorPatch]] = {}
        for change in self.folded.changes:
            by_name.setdefault(change.part.name, []).append(change)
        return by_name

    def __getitem__(self, name: str) -> TensorBits:
        if name not in self._names:
            raise KeyError(name)
        if name in self.folded.whole:
            return self.folded.whole[name]
        bits = self._read(name)
        if name in self._changes:
            bits = bits.copy()
            for change in self._changes[name]:
                scatter(bits.flat, change.located, change.values)
        return bits

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
