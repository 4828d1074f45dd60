"""What bits mean: magnitudes, classes, ulps and casts, against torch and numpy for every pattern that matters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pulse.analysis.numbers import LAYOUTS, class_count, class_of_pattern, classes_of, magnitude_of_pattern, ulp
from pulse.analysis.views import VIEWS, cast, narrow, visible
from pulse.bits import dtype_of

TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
# beside every highest half: nothing, the least, both sides of every half that BF16 and F16 round at, and everything
LOWS = sorted({0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, *(base + near for base in range(0x1000, 0x10000, 0x2000) for near in (-1, 0, 1))})


def floats():
    """F32 patterns: 65536 upper halves with every lower half that could matter to a cast."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    return (upper[:, None] | np.array(LOWS, np.uint32)).ravel()


def torch_cast(bits, view):
    values = torch.from_numpy(bits.view(np.float32).copy()).to(TORCH[view])
    unsigned = torch.uint8 if values.element_size() == 1 else torch.uint16
    return values.view(unsigned).numpy().astype(np.uint32), values.float().isnan().numpy()


@pytest.mark.parametrize("view", VIEWS["F32"])
@pytest.mark.parametrize("function", [narrow, lambda bits, view: cast(bits, "F32", view)], ids=["by arithmetic", "as it is used"])
def test_casts_are_those_of_torch(view, function):
    bits = floats()
    expected, nan = torch_cast(bits, view)
    found = function(bits, view)
    assert np.array_equal(found[~nan], expected[~nan])
    assert len(set(found[nan].tolist())) == 1
    assert not np.isin(found[~nan], found[nan]).any()


@pytest.mark.parametrize("view", VIEWS["F32"])
def test_casts_of_random_numbers_are_those_of_torch(view):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, np.uint32)
    expected, nan = torch_cast(bits, view)
    assert np.array_equal(cast(bits, "F32", view)[~nan], expected[~nan])


@pytest.mark.parametrize(("source", "view"), [(source, view) for source in ("BF16", "F16") for view in VIEWS[source]])
def test_casts_of_all_16_bit_numbers_are_those_of_torch(source, view):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    values = torch.from_numpy(patterns.copy()).view(TORCH[source]).to(TORCH[view])
    nan = values.float().isnan().numpy()
    found = cast(patterns, source, view)
    assert np.array_equal(found[~nan], values.view(torch.uint8).numpy()[~nan])
    assert len(set(found[nan].tolist())) == 1


def test_a_nan_that_stays_nan_is_not_visible_and_a_sign_of_zero_is():
    old = np.array([0x7FC00000, 0x00000000, 0x3F800000], np.uint32)
    new = np.array([0xFFC00001, 0x80000000, 0x3F800001], np.uint32)
    for view in VIEWS["F32"]:
        assert visible(old, new, "F32", view) == 1


def test_visible_changes_are_counted_over_many_blocks():
    rng = np.random.default_rng(1)
    old = rng.integers(0, 1 << 32, 200_000, np.uint32)
    new = old + rng.integers(0, 1 << 17, old.size).astype(np.uint32)
    for view in VIEWS["F32"]:
        assert visible(old, new, "F32", view) == int((narrow(old, view) != narrow(new, view)).sum())


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_magnitudes_of_16_bit_floats_are_those_of_torch(name):
    expected = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16)).view(TORCH[name]).double().abs().numpy()
    assert np.array_equal(magnitude_of_pattern(name), expected, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in TORCH if name.startswith("F8")])
def test_magnitudes_of_8_bit_floats_are_those_of_torch(name):
    expected = torch.from_numpy(np.arange(256, dtype=np.uint8)).view(TORCH[name]).double().abs().numpy()
    assert np.array_equal(magnitude_of_pattern(name)[:256], expected, equal_nan=True)


@pytest.mark.parametrize(("name", "low"), [("F32", 16), ("F64", 48)])
def test_magnitudes_of_wider_floats_are_cut_off_below_their_highest_16_bits(name, low):
    dtype = dtype_of(name)
    patterns = np.arange(1 << 16, dtype=np.uint64)
    with np.errstate(invalid="ignore"):
        expected = np.abs((patterns << np.uint64(low)).astype(dtype.unsigned).view(f"<f{dtype.width}").astype(np.float64))
    assert np.array_equal(magnitude_of_pattern(name), expected, equal_nan=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_of_one_class_share_their_power_of_two(name):
    values, classes = magnitude_of_pattern(name), class_of_pattern(name)
    layout = LAYOUTS[name]
    plain = np.isfinite(values) & (classes > 0)
    assert np.array_equal(np.frexp(values[plain])[1] - 1, classes[plain] - layout.bias)
    assert classes.max() == layout.classes - 1 == class_count(dtype_of(name)) - 1


def test_what_is_no_float_has_one_class():
    assert class_count(dtype_of("I32")) == 1
    assert classes_of(np.array([0, 1 << 31], np.uint32), dtype_of("I32")).tolist() == [0, 0]


@pytest.mark.parametrize("name", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
def test_an_ulp_is_the_way_to_the_next_number(name):
    values = magnitude_of_pattern(name)[: 1 << (LAYOUTS[name].exponent + LAYOUTS[name].mantissa)]
    values = values[np.isfinite(values)]
    assert np.array_equal(ulp(values[:-1], name), np.diff(values))
