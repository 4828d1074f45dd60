"""Checkpoints, or a store's chain, as one stream of moves: what every piece of every tensor did from moment to moment.

Checkpoints are mapped and go by piece by piece, all moments of a piece in a row, so that only a piece is ever in memory. A chain goes by
moment by moment: its first version is restored once, and every later one is written over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pulse.analysis.past import WINDOWS, Past
from pulse.analysis.tally import Move
from pulse.bits import Spec, TensorBits, dtype_of
from pulse.digest import check, digest_of
from pulse.errors import NoPath, WeightsMismatch
from pulse.folding import fold_in_turn
from pulse.manifest import Manifest
from pulse.patch import Patch, Positions, TensorPatch, changed_positions, diff_tensor
from pulse.versions import Versions

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Change = tuple[Positions, NDArray[Any], NDArray[Any]]  # where, the bits before, the bits after

PIECE = 1 << 18  # units: 512 KiB of BF16, so that a piece that was compared is still in the cache when it is compared again
_FEW = 8  # changes held, of a piece's units, from which comparing it with earlier pieces is faster than going back over them
_NOTHING = np.zeros(0, np.uint64)


class History(Protocol):
    """Weights at moments 0 to `len(labels) - 1`."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """The dtype and shape of every tensor."""

    @property
    def labels(self) -> Sequence[str]:
        """What the user calls each moment."""

    @property
    def nbytes(self) -> Sequence[int | None]:
        """What was published for the change before each moment, where that is known."""

    def moves(self, report: Progress) -> Iterator[Move]:
        """Every move of every piece; of each piece in the order of moments, from moment 0 on."""

    def patches(self) -> Iterator[tuple[Patch, Mapping[str, TensorBits]]]:
        """The change before each moment but the first as a patch, and what it applies to, which may not outlive the next one."""


def same_tensors(specs: Mapping[str, Spec], others: Mapping[str, Spec], what: str) -> None:
    """`WeightsMismatch`, naming the tensors, unless both are the same."""
    if odd := sorted(name for name in set(specs) | set(others) if specs.get(name) != others.get(name)):
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise WeightsMismatch(f"{what}: other tensors than in the first of the sequence: {', '.join(odd[:3])}{more}")


class Checkpoints:
    """Sets of weights one after the other, usually mapped files."""

    def __init__(self, weights: Sequence[Mapping[str, TensorBits]], labels: Sequence[str], *, piece: int = PIECE) -> None:
        self.specs = {name: bits.spec for name, bits in weights[0].items()}
        for label, others in zip(labels, weights, strict=True):
            same_tensors(self.specs, {name: bits.spec for name, bits in others.items()}, label)
        self.labels = list(labels)
        self.nbytes: list[int | None] = [None] * len(labels)
        self._weights = weights
        self._piece = piece

    def moves(self, report: Progress) -> Iterator[Move]:
        """See `History`."""
        done, total = 0, len(self.labels) * sum(spec.nbytes for spec in self.specs.values())
        longest = min(self._piece, max((spec.units for spec in self.specs.values()), default=0))
        differ, scratch = np.zeros((2, -(-longest // 8) * 8), np.bool_)  # one for all, or the system would hand out fresh memory each time
        for name, spec in self.specs.items():
            flats = [weights[name].flat for weights in self._weights]
            for start in range(0, spec.units, self._piece):
                pieces = [flat[start : start + self._piece] for flat in flats]
                yield from _moves((name, start), spec, pieces, differ, scratch)
                done += len(pieces) * pieces[0].nbytes
                report(done, total)

    def patches(self) -> Iterator[tuple[Patch, Mapping[str, TensorBits]]]:
        """See `History`."""
        for old, new in pairwise(self._weights):
            found = {name: diff_tensor(name, old[name], new[name]) for name in self.specs}
            changes = tuple(change for change in found.values() if isinstance(change, TensorPatch))
            yield Patch(changes, {name: bits for name, bits in found.items() if isinstance(bits, TensorBits)}), old


def _moves(
    piece: tuple[str, int], spec: Spec, pieces: Sequence[NDArray[Any]], differ: NDArray[np.bool_], scratch: NDArray[np.bool_]
) -> Iterator[Move]:
    """The moves of one piece. differ, scratch: memory for at least as many units, rounded up to eight; scratch all false."""
    dtype, size = dtype_of(spec.dtype), pieces[0].size
    yield Move(piece, dtype, 0, pieces[0], _NOTHING, pieces[0][:0], pieces[0][:0], {})
    differ = differ[: -(-size // 8) * 8]
    differ[size:] = False
    past = Past(pieces[0])
    for moment, (old, new) in enumerate(pairwise(pieces), 1):
        np.not_equal(old, new, out=differ[:size])
        positions, before, after = pick(differ, old, new)
        past.add(positions, before)
        if past.changes < size // _FEW:
            windows = past.windows(new, scratch)
        else:
            windows = {k: int(np.count_nonzero(np.not_equal(pieces[moment - k], new, out=differ[:size]))) for k in WINDOWS if k <= moment}
        yield Move(piece, dtype, moment, new, positions, before, after, windows)


def plain_pick(differ: NDArray[np.bool_], old: NDArray[Any], new: NDArray[Any]) -> Change:
    """Where `differ` is true, and the units there. differ: a multiple of eight, false after the last unit."""
    positions = np.flatnonzero(differ).view(np.uint64)
    return positions, old[positions], new[positions]


def pick(differ: NDArray[np.bool_], old: NDArray[Any], new: NDArray[Any]) -> Change:
    """`plain_pick`, compiled where that pays."""
    if old.size < 1 << 14:
        return plain_pick(differ, old, new)
    from pulse.analysis import kernels

    found: Change = kernels.pick(differ.view(np.uint64), old, new)
    return found


def went_on(manifests: Sequence[Manifest]) -> list[Manifest]:
    """The versions that the trainer went on from: those that no later version's step goes back to, or before."""
    kept: list[Manifest] = []
    lowest: int | None = None
    for manifest in reversed(manifests):
        if manifest.step is None or lowest is None or manifest.step < lowest:
            kept.insert(0, manifest)
            lowest = lowest if manifest.step is None else manifest.step
    return kept


class Chain:
    """The versions `first` to `last` of a store, without those that the trainer went back from."""

    def __init__(self, versions: Versions, first: int, last: int) -> None:
        self._versions = versions
        self._manifests = [versions.manifest(version) for version in range(first, last + 1)]
        self.kept = went_on(self._manifests)
        self.specs = dict(versions.index(self.kept[0].tensors).specs)
        self.labels = [f"version {manifest.version}" + _step(manifest) for manifest in self.kept]
        gaps = [1, *(after.version - before.version for before, after in pairwise(self.kept))]
        self.nbytes = [kept.nbytes if gap == 1 and kept.patch else None for gap, kept in zip(gaps, self.kept, strict=True)]

    def moves(self, report: Progress) -> Iterator[Move]:
        """See `History`."""
        tensors = self._versions.restore(self.kept[0].version)
        same_tensors(self.specs, {name: bits.spec for name, bits in tensors.items()}, self.labels[0])
        past = {name: Past(bits.flat) for name, bits in tensors.items()}
        scratch = np.zeros(max((spec.units for spec in self.specs.values()), default=0), np.bool_)
        for name, bits in tensors.items():
            yield Move((name, 0), dtype_of(bits.dtype), 0, bits.flat, _NOTHING, bits.flat[:0], bits.flat[:0], {})
        total = sum(manifest.nbytes for manifest in self.kept[1:])
        for moment, (before, after) in enumerate(pairwise(self.kept), 1):
            changes = written(self._between(tensors, before.version, after.version), tensors)
            for name, bits in tensors.items():
                positions, old, new = changes.get(name, (_NOTHING, bits.flat[:0], bits.flat[:0]))
                past[name].add(positions, old)
                windows = past[name].windows(bits.flat, scratch)
                yield Move((name, 0), dtype_of(bits.dtype), moment, bits.flat, positions, old, new, windows)
            report(sum(manifest.nbytes for manifest in self.kept[1 : moment + 1]), total)
        check(f"{self.labels[-1]}: state", self.kept[-1].state_digest, digest_of(tensors))

    def patches(self) -> Iterator[tuple[Patch, Mapping[str, TensorBits]]]:
        """See `History`."""
        tensors = self._versions.restore(self.kept[0].version)
        for before, after in pairwise(self.kept):
            patch = self._between(tensors, before.version, after.version)
            yield patch, tensors
            written(patch, tensors)

    def _between(self, tensors: Mapping[str, TensorBits], before: int, after: int) -> Patch:
        """What leads from one version, which `tensors` are, to a later one, with bits for values."""
        between = self._manifests[before - self._manifests[0].version + 1 : after - self._manifests[0].version + 1]
        if all(manifest.patch is not None for manifest in between):
            return fold_in_turn(
                between,
                lambda manifest, base: self._versions.patch(manifest, self.specs, base),
                self.specs,
                tensors.__getitem__,
                lambda name, at: tensors[name].flat[at],
            )
        restored = self._versions.restore(after)
        same_tensors(self.specs, {name: bits.spec for name, bits in restored.items()}, f"version {after}")
        return Patch(whole=restored)


def _step(manifest: Manifest) -> str:
    return "" if manifest.step is None else f" (step {manifest.step})"


def chain_of(versions: Versions, first: int | None = None, last: int | None = None) -> Chain:
    """The chain of a store between two versions, both included. `NoPath` if it has none, or not these."""
    newest = versions.newest()
    if newest is None:
        raise NoPath(f"{versions.store.url}: nothing has been published here")
    first, last = 0 if first is None else first, newest if last is None else last
    if not first <= last <= newest:
        raise NoPath(f"{versions.store.url}: there are no versions {first} to {last}; the newest is {newest}")
    return Chain(versions, first, last)


def written(patch: Patch, tensors: dict[str, TensorBits]) -> dict[str, Change]:
    """Write an absolute patch, in place where a tensor's memory may be written, and say what it changed."""
    changes: dict[str, Change] = {}
    for name, bits in patch.whole.items():
        positions = changed_positions(tensors[name].flat, bits.flat)
        changes[name] = positions, tensors[name].flat[positions], bits.flat[positions]
        tensors[name] = bits
    by_name: dict[str, list[tuple[Positions, NDArray[Any]]]] = {}
    for change in patch.changes:
        by_name.setdefault(change.part.name, []).append((change.located, change.values))
    for name, parts in by_name.items():
        if not tensors[name].flat.flags.writeable:
            tensors[name] = tensors[name].copy()
        flat = tensors[name].flat
        positions, new = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        order = np.argsort(positions, kind="stable") if len(parts) > 1 else slice(None)
        positions, new = positions[order], new[order]
        old = flat[positions]
        moved = old != new
        flat[positions] = new
        changes[name] = positions[moved], old[moved], new[moved]
    return changes
