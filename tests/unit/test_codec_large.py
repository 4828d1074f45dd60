"""Tensors of more than 2^31 and 2^32 units, of which no memory is held: a base without strides is one unit, seen everywhere."""

import numpy as np
import pytest

from pulse import codec
from pulse.bits import Spec, TensorBits, dtype_of
from pulse.errors import BaseMismatch
from pulse.patch import Part, Patch, TensorPatch

UNITS = (1 << 32) + 5
AT = [0, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, UNITS - 1]


def constant(code, unit):
    """So many units of the same bits."""
    return TensorBits(code, (UNITS,), np.broadcast_to(np.array(unit, dtype_of(code).unsigned), (UNITS,)))


def changes(code, at, unit, **place):
    """One change of these units to the same bits."""
    values = np.full(len(at), unit, dtype_of(code).unsigned)
    return TensorPatch(Part("w", Spec(code, (UNITS,)), **place), np.array(at, np.uint64), values)


@pytest.mark.parametrize("code", ["BF16", "U8"])
@pytest.mark.parametrize("encoding", codec.ENCODINGS)
def test_changes_on_both_sides_of_every_border_come_back(code, encoding):
    base = {"w": constant(code, 7)}
    patch = Patch((changes(code, AT, 9),))
    blob = codec.encode(patch, base, encoding=encoding)
    found = codec.decode(blob, base)
    assert found == patch
    assert found.changes[0].located.tolist() == AT


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
def test_a_span_that_begins_and_ends_beyond_them_comes_back(encoding):
    base = {"w": constant("BF16", 7)}
    spans = [(10, (1 << 31) + 3), ((1 << 31) + 3, (1 << 32) - 2), ((1 << 32) - 2, UNITS)]
    patch = Patch(tuple(changes("BF16", [0, hi - lo - 1], 9, span=(lo, hi)) for lo, hi in spans))
    found = codec.decode(codec.encode(patch, base, encoding=encoding), base)
    assert found == patch
    assert [change.located.tolist() for change in found.changes] == [[lo, hi - 1] for lo, hi in spans]


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
def test_a_box_in_the_last_rows_of_a_large_matrix_comes_back(encoding):
    spec = Spec("F8_E5M2", ((1 << 20) + 3, 1 << 12))
    base = {"w": TensorBits(spec.dtype, spec.shape, np.broadcast_to(np.array(7, "u1"), (spec.units,)))}
    part = Part("w", spec, box=((1 << 20, (1 << 20) + 3), (5, 4000)))
    patch = Patch((TensorPatch(part, np.array([0, part.units - 1], np.uint64), np.array([9, 8], "u1")),))
    found = codec.decode(codec.encode(patch, base, encoding=encoding, block=1000), base)
    assert found == patch
    assert found.changes[0].located.tolist() == [(1 << 32) + 5, spec.units - 97]


def test_other_weights_are_told_from_the_base_far_beyond_them_too():
    base, other = {"w": constant("BF16", 7)}, {"w": constant("BF16", 6)}
    blob = codec.encode(Patch((changes("BF16", AT[-3:], 9),)), base, encoding="contextual")
    with pytest.raises(BaseMismatch):
        codec.decode(blob, other)
