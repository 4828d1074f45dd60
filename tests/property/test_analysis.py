"""Every figure of the analysis against a few naive lines, on arbitrary bits of every dtype; kernels against plain numpy."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse import MemoryWeights, Publisher
from pulse.analysis import Checkpoints, chain_of, count, figures, kernels, reference_bits
from pulse.analysis.entropy import Pairs
from pulse.analysis.numbers import LAYOUTS, class_count, plain_count_patterns
from pulse.analysis.past import plain_look_back
from pulse.analysis.sequences import plain_pick
from pulse.analysis.tally import Move, Sums, plain_tally, tally
from pulse.bits import DTYPES, TensorBits, dtype_of
from pulse.codec import ENCODINGS
from pulse.store import MemoryStore
from pulse.testing import strategies
from pulse.versions import Versions
from tests.chains import Trainer


def key(bits, dtype):
    """The order of bit patterns, in plain integers."""
    width = 8 * dtype.width
    if not dtype.is_float:
        return bits
    return bits if bits < 1 << (width - 1) else (1 << (width - 1)) - 1 - bits


def step_of(old, new, dtype):
    width = 8 * dtype.width
    step = (key(new, dtype) - key(old, dtype)) % (1 << width)
    return step - (1 << width) if step >= 1 << (width - 1) else step


def class_of(bits, dtype):
    layout = LAYOUTS.get(dtype.name)
    return 0 if layout is None else (bits >> layout.mantissa) % layout.classes


class Naive:
    """The same counts, unit by unit."""

    def __init__(self, history):
        steps = len(history) - 1
        self.changed, self.classes, self.units = Counter(), Counter(), Counter()
        self.sizes, self.up, self.again, self.same, self.since, self.windows = (Counter() for _ in range(6))
        self.pairs = [Counter() for _ in range(steps)]
        for name, first in history[0].items():
            dtype = dtype_of(first.dtype)
            for unit in zip(*(weights[name].flat.tolist() for weights in history), strict=True):
                self.add(name, dtype, unit)

    def add(self, name, dtype, unit):
        last = None
        for i, (old, new) in enumerate(pairwise(unit)):
            self.units[i, dtype.name, class_of(old, dtype)] += 1
            for k in (1, 2, 4, 8, 16, 32):
                if k <= i + 1:
                    self.windows[k, i] += unit[i + 1 - k] != new
            if old == new:
                continue
            step = step_of(old, new, dtype)
            self.changed[name, i] += 1
            self.classes[i, dtype.name, class_of(old, dtype)] += 1
            self.sizes[i, (abs(step) - 1).bit_length()] += 1
            self.up[i] += step > 0
            self.pairs[i][dtype.name, class_of(old, dtype), step] += 1
            if last is not None:
                self.again[i] += 1
                self.same[i] += last[1] == (step > 0)
                self.since[i - last[0], last[1] == (step > 0)] += 1
            last = i, step > 0

    def reference(self, i):
        """n H(k/n) per class, and k times the entropy of its steps, as the definition says."""

        def entropy(counts):
            total = sum(counts)
            return sum(-c / total * math.log2(c / total) for c in counts if c)

        bits = 0.0
        for (step, dtype, kind), n in self.units.items():
            if step == i:
                k = self.classes[i, dtype, kind]
                bits += n * entropy([k, n - k])
                bits += k * entropy([c for (name, of, _), c in self.pairs[i].items() if (name, of) == (dtype, kind)])
        return bits


def nonzero(table):
    return {place: value for place, value in table.items() if value}


def assert_counted(counts, history):
    naive = Naive(history)
    steps = range(len(history) - 1)
    assert {(name, i): row[i] for name, row in counts.changed.items() for i in steps if row[i]} == nonzero(naive.changed)
    assert {(i, size): int(n) for (i, size), n in np.ndenumerate(counts.sizes) if n} == nonzero(naive.sizes)
    for found, expected in ((counts.up, naive.up), (counts.again, naive.again), (counts.same, naive.same)):
        assert {i: found[i] for i in steps if found[i]} == nonzero(expected)
    assert {(gap, bool(same)): int(n) for (gap, same), n in np.ndenumerate(counts.since) if n} == nonzero(naive.since)
    assert {(k, i): row[i] for k, row in counts.windows.items() for i in steps if row[i]} == nonzero(naive.windows)
    for table, expected in (("units", naive.units), ("left", naive.classes)):
        rows = {name: found.units() if table == "units" else found.left for name, found in counts.by_dtype.items()}
        assert {(i, name, c): int(n) for name, row in rows.items() for (i, c), n in np.ndenumerate(row) if n} == nonzero(expected)
    for i, bits in enumerate(counts.reference_bits()):
        if not any(dtype == "F64" for dtype, _, _ in naive.pairs[i]):
            assert bits == pytest.approx(naive.reference(i), abs=1e-6)
            assert bits == pytest.approx(reference_bits(history[i], history[i + 1]), abs=1e-9)
        else:
            assert bits is reference_bits(history[i], history[i + 1]) is None


@st.composite
def histories(draw, least=1, most=5):
    """Sets of the same tensors one after the other, with arbitrary bits and a few changes between them; some go back."""
    found = [draw(strategies.weights(max_size=3))]
    for _ in range(draw(st.integers(least, most)) - 1):
        earlier = draw(st.sampled_from(found))
        found.append({name: draw(strategies.edited(bits)) for name, bits in earlier.items()})
    return found


@given(histories(), st.integers(1, 7))
def test_checkpoints_are_counted_as_the_definitions_say(history, piece):
    assert_counted(count(Checkpoints(history, [str(i) for i in range(len(history))], piece=piece)), history)


@settings(max_examples=25)
@given(histories(least=2), st.sampled_from(ENCODINGS))
def test_a_chain_is_counted_as_the_checkpoints_that_were_published(history, encoding):
    store = MemoryStore()
    weights = MemoryWeights(history[0])
    publisher = Publisher(store, weights, encoding=encoding)
    for i, tensors in enumerate(history):
        for name, bits in tensors.items():
            weights.assign(name, bits)
        publisher.publish(i)
    publisher.close()
    assert_counted(count(chain_of(Versions(store))), history)


def long_history(steps, share):
    trainer = Trainer(3)
    history = [trainer.bits()]
    for i in range(steps):
        trainer.step(share)
        if i % 7 == 6:
            for name, bits in history[-5].items():  # back to what was five steps ago
                trainer.weights.assign(name, bits)
        history.append(trainer.bits())
    return trainer, history


def test_what_went_away_and_came_back_within_k_steps_has_not_changed():
    _, history = long_history(40, 0.2)
    counts = count(Checkpoints(history, [str(i) for i in range(len(history))]))
    assert_counted(counts, history)
    assert all(counts.windows[k][k - 1 :].size for k in (1, 2, 4, 8, 16, 32))


def test_a_long_chain_is_counted_as_its_checkpoints_with_anchors_between():
    _, history = long_history(40, 0.2)
    store = MemoryStore()
    weights = MemoryWeights(history[0])
    publisher = Publisher(store, weights)
    for i, tensors in enumerate(history):
        for name, bits in tensors.items():
            weights.assign(name, bits)
        if i == 17:
            publisher.close()
            publisher = Publisher(store, weights)
        publisher.publish(i)
    publisher.close()
    assert_counted(count(chain_of(Versions(store))), history)
    assert_counted(count(chain_of(Versions(store), 10, 20)), history[10:21])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_versions_that_the_trainer_went_back_from_do_not_count(encoding):
    trainer, history = long_history(9, 0.2)
    store = MemoryStore()
    weights = MemoryWeights(history[0])
    publisher = Publisher(store, weights, encoding=encoding)
    steps = [0, 1, 2, 3, 2, 3, None, 4, 3, 5]
    for step, tensors in zip(steps, history, strict=True):
        for name, bits in tensors.items():
            weights.assign(name, bits)
        publisher.publish(step)
    publisher.close()
    chain = chain_of(Versions(store))
    kept = [0, 1, 4, 6, 8, 9]
    assert [manifest.version for manifest in chain.kept] == kept
    assert_counted(count(chain), [history[i] for i in kept])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("wide", [np.int16, np.int32])
def test_the_compiled_tally_equals_the_plain_one(dtype, wide):
    rng = np.random.default_rng(dtype.bits)
    size = 20_000
    last = rng.integers(-8, 9, size).astype(wide)
    old = rng.integers(0, 256, size * dtype.width, np.uint8).view(dtype.unsigned)
    new = np.where(rng.random(size) < 0.3, old + rng.integers(-2, 3, size).astype(dtype.unsigned), old[::-1])
    new[rng.random(size) < 0.5] = 0
    positions = np.flatnonzero(old != new).view(np.uint64)
    move = Move(("w", 0), dtype, 9, new, positions, old[positions], new[positions], {})
    results = []
    for function in (plain_tally, tally):
        lengths = (64, class_count(dtype), class_count(dtype))
        sums = Sums(*(np.zeros(length, np.int64) for length in lengths), np.zeros((11, 2), np.int64))
        moved = last.copy()
        up, again, same, pairs = function(move, moved, sums)
        results.append([up, again, same, moved, sums.sizes, sums.left, sums.arrived, sums.since, *([pairs] if dtype.name != "F64" else [])])
    for plain, compiled in zip(*results, strict=True):
        assert np.array_equal(plain, compiled)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_compiled_histogram_of_patterns_equals_the_plain_one(width):
    flat = np.random.default_rng(width).integers(0, 256, width * 30_000, np.uint8).view(f"<u{width}")
    plain, compiled = np.ones((2, 1 << 16), np.int64)
    plain_count_patterns(flat, plain)
    kernels.count_patterns(flat, compiled)
    assert np.array_equal(plain, compiled)
    assert plain.sum() == flat.size + (1 << 16)


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_picking_compiled_equals_picking_plain(width, share):
    rng = np.random.default_rng(width)
    old, new = rng.integers(0, 256, (2, width * 5003), np.uint8).view(f"<u{width}")
    differ = np.zeros(5008, bool)
    differ[:5003] = rng.random(5003) < share
    plain, compiled = plain_pick(differ, old, new), kernels.pick(differ.view(np.uint64), old, new)
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, compiled, strict=True))
    assert plain[0].size == differ.sum()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_looking_back_compiled_equals_looking_back_plain(width):
    size = 600_000  # more than the kernel takes at a time
    rng = np.random.default_rng(width)
    current = rng.integers(0, 3, size).astype(f"<u{width}")
    moments = [np.flatnonzero(rng.random(size) < share) for share in (0.3, 0.0, 0.01, 0.2)]
    positions = np.concatenate([[7, 8], *moments])  # two changes too long ago
    bounds = np.cumsum([2, *(at.size for at in moments)])
    old = rng.integers(0, 3, positions.size).astype(f"<u{width}")
    then, expected = current.copy(), []
    for start, stop in reversed(list(pairwise(bounds))):
        then[positions[start:stop]] = old[start:stop]
        expected.append(np.count_nonzero(then != current))
    scratch = np.zeros(size, bool)
    for function in (plain_look_back, kernels.look_back):
        for places in (positions.astype(np.uint32), positions.astype(np.uint64)):
            assert function(places, old, bounds, current, scratch).tolist() == expected
            assert not scratch.any()


def test_pairs_are_counted_across_many_additions_and_given_up_when_too_many(monkeypatch):
    monkeypatch.setattr("pulse.analysis.entropy.MAX_PAIRS", 100)
    monkeypatch.setattr("pulse.analysis.entropy._TOGETHER", 70)
    pairs, expected = Pairs(), Counter()
    for i in range(40):
        values = np.random.default_rng(i).integers(0, 30, 50).astype(np.uint64)
        pairs.add(values)
        expected.update(values.tolist())
    assert sorted(pairs.counts()) == sorted(expected.values())
    pairs.add(np.arange(1000, dtype=np.uint64))
    assert pairs.counts() is None


def test_figures_are_json_and_add_up():
    _, history = long_history(6, 0.2)
    counts = count(Checkpoints(history, [str(i) for i in range(len(history))]), views=True)
    found = figures(counts, 1e-3)
    assert found["changed"] == sum(row["changed"] for row in found["per_step"]) == sum(row["changed"] for row in found["per_tensor"])
    assert found["changed"] == sum(row["changed"] for row in found["per_kind"]) == sum(row["changes"] for row in found["step_sizes"])
    assert found["directions"]["again"] == sum(row["again"] for row in found["per_step"])
    assert {row["name"]: row["changed_per_step"] for row in found["per_tensor"]} == {
        name: row.tolist() for name, row in counts.changed.items()
    }
    for row in found["over_k_steps"]:
        differ = [
            sum(int((a[name].flat != b[name].flat).sum()) for name in a)
            for a, b in zip(history, history[row["k"] :], strict=False)
        ]  # fmt: skip
        shares = [n / found["weights"] for n in differ]
        assert row["windows"] == len(shares)
        assert (row["share"], row["lowest"], row["highest"]) == (pytest.approx(np.mean(shares)), min(shares), max(shares))


def test_a_single_checkpoint_has_magnitudes_and_no_steps():
    weights = {"w": TensorBits("F32", (4,), np.array([0, 1, -3, np.inf], np.float32).view(np.uint32))}
    found = figures(count(Checkpoints([weights], ["one"])), 0.01)
    assert found["steps"] == found["changed"] == found["share"] == 0
    assert found["magnitudes"] == {
        "weights": 4,
        "median": 1.0,
        "zero": 1,
        "not_finite": 1,
        "binades": [
            {"from": 1.0, "power": 0, "weights": 1, "share": 1 / 3},
            {"from": 2.0, "power": 1, "weights": 1, "share": 1 / 3},
        ],
    }
    assert found["critical"][0]["magnitude"] == 2.56
    assert (found["critical"][0]["below"], found["critical"][0]["worst_below"]) == (2, 3)
