"""Plans: expectations against naive sums and simulation, choices against trying every link."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse import codec
from pulse.analysis import Checkpoints, count, plan, planned
from pulse.analysis.numbers import magnitude_of_pattern
from pulse.bits import TensorBits
from pulse.economics import (
    SPEEDS,
    WHOLE,
    Speeds,
    arrival,
    break_even,
    bytes_per_change,
    expected_sizes,
    fastest,
    index_bits,
    rate,
)
from pulse.patch import diff
from tests.chains import random_bits

SLOW, FAST = Speeds(1, 100, 1, 100), Speeds(0, 10, 0, 10)


def bf16(values):
    """F32 values rounded to BF16, as bits."""
    import torch

    tensor = torch.from_numpy(np.asarray(values, np.float32)).bfloat16()
    return tensor.view(torch.uint16).numpy()


def natural(units, seed=0):
    """Gaussian weights, as models have them, with masters anywhere in their cells."""
    masters = (np.random.default_rng(seed).standard_normal(units) * 0.02).astype(np.float32)
    return masters, {"w": TensorBits("BF16", (units,), bf16(masters))}


def counted(weights):
    return count(Checkpoints([weights], ["one"])).by_dtype


def test_the_expected_density_is_the_sum_of_what_each_weight_does():
    _, weights = natural(5000)
    update = 2e-6
    expected = 0.0
    for bits in weights["w"].flat.tolist():
        value = abs(np.array([bits << 16], np.uint32).view(np.float32)[0].item())
        expected += min(1.0, update / 2.0 ** (math.floor(math.log2(value)) - 7)) if value else 1.0
    assert plan.expected_density(counted(weights), update) == pytest.approx(expected / 5000)


def test_the_expected_density_is_that_of_a_simulated_step():
    masters, weights = natural(400_000)
    after = masters + np.float32(2e-6) * np.random.default_rng(1).choice([-1, 1], masters.size).astype(np.float32)
    share = np.mean(weights["w"].flat != bf16(after))
    assert plan.expected_density(counted(weights), 2e-6) == pytest.approx(share, rel=0.03)


def test_a_calibrated_step_gives_the_density_it_was_calibrated_by():
    by_dtype = counted(natural(5000)[1])
    for density in (0.0001, 0.01, 0.5):
        assert plan.expected_density(by_dtype, plan.calibrated(by_dtype, density)) == pytest.approx(density, rel=1e-6)
    assert plan.calibrated(counted({"i": TensorBits("I32", (2,), np.zeros(2, np.uint32))}), 0.5) == math.inf


def test_weights_of_every_kind_can_be_planned_for():
    weights = random_bits(0)
    step = plan.from_weights(counted(weights), sum(bits.spec.nbytes for bits in weights.values()), 1e-6, ["portable", "contextual"])
    assert step.units == sum(bits.spec.units for bits in weights.values())
    assert 0 < step.density < 1
    assert all(0 < size <= step.sizes[WHOLE] for size in step.sizes.values())


def test_the_expected_contextual_size_is_the_reference_entropy_of_a_simulated_step():
    from pulse.analysis import reference_bits

    masters, weights = natural(400_000)
    steps = np.random.default_rng(1).standard_normal(masters.size) * 2e-6 / math.sqrt(2 / math.pi)  # 2e-6 on average
    after = masters + steps.astype(np.float32)
    reference = reference_bits(weights, {"w": TensorBits("BF16", (masters.size,), bf16(after))})
    step = plan.from_weights(counted(weights), 800_000, 2e-6, ["contextual"])
    assert step.sizes["contextual"] * 8 == pytest.approx(reference, rel=0.1)


def test_a_trace_is_measured_by_encoding_each_of_its_steps():
    history = [random_bits(seed) for seed in (0, 0, 0)]
    history[1]["embed.weight"].flat[3:9] += 1
    history[2]["embed.weight"].flat[5:7] += 1
    history[2]["norm.weight"].flat[:] ^= 5  # mostly changed: carried whole
    history[2]["norm.weight"].flat[3] ^= 5
    step = plan.from_trace(Checkpoints(history, ["a", "b", "c"]))
    pairs = [(history[0], history[1]), (history[1], history[2])]
    changes = [sum(int((old[name].flat != new[name].flat).sum()) for name in old) for old, new in pairs]
    assert step.changes == np.mean(changes)
    for name in codec.ENCODINGS:
        exact = [len(codec.encode(diff(old, new), old, encoding=name)) for old, new in pairs]
        assert step.sizes[name] == pytest.approx(np.mean(exact), abs=80)  # these name the states before and after


def test_numbers_give_the_documented_bytes_per_change():
    step = plan.from_numbers(1_000_000, 0.006, 2, ["absolute", "portable", "contextual"])
    assert {name: step.sizes[name] / step.changes for name in codec.ENCODINGS} == pytest.approx(
        {"contextual": 0.98, "portable": 1.51, "absolute": 2.68}, abs=0.01
    )
    assert step.sizes[WHOLE] == 2_000_000
    assert step.raw == 6000 * 6


@pytest.mark.parametrize(("density", "measured"), [(0.012, 0.89), (0.08, 0.67), (0.2, 0.59), (0.4, 0.53)])
def test_what_is_expected_of_the_contextual_encoding_is_near_what_normal_weights_gave(density, measured):
    assert bytes_per_change("contextual", density) == pytest.approx(measured, abs=0.09)


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
def test_sizes_stay_positive_and_below_the_whole_whatever_changes(encoding):
    for changes in range(1000, 1_000_001, 999_000 // 50):
        assert 0.2 * changes < expected_sizes([encoding], 1_000_000, changes)[encoding] <= 2_000_000


def test_no_change_weighs_nothing_and_everything_weighs_the_whole():
    assert expected_sizes(codec.ENCODINGS, 1000, 0) == {"absolute": 0, "portable": 0, "contextual": 0, WHOLE: 2000}
    assert expected_sizes(["absolute"], 1000, 1000) == {"absolute": pytest.approx(1000 * bytes_per_change("absolute", 1.0)), WHOLE: 2000}
    assert expected_sizes(["absolute"], 0, 0) == {"absolute": 0, WHOLE: 0}


@given(st.floats(1e-6, 0.999))
def test_index_bits_are_the_entropy_of_where_per_change(density):
    entropy = -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    assert index_bits(density) == pytest.approx(entropy / density, rel=1e-6)


sizes = st.floats(0, 1e12)
speeds = st.builds(Speeds, *[st.floats(0, 1000)] * 4)


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(sizes, speeds), min_size=1), st.integers(0, 10**10), st.floats(1e3, 1e13))
def test_the_fastest_is_the_one_of_least_seconds(ways, units, link):
    found = fastest(
        {name: size for name, (size, _) in ways.items()}, units, units / 100, link, {name: speed for name, (_, speed) in ways.items()}
    )
    seconds = {name: arrival(size, units, units / 100, link, speed) for name, (size, speed) in ways.items()}
    assert found.seconds == seconds
    assert seconds[found.encoding] == min(seconds.values())
    assert found.reason.startswith(found.encoding)


@given(sizes, sizes, speeds, speeds)
def test_below_the_break_even_the_smaller_one_arrives_first_and_above_it_does_not(small, large, a, b):
    both, by = {"a": small, "b": large}, {"a": a, "b": b}
    link = break_even("a", "b", both, 1_000_000, 10_000, by)
    first = {near: fastest(both, 1_000_000, 10_000, near, by).seconds for near in (link * 0.9, link * 1.1) if 0 < near < math.inf}
    for near, seconds in first.items():
        if abs(seconds["a"] - seconds["b"]) > 1e-9 * max(seconds.values()):
            assert (seconds["a"] < seconds["b"]) == (near < link)
    if link == 0:
        assert small >= large


def test_one_that_is_smaller_and_no_more_work_is_always_first():
    assert break_even("a", "b", {"a": 1, "b": 2}, 100, 1, {"a": FAST, "b": SLOW}) == math.inf
    assert break_even("a", "b", {"a": 2, "b": 1}, 100, 1, {"a": FAST, "b": SLOW}) == 0


@given(st.integers(10**6, 10**10), st.floats(1e-5, 0.3), st.integers(1, 8))
def test_the_borders_tell_the_fastest_on_every_link(units, density, workers):
    step = plan.from_numbers(units, density, 2, ["absolute", "portable", "contextual"])
    borders = plan.borders(step, workers)
    links = [link for link, _, _ in borders]
    assert links == sorted(links)
    for link in np.geomspace(1e4, 1e14, 60):
        found = plan.on_link(step, link, workers=workers)
        told = next((below for border, below, _ in borders if link < border), borders[-1][2])
        assert found.seconds[told] == pytest.approx(min(found.seconds.values()), rel=1e-6)


def test_workers_share_the_link_and_the_interval_says_how_busy_it_is():
    step = plan.Step(1_000_000, 10_000, 2, {"portable": 15_000, WHOLE: 2_000_000}, "test")
    one, four = (plan.on_link(step, 1e6, interval=10, workers=workers) for workers in (1, 4))
    assert one.busy == {"portable": 15_000 * 8 / 1e6 / 10, WHOLE: 1.6}
    assert four.busy == {name: pytest.approx(4 * busy) for name, busy in one.busy.items()}
    work = SPEEDS["portable"].seconds(1_000_000, 10_000)
    assert four.seconds["portable"] == pytest.approx(work + 4 * 0.12)
    assert four.useful == pytest.approx(10 / (10 + work + 0.48))


def test_the_smaller_of_every_two_is_named_with_its_break_even():
    step = plan.from_numbers(10**9, 0.006, 2, ["absolute", "portable", "contextual"])
    found = {(a, b): link for link, a, b in plan.break_evens(step)}
    assert set(found) == {
        ("contextual", "portable"),
        ("contextual", "absolute"),
        ("contextual", WHOLE),
        ("portable", "absolute"),
        ("portable", WHOLE),
        ("absolute", WHOLE),
    }
    for (a, b), link in found.items():
        assert link == break_even(a, b, step.sizes, step.units, step.changes)


def test_several_cores_share_the_work():
    assert SLOW.on(4).seconds(1000, 10) == pytest.approx(SLOW.seconds(1000, 10) / 4)


def test_speeds_are_measured_for_every_encoding():
    found = plan.measured_speeds(units=1 << 16)
    assert set(found) == {*codec.ENCODINGS, WHOLE}
    assert all(speed.seconds(10**9, 10**7) > 0 for speed in found.values())


def test_a_line_through_two_measurements_gives_both_costs_back():
    assert plan._line(1000, [(10, 1e-9 * (2 * 1000 + 50 * 10)), (100, 1e-9 * (2 * 1000 + 50 * 100))]) == (
        pytest.approx(2),
        pytest.approx(50),
    )
    assert plan._line(1000, [(10, 5e-6), (100, 4e-6)]) == (pytest.approx(5), 0)


def test_a_plan_is_json_and_says_what_it_assumes():
    step = plan.from_numbers(10**9, 0.006)
    placed = [plan.on_link(step, link, interval=30) for link in plan.LINKS]
    found = json.loads(json.dumps(planned.as_json(step, placed, 1, 30, SPEEDS), allow_nan=False))
    assert [row["link"] for row in found["links"]] == list(plan.LINKS)
    assert found["bytes"][plan.RAW] == 6_000_000 * 6
    said = "\n".join(planned.lines(step))
    assert "0.6 % change per step (6,000,000)" in said
    shown = planned.tables(step, placed, 2)
    assert shown[1].title.endswith("2 workers on the link")
    assert {row[0] for row in shown[0].rows} == {WHOLE, plan.RAW, *codec.ENCODINGS}


def test_links_are_written_as_people_say_them():
    assert [rate(link) for link in (500, 2e5, 1e8, 2.5e9, 1e12)] == ["500 bit/s", "200 kbit/s", "100 Mbit/s", "2.5 Gbit/s", "1 Tbit/s"]


def test_every_magnitude_has_a_probability():
    by_dtype = counted(random_bits(1))
    for name in ("BF16", "F16", "F32"):
        shares = plan.visible_share(by_dtype[name], 1e-6)
        assert ((shares >= 0) & (shares <= 1)).all()
        assert (shares[~np.isfinite(magnitude_of_pattern(name))] == 0).all()
