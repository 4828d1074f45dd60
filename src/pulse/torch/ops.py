"""The compiled kernels as torch operations: diff, ranks, scatter, digest and steps where the weights live, without a copy to the host.

Bit-equal to `pulse.kernels` and its plain twins (`tests/property/test_torch_ops.py`), for every dtype that `pulse.torch.tensors` knows.
They have run on the CPU only, where the compiled kernels are faster, and have not met a GPU.

*Units* here are torch's own integers of a unit's width: uint8, int16, int32, int64. Positions are int64, ascending, inside the tensor, and
on its device. Memory beside the results is bounded by a chunk, but for `rank` and `select`, which sort the piece that they are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pulse.bits import DType, dtype_of
from pulse.digest import Sum
from pulse.errors import WeightsMismatch
from pulse.mixer import C0, C1, C2, C3, C4
from pulse.torch.tensors import code_of, signed_view

_CHUNK = 1 << 20  # units per pass: some 40 MB of temporaries
_MASK = (1 << 64) - 1


def units_of(tensor: Tensor) -> Tensor:
    """The units of a tensor in row-major order, (units,). Shares its memory if that is contiguous."""
    return signed_view(tensor.detach().resolve_conj().resolve_neg()).contiguous().view(-1)


# --- where two tensors differ, and writing there ---


def changed(old: Tensor, new: Tensor) -> Tensor:
    """Where two tensors of one dtype and shape differ in bits: positions, (n,). `WeightsMismatch` if dtype or shape differ."""
    before, after = comparable_units(old, new)
    found = [torch.nonzero(before[piece] != after[piece]).view(-1) + piece.start for piece in _pieces(before)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=old.device)


def comparable_units(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The units of two tensors; `WeightsMismatch` unless they have one dtype and shape."""
    if old.dtype != new.dtype or old.shape != new.shape:
        raise WeightsMismatch(f"{old.dtype}{list(old.shape)} and {new.dtype}{list(new.shape)} cannot be compared bit by bit")
    return units_of(old), units_of(new)


def gather(tensor: Tensor, positions: Tensor) -> Tensor:
    """The units at these positions, (n,)."""
    return units_of(tensor)[positions]


def scatter_(tensor: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """Write units in place, and return those that were there, (n,).

    positions: distinct; values: (n,) units, or any dtype of the same width. `WeightsMismatch` if widths or numbers differ, or the tensor
    is not contiguous.
    """
    flat, bits = writable_units(tensor, positions, values)
    old = flat[positions]
    flat[positions] = bits
    return old


def writable_units(tensor: Tensor, positions: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The units of a tensor, sharing its memory, and those to be written; `WeightsMismatch` as `scatter_` says."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise WeightsMismatch("only a contiguous tensor can be written at flat positions: scatter into its contiguous() and copy that back")
    flat, bits = signed_view(tensor).view(-1), units_of(values)
    if flat.dtype != bits.dtype:
        raise WeightsMismatch(f"{values.dtype} is not as wide as {tensor.dtype}")
    if positions.dtype != torch.int64 or positions.shape != bits.shape:
        raise WeightsMismatch(f"{positions.dtype}{list(positions.shape)} are no positions, int64, for {bits.numel()} values")
    return flat, bits


# --- ranks within the classes of a base ---


class Ranks(NamedTuple):
    """What `rank` finds. classes: (n,) uint8; ranks: (n,) int64; seen: (classes,) int64, the units of each class so far."""

    classes: Tensor
    ranks: Tensor
    seen: Tensor


class Selected(NamedTuple):
    """What `select` finds. positions: (n,); which: (n,) int64, the change that each is; seen: as in `Ranks`."""

    positions: Tensor
    which: Tensor
    seen: Tensor


def rank(base: Tensor, positions: Tensor, cuts: Sequence[int], seen: Tensor | None = None) -> Ranks:
    """The class and rank of each change in a piece of a base: `pulse.kernels.classes.rank` by one stable sort.

    The class of a unit is how many of the cuts are <= its magnitude: its bits without the sign for floats, all of them for other dtypes,
    unsigned. cuts: ascending, at most 255. seen: the units of each class before the piece, none by default. Takes about 25 bytes per unit
    of the piece.
    """
    order, places = _sorted(base, cuts)
    index = torch.empty_like(order)
    index[order] = torch.arange(order.numel(), device=order.device)
    classes = places.classes[positions]
    return Ranks(classes, index[positions] + places.shift(seen)[classes.long()], places.after(seen))


def select(base: Tensor, cuts: Sequence[int], classes: Tensor, ranks: Tensor, seen: Tensor | None = None) -> Selected:
    """The inverse of `rank`: where the changes that lie in a piece of a base are, ascending.

    classes, ranks: (changes in the block,), in any order, distinct. Those before or behind the piece are passed over; a caller who has seen
    all pieces and found fewer than there are has been given ranks that the base does not have.
    """
    order, places = _sorted(base, cuts)
    before = places.after(seen) - places.counts
    of = classes.long()
    inside = torch.nonzero((ranks >= before[of]) & (ranks < places.after(seen)[of])).view(-1)
    found = order[ranks[inside] - places.shift(seen)[of[inside]]]
    positions, ascending = torch.sort(found)
    return Selected(positions, inside[ascending], places.after(seen))


class _Places(NamedTuple):
    """The classes of a piece, (units,) uint8, and how many units each has, (classes,)."""

    classes: Tensor
    counts: Tensor

    def after(self, seen: Tensor | None) -> Tensor:
        """The units of each class up to the end of the piece."""
        return self.counts if seen is None else seen + self.counts

    def shift(self, seen: Tensor | None) -> Tensor:
        """What turns the place of a unit in the sorted piece into its rank, per class."""
        return self.after(seen) - self.counts.cumsum(0)


def _sorted(base: Tensor, cuts: Sequence[int]) -> tuple[Tensor, _Places]:
    """The positions of a piece, class after class and ascending in each, and the classes."""
    units = units_of(base)
    limits = torch.iinfo(units.dtype)  # of uint8 or a signed type: adding `min` to unsigned numbers, modulo 2^w, orders them as they were
    borders = torch.tensor([int(cut) + limits.min for cut in cuts], dtype=units.dtype, device=units.device)
    magnitudes = units & _magnitude(dtype_of(code_of(base.dtype)))
    classes = torch.bucketize(magnitudes ^ limits.min, borders, right=True, out_int32=True).to(torch.uint8)
    return torch.sort(classes, stable=True).indices, _Places(classes, torch.bincount(classes, minlength=len(cuts) + 1))


def _magnitude(dtype: DType) -> int:
    """The bits that make up a magnitude, as a mask."""
    if dtype.is_float:
        return (1 << (8 * dtype.width - 1)) - 1
    return 0xFF if dtype.width == 1 else -1


# --- the state digest's sums ---


def flat_sum(tensor: Tensor) -> Sum:
    """The state digest's sum over a whole tensor: `pulse.digest.flat_sum` on its device."""
    flat = units_of(tensor)
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for piece in _pieces(flat):
        total += _lanes(torch.arange(piece.start, piece.stop, device=flat.device), flat[piece])
    return _as_sum(total)


def sum_at(positions: Tensor, values: Tensor) -> Sum:
    """The state digest's sum over some positions: `pulse.digest.sum_at`. positions: (n,) int64; values: (n,) units."""
    flat = units_of(values)
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for piece in _pieces(flat):
        total += _lanes(positions[piece], flat[piece])
    return _as_sum(total)


def _lanes(positions: Tensor, units: Tensor) -> Tensor:
    """Both lanes of `pulse.mixer`, summed, (2,) int64: torch has no unsigned arithmetic, but signed arithmetic wraps to the same bits."""
    width = units.element_size()
    values = units.long() & ((1 << 8 * width) - 1 if width < 8 else -1)
    h = _folded((positions + 1).mul_(_signed(C0)), 32)
    x = _folded(_folded((values ^ h).mul_(_signed(C1)), 29).mul_(_signed(C2)), 32)
    y = _folded(_folded((values + h).mul_(_signed(C3)), 31).mul_(_signed(C4)), 30)
    return torch.stack((x.sum(), y.sum()))


def _folded(lane: Tensor, by: int) -> Tensor:
    """In place, lane ^= lane >> by, where the mask makes the signed shift an unsigned one."""
    return lane.bitwise_xor_((lane >> by).bitwise_and_(_MASK >> by))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _as_sum(lanes: Tensor) -> Sum:
    lane0, lane1 = lanes.tolist()
    return Sum(lane0 & _MASK, lane1 & _MASK)


# --- steps ---


def to_key(units: Tensor, dtype: DType) -> Tensor:
    """`pulse.bits.to_key` on units of that dtype, of any shape."""
    if not dtype.is_float:
        return units
    signed = units.view(torch.int8) if dtype.width == 1 else units
    key = signed ^ ((signed >> (8 * dtype.width - 1)) & torch.iinfo(signed.dtype).max)
    return key.view(units.dtype)


from_key = to_key  # its own inverse


def steps_between(old: Tensor, new: Tensor, dtype: DType) -> Tensor:
    """`pulse.bits.steps_between`: how many representable numbers lie from `old` to `new`, modulo 2^w, as units of the same width."""
    return to_key(new, dtype) - to_key(old, dtype)


def advance(old: Tensor, steps: Tensor, dtype: DType) -> Tensor:
    """`pulse.bits.advance`: the units that lie `steps` away from `old`."""
    return from_key(to_key(old, dtype) + steps, dtype)


def _pieces(flat: Tensor) -> Iterator[Any]:
    """The slices that cut a tensor into chunks."""
    for start in range(0, flat.numel(), _CHUNK):
        yield slice(start, min(start + _CHUNK, flat.numel()))
