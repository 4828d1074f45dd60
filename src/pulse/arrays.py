"""What people hand in and get back: numpy arrays and torch tensors, as bits and as themselves again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.bits import TensorBits, dtype_of
from pulse.errors import WeightsMismatch

_NUMPY_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bool": "BOOL", "complex64": "C64",
    "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32", "int64": "I64", "uint64": "U64",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


def from_array(array: NDArray[Any]) -> TensorBits:
    """The bits of a numpy array (the ml_dtypes extension types included), copied only if it is not contiguous."""
    code = _NUMPY_CODES.get(array.dtype.name)
    if code is None:
        raise WeightsMismatch(f"no safetensors dtype for numpy {array.dtype}")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    flat = np.ascontiguousarray(little).reshape(-1).view(dtype_of(code).unsigned)
    return TensorBits(code, tuple(array.shape), flat)


def as_bits(tensor: object) -> TensorBits:
    """The bits of a `TensorBits`, numpy array or torch tensor. Shares memory where it can."""
    if isinstance(tensor, TensorBits):
        return tensor
    if isinstance(tensor, np.ndarray):
        return from_array(tensor)
    torch = sys.modules.get("torch")  # a tensor can only be here if torch is
    if torch is not None and isinstance(tensor, torch.Tensor):
        from pulse.torch.tensors import tensor_bits  # the wire world never loads torch by itself

        return tensor_bits(tensor)
    raise WeightsMismatch(f"a tensor, numpy array or TensorBits is wanted, not {type(tensor).__name__}")


def must_be_mapping(weights: object) -> None:
    """`TypeError`, with what to do, for anything but names with tensors."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"names with tensors are wanted, such as module.state_dict(), not {type(weights).__name__}")
    for name in weights:
        if not isinstance(name, str) or any("\ud800" <= sign <= "\udfff" for sign in name):
            raise TypeError(f"{name!r} is not a tensor's name: a string is wanted, without half surrogates, which no file could hold")


def bits_like(bits: TensorBits, like: Any) -> Any:  # as many kinds come out as go in
    """`bits` as the kind of thing that `like` is: numpy array, torch tensor on the same device, or else `TensorBits`."""
    if isinstance(like, np.ndarray):
        native = like.dtype if _NUMPY_CODES.get(like.dtype.name) == bits.dtype else _numpy_dtype(bits.dtype)
        return bits.flat.view(native.newbyteorder("<")).reshape(bits.shape)
    if like is None or isinstance(like, TensorBits):
        return bits
    from pulse.torch.tensors import bits_tensor

    return bits_tensor(bits).to(like.device)


def _numpy_dtype(code: str) -> np.dtype[Any]:
    names = {code: name for name, code in _NUMPY_CODES.items()}
    try:
        return np.dtype(names[code])
    except (KeyError, TypeError) as error:
        raise WeightsMismatch(f"numpy has no dtype for {code} (the ml_dtypes package adds BF16 and FP8)") from error
