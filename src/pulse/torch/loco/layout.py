"""Which parameters take part, in which order, and what their view is: the same on every rank, or nothing begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pulse.bits import Spec
from pulse.canonical import to_json
from pulse.digest import sha256, state_digest, tensor_sums
from pulse.errors import WeightsMismatch
from pulse.torch import ops
from pulse.torch.tensors import code_of, tensor_bits
from pulse.torch.weights import cast_of

View = torch.dtype | Mapping[str, torch.dtype]


@dataclass(frozen=True)
class Layout:
    """The trainable parameters in order. shapes: of what this rank holds; views: what the forward pass computes with; places: where a
    shard lies in its whole tensor, empty for whole ones."""  # noqa: D205, D209

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    views: tuple[torch.dtype, ...]
    places: tuple[str, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each begins in all of them laid end to end, and where the last one ends."""
        return tuple(accumulate(self.sizes, initial=0))

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return self.starts[-1]

    @cached_property
    def view_codes(self) -> tuple[str, ...]:
        """The views' safetensors codes."""
        return tuple(map(code_of, self.views))

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that differ if anything of this differs."""
        rows = zip(self.names, map(list, self.shapes), self.view_codes, self.places, strict=True)
        return sha256(to_json({"layout": [list(row) for row in rows]}))[:32]

    def digest(self, tensors: Sequence[Tensor]) -> str:
        """The state digest of FP32 tensors that lie as this layout says, (n,) each; on their device, if that is not the host."""
        specs = {name: Spec("F32", shape) for name, shape in zip(self.names, self.shapes, strict=True)}
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return state_digest(specs, {name: ops.flat_sum(tensor) for name, tensor in zip(self.names, tensors, strict=True)})
        return state_digest(specs, tensor_sums({name: tensor_bits(tensor) for name, tensor in zip(self.names, tensors, strict=True)}))


def collect(named: Iterable[tuple[str, Tensor]], view: View) -> tuple[Layout, list[Tensor]]:
    """The layout of the parameters that train, and those parameters, sharing their memory: of a sharded one, this rank's shard.

    Tied parameters count once, frozen ones do not count. Raises `WeightsMismatch` for parameters that are not FP32: the difference of a
    low-precision weight to an FP32 anchor is mostly rounding, and would be sent for ever.
    """
    _must_be_dtypes(view)
    found: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in map(_pair, named):
        if parameter.requires_grad and id(parameter) not in found:
            found[id(parameter)] = (name, parameter)
    rows = list(found.values())
    if not rows:
        raise WeightsMismatch("no parameter that trains: hand in model.named_parameters()")
    if len({name for name, _ in rows}) != len(rows):
        raise WeightsMismatch("two parameters have the same name")
    for name, parameter in rows:
        if parameter.dtype != torch.float32:
            raise WeightsMismatch(
                f"{name} is {parameter.dtype}: FP32 parameters are wanted, with the low precision as view= (autocast computes in it)"
            )
    tensors = [local_of(parameter) for _, parameter in rows]
    for (name, _), tensor in zip(rows, tensors, strict=True):
        if tensor.is_meta or not tensor.is_contiguous():
            raise WeightsMismatch(f"{name}: a contiguous parameter with memory of its own is wanted")
    layout = Layout(
        tuple(name for name, _ in rows),
        tuple(tuple(tensor.shape) for tensor in tensors),
        tuple(cast_of(name, parameter, view) for name, parameter in rows),
        tuple(_place(parameter) for _, parameter in rows),
    )
    return layout, [tensor.view(-1) for tensor in tensors]


def _must_be_dtypes(view: View) -> None:
    for dtype in view.values() if isinstance(view, Mapping) else [view]:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"view: a torch dtype is wanted, such as torch.bfloat16, not {dtype!r}")


def _pair(item: Any) -> tuple[str, Tensor]:
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)):
        raise TypeError(f"pairs of a name and a parameter are wanted, as model.named_parameters() gives them, not {type(item).__name__}")
    return item


def local_of(parameter: Tensor) -> Tensor:
    """The memory behind a parameter: of a DTensor this rank's shard."""
    local = getattr(parameter, "_local_tensor", parameter)  # a DTensor's, without loading what defines it
    return local.detach()


def _place(parameter: Tensor) -> str:
    """Which shard of a sharded tensor this rank holds."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return ""
    return f"{tuple(parameter.shape)} {parameter.placements} {mesh.get_coordinate()} of {tuple(mesh.shape)}"  # type: ignore[attr-defined]
