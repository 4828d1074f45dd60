"""Torch tensors as bits, without a cast: the other place, beside `pulse.bits`, that knows dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pulse.bits import TensorBits, dtype_of
from pulse.errors import WeightsMismatch

_CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.bool: "BOOL",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float4_e2m1fn_x2: "F4",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}

# Signed, since torch cannot index or compare most unsigned types; bits are bits.
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def code_of(dtype: torch.dtype) -> str:
    """The safetensors code of a torch dtype; `WeightsMismatch` if it has none."""
    if dtype not in _CODES:
        raise WeightsMismatch(f"no safetensors dtype for {dtype}")
    return _CODES[dtype]


def dtype_from(code: str) -> torch.dtype:
    """The torch dtype of a safetensors code; `WeightsMismatch` if torch has none."""
    if code not in _DTYPES:
        raise WeightsMismatch(f"torch has no dtype for {code}")
    return _DTYPES[code]


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape that safetensors writes: in elements, where torch counts F4 in pairs."""
    if tensor.dtype == torch.float4_e2m1fn_x2:
        return (*tensor.shape[:-1], tensor.shape[-1] * 2)
    return tuple(tensor.shape)


def signed_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width and strides."""
    return tensor.detach().view(_SIGNED[dtype_of(code_of(tensor.dtype)).width])


def tensor_bits(tensor: torch.Tensor) -> TensorBits:
    """The bits of a tensor on any device. Shares its memory if that is on the host and contiguous."""
    code = code_of(tensor.dtype)
    if tensor.is_meta or tensor.layout != torch.strided:
        raise WeightsMismatch(f"a tensor of layout {tensor.layout} on the {tensor.device.type} device has no plain bits")
    flat = signed_view(tensor.detach().resolve_conj().resolve_neg()).contiguous().reshape(-1).cpu().numpy()
    return TensorBits(code, shape_of(tensor), flat.view(dtype_of(code).unsigned))


def bits_tensor(bits: TensorBits) -> torch.Tensor:
    """A new tensor on the host with these bits."""
    width = dtype_of(bits.dtype).width
    if bits.dtype == "F4" and (not bits.shape or bits.shape[-1] % 2):
        raise WeightsMismatch(f"torch packs F4 in pairs along the last dimension, which {bits.spec} does not allow")
    shape = bits.shape if bits.dtype != "F4" else (*bits.shape[:-1], bits.shape[-1] // 2)
    return host_integers(bits.flat, width).view(dtype_from(bits.dtype)).reshape(shape)


def host_integers(units: NDArray[Any], width: int) -> torch.Tensor:
    """Unsigned units as a host tensor of integers of the same width, copied."""
    return torch.from_numpy(units.view(np.uint8 if width == 1 else f"<i{width}").copy())
