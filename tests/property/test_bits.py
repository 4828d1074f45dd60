"""Bits in, bits out, whatever holds them; and the one bijection that the wire format rests on."""

import math
import sys
from operator import attrgetter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulse.arrays import as_bits, bits_like
from pulse.bits import DTYPES, Spec, TensorBits, advance, dtype_of, from_key, steps_between, to_key
from pulse.errors import FormatError, WeightsMismatch
from pulse.testing import strategies as some
from pulse.torch.tensors import bits_tensor, dtype_from

NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "BOOL": "?", "C64": "c8"} | {
    f"{k}{8 * w}": f"{k.lower()}{w}" for k in "IU" for w in (1, 2, 4, 8)
}
FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_float]
SIXTEEN = np.arange(1 << 16, dtype="<u2")


def as_numpy(bits, order="<"):
    """The tensor as a numpy array of that byte order, without a cast: only bytes are moved."""
    dtype = np.dtype(NUMPY[bits.dtype])
    half = 4 if bits.dtype == "C64" else dtype.itemsize  # a complex number is swapped half by half
    raw = bits.flat.view(f"<u{half}").astype(f"{order}u{half}")
    return raw.view(dtype.newbyteorder(order)).reshape(bits.shape)


@given(st.sampled_from(list(NUMPY)).flatmap(lambda code: some.specs(dtype_of(code))).flatmap(some.tensors))
def test_a_numpy_array_of_either_byte_order_gives_its_exact_bits(bits):
    assert as_bits(as_numpy(bits)) == bits
    assert as_bits(as_numpy(bits, ">")) == bits


@given(st.sampled_from(list(NUMPY)).flatmap(lambda code: some.specs(dtype_of(code))).flatmap(some.tensors))
def test_a_numpy_array_comes_back_as_a_numpy_array_of_the_same_type(bits):
    array = as_numpy(bits)
    back = bits_like(as_bits(array), array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@given(some.tensors(), st.booleans())
def test_strided_transposed_and_read_only_arrays_give_the_bits_of_their_contiguous_copy(bits, readonly):
    if bits.dtype not in NUMPY:
        bits = TensorBits("U8", (bits.flat.nbytes,), bits.flat.view("<u1"))
    array = as_numpy(bits)
    roomy = np.zeros((*array.shape, 2), array.dtype)
    roomy[..., 0] = array
    for view in (roomy[..., 0], array.T.copy().T, np.flip(np.flip(array).copy()) if array.ndim else array):
        view.flags.writeable = view.flags.writeable and not readonly
        assert as_bits(view) == bits


@given(some.tensors())
def test_a_contiguous_array_is_not_copied(bits):
    if bits.dtype in NUMPY and bits.flat.size:
        array = as_numpy(bits)
        assert np.shares_memory(as_bits(array).flat, array)


@given(some.tensors())
def test_a_torch_tensor_of_every_dtype_gives_its_exact_bits_and_comes_back(bits):
    if bits.dtype in {"F6_E2M3", "F6_E3M2"}:
        with pytest.raises(WeightsMismatch, match=bits.dtype):
            bits_tensor(bits)
        return
    tensor = bits_tensor(bits)
    assert tensor.dtype == dtype_from(bits.dtype)
    assert as_bits(tensor) == bits
    back = bits_like(as_bits(tensor), tensor)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert as_bits(back) == bits


def test_strided_torch_tensors_and_parameters_give_the_bits_of_their_contiguous_copy():
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    assert as_bits(tensor.T) == as_bits(tensor.T.contiguous())
    assert as_bits(tensor[:, ::2]) == as_bits(tensor[:, ::2].contiguous())
    assert as_bits(torch.nn.Parameter(tensor)) == as_bits(tensor)


def test_an_unaligned_array_gives_its_exact_bits():
    data = np.arange(9, dtype="u1")
    array = np.frombuffer(data.tobytes(), "<u4", count=2, offset=1)
    assert as_bits(array).flat.tolist() == [0x04030201, 0x08070605]


@pytest.mark.parametrize("thing", [3, "text", None, [1, 2], np.float32(1), object()])
def test_what_is_no_tensor_is_refused_by_its_type(thing):
    with pytest.raises(WeightsMismatch, match=type(thing).__name__):
        as_bits(thing)


@pytest.mark.parametrize("dtype", ["M8[s]", "S3", "O", "c16", "g", "V2"])
def test_a_numpy_dtype_that_safetensors_lacks_is_refused(dtype):
    with pytest.raises(WeightsMismatch, match="no safetensors dtype"):
        as_bits(np.zeros(2, dtype))


@pytest.mark.parametrize("code", ["BF16", "F8_E4M3", "F4", "F6_E2M3"])
@pytest.mark.skipif("ml_dtypes" in sys.modules, reason="ml_dtypes gives numpy these dtypes")
def test_bits_that_numpy_has_no_dtype_for_are_refused_in_words(code):
    bits = TensorBits(code, (4,), np.zeros(Spec(code, (4,)).units, dtype_of(code).unsigned))
    with pytest.raises(WeightsMismatch, match=f"numpy has no dtype for {code}"):
        bits_like(bits, np.zeros(1, np.float32))


def test_nan_equals_itself_and_the_two_zeros_differ():
    nan = np.array([np.nan], np.float32)
    assert as_bits(nan) == as_bits(nan.copy())
    assert as_bits(np.array([0.0])) != as_bits(np.array([-0.0]))


def test_equality_looks_at_dtype_and_shape_too():
    zeros = np.zeros(4, np.float32)
    assert as_bits(zeros) != as_bits(zeros.reshape(2, 2))
    assert as_bits(zeros) != as_bits(zeros.view(np.int32))
    assert as_bits(zeros) != "zeros"


@given(some.specs())
def test_units_times_width_is_the_size_in_bytes(spec):
    assert spec.units * dtype_of(spec.dtype).width == spec.nbytes == math.prod(spec.shape) * dtype_of(spec.dtype).bits // 8


@pytest.mark.parametrize(("dtype", "shape"), [("F4", (3,)), ("F6_E2M3", (2,)), ("F4", ())])
def test_a_packed_tensor_that_does_not_fill_its_last_byte_is_refused(dtype, shape):
    with pytest.raises(FormatError, match="whole bytes"):
        _ = Spec(dtype, shape).nbytes


@pytest.mark.parametrize("shape", [(1,) * 65, (1 << 61,), (1 << 40, 1 << 40), (1 << 62, 1 << 62, 0)])
def test_a_shape_that_no_library_could_hold_is_refused(shape):
    with pytest.raises(FormatError, match=r"dimensions|elements"):
        Spec("U8", shape)


def test_units_of_another_number_or_width_than_the_shape_asks_for_are_refused():
    with pytest.raises(FormatError, match="needs 3 units"):
        TensorBits("F32", (3,), np.zeros(4, "<u4"))
    with pytest.raises(FormatError, match="needs 3 units"):
        TensorBits("F32", (3,), np.zeros(3, "<u2"))


def test_an_unknown_dtype_is_refused_and_the_known_ones_are_named():
    with pytest.raises(FormatError, match=r"unknown dtype 'F7'.*BF16"):
        dtype_of("F7")


@pytest.mark.parametrize("code", ["F16", "BF16"])
def test_to_key_is_a_bijection_and_its_own_inverse_on_all_65536_patterns(code):
    keys = to_key(SIXTEEN, dtype_of(code))
    assert np.unique(keys).size == 1 << 16
    assert np.array_equal(from_key(keys, dtype_of(code)), SIXTEEN)


@pytest.mark.parametrize("code", ["F16", "BF16"])
def test_to_key_is_monotone_on_all_finite_values_and_infinities_and_knows_both_zeros(code):
    values = torch.from_numpy(SIXTEEN.view("<i2").copy()).view(dtype_from(code)).float().numpy()
    keys = to_key(SIXTEEN, dtype_of(code)).view("<i2")
    ordered = ~np.isnan(values)
    order = np.argsort(keys[ordered], kind="stable")
    steps = np.diff(values[ordered][order].astype(np.float64).clip(-1e39, 1e39))
    assert (steps >= 0).all()
    assert (steps == 0).sum() == 1  # from -0 to +0
    assert keys[0] == 0
    assert keys[0x8000] == -1


@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtype.width == 1], ids=attrgetter("name"))
def test_to_key_is_a_monotone_bijection_on_all_patterns_of_one_byte(dtype):
    patterns = np.arange(256, dtype="u1")
    keys = to_key(patterns, dtype)
    assert np.unique(keys).size == 256
    assert np.array_equal(from_key(keys, dtype), patterns)
    values = torch.from_numpy(patterns).view(dtype_from(dtype.name)).float().numpy()
    finite = np.isfinite(values)
    order = np.argsort(keys.view("i1")[finite], kind="stable")
    assert (np.diff(values[finite][order]) >= 0).all()


@given(st.sampled_from(FLOATS).flatmap(lambda dtype: some.tensors(Spec(dtype.name, (9,)))))
def test_to_key_is_its_own_inverse_and_monotone_at_every_width(bits):
    dtype = dtype_of(bits.dtype)
    keys = to_key(bits.flat, dtype)
    assert np.array_equal(to_key(keys, dtype), bits.flat)
    if dtype.width in {4, 8}:
        values = bits.flat.view(f"<f{dtype.width}")
        numbers = ~np.isnan(values)
        order = np.argsort(keys.view(f"<i{dtype.width}")[numbers], kind="stable")
        ranked = values[numbers][order]
        assert (ranked[1:] >= ranked[:-1]).all()


@pytest.mark.parametrize("code", ["BF16", "F16", "U16", "I16"])
@pytest.mark.parametrize("base", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x3F80, 0x7F80, 0x7FC1, 0xFF80, 0xBEEF])
def test_advance_inverts_steps_between_for_every_target_of_a_16_bit_base(code, base):
    old = np.full(1 << 16, base, "<u2")
    steps = steps_between(old, SIXTEEN, dtype_of(code))
    assert np.array_equal(advance(old, steps, dtype_of(code)), SIXTEEN)
    assert np.unique(steps).size == 1 << 16
    assert np.flatnonzero(steps == 0).tolist() == [base]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype.width == 1], ids=attrgetter("name"))
def test_advance_inverts_steps_between_for_every_pair_of_bytes(dtype):
    old, new = (grid.reshape(-1) for grid in np.meshgrid(np.arange(256, dtype="u1"), np.arange(256, dtype="u1")))
    assert np.array_equal(advance(old, steps_between(old, new, dtype), dtype), new)


@given(some.specs().flatmap(lambda spec: st.tuples(some.tensors(spec), some.tensors(spec))))
def test_advance_inverts_steps_between_for_every_dtype(pair):
    old, new = pair
    dtype = dtype_of(old.dtype)
    assert np.array_equal(advance(old.flat, steps_between(old.flat, new.flat, dtype), dtype), new.flat)


def test_a_step_to_the_next_representable_number_is_one():
    one = np.array([1.0, -1.0, 0.0], np.float32)
    up = np.nextafter(one, np.float32(np.inf), dtype=np.float32)
    assert steps_between(one.view("<u4"), up.view("<u4"), dtype_of("F32")).tolist() == [1, 1, 1]
