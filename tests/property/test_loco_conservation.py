"""Nothing is lost and nothing is invented: what was sent and what was kept are what a rank had, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulse.codec import dense
from pulse.torch.loco.gate import Everything
from pulse.torch.loco.methods import METHODS, Dense, Method, Sparse, method_of
from pulse.torch.loco.rounds import pseudo_gradient
from tests.rounds import read
from tests.trainers import Played, same_bits, weights_like_a_models, window

LOSSY = ("bfloat16", "float8")
METHODS_AND_WIRES = [
    *METHODS.values(),
    *(method_of("pulseloco", value_dtype) for value_dtype in LOSSY),
    Method("all, as entries", Everything(), Sparse()),
    Method("all, as short entries", Everything(), Sparse("float8", gated=False)),
]
VIEWS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32)


def started(method, view=torch.bfloat16, **options) -> Played:
    start = {"matrix": weights_like_a_models(0, 3000).view(30, 100), "bias": torch.zeros(40), "odd": weights_like_a_models(1, 77)}
    start["bias"][:20] *= -1.0  # zeros of both signs
    start["odd"][:4] = torch.tensor([1e-40, -1e-42, 250.0, -3e4])
    return Played(start, 2, method, view=view, **options)


def windows(number: int, size: float) -> list[list[torch.Tensor]]:
    return [[window(100 * number + 10 * rank + i, n, size) for i, n in enumerate((3000, 40, 77))] for rank in range(2)]


@pytest.mark.parametrize("size", [1e-7, 1e-5, 0.3])
@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize("method", METHODS_AND_WIRES, ids=lambda method: f"{method.name} {method.wire}")
def test_what_arrives_and_what_is_kept_are_what_there_was(method, view, size):
    played = started(method, view)
    for number in range(3):
        played.move(windows(number, size))
        had = [
            [pseudo_gradient(state, i, local[i], method.decay) for i in range(3)]
            for state, local in zip(played.states, played.local, strict=True)
        ]
        anchors = [tensor.clone() for tensor in played.states[0].anchor]
        played.round()
        arrived = method.wire.decode([outgoing.blob for outgoing in played.outgoing], anchors, played.layout)
        for rank, state in enumerate(played.states):
            for i in range(3):
                sent = torch.zeros_like(had[rank][i])
                arrived[rank][i].add_to(sent)
                kept = torch.zeros_like(sent) if state.feedback is None else state.feedback[i]
                assert same_bits(sent + kept, had[rank][i])
                if method.wire.lossless:
                    assert ((sent == 0) | (kept == 0)).all()  # an entry goes whole or stays whole


@pytest.mark.parametrize("value_dtype", ["float32", *LOSSY])
def test_what_is_kept_in_the_local_weights_is_what_was_not_sent(value_dtype):
    method = method_of("pulseloco", value_dtype)
    played = started(method, residual="masters", lr=1.0, momentum=0.0)
    for number in range(5):
        played.move(windows(number, 1e-5))
        had = [pseudo_gradient(played.states[0], i, played.local[0][i], 1.0) for i in range(3)]
        played.round()
        assert played.states[0].feedback is None
        for i, part in enumerate(played.outgoing[0].parts):
            kept = had[i].clone()
            kept[part.positions] -= part.values
            assert same_bits(played.local[0][i], played.states[0].anchor[i] - kept)


@pytest.mark.parametrize("residual", ["feedback", "masters"])
@pytest.mark.parametrize("method", [one for one in METHODS_AND_WIRES if one.decay == 1], ids=lambda method: f"{method.name} {method.wire}")
def test_ten_rounds_without_training_send_nothing_and_change_nothing(method, residual):
    played = started(method, residual=residual)
    before = played.anchor
    for _ in range(10):
        for outcome in played.round():
            assert outcome.view_changed == outcome.feedback_norm == outcome.age_max == 0
            assert isinstance(method.gate, Everything) or (outcome.sent, outcome.union) == (0, 0)
    assert same_bits(played.anchor, before)
    for state, local in zip(played.states, played.local, strict=True):
        assert same_bits(torch.cat(local), before)
        assert all(same_bits(tensor, torch.zeros_like(tensor)) for tensor in state.feedback or [])


def test_what_is_below_the_view_waits_and_goes_out_whole_when_it_shows():
    step = 2.0**-10 + 2.0**-13  # 1 becomes another BF16 number beyond 2^-8
    played = Played({"w": torch.ones(1)}, 1, METHODS["pulseloco"], lr=1.0, momentum=0.0)
    for number in (1, 2, 3):
        played.move([[torch.tensor([-step])]])
        (outcome,) = played.round()
        assert (outcome.sent, outcome.age_max, outcome.feedback_norm) == (0, number, number * step)
        assert played.anchor.item() == 1
    played.move([[torch.tensor([-step])]])
    (outcome,) = played.round()
    assert (outcome.sent, outcome.age_max, outcome.feedback_norm) == (1, 0, 0)
    assert played.outgoing[0].parts[0].values.tolist() == [-4 * step]
    assert played.anchor.item() == 1 + 4 * step


# --- shortened values ---


def of_the_real_round(rank: int):
    """Anchor and s of a trainer in tests/data/round, end to end."""
    anchor, local, feedback = (read(name) for name in ("anchor", f"local-{rank}", f"feedback-{rank}"))
    joined = [torch.from_numpy(np.concatenate([values[name].reshape(-1) for name in anchor])) for values in (anchor, local, feedback)]
    return joined[0], joined[2] + (joined[0] - joined[1])


@pytest.mark.parametrize("value_dtype", LOSSY)
def test_a_shortened_value_never_overshoots_and_stays_visible(value_dtype):
    """Beside an early variant, which sent the difference of the views: more than there was, for nine entries in ten."""
    method = method_of("pulseloco", value_dtype)
    anchor, s = of_the_real_round(0)
    played = Played({"w": anchor}, 1, method)
    played.states[0].feedback[0].copy_(s)  # with L = A, s is E
    had = pseudo_gradient(played.states[0], 0, played.local[0][0], 1.0)
    assert same_bits(had, s)
    played.round()
    part, kept = played.outgoing[0].parts[0], played.states[0].feedback[0]
    at, sent = part.positions, part.values
    assert at.numel() > 1000
    assert (sent.abs() <= s[at].abs()).all()
    assert (sent.sign() == s[at].sign()).all()
    assert (kept[at].sign() * s[at].sign() >= 0).all()
    assert kept[at].count_nonzero() > 0
    assert ((anchor[at] - sent).bfloat16() != anchor[at].bfloat16()).all()

    early = anchor[at].bfloat16().float() - (anchor[at] - s[at]).bfloat16().float()
    left = s[at] - early
    assert (early.abs() > s[at].abs()).float().mean() > 0.9
    assert (left.sign() == -s[at].sign()).float().mean() > 0.9
    assert left.abs().sum() > 10 * s[at].abs().sum()
    assert kept[at].abs().sum() < 0.03 * s[at].abs().sum()


# --- small whole numbers ---


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=600), st.sampled_from((32, 8, 4)))
def test_dense_payloads_carry_what_they_say_and_what_they_leave_makes_it_whole(values, bits):
    values = np.array(values, np.float32)
    blob, carried = dense.encode(values, bits, {"round": 3})
    assert np.array_equal(dense.decode(blob, values.size).view(np.uint32), carried.view(np.uint32))
    assert np.isfinite(carried).all()
    with np.errstate(over="ignore"):
        whole = carried + (values - carried)
    assert np.array_equal(whole, values)
    if bits == 32:
        assert np.array_equal(carried.view(np.uint32), values.view(np.uint32))
    for group, sent in zip(np.split(values, range(256, values.size, 256)), np.split(carried, range(256, values.size, 256)), strict=True):
        assert not group.size or np.abs(sent).max() <= np.abs(group).max()


@pytest.mark.parametrize(("bits", "per_entry"), [(32, 4.0), (8, 1 + 4 / 256), (4, 0.5 + 4 / 256)])
def test_dense_payloads_have_the_bytes_that_they_are_said_to_have(bits, per_entry):
    values = window(0, 256 * 400).numpy()
    blob, _ = dense.encode(values, bits)
    assert abs(len(blob) - per_entry * values.size) < 500


def test_a_wire_of_its_own_is_all_that_a_method_needs_to_be_another():
    coarse = replace(METHODS["diloco"], name="coarse", wire=Dense(4))
    assert coarse.keeps
    assert not METHODS["diloco"].keeps
