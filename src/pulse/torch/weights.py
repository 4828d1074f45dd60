"""`ModuleWeights`: any `nn.Module`, on any device, as a set of weights to publish or to receive into."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from numpy.typing import NDArray
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pulse.bits import Spec, TensorBits, dtype_of
from pulse.errors import WeightsMismatch
from pulse.patch import Positions, TensorPatch, diff_tensor
from pulse.torch.tensors import code_of, host_integers, shape_of, signed_view, tensor_bits

# What compilers and data-parallel wrappers put into names; checkpoints do not have it.
_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class ModuleWeights:
    """The parameters and persistent buffers of a module, under their Hugging Face names.

    `view` is what the receivers compute with: a dtype for every floating tensor that is at least as wide, or a mapping of names (or
    patterns such as `"*.gate.weight"`; the first that fits wins) to dtypes, where tensors without an entry stay as they are. FP32
    masters read through `view=torch.bfloat16` are cast as autocast casts them: round to nearest even.

    Tied tensors count once, under the first of their names. Writes go in place, to any layout and device, keep every `data_ptr`, and
    touch only the elements named; a receiver has no view, since what it holds must be what was published, bit for bit.
    """

    def __init__(self, module: torch.nn.Module, *, view: torch.dtype | Mapping[str, torch.dtype] | None = None) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"a torch module is wanted, not {type(module).__name__}; for a mapping of tensors there is pulse.MemoryWeights")
        for dtype in view.values() if isinstance(view, Mapping) else [view]:
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"view: a torch dtype is wanted, such as torch.bfloat16, not {dtype!r}")
        self._module = _unwrapped(module)
        self._view = view
        self._casts: dict[str, torch.dtype] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self.aliases: Mapping[str, str] = {}
        self._collect()
        if isinstance(view, Mapping):
            unused = [pattern for pattern in view if not any(fnmatchcase(name, pattern) for name in self._tensors)]
            if unused:
                raise WeightsMismatch(f"view: no tensor is named {', '.join(unused)}")

    @property
    def view(self) -> str | Mapping[str, str] | None:
        """See `Weights.view`."""
        if isinstance(self._view, Mapping):
            return {pattern: code_of(dtype) for pattern, dtype in self._view.items()}
        return None if self._view is None else code_of(self._view)

    def specs(self) -> dict[str, Spec]:
        """See `Weights.specs`."""
        self._collect()
        return {name: Spec(code_of(self._casts[name]), shape_of(tensor)) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> TensorBits:
        """See `Weights.read`."""
        tensor = self._tensors[name].detach()
        return tensor_bits(tensor.to(self._casts[name]))

    def diff(self, name: str, base: TensorBits) -> TensorPatch | TensorBits | None:
        """See `Weights.diff`."""
        found = diff_tensor(name, base, self.read(name))
        return found.copy() if isinstance(found, TensorBits) else found

    def gather(self, name: str, positions: Positions) -> NDArray[Any]:
        """See `Weights.gather`."""
        self._must_be_writable(name)
        live = signed_view(self._tensors[name])
        found = _flat(live)[self._index(live, positions)] if live.is_contiguous() else live[self._coordinates(live, positions)]
        units: NDArray[Any] = found.cpu().numpy()
        return units.view(dtype_of(code_of(self._tensors[name].dtype)).unsigned)

    @torch.no_grad()
    def scatter(self, name: str, positions: Positions, values: NDArray[Any]) -> None:
        """See `Weights.scatter`."""
        self._must_be_writable(name)
        live = signed_view(self._tensors[name])
        numbers = host_integers(values, values.dtype.itemsize).to(live.device)
        if live.is_contiguous():
            _flat(live)[self._index(live, positions)] = numbers
        else:
            live[self._coordinates(live, positions)] = numbers

    @torch.no_grad()
    def assign(self, name: str, bits: TensorBits) -> None:
        """See `Weights.assign`."""
        self._must_be_writable(name)
        live = signed_view(self._tensors[name])
        live.copy_(host_integers(bits.flat, bits.flat.dtype.itemsize).reshape(live.shape))

    def _collect(self) -> None:
        """Look the tensors up anew: a module may replace its parameters (`load_state_dict(assign=True)`, `.to`)."""
        self._tensors, self.aliases = _distinct(_named(self._module))
        self._casts = {name: cast_of(name, tensor, self._view) for name, tensor in self._tensors.items()}

    def _must_be_writable(self, name: str) -> None:
        tensor = self._tensors[name]
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise WeightsMismatch(f"{name}: an expanded tensor, whose elements share memory, cannot be received into: clone it first")
        held = tensor.dtype
        if held != self._casts[name]:
            raise WeightsMismatch(
                f"{name}: held as {held} and viewed as {self._casts[name]}: a view is read, never written; receive without view="
            )

    @staticmethod
    def _index(live: torch.Tensor, positions: Positions) -> torch.Tensor:
        return torch.from_numpy(positions.astype("<i8")).to(live.device)

    def _coordinates(self, live: torch.Tensor, positions: Positions) -> tuple[torch.Tensor, ...]:
        return torch.unravel_index(self._index(live, positions), live.shape)


def _flat(live: torch.Tensor) -> torch.Tensor:
    return live.view(-1)


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside data-parallel wrappers: those name everything `module.`, which is a name like any other further in."""
    while isinstance(inner := getattr(module, "_orig_mod", module), DistributedDataParallel | DataParallel):
        module = inner.module
    return module


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer, ties under all their names, as a state dict orders them."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):  # a module may keep other extra state
            yield _WRAPPERS.sub("", name), tensor


def _distinct(named: Iterator[tuple[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each storage once, under its first name, and the other names as aliases."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in named:
        if tensor.is_meta:
            raise WeightsMismatch(f"{name}: on the meta device there are no weights")
        if tensor.layout != torch.strided:
            raise WeightsMismatch(f"{name}: a tensor of layout {tensor.layout} has no plain bits; make it dense")
        if hasattr(tensor, "device_mesh"):  # a DTensor, without loading what defines it
            raise WeightsMismatch(f"{name}: sharded over {tensor.device_mesh}; sharded modules are not supported yet: gather them first")
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        canonical = first.setdefault(place, name)
        if canonical == name:
            tensors[name] = tensor
        else:
            aliases[name] = canonical
    return tensors, aliases


def cast_of(name: str, tensor: torch.Tensor, view: torch.dtype | Mapping[str, torch.dtype] | None) -> torch.dtype:
    """The dtype that a tensor is viewed as."""
    if isinstance(view, Mapping):
        wanted = next((dtype for pattern, dtype in view.items() if fnmatchcase(name, pattern)), tensor.dtype)
    else:
        wanted = view or tensor.dtype
        if not tensor.is_floating_point() or tensor.element_size() < wanted.itemsize:
            return tensor.dtype
    if wanted != tensor.dtype and not (tensor.is_floating_point() and wanted.is_floating_point):
        raise WeightsMismatch(f"view: {name} is {tensor.dtype}, which has no view as {wanted}")
    return wanted
