"""The arithmetic of rounds, all ranks played by one process, against DiLoCo written by hand, plain training, and tables."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from pulse.torch.loco import rounds
from pulse.torch.loco.gate import Everything, Largest
from pulse.torch.loco.layout import collect
from pulse.torch.loco.methods import METHODS, Dense, Method, Part, Sparse, method_of
from pulse.torch.loco.steps import Nesterov, TorchStep
from tests.trainers import Net, Played, Trainer, same_bits, weights_like_a_models, window


@pytest.fixture(autouse=True)
def _one_thread():
    """Large elementwise work gains little from more, and other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


ALWAYS_OPEN = [Method(f"open {wire}", Everything(), wire) for wire in (Dense(), Sparse(), Sparse(gated=False))]


def diloco(start: np.ndarray, windows: list[list[np.ndarray]], lr: float, momentum: float, weights=None) -> np.ndarray:
    """DiLoCo in numpy, FP32. windows[t][r]: what rank r's inner steps take off its weights in round t."""
    anchor, velocity = start.copy(), None
    for of_all in windows:
        gradient = np.zeros_like(anchor)
        for r, change in enumerate(of_all):
            local = anchor - change
            gradient += (anchor - local) * np.float32(weights[r] if weights else 1)
        gradient /= np.float32(sum(weights) if weights else len(of_all))
        velocity = gradient if velocity is None else np.float32(momentum) * velocity + gradient
        anchor -= np.float32(lr) * (gradient + np.float32(momentum) * velocity)
    return anchor


@pytest.mark.parametrize("weights", [None, (3.0, 1.0, 0.5, 7.0, 1.0, 1.0, 2.0, 0.1)], ids=["equal", "unequal"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("method", ALWAYS_OPEN, ids=lambda method: method.name)
def test_a_gate_that_is_always_open_is_diloco_bit_for_bit(method, ranks, weights):
    weights = weights and weights[:ranks]
    start = weights_like_a_models(0, 4000)
    windows = [[window(10 * t + r, 4000, 1e-4) for r in range(ranks)] for t in range(5)]
    played = Played({"w": start.clone()}, ranks, method)
    for of_all in windows:
        played.move([[change] for change in of_all])
        played.round(weights)
    wanted = diloco(start.numpy(), [[change.numpy() for change in of_all] for of_all in windows], 0.7, 0.9, weights)
    assert same_bits(played.anchor, torch.from_numpy(wanted))


def test_the_largest_of_every_chunk_with_feedback_that_decays_is_sparseloco():
    """Written by hand beside it, with the values as they are: SparseLoCo's own are shortened, which the wire does."""
    method = replace(METHODS["sparseloco"], gate=Largest(3, 50), wire=Sparse(gated=False))
    start = weights_like_a_models(0, 500)
    played = Played({"w": start.clone()}, 2, method)
    anchor, feedback = start.numpy().copy(), np.zeros((2, 500), np.float32)
    for t in range(4):
        windows = [window(10 * t + r, 500, 1e-4) for r in range(2)]
        played.move([[change] for change in windows])
        played.round()
        sums = np.zeros(500, np.float32)
        for r, change in enumerate(windows):
            s = (anchor - (anchor - change.numpy())) + np.float32(0.95) * feedback[r]
            order = np.argsort(-np.abs(s.reshape(10, 50)), axis=1, kind="stable")[:, :3] + 50 * np.arange(10)[:, None]
            sent = np.zeros(500, np.float32)
            sent[order] = s[order]
            feedback[r] = s - sent
            sums += sent
        anchor -= sums / np.float32(2)
        assert same_bits(played.anchor, torch.from_numpy(anchor))
        assert all(same_bits(state.feedback[0], torch.from_numpy(kept)) for state, kept in zip(played.states, feedback, strict=True))


class Handed:
    """A wire for large sets of weights: parts are handed over as they are."""

    lossless = True

    def encode(self, parts, anchor, layout, facts):
        return b"", parts

    def decode(self, blobs, anchor, layout):
        raise NotImplementedError


def test_one_rank_that_exchanges_every_step_shows_the_forward_pass_what_plain_training_shows():
    """100 rounds of a million weights: on average the views differ in less than one of them, where rounding differs at a border."""
    method, elements, different = replace(METHODS["pulseloco"], wire=Handed()), 1_000_000, []
    plain = weights_like_a_models(0, elements)
    layout, flat = collect([("w", torch.nn.Parameter(plain.clone()))], torch.bfloat16)
    local = [tensor.clone() for tensor in flat]
    state, made, drift = rounds.new_state(local, method, Nesterov(1.0, 0.0), "feedback"), torch.Generator().manual_seed(1), None
    for _ in range(100):
        noise = torch.randn(elements, generator=made)
        drift = noise if drift is None else drift.mul_(0.9).add_(noise, alpha=0.44)  # as Adam's momentum makes steps alike
        change = drift.clamp(-2, 2) * 3e-6
        plain.sub_(change)
        local[0].sub_(change)
        outgoing = rounds.encode(state, layout, local, method, {})
        rounds.commit(state, layout, local, method, outgoing, [outgoing.parts])
        different.append(int((local[0].bfloat16() != plain.bfloat16()).sum()))
        assert same_bits(local[0], state.anchor[0])
    assert 0.01 < outgoing.count / elements < 0.5
    assert np.mean(different) / elements < 1e-6
    assert max(different) / elements < 1e-5


@pytest.mark.parametrize("inner_steps", [1, 8])
def test_one_rank_that_keeps_the_rest_in_its_masters_trains_as_without_a_gate(inner_steps):
    """Real gradients: the forward pass sees the same view at every step. Weights that a window changes by more than a factor of two differ by
    the rounding of A - (A - L)."""
    alone, gated = beside(inner_steps, residual="masters")
    for _ in range(48):
        alone.train(1)
        gated.train(1)
        for a, b in zip(alone.model.parameters(), gated.model.parameters(), strict=True):
            assert torch.equal(a.bfloat16(), b.bfloat16())
            assert torch.allclose(a, b, rtol=0, atol=1e-9)
    assert len(gated.reports) == 48 // inner_steps
    assert 0 < gated.reports[-1].density < 0.9
    for name, tensor in gated.outer.anchor.items():  # what is published
        assert torch.equal(tensor.bfloat16(), gated.model.get_parameter(name).bfloat16())


def test_error_feedback_with_many_inner_steps_only_nearly_trains_as_without_a_gate():
    """Inner steps begin at A rather than at A - E: so the gradients differ a little."""
    alone, gated = beside(8)
    alone.train(48)
    gated.train(48)
    pairs = list(zip(alone.model.parameters(), gated.model.parameters(), strict=True))
    differing = sum(int((a.bfloat16() != b.bfloat16()).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)
    assert 0 < differing < 0.2


def beside(inner_steps, **options) -> tuple[Trainer, Trainer]:
    """A trainer without rounds, and one with, an outer rate of 1 and no momentum."""
    return Trainer(None, inner_steps=10**6, rate=2e-5), Trainer(None, inner_steps=inner_steps, lr=1, momentum=0, rate=2e-5, **options)


def test_a_table_worked_out_by_hand():
    """Two ranks whose weight goes down by 0.3 and 0.1 in every window: the mean is 0.2. Nesterov's factors are 0.7 (1 + 0.9 (1 + 0.9 + ...))."""
    played = Played({"w": torch.tensor([5.0])}, 2, METHODS["diloco"])
    factors = (1.33, 1.897, 2.4073, 2.86657, 3.279913)
    expected = 5.0
    for factor in factors:
        played.move([[torch.tensor([0.3])], [torch.tensor([0.1])]])
        played.round()
        expected -= 0.2 * factor
        assert played.anchor.item() == pytest.approx(expected, abs=2e-6)
    assert expected == pytest.approx(5 - 0.2 * 11.780783)


def test_for_a_constant_direction_the_outer_gain_grows_to_seven():
    played = Played({"w": torch.tensor([0.0])}, 1, METHODS["diloco"])
    for _ in range(200):
        before = played.anchor.item()
        played.move([[torch.tensor([-1.0])]])
        played.round()
    assert played.anchor.item() - before == pytest.approx(7.0, rel=1e-4)


def test_the_outer_steps_of_torch_are_the_same_nesterov():
    ours, theirs = (Played({"w": weights_like_a_models(0, 500)}, 1, METHODS["diloco"]) for _ in range(2))
    theirs.states[0].outer = TorchStep(lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True))
    for t in range(4):
        for played in (ours, theirs):
            played.move([[window(t, 500)]])
            played.round()
    assert torch.allclose(ours.anchor, theirs.anchor, rtol=0, atol=1e-8)


def test_plain_averaging_is_the_mean_of_the_local_weights():
    played = Played({"w": weights_like_a_models(0, 500)}, 4, METHODS["localsgd"])
    for t in range(3):
        played.move([[window(10 * t + r, 500)] for r in range(4)])
        wanted = sum(local[0].double() for local in played.local) / 4
        played.round()
        assert torch.allclose(played.anchor.double(), wanted, rtol=0, atol=1e-8)


def test_weights_weigh_and_only_their_ratios_matter():
    def anchor(weights):
        played = Played({"w": weights_like_a_models(0, 500)}, 2, METHODS["localsgd"])
        played.move([[window(r, 500)] for r in range(2)])
        played.round(weights)
        return played.anchor

    start, mine, theirs = weights_like_a_models(0, 500), window(0, 500), window(1, 500)
    assert torch.allclose(anchor((3.0, 1.0)), start - (3 * mine + theirs) / 4, rtol=0, atol=1e-8)
    assert same_bits(anchor((3.0, 1.0)), anchor((12.0, 4.0)))
    assert same_bits(anchor((2.0, 2.0)), anchor(None))


def test_a_rank_that_does_not_send_an_entry_counts_as_zero_there():
    sent = [
        Part(torch.tensor([1, 2]), torch.tensor([4.0, 8.0])),
        Part(torch.tensor([2]), torch.tensor([1.0])),
        Part(torch.tensor([]).long(), torch.tensor([])),
    ]
    assert rounds.mean(sent, torch.zeros(4)).tolist() == [0, 4 / np.float32(3), 3, 0]
    assert rounds.mean(sent, torch.zeros(4), [2.0, 1.0, 1.0]).tolist() == [0, 2, 4.25, 0]


def test_sums_run_in_rank_order_and_each_operation_is_rounded_by_itself():
    large, small = torch.tensor([2.0**24]), torch.tensor([1.0])
    parts = {name: Part(None, value) for name, value in (("+", large), ("-", -large), ("1", small))}
    assert rounds.mean([parts[name] for name in "+-1"], small).item() == np.float32(1) / np.float32(3)
    assert rounds.mean([parts[name] for name in "+1-"], small).item() == 0
    made = torch.Generator().manual_seed(0)
    values = [torch.randn(5000, generator=made) for _ in range(7)]
    total = np.zeros(5000, np.float32)
    for r, value in enumerate(values):
        total = total + value.numpy() * np.float32(1.1 * r + 0.1)
    wanted = total / np.float32(sum(1.1 * r + 0.1 for r in range(7)))
    found = rounds.mean([Part(None, value) for value in values], torch.empty(5000), [1.1 * r + 0.1 for r in range(7)])
    assert same_bits(found, torch.from_numpy(wanted))


def test_other_numbers_for_the_same_ranks_change_nothing_but_the_order_of_sums():
    """With numbers that add up exactly that order does not show either."""
    start = (weights_like_a_models(0, 2000) * 2**24).round() / 2**24

    def played(order):
        found = Played({"w": start.clone()}, 4, METHODS["pulseloco"], lr=1.0, momentum=0.0)
        for t in range(2):
            found.move([[window(10 * t + r, 2000, 40.0).round() / 2**20] for r in order])
            found.round()
        return found

    wanted = played(range(4))
    assert any(state.feedback[0].any() for state in wanted.states)
    for order in itertools.permutations(range(4)):
        found = played(order)
        assert same_bits(found.anchor, wanted.anchor)
        assert all(same_bits(found.states[i].feedback[0], wanted.states[r].feedback[0]) for i, r in enumerate(order))


def test_two_ranks_may_change_places():
    anchors = []
    for order in ((0, 1), (1, 0)):
        played = Played({"w": weights_like_a_models(0, 2000)}, 2, METHODS["pulseloco"])
        for t in range(3):
            played.move([[window(10 * t + r, 2000)] for r in order])
            played.round()
        anchors.append(played.anchor)
    assert same_bits(*anchors)


@pytest.mark.parametrize("value_dtype", ["float32", "bfloat16", "float8"])
def test_another_order_of_parameters_changes_nothing_but_that(value_dtype):
    sizes = {"a": 700, "b": 30, "c": 2000}

    def played(names):
        found = Played({name: weights_like_a_models(ord(name), sizes[name]) for name in names}, 3, method_of("pulseloco", value_dtype))
        for t in range(3):
            found.move([[window(100 * t + 10 * r + ord(name), sizes[name]) for name in names] for r in range(3)])
            found.round()
        return found.layout, dict(zip(names, found.states[0].anchor, strict=True))

    (layout, wanted), (other, found) = played("abc"), played("cab")
    assert all(same_bits(wanted[name], found[name]) for name in sizes)
    assert layout.fingerprint != other.fingerprint
    assert layout.digest(list(wanted.values())) == other.digest(list(found.values()))  # a digest goes by names


def test_a_round_in_pieces_is_the_round(monkeypatch):
    def played():
        found = Played({"w": weights_like_a_models(0, 3000)}, 2, METHODS["pulseloco"])
        for t in range(2):
            found.move([[window(10 * t + r, 3000)] for r in range(2)])
            found.round()
        return found.anchor, found.outgoing[0].blob

    anchor, blob = played()
    monkeypatch.setattr(rounds, "_CHUNK", 999)
    assert same_bits(played()[0], anchor)
    assert played()[1] == blob


def test_threads_change_no_byte():
    start = weights_like_a_models(0, 50_000)
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            played = Played({"w": start.clone()}, 2, METHODS["pulseloco"])
            played.move([[window(r, 50_000)] for r in range(2)])
            played.round()
        finally:
            torch.set_num_threads(before)
        found.append((played.outgoing[0].blob, played.layout.digest(played.states[0].anchor)))
    assert found[0] == found[1]


# --- what is reported ---


@pytest.mark.parametrize("value_dtype", ["float32", "float8"])
def test_what_is_reported_of_a_round_is_what_was(value_dtype):
    method = method_of("pulseloco", value_dtype)
    played = Played({"a": weights_like_a_models(0, 900), "b": weights_like_a_models(1, 100)}, 3, method)
    ages = [torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)]
    for t in range(4):
        played.move([[window(100 * t + 10 * r + i, n) for i, n in enumerate((900, 100))] for r in range(3)])
        before = played.anchor
        outcomes = played.round()
        sent = [torch.zeros(1000, dtype=torch.bool) for _ in range(3)]
        for r, outgoing in enumerate(played.outgoing):
            for part, start in zip(outgoing.parts, (0, 900), strict=True):
                sent[r][part.positions + start] = True
        for r, outcome in enumerate(outcomes):
            kept = torch.cat(played.states[r].feedback)
            ages[r] = torch.where(kept == 0, 0, torch.where(sent[r], 1, ages[r] + 1))  # what rounding left of a sent one is new
            assert outcome.sent == int(sent[r].sum())
            assert outcome.union == int((sent[0] | sent[1] | sent[2]).sum())
            assert outcome.view_changed == int((before.bfloat16() != played.anchor.bfloat16()).sum())
            assert outcome.feedback_norm == pytest.approx(float(kept.double().norm()))
            assert (outcome.age_max, outcome.age_mean) == (ages[r].max(), pytest.approx(float(ages[r].sum() / (kept != 0).sum())))


def test_without_ages_the_rest_is_reported_and_no_memory_is_taken():
    state = rounds.new_state([torch.ones(8)], METHODS["pulseloco"], Nesterov(0.7, 0.9), "feedback", track_age=False)
    assert state.age is None
    layout, local = collect([("w", torch.nn.Parameter(torch.ones(8) - 1e-4))], torch.bfloat16)
    outgoing = rounds.encode(state, layout, local, METHODS["pulseloco"], {})
    outcome = rounds.commit(state, layout, local, METHODS["pulseloco"], outgoing, [outgoing.parts])
    assert (outcome.sent, outcome.age_max, outcome.age_mean) == (0, 0, 0)
    assert outcome.feedback_norm == pytest.approx(1e-4 * 8**0.5, rel=1e-3)


def test_an_age_stops_counting_at_255():
    played = Played({"w": torch.ones(1)}, 1, METHODS["pulseloco"])
    played.move([[torch.tensor([1e-6])]])
    assert [played.round()[0].age_max for _ in range(300)] == [min(number, 255) for number in range(1, 301)]


# --- what a layout is ---


def test_tied_parameters_count_once_and_frozen_ones_and_buffers_do_not_count():
    net = Net()
    layout, local = collect(net.named_parameters(), torch.bfloat16)
    assert layout.names == ("embed.weight", "up.weight", "up.bias", "down.weight", "spare.weight", "spare.bias")
    everything = [*net.named_parameters(remove_duplicate=False), *net.named_buffers()]
    assert collect(everything, torch.bfloat16)[0] == layout
    assert layout.elements == sum(tensor.numel() for tensor in local)
    local[0].add_(1)
    assert net.head.weight.data_ptr() == net.embed.weight.data_ptr() == local[0].data_ptr()


def test_each_parameter_may_have_a_view_of_its_own():
    net = Net()
    layout, _ = collect(net.named_parameters(), {"embed.*": torch.float16, "*.weight": torch.bfloat16})
    assert layout.view_codes == ("F16", "BF16", "F32", "BF16", "BF16", "F32")


@pytest.mark.parametrize("sizes", [(0,), (5, 0), (0, 0, 300), (1,)])
@pytest.mark.parametrize("method", [*METHODS.values(), *ALWAYS_OPEN], ids=lambda method: method.name)
def test_parameters_without_elements_take_part(method, sizes):
    """A rank's shard of a small parameter may have none."""
    played = Played({f"w{i}": weights_like_a_models(i, n) for i, n in enumerate(sizes)}, 2, method)
    for t in range(2):
        played.move([[window(10 * t + r, n, 1e-3) for n in sizes] for r in range(2)])
        played.round()
    assert played.anchor.numel() == sum(sizes)
