"""What turns one set of weights into another, bit for bit: `diff`, `apply`, `compose`, in plain numpy.

A patch lists positions and values per *part*: a whole tensor, a box of it (a shard, an expert) or a flat range. Values are either
the new bits themselves (absolute: applying twice is applying once) or steps from the old bits (relative: smaller on the wire, and
`resolve` turns them into bits by reading the old ones). Tensors that were added, removed, reshaped, retyped or mostly changed are
carried whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pulse import digest
from pulse.arrays import as_bits, bits_like, must_be_mapping
from pulse.bits import Spec, TensorBits, advance, dtype_of, steps_between
from pulse.errors import BaseMismatch, DigestMismatch, FormatError, WeightsMismatch
from pulse.threads import each

Positions = NDArray[np.uint64]
_KERNEL_FROM = 1 << 14  # units from which the compiled compare pays
_WHOLE_ABOVE = 0.5  # share of changed units from which positions cost more than they save


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a tensor: all of it, a `box` of (start, stop) per dimension, or a flat `span` of units.

    Positions count units inside the piece, in row-major order.
    """

    name: str
    spec: Spec
    box: tuple[tuple[int, int], ...] | None = None
    span: tuple[int, int] | None = None

    @property
    def units(self) -> int:
        """How many positions the piece has."""
        if self.span is not None:
            return self.span[1] - self.span[0]
        if self.box is not None:
            return math.prod(stop - start for start, stop in self.box)
        return self.spec.units

    def check(self) -> None:
        """Raise `FormatError` unless the piece lies inside the tensor."""
        if self.box is not None and self.span is not None:
            raise FormatError(f"{self.name}: both a box and a span")
        if self.span is not None and not 0 <= self.span[0] <= self.span[1] <= self.spec.units:
            raise FormatError(f"{self.name}: span {self.span} lies outside {self.spec}")
        if self.box is None:
            return
        fits = len(self.box) == len(self.spec.shape)
        if not fits or any(not 0 <= lo <= hi <= size for (lo, hi), size in zip(self.box, self.spec.shape, strict=True)):
            raise FormatError(f"{self.name}: box {self.box} lies outside {self.spec}")
        if dtype_of(self.spec.dtype).bits % 8:
            raise FormatError(f"{self.name}: {self.spec.dtype} packs several elements into a byte, so it has no boxes")

    def locate(self, positions: Positions) -> Positions:
        """Positions in the piece as positions in the flattened tensor."""
        if self.span is not None:
            return positions + np.uint64(self.span[0])
        if self.box is None:
            return positions
        inside = np.unravel_index(positions.astype(np.int64), [hi - lo for lo, hi in self.box])
        moved = [index + lo for index, (lo, _) in zip(inside, self.box, strict=True)]
        return np.ravel_multi_index(moved, self.spec.shape).astype(np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class TensorPatch:  # noqa: PLW1641  arrays have no hash
    """The changes in one part. positions: (n,) uint64, ascending; values: (n,) unsigned of the dtype's width, bits or steps."""

    part: Part
    positions: Positions
    values: NDArray[Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorPatch):
            return NotImplemented
        same = np.array_equal(self.positions, other.positions) and np.array_equal(self.values, other.values)
        return same and self.part == other.part

    @property
    def located(self) -> Positions:
        """The positions in the flattened tensor."""
        return self.part.locate(self.positions)


@dataclass(frozen=True, slots=True)
class Patch:
    """Everything that changed from a base to a result.

    `values` says what the numbers in `changes` are. `base` and `result` are state digests of the two sides where they are known:
    `apply` then refuses other weights, and proves what it made.
    """

    changes: tuple[TensorPatch, ...] = ()
    whole: Mapping[str, TensorBits] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    values: Literal["bits", "steps"] = "bits"
    base: str | None = None
    result: str | None = None

    @property
    def changed(self) -> int:
        """How many units are written."""
        return sum(change.positions.size for change in self.changes) + sum(bits.flat.size for bits in self.whole.values())

    @property
    def names(self) -> set[str]:
        """The tensors that are touched."""
        return {change.part.name for change in self.changes} | set(self.whole) | set(self.removed)


def changed_positions(old: NDArray[Any], new: NDArray[Any]) -> Positions:
    """Where two flat tensors differ in bits, ascending."""
    if old.size < _KERNEL_FROM:
        return np.flatnonzero(old != new).astype(np.uint64)
    from pulse import kernels  # numba loads only when there is work for it

    found: Positions = kernels.changed_positions(old, new)
    return found


def scatter(flat: NDArray[Any], positions: Positions, values: NDArray[Any]) -> None:
    """flat[positions] = values, without the GIL where it takes long."""
    if positions.size < _KERNEL_FROM:
        flat[positions] = values
        return
    from pulse import kernels

    if int(positions.max()) >= flat.size:  # compiled code would write there
        raise IndexError(f"position {positions.max()} lies outside a tensor of {flat.size} units")
    kernels.scatter(flat, positions, values)


def diff_tensor(name: str, old: TensorBits, new: TensorBits) -> TensorPatch | TensorBits | None:
    """What changed in one tensor: a `TensorPatch`, the new bits whole where that is smaller, or `None` for nothing."""
    if old.spec != new.spec:
        return new
    positions = changed_positions(old.flat, new.flat)
    if positions.size == 0:
        return None
    if positions.size > _WHOLE_ABOVE * new.flat.size:
        return new
    return TensorPatch(Part(name, new.spec), positions, new.flat[positions])


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> Patch:
    """The patch that turns `old` into `new`, bit for bit. Both map names to `TensorBits`, numpy arrays or torch tensors.

    >>> import numpy as np
    >>> before = {"w": np.zeros(8, np.float32)}
    >>> after = {"w": np.array([0, 0, -0.0, 0, 0, 1, 0, 0], np.float32)}
    >>> patch = diff(before, after)
    >>> patch.changes[0].positions
    array([2, 5], dtype=uint64)
    >>> apply(patch, before)["w"]
    array([ 0.,  0., -0.,  0.,  0.,  1.,  0.,  0.], dtype=float32)
    """
    must_be_mapping(old)
    must_be_mapping(new)
    before = {name: as_bits(tensor) for name, tensor in old.items()}
    after = {name: as_bits(tensor) for name, tensor in new.items()}
    names = sorted(after)
    found = dict(
        zip(names, each(lambda name: diff_tensor(name, before[name], after[name]) if name in before else after[name], names), strict=True)
    )
    changes = tuple(change for change in found.values() if isinstance(change, TensorPatch))
    whole = {name: bits for name, bits in found.items() if isinstance(bits, TensorBits)}
    patch = Patch(changes, whole, tuple(sorted(set(before) - set(after))))
    sums = digest.tensor_sums(before)
    return replace(patch, base=_state(before, sums), result=_state(after, sums_after(patch, before, sums)))


def sums_after(patch: Patch, old: Mapping[str, TensorBits], sums: Mapping[str, digest.Sum]) -> dict[str, digest.Sum]:
    """The digest's sums of what `patch`, of bits, makes of `old`, from those of `old`: O(changed)."""
    new = {name: total for name, total in sums.items() if name not in patch.removed}
    for change in patch.changes:
        positions = change.located
        new[change.part.name] += digest.sum_at(positions, change.values) - digest.sum_at(positions, old[change.part.name].flat[positions])
    return new | digest.tensor_sums(patch.whole)


def _state(tensors: Mapping[str, TensorBits], sums: Mapping[str, digest.Sum]) -> str:
    return digest.state_digest({name: bits.spec for name, bits in tensors.items()}, sums)


def _base_of(change: TensorPatch, old: Mapping[str, TensorBits]) -> TensorBits:
    part = change.part
    if part.name not in old:
        raise WeightsMismatch(f"the patch changes {part.name}, which these weights do not have")
    if old[part.name].spec != part.spec:
        raise WeightsMismatch(f"{part.name}: the patch is for {part.spec}, these weights have {old[part.name].spec}")
    return old[part.name]


def resolve(patch: Patch, old: Mapping[str, TensorBits]) -> Patch:
    """The same patch with bits for values, reading the old bits only where it writes."""
    if patch.values == "bits":
        return patch
    changes = []
    for change in patch.changes:
        before = _base_of(change, old).flat[change.located]
        changes.append(replace(change, values=advance(before, change.values, dtype_of(change.part.spec.dtype))))
    return replace(patch, changes=tuple(changes), values="bits")


def relate(patch: Patch, old: Mapping[str, TensorBits]) -> Patch:
    """The inverse of `resolve`: the same patch with steps for values. What is written but does not differ drops out."""
    if patch.values == "steps":
        return patch
    changes = []
    for change in patch.changes:
        before = _base_of(change, old).flat[change.located]
        steps = steps_between(before, change.values, dtype_of(change.part.spec.dtype))
        moved = steps != 0
        changes.append(TensorPatch(change.part, change.positions[moved], steps[moved]))
    return replace(patch, changes=tuple(changes), values="steps")


def apply_bits(patch: Patch, old: Mapping[str, TensorBits]) -> dict[str, TensorBits]:
    """The result of `patch` on `old`; untouched tensors are shared, touched ones copied once. No digest is checked."""
    new = {name: bits for name, bits in old.items() if name not in patch.removed}
    copied: set[str] = set()
    for change in resolve(patch, old).changes:
        name = change.part.name
        if name not in copied:
            new[name] = _base_of(change, new).copy()
            copied.add(name)
        scatter(new[name].flat, change.located, change.values)
    return new | dict(patch.whole)


def apply(patch: Patch, old: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with `patch` applied, of the same kind of tensors; `old` is not changed.

    What the patch does not touch is not copied: numpy arrays and `TensorBits` then share the memory of `old`.

    Raises `BaseMismatch` when the patch was made for other weights, `DigestMismatch` when the result is not what it should be, and
    `WeightsMismatch` when names, shapes or dtypes do not fit.
    """
    if not isinstance(patch, Patch):
        raise TypeError(f"apply(patch, old) wants a Patch first, not {type(patch).__name__}; bytes must be decoded before")
    must_be_mapping(old)
    before = {name: as_bits(tensor) for name, tensor in old.items()}
    sums = digest.tensor_sums(before)
    if patch.base is not None and (found := _state(before, sums)) != patch.base:
        _explain_shapes(patch, before)
        raise BaseMismatch(f"the patch applies to weights with state digest {patch.base}; these have {found}: find its base, or an anchor")
    patch = resolve(patch, before)
    after = apply_bits(patch, before)
    if patch.result is not None and (found := _state(after, sums_after(patch, before, sums))) != patch.result:
        raise DigestMismatch(f"the result should have state digest {patch.result}, but has {found}: discard it")
    sample = next(iter(old.values()), None)
    return {name: bits_like(bits, old.get(name, sample)) for name, bits in after.items()}


def _explain_shapes(patch: Patch, old: Mapping[str, TensorBits]) -> None:
    """A missing or reshaped tensor explains a wrong base better than two digests do."""
    for change in patch.changes:
        _base_of(change, old)


def compose(first: Patch, second: Patch) -> Patch:
    """One patch that does what `first` and then `second` do.

    Absolute patches: the later value wins. Relative ones: steps add, zero sums drop. Mixed kinds do not compose without the weights:
    `resolve` or `relate` one of them first.
    """
    if first.result is not None and second.base is not None and first.result != second.base:
        raise BaseMismatch(f"the second patch applies to state digest {second.base}, the first one makes {first.result}")
    gone = set(second.removed) | set(second.whole)
    whole = {name: bits for name, bits in first.whole.items() if name not in gone}
    on_whole = tuple(change for change in second.changes if change.part.name in whole)
    earlier = [change for change in first.changes if change.part.name not in gone]
    later = [change for change in second.changes if change.part.name not in whole]
    if first.values != second.values and earlier and later:
        raise WeightsMismatch(f"a patch of {first.values} and one of {second.values} do not compose; resolve or relate one of them")
    if lost := sorted({change.part.name for change in later} & set(first.removed)):
        raise WeightsMismatch(f"the second patch changes {', '.join(lost)}, which the first one removes")
    values = second.values if later else first.values
    whole = apply_bits(Patch(on_whole, values=second.values), whole) | dict(second.whole)
    removed = tuple(sorted((set(first.removed) | set(second.removed)) - set(whole)))
    return Patch(tuple(_merged(earlier + later, values)), whole, removed, values, first.base, second.result)


def _merged(changes: list[TensorPatch], values: str) -> Iterator[TensorPatch]:
    """One change per part, in order of names; a tensor that was cut in different ways is put in whole-tensor positions."""
    by_name: dict[str, list[TensorPatch]] = {}
    for change in changes:
        by_name.setdefault(change.part.name, []).append(change)
    for name in sorted(by_name):
        group = by_name[name]
        if len({change.part.spec for change in group}) > 1:
            raise WeightsMismatch(f"{name}: the patches disagree on its dtype or shape")
        cuts = Counter(change.part for change in group)
        if len(cuts) > 1 and set(cuts.values()) != {2}:
            group = [replace(change, part=Part(name, change.part.spec), positions=change.located) for change in group]
        by_part: dict[Part, list[TensorPatch]] = {}
        for change in group:
            by_part.setdefault(change.part, []).append(change)
        for same in by_part.values():
            merged = _merge(same, values)
            if merged.positions.size:
                yield merged


def _merge(group: list[TensorPatch], values: str) -> TensorPatch:
    """Several changes of one part, in order, as one."""
    if len(group) == 1 and bool(np.all(np.diff(group[0].positions.astype(np.int64)) > 0)):
        return group[0]
    positions = np.concatenate([change.positions for change in group])
    numbers = np.concatenate([change.values for change in group])
    if positions.size == 0:
        return group[0]
    order = np.argsort(positions, kind="stable")
    positions, numbers = positions[order], numbers[order]
    last = np.append(positions[1:] != positions[:-1], True)  # numpy's own signature
    if values == "bits":
        return TensorPatch(group[0].part, positions[last], numbers[last])
    first = np.flatnonzero(np.concatenate([[True], last[:-1]]))
    sums = np.add.reduceat(numbers, first, dtype=numbers.dtype)
    keep = sums != 0
    return TensorPatch(group[0].part, positions[first][keep], sums[keep])
