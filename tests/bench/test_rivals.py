"""The layouts of others hold everything: each is read back, bit for bit, by a reader written from the same description."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.rivals import PIECE, RIVALS
from bench.steps import to_bf16, trace
from tests.bench.inverses import INVERSES, changes_between

TRACE = Path(__file__).parents[1] / "data" / "trace"

every_layout = pytest.mark.parametrize("layout", RIVALS.values(), ids=lambda layout: layout.__name__)


@st.composite
def pairs(draw):
    """Old and new bits of a few tensors, with their shapes: any pattern may become any other."""
    old, new, shapes = {}, {}, {}
    for name in draw(st.sets(st.sampled_from(["a", "b.weight", "ä"]), min_size=1)):
        shapes[name] = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        units = int(np.prod(shapes[name]))
        before = np.frombuffer(draw(st.binary(min_size=2 * units, max_size=2 * units)), "<u2")
        mask = np.frombuffer(draw(st.binary(min_size=2 * units, max_size=2 * units)), "<u2")
        every = draw(st.sampled_from([1, 3, 50]))
        old[name], new[name] = before, np.where(np.arange(units) % every == 0, before ^ mask, before)
    return old, new, shapes


def test_every_layout_has_a_reader():
    assert set(RIVALS.values()) == set(INVERSES)


@every_layout
@given(pair=pairs())
def test_arbitrary_bits_come_back(layout, pair):
    old, new, shapes = pair
    changes = changes_between(old, new, shapes)
    if changes:
        assert_same(INVERSES[layout](layout(changes), old), new)


def scattered(shape, positions, add=1):
    random = np.random.default_rng(0)
    old = to_bf16(random.standard_normal(int(np.prod(shape)), np.float32))
    new = old.copy()
    new[positions] += np.uint16(add)
    return {"w": old}, {"w": new}, {"w": shape}


@every_layout
@pytest.mark.parametrize(
    ("shape", "positions", "add"),
    [
        pytest.param((2, 100_000), [70_000, 199_999], 1, id="distances that no u16 holds"),
        pytest.param((70_000, 2), [0, 139_999], 1, id="rows that no u16 holds"),
        pytest.param((300, 300), list(range(0, 90_000, 256)), 1, id="distances at the edge of a byte"),
        pytest.param((300, 300), list(range(0, 90_000, 255)), 127, id="steps at the edge of a byte"),
        pytest.param((300, 300), list(range(0, 90_000, 77)), 0x8000, id="signs that flip"),
        pytest.param((300, 300), list(range(300)), 1, id="one row in full"),
        pytest.param((PIECE + 3,), [0, PIECE - 1, PIECE, PIECE + 2], 1, id="more than a piece"),
    ],
)
def test_widths_and_borders_hold(layout, shape, positions, add):
    old, new, shapes = scattered(shape, positions, add)
    assert_same(INVERSES[layout](layout(changes_between(old, new, shapes)), old), new)


@every_layout
def test_a_real_step_comes_back(layout):
    for step in trace("slice", TRACE, "", ""):
        made = INVERSES[layout](layout(step.changes), {name: bits.flat for name, bits in step.old.items()})
        assert_same(made, {name: bits.flat for name, bits in step.new.items()})


def test_the_papers_layout_has_the_size_that_was_reported_for_it():
    """2.83 bytes per change at 2 %, in a matrix of 4,096 rows of normal weights that Adam moves: the authors' code, run."""
    random = np.random.default_rng(0)
    masters = random.standard_normal(1 << 24, np.float32) * np.float32(0.028)
    old, new = (to_bf16(masters + step) for step in (np.float32(0), np.float32(0.75e-6) * random.standard_normal(1 << 24, np.float32)))
    changes = changes_between({"w": old}, {"w": new}, {"w": (4096, 4096)})
    layout = next(layout for name, layout in RIVALS.items() if name.startswith("paper v3.1"))
    assert len(layout(changes)) / changes[0].positions.size == pytest.approx(2.83, abs=0.03)


def assert_same(made, expected):
    assert set(made) == set(expected)
    for name, bits in expected.items():
        np.testing.assert_array_equal(made[name], bits)
