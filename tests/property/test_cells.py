"""The borders of a view's cells are where a real cast changes, and the compiled levels are the plain ones."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulse import kernels
from pulse.bits import dtype_of, from_key, to_key
from pulse.codec import cells
from pulse.codec.cells import LEVELS, borders, cells_of, levels, plain_levels
from pulse.errors import UnsupportedFormat
from tests.rounds import VIEWS

F32 = dtype_of("F32")
TORCH = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip


def seen(patterns, view):
    """What the view shows of FP32 patterns, as numbers: both zeros are one."""
    return torch.from_numpy(patterns.view(np.float32).copy()).to(TORCH[view]).float().numpy()


def moved(patterns, steps):
    """FP32 patterns so many steps further outward."""
    keys = to_key(patterns, F32).view(np.int32).astype(np.int64)
    keys += np.where(patterns >> np.uint32(31) != 0, -steps, steps)
    return from_key(keys.astype(np.int32).view(np.uint32), F32)


def size_of(patterns):
    return np.abs(patterns.view(np.float32))


def numbers_of(view):
    """Every finite number of a view, as FP32, ascending."""
    width = dtype_of(view).width
    bits = torch.arange(1 << 8 * width, dtype=torch.int32).to(torch.uint8 if width == 1 else torch.uint16)
    numbers = bits.view(TORCH[view]).float().numpy()
    return np.unique(numbers[np.isfinite(numbers)])


def places(view):
    """(patterns, whether each is a midpoint): the midpoints between all finite numbers of a view, two steps around each, and the numbers."""
    numbers = numbers_of(view).astype(np.float64)
    middles = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    assert (2 * middles.astype(np.float64) == numbers[1:] + numbers[:-1]).all()
    around = to_key(middles.view(np.uint32), F32).view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
    patterns = from_key(around.view(np.uint32).reshape(-1), F32)
    patterns = np.concatenate([patterns, numbers[1:-1].astype(np.float32).view(np.uint32), np.array([1 << 31], np.uint32)])
    return patterns[size_of(patterns) < numbers.max()], middles


@pytest.mark.parametrize("view", TORCH)
def test_a_cast_changes_at_the_borders_from_every_number_of_the_view_and_from_around_every_midpoint(view):
    patterns, middles = places(view)
    patterns = patterns[~np.isin(patterns.view(np.float32), middles)]
    most = numbers_of(view).max()
    outward, inward = borders(patterns, cells_of(view))
    before = seen(patterns, view)
    for steps, sign in ((outward, 1), (-inward, -1)):
        last, at, past = (moved(patterns, steps + sign * by) for by in (-1, 0, 1))
        shown = size_of(past) < most  # beyond its largest number a view need not change
        assert shown.mean() > 0.9
        assert (seen(last, view) == before)[shown].all()
        assert np.isin(at.view(np.float32), middles)[shown].all()
        assert (seen(past, view) != before)[shown].all()
        changed_at_once = (seen(at, view) != before)[shown]
        assert 0.4 < changed_at_once.mean() < 0.6  # that is a tie, which goes to the even one of two


@pytest.mark.parametrize("view", TORCH)
def test_a_weight_on_a_midpoint_lies_in_the_cell_that_a_cast_puts_it_in(view):
    patterns, middles = places(view)
    ties = patterns[np.isin(patterns.view(np.float32), middles)]
    outward, inward = borders(ties, cells_of(view))
    one = np.ones(ties.size, np.int64)
    above, below = moved(ties, one), moved(ties, -one)
    rounded_up = seen(ties, view) == seen(above, view)
    assert 0.4 < rounded_up.mean() < 0.6
    assert (seen(below, view) == seen(ties, view))[~rounded_up].all()
    assert (np.where(rounded_up, inward, outward) == 1).all()
    inside = np.where(rounded_up, above, below)
    far = borders(inside, cells_of(view))
    assert (np.where(rounded_up, outward, inward) == np.where(rounded_up, *far) + 1).all()


def test_every_step_changes_a_view_of_fp32():
    patterns = np.array([0, 1, 0x80000000, 0x3F800000, 0x7F7FFFFF, 0xFFC00000], np.uint32)
    assert [row.tolist() for row in borders(patterns, cells_of("F32"))] == [[1] * 6, [1] * 6]
    assert plain_levels(patterns[3:4], cells_of("F32")).tolist() == [4 * 127]


def test_the_distances_in_the_cell_of_the_zeros_lead_over_both_zeros():
    zeros = np.array([0, 0x80000000], np.uint32)
    assert [row.tolist() for row in borders(zeros, cells_of("BF16"))] == [[0x8000] * 2, [0x8001] * 2]
    half = np.float32(2.0**-10).view(np.uint32)  # of the smallest number of F8_E4M3
    assert [row.tolist() for row in borders(zeros, cells_of("F8_E4M3"))] == [[half] * 2, [half + 1] * 2]


@pytest.mark.parametrize("view", VIEWS)
def test_every_pattern_has_a_level_in_range_and_the_kernel_finds_the_same(view):
    spread = np.arange(1 << 20, dtype=np.uint32) * np.uint32(4096) + np.arange(1 << 20, dtype=np.uint32) % np.uint32(4096)
    edges = places(view)[0] if view in TORCH else np.empty(0, np.uint32)
    patterns = np.concatenate([spread, edges, np.array([0xFFFFFFFF, 0x7F800000, 0xFF800000], np.uint32)])
    plain = plain_levels(patterns, cells_of(view))
    assert plain.max() < LEVELS
    assert np.array_equal(levels(patterns, cells_of(view)), plain)


@given(st.sampled_from(VIEWS), st.lists(st.integers(0, (1 << 32) - 1), max_size=30))
def test_the_kernel_gives_what_plain_numpy_gives_for_any_patterns(view, held):
    patterns, found = np.array(held, np.uint32), np.empty(len(held), np.uint16)
    of = cells_of(view)
    kernels.levels(patterns, of.drop, of.least, of.midpoints, found)
    assert np.array_equal(found, plain_levels(patterns, of))


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, cells._FAST_FROM - 1, cells._FAST_FROM, cells._FAST_FROM + 1])
@pytest.mark.parametrize("view", ["BF16", "F8_E5M2"])
def test_levels_do_not_depend_on_size_or_memory(view, size):
    patterns = np.random.default_rng(size).integers(0, 1 << 32, size, dtype=np.uint32)
    expected = plain_levels(patterns, cells_of(view))
    strided = np.repeat(patterns, 2)[::2]
    fixed = patterns.copy()
    fixed.flags.writeable = False
    for twin in (patterns, strided, fixed):
        assert np.array_equal(levels(twin, cells_of(view)), expected)
    assert patterns.flags.writeable


def test_a_nearer_border_never_has_a_higher_level_within_one_exponent():
    patterns = np.uint32(0x3F800000) + np.arange(1 << 16, dtype=np.uint32)
    nearer = np.minimum(*borders(patterns, cells_of("BF16")))
    order = np.argsort(nearer, kind="stable")
    assert (np.diff(plain_levels(patterns, cells_of("BF16"))[order].astype(int)) >= 0).all()


@pytest.mark.parametrize("dtype", ["F64", "I8", "F4", "F8_E8M0", "BOOL", "none", ""])
def test_what_is_no_view_of_fp32_is_refused(dtype):
    with pytest.raises(UnsupportedFormat, match="no view"):
        cells_of(dtype)
