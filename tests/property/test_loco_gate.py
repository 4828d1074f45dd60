"""The gates: what is visible, against a rounding of our own, around every weight that a view can hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulse.torch.loco import rounds
from pulse.torch.loco.gate import Everything, Largest, Visible, visible
from pulse.torch.loco.layout import collect
from pulse.torch.loco.methods import METHODS
from pulse.torch.loco.steps import Nesterov

VIEWS = {torch.bfloat16: 16, torch.float16: 16, torch.float8_e4m3fn: 8, torch.float8_e5m2: 8}
LARGEST = {torch.bfloat16: 0x7F7F, torch.float16: 0x7BFF, torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}


def numbers(view: torch.dtype) -> np.ndarray:
    """The magnitudes that a view can hold, by their patterns, and the one that would come after the largest. float64, exact."""
    width = VIEWS[view]
    patterns = torch.arange(LARGEST[view] + 1, dtype=torch.int16 if width == 16 else torch.uint8)
    held = patterns.view(view).to(torch.float64).numpy()
    return np.append(held, 2 * held[-1] - held[-2])


def rounded(values: np.ndarray, view: torch.dtype) -> np.ndarray:
    """The patterns that finite FP32 numbers round to: the nearest, of two equally near the even one. Beyond the largest lies infinity; E4M3
    has none, and PyTorch takes the largest."""
    held = numbers(view)
    size = np.abs(values.astype(np.float64))
    upper = np.clip(np.searchsorted(held, size), 1, held.size - 1)
    below, above = held[upper - 1], held[upper]
    middle = below + (above - below) / 2
    up = (size > middle) | ((size == middle) & (upper % 2 == 0))
    sign = np.signbit(values).astype(np.int64) << (VIEWS[view] - 1)
    pattern = np.where(up, upper, upper - 1)
    return sign | (np.minimum(pattern, LARGEST[view]) if view is torch.float8_e4m3fn else pattern)


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def neighbours(values: np.ndarray, steps: range) -> np.ndarray:
    """The FP32 numbers that lie so many steps from these, away from zero. (values, steps)."""
    bits = np.abs(values).astype(np.float32).view(np.int32).astype(np.int64)
    return np.clip(bits[:, None] + np.array(steps), 0, 0x7F7FFFFF).astype(np.int32).view(np.float32)


@pytest.mark.parametrize("view", VIEWS)
def test_an_entry_is_sent_exactly_if_it_changes_the_view_around_every_number_that_the_view_holds(view):
    """For BF16 these are all 65,536 patterns but NaNs and infinities, which the tests below have."""
    held = numbers(view)
    with np.errstate(over="ignore"):
        centres = held[:-1].astype(np.float32)
        around = np.stack([held[1:] + held[:-1], np.append(0.0, held[1:-1] + held[:-2])], axis=1) / 2  # the borders above and below
        targets = np.concatenate([neighbours(around[:, side].astype(np.float32), range(-2, 3)) for side in (0, 1)], axis=1)
    for sign in (1, -1):
        for towards in (sign, -sign):  # the same side of zero, and across it
            anchor, target = np.float32(sign) * np.repeat(centres[:, None], 10, axis=1), np.float32(towards) * targets
            with np.errstate(over="ignore"):
                s = anchor - target
                after = anchor - s  # what the gate sees, which is the target unless the two are far apart
            finite = np.isfinite(after)
            assert finite.mean() > 0.99
            if towards == sign:
                assert (after == target)[finite].mean() > 0.99
            wanted = rounded(anchor[finite], view) != rounded(after[finite], view)
            assert 0.3 < wanted.mean() <= 1
            found = Visible().opens(tensor(anchor[finite]), tensor(s[finite]), view)
            assert np.array_equal(found.numpy(), wanted)


PATTERNS = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=50)


@given(PATTERNS, st.sampled_from(list(VIEWS)))
def test_an_entry_is_sent_exactly_if_it_changes_the_view_wherever_the_weight_is(pairs, view):
    anchor, s = np.array(pairs, np.uint32).view(np.float32).T
    with np.errstate(all="ignore"):
        after = anchor - s
    usable = np.isfinite(anchor) & np.isfinite(after)
    anchor, s, after = anchor[usable], s[usable], after[usable]
    found = Visible().opens(tensor(anchor), tensor(s), view)
    assert np.array_equal(found.numpy(), rounded(anchor, view) != rounded(after, view))


def test_a_tie_rounds_to_even_so_one_border_belongs_to_the_cell_and_the_other_does_not():
    half = 2.0**-8  # of the distance between 1 and the next BF16 number
    even, odd = torch.tensor([1.0]), torch.tensor([1 + 2 * half])
    assert not visible(even, even + half, torch.bfloat16)
    assert visible(odd, odd + half, torch.bfloat16)
    assert visible(odd, odd - half, torch.bfloat16)


def test_zeros_of_both_signs_differ():
    tiny = 1e-45  # far below what BF16 can hold
    for anchor, s, sent in (
        (0.0, tiny, True),
        (0.0, -tiny, False),
        (-0.0, -tiny, True),
        (-0.0, tiny, False),
        (0.0, 0.0, False),
        (-0.0, 0.0, False),
    ):
        assert bool(Visible().opens(torch.tensor([anchor]), torch.tensor([s]), torch.bfloat16)) is sent


def test_beyond_the_largest_number_of_the_view_lies_its_infinity_and_for_e4m3_nothing():
    for view, most in (
        (torch.bfloat16, 3.3895314e38),
        (torch.float16, 65504.0),
        (torch.float8_e5m2, 57344.0),
        (torch.float8_e4m3fn, 448.0),
    ):
        largest = torch.tensor([most])
        step = torch.tensor([float(numbers(view)[-1] - numbers(view)[-2])])
        assert not Visible().opens(largest, -0.49 * step, view)
        assert bool(Visible().opens(largest, -0.51 * step, view)) is (view is not torch.float8_e4m3fn)


@pytest.mark.parametrize("view", VIEWS)
def test_a_weight_that_is_not_finite_is_refused_and_not_sent_for_ever(view):
    weights = torch.cat([torch.full((40,), value) for value in (float("nan"), float("inf"), -float("inf"))])
    nothing = torch.zeros_like(weights)
    assert not Visible().opens(weights, nothing, view).any()  # its bits do not change
    for value in (float("nan"), float("inf"), -float("inf"), 2.0**65):
        layout, local = collect([("w", torch.nn.Parameter(torch.ones(10)))], view)
        for method in METHODS.values():
            for bad_anchor in (False, True):
                state = rounds.new_state(local, method, Nesterov(0.7, 0.9), "feedback")
                mine = [tensor.clone() for tensor in local]
                (state.anchor if bad_anchor else mine)[0][3] = value
                outgoing = rounds.encode(state, layout, mine, method, {})
                assert (outgoing.bad, outgoing.blobs, outgoing.parts) == ("w", (), [])


def test_the_largest_of_every_chunk_are_sent_the_first_of_equals_and_no_zeros():
    s = torch.tensor([0.0, -3.0, 1.0, 3.0, 3.0, 0.0, 0.0, 0.0, 0.0, 2.0, -5.0])
    assert Largest(2, 4).opens(s, s, torch.bfloat16).tolist() == [*(False, True, False, True), *(True, *3 * [False]), *(False, True, True)]
    assert Largest(2, 4).opens(s[:0], s[:0], torch.bfloat16).tolist() == []  # a shard may be empty


@given(st.integers(1, 9000), st.integers(0, 99))
def test_of_a_thousand_chunks_no_more_than_the_count_and_none_smaller_than_what_stays(elements, seed):
    s = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
    opens = Largest().opens(s, s, torch.bfloat16)
    for sent, chunk in zip(opens.split(4096), s.split(4096), strict=True):
        assert int(sent.sum()) == min(64, len(chunk))
        if not sent.all():
            assert chunk[sent].abs().min() >= chunk[~sent].abs().max()


def test_a_dense_gate_is_always_open():
    assert Everything().opens(torch.zeros(3), torch.zeros(3), torch.bfloat16) is None
