"""Bytes per change on a slice of a real RL run (tests/data/trace), container included."""

from itertools import pairwise
from pathlib import Path

import pytest

from pulse import checkpoint, codec
from pulse.patch import apply, compose, diff, relate

TRACE = Path(__file__).parents[1] / "data" / "trace"
LIMITS = {"portable": 1.75, "absolute": 2.85}


@pytest.fixture(scope="module")
def steps():
    return [checkpoint.read(path) for path in sorted(TRACE.glob("*.safetensors"))]


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
@pytest.mark.parametrize("step", [0, 1])
def test_a_real_step_takes_few_bytes_per_change(steps, step, encoding):
    old, new = steps[step : step + 2]
    patch = diff(old, new)
    blob = codec.encode(patch, old, encoding=encoding)
    assert patch.changed > 1900
    assert len(blob) / patch.changed <= LIMITS[encoding]
    assert apply(codec.decode(blob), old) == new


def test_two_real_steps_compose_into_one_patch_smaller_than_both(steps):
    first, second = (relate(diff(old, new), old) for old, new in pairwise(steps))
    both = codec.encode(compose(first, second))
    assert apply(codec.decode(both), steps[0]) == steps[2]
    assert len(both) < len(codec.encode(first)) + len(codec.encode(second))
