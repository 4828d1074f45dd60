"""Hypothesis strategies: tensors of every dtype with arbitrary bit patterns, sets of weights, and what training may do to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from pulse.bits import DTYPES, DType, Spec, TensorBits, dtype_of
from pulse.patch import Part, Patch, TensorPatch

_PER_ROW = {4: 2, 6: 4}  # how many packed elements fill whole bytes
_NAMES = st.sampled_from(["w", "model.norm.weight", "b", "ä", "x y"]) | st.text(max_size=8)

dtypes: st.SearchStrategy[DType] = st.sampled_from(list(DTYPES.values()))


def _unsigned(data: bytes, dtype: DType) -> NDArray[Any]:
    return np.frombuffer(data, dtype.unsigned).copy()


@st.composite
def specs(draw: st.DrawFn, dtype: DType | None = None) -> Spec:
    """A dtype and a shape: 0-d, empty, and up to three short dimensions."""
    dtype = dtype or draw(dtypes)
    shape = draw(st.lists(st.integers(2, 5), min_size=1, max_size=3) | st.lists(st.integers(0, 5), max_size=3))
    if dtype.bits in _PER_ROW:
        shape = [*shape[:2], _PER_ROW[dtype.bits] * draw(st.integers(0, 3))]
    return Spec(dtype.name, tuple(shape))


@st.composite
def tensors(draw: st.DrawFn, spec: Spec | None = None) -> TensorBits:
    """A tensor of arbitrary bits: NaN payloads, both zeros, denormals and all."""
    spec = spec or draw(specs())
    size = spec.nbytes
    data = draw(st.binary(min_size=size, max_size=size) | st.sampled_from([b"\x00", b"\x80", b"\xff"]).map(lambda byte: byte * size))
    return TensorBits(spec.dtype, spec.shape, _unsigned(data, dtype_of(spec.dtype)))


def weights(max_size: int = 4) -> st.SearchStrategy[dict[str, TensorBits]]:
    """A set of weights: names and tensors."""
    return st.dictionaries(_NAMES, tensors(), max_size=max_size)


@st.composite
def edited(draw: st.DrawFn, bits: TensorBits) -> TensorBits:
    """The tensor with some units replaced, perhaps by the same."""
    new = bits.copy()
    if not new.flat.size:
        return new
    highest = (1 << 8 * new.flat.dtype.itemsize) - 1
    for position in draw(st.lists(st.integers(0, new.flat.size - 1), min_size=1, max_size=6)):
        new.flat[position] = draw(st.integers(0, highest))
    return new


def _reshaped(bits: TensorBits) -> TensorBits:
    packed = dtype_of(bits.dtype).bits % 8
    return replace(bits, shape=(1, *bits.shape) if packed else (math.prod(bits.shape), 1))


def _retyped(bits: TensorBits) -> TensorBits:
    return TensorBits("U8", (bits.flat.nbytes,), bits.flat.view("<u1"))


@st.composite
def evolved(draw: st.DrawFn, old: Mapping[str, TensorBits]) -> dict[str, TensorBits]:
    """What could come after `old`: tensors kept, edited, rewritten, reshaped, retyped, removed and added."""
    new = {}
    for name, bits in old.items():
        match draw(st.sampled_from(["edit", "edit", "edit", "keep", "rewrite", "reshape", "retype", "remove"])):
            case "edit":
                new[name] = draw(edited(bits))
            case "keep":
                new[name] = bits
            case "rewrite":
                new[name] = draw(tensors(bits.spec))
            case "reshape":
                new[name] = _reshaped(bits)
            case "retype":
                new[name] = _retyped(bits)
    return new | draw(weights(max_size=1))


@st.composite
def sequences(draw: st.DrawFn, length: int) -> list[dict[str, TensorBits]]:
    """Several sets of weights, each evolved from the one before."""
    found = [draw(weights())]
    while len(found) < length:
        found.append(draw(evolved(found[-1])))
    return found


@st.composite
def parts(draw: st.DrawFn, name: str, spec: Spec) -> list[Part]:
    """Parts that cover the tensor and do not overlap: all of it, spans, or boxes along one dimension."""
    kinds = ["all", "spans"]
    if spec.shape and not dtype_of(spec.dtype).bits % 8:
        kinds.append("boxes")
    kind = draw(st.sampled_from(kinds))
    if kind == "all":
        return [Part(name, spec)]
    axis = draw(st.integers(0, len(spec.shape) - 1)) if kind == "boxes" else 0
    size = spec.shape[axis] if kind == "boxes" else spec.units
    cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
    ranges = list(pairwise(cuts)) or [(0, 0)]
    if kind == "spans":
        return [Part(name, spec, span=pair) for pair in ranges]
    whole = [(0, size) for size in spec.shape]
    return [Part(name, spec, box=(*whole[:axis], pair, *whole[axis + 1 :])) for pair in ranges]


@st.composite
def cut(draw: st.DrawFn, patch: Patch) -> Patch:
    """The same patch with every tensor's changes cut into parts, some of them perhaps empty."""
    changes = []
    for change in patch.changes:
        where = dict(zip(change.located.tolist(), change.values.tolist(), strict=True))
        for part in draw(parts(change.part.name, change.part.spec)):
            inside = part.locate(np.arange(part.units, dtype=np.uint64)).tolist()
            held = [i for i, position in enumerate(inside) if position in where]
            values = np.array([where[inside[i]] for i in held], change.values.dtype)
            changes.append(TensorPatch(part, np.array(held, np.uint64), values))
    return replace(patch, changes=tuple(changes))
