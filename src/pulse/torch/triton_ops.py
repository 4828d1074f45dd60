"""Triton kernels for the two operations that a GPU does most: diff-and-compact, and scatter.

The same results as `pulse.torch.ops`, in fewer passes and with one wait for the device per diff. **They have not met a GPU.** They have
run under Triton's interpreter only (`TRITON_INTERPRET=1`, set before Triton is loaded), where `tests/property/test_triton_ops.py` proves
them equal to the torch operations and to the compiled kernels; and Triton 3.7.1 compiles them for sm_90 and gfx942. Nothing else imports
this module; importing it takes Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pulse.errors import WeightsMismatch
from pulse.torch.ops import comparable_units, writable_units

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("pulse.torch.triton_ops needs Triton: pip install triton, or use pulse.torch.ops", name=error.name) from error

BLOCK = 1024  # units, or changes, per program


class Changes(NamedTuple):
    """Where two tensors differ, ascending, (n,) int64, and the new units there, (n,)."""

    positions: Tensor
    values: Tensor


# The kernels' annotations are Triton's own: its compiler, unlike its interpreter, refuses names that it does not know.


@triton.jit
def _count(old: tl.tensor, new: tl.tensor, counts: tl.tensor, units: tl.int64, block: tl.constexpr) -> None:
    """How many units differ in each block."""
    program = tl.program_id(0).to(tl.int64)  # a tensor may have more than 2^31 units
    at = program * block + tl.arange(0, block)
    inside = at < units
    differs = tl.load(old + at, mask=inside, other=0) != tl.load(new + at, mask=inside, other=0)
    tl.store(counts + program, tl.sum(differs.to(tl.int64), 0))


@triton.jit
def _compact(
    old: tl.tensor, new: tl.tensor, ends: tl.tensor, positions: tl.tensor, values: tl.tensor, units: tl.int64, block: tl.constexpr
) -> None:
    """Write each block's changes behind those of the blocks before it."""
    program = tl.program_id(0).to(tl.int64)
    at = program * block + tl.arange(0, block)
    inside = at < units
    after = tl.load(new + at, mask=inside, other=0)
    differs = tl.load(old + at, mask=inside, other=0) != after
    ones = differs.to(tl.int64)
    slot = tl.load(ends + program) - tl.sum(ones, 0) + tl.cumsum(ones, 0) - 1
    tl.store(positions + slot, at, mask=differs)
    tl.store(values + slot, after, mask=differs)


@triton.jit
def _exchange(flat: tl.tensor, positions: tl.tensor, values: tl.tensor, old: tl.tensor, changes: tl.int64, block: tl.constexpr) -> None:
    """flat[positions], values = values, flat[positions]."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < changes
    place = flat + tl.load(positions + at, mask=inside, other=0)
    tl.store(old + at, tl.load(place, mask=inside, other=0), mask=inside)
    tl.store(place, tl.load(values + at, mask=inside, other=0), mask=inside)


def changes(old: Tensor, new: Tensor) -> Changes:
    """Where two tensors of one dtype and shape differ in bits, and the new units: count per block, add up, write.

    `WeightsMismatch` if dtype or shape differ, or if they live where no kernel runs.
    """
    before, after = comparable_units(old, new)
    _must_run_on(before, after)
    units = before.numel()
    counts = torch.empty(triton.cdiv(units, BLOCK), dtype=torch.int64, device=before.device)
    with torch.cuda.device(before.get_device()):
        if units:
            _count[(counts.numel(),)](before, after, counts, units, block=BLOCK)
        ends = counts.cumsum(0)
        total = int(ends[-1]) if units else 0
        positions = torch.empty(total, dtype=torch.int64, device=before.device)
        values = torch.empty(total, dtype=after.dtype, device=before.device)
        if total:
            _compact[(counts.numel(),)](before, after, ends, positions, values, units, block=BLOCK)
    return Changes(positions, values)


def scatter_(tensor: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """Write units in place, and return those that were there, (n,), in one pass: see `pulse.torch.ops.scatter_`.

    No position is checked: one that lies outside corrupts memory.
    """
    flat, bits = writable_units(tensor, positions, values)
    where = positions.contiguous()
    _must_run_on(flat, bits, where)
    old = torch.empty_like(bits)
    if bits.numel():
        with torch.cuda.device(flat.get_device()):
            _exchange[(triton.cdiv(bits.numel(), BLOCK),)](flat, where, bits, old, bits.numel(), block=BLOCK)
    return old


def _must_run_on(*tensors: Tensor) -> None:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise WeightsMismatch(f"tensors on different devices: {', '.join(sorted(map(str, devices)))}")
    if tensors[0].is_cpu and not triton.knobs.runtime.interpret:
        raise WeightsMismatch("Triton kernels run on a GPU, and these tensors are on the CPU: use pulse.torch.ops")
