"""What goes wrong with several trainers: each mistake is refused, on every rank alike, says what to do, and changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch

from pulse.errors import BaseMismatch, DigestMismatch, FormatError, RoundRefused, TornUpdate, UnsupportedFormat, WeightsMismatch
from pulse.exchange import MemoryExchange
from pulse.torch import METHODS, OuterOptimizer
from pulse.torch.loco import rounds, saved
from pulse.torch.loco.layout import collect
from pulse.torch.loco.methods import Dense, Sparse
from pulse.torch.loco.steps import Nesterov
from tests.trainers import Garbling, Net, Stale, Trainer, assert_same, digests, garbled, in_threads, same_bits, tensors_in, trained


def named(**tensors):
    return [(name, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())) for name, tensor in tensors.items()]


def each_is_refused(exchanges, act, error, match) -> list:
    """Every rank's act raises; what it raised."""

    def run(exchange):
        with pytest.raises(error, match=match) as caught:
            act(exchange)
        return caught.value

    return in_threads(exchanges, run)


# --- at the start ---


@pytest.mark.parametrize(
    ("parameters", "error", "match"),
    [
        ([], WeightsMismatch, "no parameter that trains: hand in model.named_parameters"),
        (iter([]), WeightsMismatch, "no parameter that trains"),
        (Net().parameters(), TypeError, r"as model.named_parameters\(\) gives them, not Parameter"),
        (torch.nn.Linear(2, 2).parameters(), TypeError, "not Parameter"),  # one with two rows could pass for a pair
        (torch.nn.Sequential(torch.nn.Linear(2, 2)), TypeError, "not Linear"),
        (dict(Net().named_parameters()), TypeError, "not str"),
        ([("w", torch.zeros(2))], WeightsMismatch, "no parameter that trains"),
        (named(w=torch.zeros(3, dtype=torch.bfloat16)), WeightsMismatch, "w is torch.bfloat16: FP32 parameters are wanted"),
        (named(w=torch.zeros(3, dtype=torch.float64)), WeightsMismatch, "w is torch.float64"),
        (named(w=torch.zeros(3, 4).T), WeightsMismatch, "w: a contiguous parameter"),
        (named(w=torch.zeros(3, device="meta")), WeightsMismatch, "memory of its own"),
        ([*named(w=torch.zeros(3)), *named(w=torch.ones(3))], WeightsMismatch, "same name"),
    ],
)
def test_parameters_that_cannot_take_part_are_refused_at_once(parameters, error, match):
    with pytest.raises(error, match=match):
        OuterOptimizer(parameters)


def test_a_generator_that_an_optimizer_has_used_up_is_refused_and_not_ignored():
    parameters = Net().named_parameters()
    torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)
    with pytest.raises(WeightsMismatch, match="no parameter that trains"):
        OuterOptimizer(parameters)
    assert OuterOptimizer(Net().named_parameters()).anchor.keys() == OuterOptimizer(list(Net().named_parameters())).anchor.keys()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"inner_steps": 0}, ValueError, "1 or more"),
        ({"inner_steps": 2.0}, ValueError, "1 or more"),
        ({"method": "dilocco"}, ValueError, "known are pulseloco, diloco"),
        ({"method": "diloco", "value_dtype": "bfloat16"}, ValueError, "only pulseloco has one"),
        ({"value_dtype": "bf16"}, ValueError, "float32, bfloat16, float8"),
        ({"method": METHODS["pulseloco"], "value_dtype": "float8"}, ValueError, "its wire says that"),
        ({"residual": "none"}, ValueError, "known are feedback and masters"),
        ({"residual": "masters", "method": "sparseloco"}, ValueError, "decay"),
        ({"share": "ring"}, ValueError, "known are gather and scatter"),
        ({"share": "scatter", "method": "diloco"}, ValueError, "sends all"),
        ({"on_nonfinite": "ignore"}, ValueError, "known are refuse and drop"),
        ({"weight": 0}, ValueError, "above 0"),
        ({"weight": float("nan")}, ValueError, "above 0"),
        ({"lr": 0}, ValueError, "lr is positive"),
        ({"momentum": 1.0}, ValueError, "below 1"),
        ({"lr": 0.7, "outer": torch.optim.SGD}, ValueError, "Nesterov's"),
        ({"view": "bfloat16"}, TypeError, r"torch\.bfloat16"),
        ({"view": {"*": "bfloat16"}}, TypeError, r"torch\.bfloat16"),
        ({"view": torch.int8}, WeightsMismatch, "no view"),
    ],
    ids=str,
)
def test_options_that_are_none_are_refused_at_once(options, error, match):
    with pytest.raises(error, match=match):
        OuterOptimizer(Net().named_parameters(), **options)


def test_a_weight_is_checked_whenever_it_is_set():
    outer = OuterOptimizer(Net().named_parameters())
    outer.weight = 3
    with pytest.raises(ValueError, match="weight=-1"):
        outer.weight = -1
    assert outer.weight == 3


# --- ranks that are not alike ---

ODD_MODELS = {
    "another order": lambda rows: rows[::-1],
    "one more": lambda rows: [*rows, *named(more=torch.zeros(2))],
    "one less": lambda rows: rows[1:],
    "another name": lambda rows: [("other", rows[0][1]), *rows[1:]],
    "another shape": lambda rows: [(rows[0][0], torch.nn.Parameter(torch.zeros(4, 3))), *rows[1:]],
    "one frozen": lambda rows: [(name, parameter.requires_grad_(name != "b")) for name, parameter in rows],
}


@pytest.mark.parametrize("odd", ODD_MODELS)
def test_other_parameters_on_one_rank_are_refused_on_every_rank(odd):
    def act(exchange):
        rows = named(a=torch.ones(3, 4), b=torch.ones(5), c=torch.ones(2))
        OuterOptimizer(ODD_MODELS[odd](rows) if exchange.rank == 2 else rows, exchange=exchange).start()

    each_is_refused(MemoryExchange.group(4, timeout=60), act, WeightsMismatch, "rank 2: other parameters .names, shapes, order, view. than")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"inner_steps": 4}, "inner_steps 4 instead of 8"),
        ({"lr": 0.5}, "lr 0.5 instead of 0.7"),
        ({"momentum": 0}, "momentum 0 instead of 0.9"),
        ({"method": "diloco"}, "gate 'Everything.*method 'diloco' instead of 'pulseloco'"),
        ({"value_dtype": "bfloat16"}, "wire .*bfloat16"),
        ({"residual": "masters"}, "residual 'masters' instead of 'feedback'"),
        ({"share": "scatter"}, "share 'scatter' instead of 'gather'"),
        ({"outer": torch.optim.SGD}, "outer 'SGD' instead of 'nesterov'"),
        ({"view": torch.float16}, "other parameters"),
    ],
    ids=str,
)
def test_other_settings_on_one_rank_are_refused_on_every_rank(options, says):
    def act(exchange):
        OuterOptimizer(named(w=torch.ones(3)), exchange=exchange, **(options if exchange.rank == 1 else {})).start()

    each_is_refused(MemoryExchange.group(3, timeout=60), act, WeightsMismatch, f"rank 1: .*{says}")


def test_buffers_are_compared_at_every_meeting_and_never_exchanged():
    def act(exchange):
        trainer = Trainer(exchange)
        trainer.outer = OuterOptimizer(
            trainer.model.named_parameters(), exchange=exchange, inner_steps=2, buffers=trainer.model.named_buffers()
        )
        trainer.train(2)
        if exchange.rank == 1:
            trainer.model.scale.mul_(2)
        before = trainer.outer.digest
        with pytest.raises(WeightsMismatch, match="rank 1: other buffers than the rest"):
            trainer.train(2)
        assert trainer.outer.digest == before
        if exchange.rank == 1:
            trainer.model.scale.fill_(1)
        return trainer.outer.round()

    first, second = in_threads(MemoryExchange.group(2, timeout=60), act)
    assert first.digest == second.digest


def test_parameters_that_change_after_the_start_are_noticed():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    outer = OuterOptimizer(model.named_parameters(), inner_steps=1)
    model[0].weight.data = model[0].weight.data.clone()  # as `module.to` may do
    with torch.no_grad():
        model[0].weight.add_(0.5)
    assert outer.step().sent == 9
    model[0].bias.requires_grad_(False)
    with pytest.raises(WeightsMismatch, match="make a new one"):
        outer.step()
    model[0].bias.requires_grad_(True)
    model.bfloat16()
    with pytest.raises(WeightsMismatch, match="FP32"):
        outer.step()


# --- numbers that are none ---


@pytest.mark.parametrize("share", ["gather", "scatter"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_a_weight_that_is_not_finite_on_one_rank_is_refused_on_all_and_nothing_changes(bad, share):
    def act(exchange):
        trainer = Trainer(exchange, share=share)
        trainer.train(5)
        trainer.inner_step()
        if exchange.rank == 1:
            with torch.no_grad():
                trainer.model.up.weight[3, 4] = bad
        before = trainer.outer.state_dict(), [tensor.detach().clone() for tensor in trainer.model.parameters()]
        with pytest.raises(RoundRefused, match=r"rank 1: up\.weight.*nothing has changed") as caught:
            trainer.outer.step()
        assert caught.value.ranks == (1,)
        assert trainer.outer.state_dict()["steps"] == 3
        same_state(trainer.outer.state_dict() | {"steps": 2}, before[0])
        assert all(same_bits(a, b) for a, b in zip(trainer.model.parameters(), before[1], strict=True))
        if exchange.rank == 1:
            trainer.outer.rollback()
        trainer.note(trainer.outer.round())
        trainer.train(3)
        return trainer

    trainers = in_threads(MemoryExchange.group(3, timeout=60), act)
    assert digests(trainers)[0] == digests(trainers)[1] == digests(trainers)[2]
    assert [trainer.outer.rounds for trainer in trainers] == [3, 3, 3]
    assert trainers[1].reports[1].inner_steps == 0
    assert all(torch.isfinite(tensor).all() for trainer in trainers for tensor in trainer.outer.anchor.values())


def same_state(a, b) -> None:
    assert_same(dict(flat(a)), dict(flat(b)))


def flat(state, name="state"):
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from flat(value, f"{name}.{key}")
    elif isinstance(state, torch.Tensor | int):
        yield name, state


def test_a_refused_round_that_is_tried_again_is_what_a_clean_one_would_have_been():
    def act(exchange, spoilt):
        trainer = Trainer(exchange)
        trainer.train(5)
        trainer.inner_step()
        if exchange.rank == 2:
            trainer.outer.rollback()  # in both runs its window is lost
        if spoilt:
            if exchange.rank == 2:
                with torch.no_grad():
                    trainer.model.embed.weight[0, 0] = float("nan")
            with pytest.raises(RoundRefused):
                trainer.outer.round()
            if exchange.rank == 2:
                trainer.outer.rollback()
        trainer.note(trainer.outer.round())
        trainer.train(3)
        return trainer

    spoilt, clean = (in_threads(MemoryExchange.group(3, timeout=60), lambda exchange, s=s: act(exchange, s)) for s in (True, False))
    for one, other in zip(spoilt, clean, strict=True):
        assert_same(one.bits(), other.bits())


@pytest.mark.parametrize("method", ["pulseloco", "diloco", "diloco-int8", "sparseloco"])
def test_a_window_that_is_not_finite_may_be_dropped_and_the_others_go_on(method):
    def act(exchange):
        trainer = Trainer(exchange, on_nonfinite="drop", method=method)
        trainer.train(3)
        kept = trainer.outer.state_dict()["feedback"]
        trainer.train(2)
        trainer.inner_step()
        if exchange.rank == 1:
            with torch.no_grad():
                trainer.model.up.weight[3, 4] = float("nan")
        trainer.note(trainer.outer.step())
        if exchange.rank == 1 and method == "pulseloco":  # what waited before still does, or was sent, since the anchor has moved
            for name, tensor in trainer.outer.state_dict()["feedback"].items():
                assert ((tensor == kept[name]) | (tensor == 0)).all()
                assert tensor.any() or not kept[name].any()
        trainer.train(3)
        return trainer

    trainers = in_threads(MemoryExchange.group(3, timeout=60), act)
    assert digests(trainers)[0] == digests(trainers)[1] == digests(trainers)[2]
    for trainer in trainers:
        assert [report.dropped for report in trainer.reports] == [(), (1,), ()]
    assert [report.inner_steps for report in trainers[1].reports] == [3, 0, 3]


def test_an_anchor_that_is_not_finite_is_refused_and_cannot_be_dropped():
    model = Net()
    with torch.no_grad():
        model.up.weight[0, 0] = float("inf")
    for policy in ("refuse", "drop"):
        with pytest.raises(RoundRefused, match=r"up\.weight"):
            OuterOptimizer(model.named_parameters(), on_nonfinite=policy).round()


# --- bytes that are none ---


@pytest.mark.parametrize(("share", "what"), [("gather", "payload"), ("scatter", "payload"), ("scatter", "sum")])
def test_bytes_that_one_rank_cannot_read_are_refused_on_all_and_the_next_try_is_a_clean_round(share, what):
    def act(exchange, spoilt):
        around = Garbling(exchange, what) if spoilt and exchange.rank == 1 else exchange
        trainer = Trainer(around, share=share)
        trainer.outer.start()
        trainer.train(2)
        trainer.inner_step()
        before = trainer.outer.state_dict()
        if spoilt:
            with pytest.raises(RoundRefused, match=r"could not be read, nothing has changed .*rank 1: [A-Z]") as caught:
                trainer.outer.step()
            assert 1 in caught.value.ranks
            assert caught.value.ranks == (1,) or (share, what) == ("scatter", "payload")  # then no rank can have its sum
            same_state(trainer.outer.state_dict() | {"steps": 2}, before)
            trainer.note(trainer.outer.round())
        else:
            trainer.note(trainer.outer.step())
        trainer.train(3)
        return trainer

    spoilt, clean = (in_threads(MemoryExchange.group(3, timeout=60), lambda exchange, s=s: act(exchange, s)) for s in (True, False))
    for one, other in zip(spoilt, clean, strict=True):
        assert_same(one.bits(), other.bits())
        assert [report.digest for report in one.reports] == [report.digest for report in other.reports]


@pytest.mark.parametrize(("share", "method"), [("gather", "pulseloco"), ("scatter", "pulseloco"), ("gather", "diloco")])
def test_payloads_of_an_earlier_round_are_refused_though_they_could_be_read(share, method):
    """Dense ones say nothing of the anchor that they were made for."""

    def act(exchange):
        trainer = Trainer(Stale(exchange, "payload") if exchange.rank == 1 else exchange, share=share, method=method)
        trainer.train(5)
        with pytest.raises(RoundRefused, match="rank 1: RoundRefused: the payload of rank 0 is not the one that it announced"):
            trainer.train(1)
        trainer.note(trainer.outer.round())
        return trainer

    trainers = in_threads(MemoryExchange.group(3, timeout=60), act)
    wanted = trained(3, 2, share=share, method=method)
    assert digests(trainers) == digests(wanted)


@pytest.mark.parametrize("wire", [Dense(), Dense(8), Dense(4), Sparse(), Sparse("float8", gated=False)], ids=str)
def test_payloads_of_another_anchor_or_size_or_kind_are_refused(wire):
    method = METHODS["pulseloco"] if isinstance(wire, Sparse) else METHODS["diloco"]
    layout, local = collect(named(w=torch.linspace(0.5, 1, 3000)), torch.bfloat16)
    other, less = collect(named(w=torch.linspace(0.5, 1, 2999)), torch.bfloat16)
    state = rounds.new_state([tensor + 0.01 for tensor in local], method, Nesterov(0.7, 0.9), "feedback")
    parts = rounds.encode(state, layout, local, method, {}).parts
    blob, _ = wire.encode(parts, state.anchor, layout, {})
    assert len(wire.decode([blob, blob], state.anchor, layout)) == 2
    with pytest.raises((FormatError, BaseMismatch)):
        wire.decode([blob], less, other)
    strange, _ = (Dense(8) if isinstance(wire, Sparse) else Sparse()).encode(parts, state.anchor, layout, {})
    with pytest.raises(FormatError, match=r"no .*payload of a round"):
        wire.decode([strange], state.anchor, layout)
    for damaged in (garbled(blob), blob[:-1], blob[: len(blob) // 2], b"", b"PULSE", blob + b"\0"):
        with pytest.raises(FormatError):
            wire.decode([damaged], state.anchor, layout)
    if isinstance(wire, Sparse):
        with pytest.raises(BaseMismatch):
            wire.decode([blob], [tensor + 0.02 for tensor in local], layout)


# --- saved states ---


def state_of(trainer) -> dict:
    return copy.deepcopy(trainer.outer.state_dict())


@pytest.fixture(scope="module")
def trained_one() -> Trainer:
    return trained(1, 2)[0]


def refuses(outer, state, error, match) -> None:
    """A state is refused, and nothing is changed by that."""
    before = copy.deepcopy(outer.state_dict())
    with pytest.raises(error, match=match):
        outer.load_state_dict(state)
    same_state(outer.state_dict(), before)


def test_a_state_of_other_parameters_or_another_method_is_refused(trained_one):
    state = state_of(trained_one)
    for outer, match in (
        (OuterOptimizer(named(w=torch.ones(3))), "other parameters"),
        (OuterOptimizer(list(Net().named_parameters())[::-1]), "other parameters"),
        (OuterOptimizer(Net().named_parameters(), view=torch.float16), "other parameters"),
        (OuterOptimizer(Net().named_parameters(), method="diloco"), "of method pulseloco, and this is diloco"),
        (OuterOptimizer(Net().named_parameters(), method="diloco-int8"), "of method pulseloco, and this is diloco-int8"),
        (OuterOptimizer(Net().named_parameters(), residual="masters"), "of residual feedback, and this is masters"),
        (
            OuterOptimizer(Net().named_parameters(), outer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
            "of outer optimizer nesterov",
        ),
    ):
        refuses(outer, state, WeightsMismatch, match)


def test_a_state_that_is_damaged_is_refused(trained_one):
    outer, state = OuterOptimizer(Net().named_parameters()), state_of(trained_one)
    changed = copy.deepcopy(state)
    changed["anchor"]["up.weight"][0, 0] += 1e-3
    refuses(outer, changed, DigestMismatch, "saved anchor: expected digest")
    refuses(outer, state | {"schema": 2}, UnsupportedFormat, "schema 2; this version knows 1")
    refuses(outer, dict(Net().state_dict()), UnsupportedFormat, "schema None")
    for part in ("anchor", "feedback", "outer"):
        low = copy.deepcopy(state)
        low[part] = _in_bf16(low[part])
        refuses(outer, low, WeightsMismatch, "is torch.bfloat16: it was FP32")


def _in_bf16(value):
    if isinstance(value, torch.Tensor):
        return value.bfloat16()
    return [_in_bf16(part) for part in value] if isinstance(value, list) else {key: _in_bf16(part) for key, part in value.items()}


@pytest.mark.parametrize("options", [{}, {"outer": lambda parameters: torch.optim.Adam(parameters, lr=1e-5)}], ids=["nesterov", "adam"])
def test_loading_leaves_the_state_alone_and_shares_no_memory_with_it(options):
    first = trained(1, 2, **options)[0]
    state = state_of(first)
    before = copy.deepcopy(state)
    other = Trainer(None, **options)
    other.outer.load_state_dict(state)
    assert other.outer.rounds == 2
    other.train(6)
    same_state(state, before)
    taken = first.outer.state_dict()
    for _, tensor in tensors_in({name: taken[name] for name in ("anchor", "outer", "feedback", "age")}, "state"):
        tensor.zero_()
    same_state(first.outer.state_dict(), before)


def test_saved_tensors_are_fp32_and_survive_torch_save_without_trust(trained_one, tmp_path):
    state = state_of(trained_one)
    for part in ("anchor", "feedback"):
        assert {tensor.dtype for tensor in state[part].values()} == {torch.float32}
    assert {tensor.dtype for tensor in state["outer"]["momentum"]} == {torch.float32}
    torch.save(state, tmp_path / "outer.pt")
    other = OuterOptimizer(Net().named_parameters())
    other.load_state_dict(torch.load(tmp_path / "outer.pt", weights_only=True))
    same_state(other.state_dict(), state)


def test_an_anchor_that_was_written_to_is_neither_saved_nor_used():
    """Alone there is nobody to take another from: tests/fault has ranks that do."""
    trainer = trained(1, 2)[0]
    state = state_of(trainer)
    trainer.outer.anchor["up.weight"][0, 0] += 1.0
    for call in (trainer.outer.state_dict, trainer.outer.round, trainer.outer.start):
        with pytest.raises(TornUpdate, match="load a saved state"):
            call()
    trainer.outer.load_state_dict(state)
    assert trainer.outer.round() is not None


def test_a_round_that_is_interrupted_while_it_is_applied_is_noticed(monkeypatch):
    trainer = trained(1, 2)[0]
    state, model = state_of(trainer), copy.deepcopy(trainer.model.state_dict())

    def interrupted(anchor, gradients):
        next(gradients)
        anchor[0].add_(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.outer._rank.state.outer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(3)
    monkeypatch.undo()
    with pytest.raises(TornUpdate, match="load a saved state"):
        trainer.outer.round()
    trainer.outer.load_state_dict(state)
    trainer.model.load_state_dict(model)
    assert trainer.outer.round().digest == trained_again()


def trained_again() -> str:
    trainer = trained(1, 2)[0]
    return trainer.outer.round().digest


def test_what_another_rank_sends_as_its_state_is_checked_before_it_is_taken():
    trainer = trained(1, 2)[0]
    rank = trainer.outer._rank
    before, blob = state_of(trainer), rank.pack()
    for data, error in ((b"", FormatError), (b"x" * 100, FormatError), (blob[:-9], FormatError), (blob, DigestMismatch)):
        with pytest.raises(error):
            saved.take_over(rank.state, rank.layout, data, "0" * 32)
        same_state(state_of(trainer), before)
    strange = trained(1, 1, act=lambda one: one.outer.start())[0]
    state = rounds.new_state([torch.ones(3)], METHODS["pulseloco"], Nesterov(0.7, 0.9), "feedback")
    with pytest.raises(FormatError, match="other parameters"):
        saved.take_over(strange.outer._rank.state, rank.layout, saved.pack(state), "0" * 32)
