"""What is measured is what it says: rounding, medians, made-up steps, steps out of a store."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.steps import Step, stored, synthetic, to_bf16
from pulse import MemoryWeights, Publisher, open_store
from pulse.bits import TensorBits
from pulse.errors import WeightsMismatch

LR = 1.25e-6


@pytest.fixture(scope="module")
def made_up():
    return synthetic(2e6, LR)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_rounding_to_bf16_is_torchs(values):
    expected = torch.tensor(values, dtype=torch.float32).bfloat16().view(torch.int16).numpy().view("<u2")
    np.testing.assert_array_equal(to_bf16(np.array(values, np.float32)), expected)


def test_a_made_up_step_is_the_same_every_time_and_another_for_another_seed(made_up):
    again, other = synthetic(2e6, LR), synthetic(2e6, LR, seed=1)
    assert (again.old, again.new) == (made_up.old, made_up.new)
    assert other.old != made_up.old


def test_a_made_up_step_looks_like_one_of_the_papers_models(made_up):
    assert made_up.median == pytest.approx(0.019, rel=0.3)
    assert 0.005 < made_up.changed / made_up.units < 0.02
    assert 1e6 < made_up.units < 3e6


def step_of(old, new):
    return Step("s", "", "", *({"w": TensorBits("BF16", (len(bits),), np.array(bits, "<u2"))} for bits in (old, new)))


patterns = st.integers(0, 0xFFFF)


@given(st.lists(patterns, min_size=1, max_size=60))
def test_the_median_is_that_of_the_magnitudes(bits):
    middle = sorted(pattern & 0x7FFF for pattern in bits)[(len(bits) - 1) // 2]
    found = step_of(bits, bits).median
    assert np.array([found], np.float32).view(np.uint32)[0] >> 16 == middle or math.isnan(found)


def test_checkpoints_that_do_not_match_are_refused():
    tensor = TensorBits("BF16", (2,), np.zeros(2, "<u2"))
    wide = TensorBits("F32", (2,), np.zeros(2, "<u4"))
    with pytest.raises(WeightsMismatch, match="names, shapes or dtypes"):
        Step("s", "", "", {"w": tensor}, {"v": tensor})
    with pytest.raises(WeightsMismatch, match="w is F32"):
        Step("s", "", "", {"w": wide}, {"w": wide})


def test_steps_come_out_of_a_store_as_they_went_in(tmp_path, made_up):
    weights = MemoryWeights(made_up.old)
    with Publisher(open_store(str(tmp_path)), weights) as publisher:
        publisher.publish()
        for name, bits in made_up.new.items():
            weights.assign(name, bits)
        publisher.publish()
    (step,) = stored(str(tmp_path), [(0, 1)], "1e-6", "BF16")
    assert (step.old, step.new) == (made_up.old, made_up.new)
