"""`OuterOptimizer` with every method, over an exchange: the same weights on all ranks, the inner optimizer untouched, bytes as counted."""

from __future__ import annotations

import copy

import pytest
import torch

from pulse import Publisher, Subscriber
from pulse.exchange import MemoryExchange
from pulse.store import MemoryStore
from pulse.torch import METHODS, ModuleWeights, OuterOptimizer
from pulse.torch.loco.gate import Everything
from pulse.torch.loco.methods import Dense, Method, Sparse, method_of
from tests.trainers import (
    Counting,
    Late,
    Net,
    Played,
    Trainer,
    digests,
    in_threads,
    same_bits,
    tensors_in,
    trained,
    weights_like_a_models,
    window,
)  # fmt: skip

VALUE_DTYPES = ("float32", "bfloat16", "float8")
EVERY = [{"method": name} for name in METHODS] + [{"value_dtype": name} for name in VALUE_DTYPES[1:]] + [{"residual": "masters"}]
EVERY += [{"method": "diloco-int8", "residual": "masters"}, {"outer": lambda parameters: torch.optim.Adam(parameters, lr=1e-5)}]
SPARSE = [{"value_dtype": name} for name in VALUE_DTYPES] + [{"method": "sparseloco"}, {"residual": "masters"}]


def ends_alike(trainers) -> None:
    """One digest per round on all ranks, one anchor, and unless the rest waits in the masters, the same weights."""
    rows = digests(trainers)
    assert all(row == rows[0] for row in rows)
    assert len({trainer.outer.digest for trainer in trainers}) == 1
    for trainer in trainers[1:]:
        for name, tensor in trainer.outer.anchor.items():
            assert same_bits(tensor, trainers[0].outer.anchor[name])
    for trainer in trainers:
        for name, tensor in trainer.outer.anchor.items():
            if trainer.outer._rank.options.residual == "feedback":
                assert same_bits(trainer.model.get_parameter(name), tensor)
        assert not any(report.differing or report.dropped for report in trainer.reports)


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_all_ranks_have_the_same_anchor_after_every_round(options):
    trainers = trained(3, 3, **options)
    ends_alike(trainers)
    assert [len(trainer.reports) for trainer in trainers] == [3, 3, 3]
    assert len(set(digests(trainers)[0])) == 3
    assert not same_bits(trainers[0].outer.anchor["up.weight"], Trainer(None).outer.anchor["up.weight"])


@pytest.mark.parametrize("share", ["gather", "scatter"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_the_order_of_arrival_does_not_matter(ranks, share):
    runs = []
    for seed in range(2):
        exchanges = [Late(exchange, seed) for exchange in MemoryExchange.group(ranks, timeout=60)]
        runs.append(in_threads(exchanges, lambda exchange: finished(exchange, windows=4, share=share)))
        ends_alike(runs[-1])
        assert [report.round for report in runs[-1][0].reports] == [1, 2, 3, 4]
    assert digests(runs[0]) == digests(runs[1])


def finished(exchange, *, windows, more=0, **options) -> Trainer:
    trainer = Trainer(exchange, **options)
    trainer.train(3 * windows + more)
    trainer.finish()
    return trainer


@pytest.mark.parametrize("options", SPARSE, ids=str)
@pytest.mark.parametrize(("ranks", "weights"), [(2, False), (5, True)])
def test_ranges_and_everything_to_everyone_give_the_same_bits(options, ranks, weights):
    def run(share):
        def act(exchange):
            weight = {"weight": exchange.rank + 0.3} if weights else {}
            return finished(exchange, windows=2, share=share, **weight, **options)

        return in_threads(MemoryExchange.group(ranks, timeout=60), act)

    gathered, scattered = run("gather"), run("scatter")
    ends_alike(gathered)
    ends_alike(scattered)
    assert digests(gathered) == digests(scattered)
    for one, other in zip(gathered, scattered, strict=True):
        assert [report.feedback_norm for report in one.reports] == [report.feedback_norm for report in other.reports]
        assert [report.union for report in one.reports] == [report.union for report in other.reports]


def test_more_ranks_than_parameters_may_share_them_out():
    def act(exchange):
        weight = torch.nn.Parameter(torch.ones(3))
        outer = OuterOptimizer([("w", weight)], exchange=exchange, share="scatter", inner_steps=1)
        outer.start()
        with torch.no_grad():
            weight.sub_(0.1 * (exchange.rank + 1))
        return outer.step(), weight.detach()

    found = in_threads(MemoryExchange.group(5, timeout=60), act)
    assert all(torch.allclose(weight, torch.full((3,), 1 - 1.33 * 0.3)) for _, weight in found)
    assert len({report.digest for report, _ in found}) == 1


@pytest.mark.parametrize("wire", [Dense(), Sparse()], ids=str)
def test_a_gate_that_is_always_open_is_the_dense_method_over_any_exchange(wire):
    ours = trained(4, 2, method=Method("diloco", Everything(), wire))
    assert digests(ours) == digests(trained(4, 2, method="diloco"))


def test_the_first_step_meets_the_others_and_gives_all_the_weights_of_rank_0():
    def act(exchange):
        trainer = Trainer(exchange, seed=exchange.rank)
        trainer.outer.start()
        return trainer

    trainers = in_threads(MemoryExchange.group(3, timeout=60), act)
    wanted = Trainer(None, seed=0).model.state_dict()
    assert all(
        torch.equal(tensor, wanted[name])
        for trainer in trainers
        for name, tensor in trainer.model.named_parameters()
        if tensor.requires_grad
    )

    def late(exchange):
        trainer = Trainer(exchange, seed=exchange.rank)
        trainer.train(6)  # nobody has called start
        return trainer

    trainers = in_threads(MemoryExchange.group(3, timeout=60), late)
    assert len({trainer.outer.digest for trainer in trainers}) == 1


# --- what a round leaves alone ---


def test_a_round_leaves_the_inner_optimizer_and_its_schedule_alone():
    trainer = Trainer(None, inner_steps=10**6, rate=1e-3)
    trainer.train(7)
    before = copy.deepcopy((trainer.inner.state_dict(), trainer.schedule.state_dict()))
    gradients = [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()]
    assert trainer.outer.round() is not None
    after = trainer.inner.state_dict(), trainer.schedule.state_dict()
    assert after[0]["param_groups"] == before[0]["param_groups"]
    assert after[1] == before[1]
    rows = zip(tensors_in(after[0], "inner"), tensors_in(before[0], "inner"), strict=True)
    assert all(name == other and same_bits(a, b) for (name, a), (other, b) in rows)
    assert all(a is None or same_bits(a.grad, b) for a, b in zip(trainer.model.parameters(), gradients, strict=True) if b is not None)


def test_frozen_parameters_and_buffers_stay_each_ranks_own_and_cost_nothing():
    trainers = trained(2, 2)
    for trainer in trainers:
        assert "down.bias" not in trainer.outer.anchor
        assert same_bits(trainer.model.down.bias, Trainer(None).model.down.bias)
        assert trainer.model.head.weight is trainer.model.embed.weight
        spare = trainer.model.spare.weight
        assert spare.grad is None
        assert same_bits(spare, Trainer(None).model.spare.weight)  # nothing was sent of it, and nothing moved it
    assert trainers[0].reports[0].elements == sum(p.numel() for p in trainers[0].model.parameters() if p.requires_grad)


def test_a_step_that_was_skipped_counts_so_a_rank_that_skips_stays_in_step():
    """A GradScaler skips a step on one rank only; H counts calls, not steps of the inner optimizer."""

    def act(exchange):
        trainer = Trainer(exchange)
        for step in range(9):
            if exchange.rank == 1 and step in {1, 2, 4}:
                trainer.note(trainer.outer.step())
            else:
                trainer.train(1)
        return trainer

    trainers = in_threads(MemoryExchange.group(3, timeout=60), act)
    ends_alike(trainers)
    assert [report.inner_steps for report in trainers[1].reports] == [3, 3, 3]


def test_a_rank_that_is_slow_is_waited_for():
    """Even one that makes fewer calls before a round: the others are at the meeting until it comes."""

    def act(exchange):
        trainer = Trainer(exchange, inner_steps=3)
        trainer.outer.start()
        if exchange.rank == 0:
            trainer.train(1)
            trainer.note(trainer.outer.round())  # it does not want to wait for its third step
            trainer.train(3)
        else:
            trainer.train(6)
        return trainer

    trainers = in_threads(MemoryExchange.group(2, timeout=60), act)
    ends_alike(trainers)
    assert [report.inner_steps for report in trainers[0].reports] == [1, 3]
    assert [report.inner_steps for report in trainers[1].reports] == [3, 3]


@pytest.mark.parametrize("extra", [(0, 0, 0), (1, 0, 0), (2, 7, 0), (0, 12, 4)])
def test_ranks_with_unequal_data_end_with_the_same_weights(extra):
    trainers = in_threads(MemoryExchange.group(3, timeout=60), lambda exchange: finished(exchange, windows=2, more=extra[exchange.rank]))
    ends_alike(trainers)
    assert trainers[0].outer.rounds == 2 + -(-max(extra) // 3)


def test_one_rank_needs_no_exchange():
    trainer = Trainer(None)
    trainer.train(7)
    trainer.finish()
    assert [(report.inner_steps, report.wire_sent, report.wire_received) for report in trainer.reports] == [(3, 0, 0), (3, 0, 0), (1, 0, 0)]
    assert trainer.reports[0].sent == trainer.reports[0].union > 0
    assert trainer.outer.finish() == []


# --- accounting ---


@pytest.mark.parametrize("share", ["gather", "scatter"])
def test_reported_wire_bytes_are_those_of_an_exchange_that_counts(share):
    def act(exchange):
        counting = Counting(exchange)
        trainer = Trainer(counting, share=share)
        trainer.outer.start()
        for _ in range(3):
            before = counting.sent, counting.received
            trainer.train(3)
            report = trainer.reports[-1]
            assert (report.wire_sent, report.wire_received) == (counting.sent - before[0], counting.received - before[1])
            assert set(report.seconds) == {"encode", "meet", "exchange", "decode", "vote", "commit", "proof"}
        return trainer

    trainers = in_threads(MemoryExchange.group(4, timeout=60), act)
    for reports in zip(*(trainer.reports for trainer in trainers), strict=True):
        assert len({report.payload_bytes for report in reports}) == 1
        assert sum(report.wire_sent for report in reports) == sum(report.wire_received for report in reports)
        if share == "gather":  # three payloads go out, three come in, and little else
            for rank, report in enumerate(reports):
                assert 0 < report.wire_sent - 3 * report.payload_bytes[rank] < 3 * 1500
                assert 0 < report.wire_received - sum(report.payload_bytes) + report.payload_bytes[rank] < 3 * 1500


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_wire_bytes_grow_with_ranks_for_everything_to_everyone_and_hardly_for_ranges(ranks):
    """The table of docs/loco.md: R - 1 payloads beside (R - 1)/R of a payload and R - 1 ranges of the union."""

    def run(share):
        def act(exchange):
            weight = torch.nn.Parameter(torch.linspace(0.5, 1, 40_000))
            outer = OuterOptimizer([("w", weight)], exchange=exchange, share=share, inner_steps=1)
            outer.start()
            with torch.no_grad():
                weight[::10].sub_(torch.rand(4000, generator=torch.Generator().manual_seed(exchange.rank)) * 0.01 + 0.005)
            return outer.step()

        return in_threads(MemoryExchange.group(ranks, timeout=60), act)

    gathered, scattered = run("gather")[0], run("scatter")[0]
    payload = gathered.payload_bytes[0]
    assert gathered.union == gathered.sent == 4000  # all have sent the same entries
    assert gathered.wire_received == pytest.approx((ranks - 1) * payload, rel=0.2)
    assert scattered.wire_received < 2.2 * payload + 4000 * (ranks - 1)


def test_dense_fp32_is_four_bytes_per_parameter_and_ddp_that_in_every_step():
    (report,) = trained(1, 1, method="diloco")[0].reports
    assert report.dense_bytes == 4 * report.elements
    assert 0 < report.payload_bytes[0] - report.dense_bytes < 400
    assert report.reduction == report.dense_bytes / report.payload_bytes[0]
    ddp = report.inner_steps * 4 * report.elements  # FP32 gradients, one payload in every inner step
    assert ddp / report.dense_bytes == report.inner_steps == 3


def test_a_report_says_in_a_line_what_a_round_was():
    (report,) = trained(1, 1)[0].reports
    line = f"round 1: {report.density:.2%} sent, "
    assert str(report).startswith(line)
    assert str(report).endswith(f"anchor {report.digest[:8]}")
    assert report.density == report.sent / report.elements


def test_what_is_published_after_a_round_is_the_view_of_the_anchor():
    trainer, policy, store = Trainer(None), Net(seed=9).to(torch.bfloat16), MemoryStore()
    trainer.outer.start()
    publisher, subscriber = Publisher(store, ModuleWeights(trainer.model, view=torch.bfloat16)), Subscriber(store, ModuleWeights(policy))
    for number in range(4):
        assert publisher.publish().version == number
        subscriber.apply(subscriber.fetch())
        assert all(torch.equal(policy.get_parameter(name), tensor.bfloat16()) for name, tensor in trainer.outer.anchor.items())
        trainer.train(3)
        moved = [policy.get_parameter(name) != tensor.bfloat16() for name, tensor in trainer.outer.anchor.items()]
        assert sum(int(where.sum()) for where in moved) == trainer.reports[-1].view_changed


def test_a_patch_is_of_the_view_and_not_of_what_was_sent():
    """Momentum moves weights visibly that nobody has sent, and much of what one rank sent the mean does not show."""
    played = Played({"w": weights_like_a_models(0, 20_000)}, 4, METHODS["pulseloco"])
    for number in range(4):
        played.move([[window(10 * number + rank, 20_000, 3e-6)] for rank in range(4)])
        before = played.anchor.bfloat16()
        outcome = played.round()[0]
    sent = torch.zeros(20_000, dtype=torch.bool)
    for outgoing in played.outgoing:
        sent[outgoing.parts[0].positions] = True
    moved = before != played.anchor.bfloat16()
    assert (int(sent.sum()), int(moved.sum())) == (outcome.union, outcome.view_changed)
    assert (moved & ~sent).sum() / moved.sum() > 0.03
    assert (sent & ~moved).sum() / sent.sum() > 0.3


def test_figures_of_a_run_that_is_always_the_same_stay_the_same():
    """Made-up windows: which entries are sent follows from nothing but the gate, the feedback and the outer step."""
    played = Played({"w": weights_like_a_models(0, 20_000)}, 4, METHODS["pulseloco"])
    found = []
    for number in range(4):
        played.move([[window(10 * number + rank, 20_000, 3e-6)] for rank in range(4)])
        outcome = played.round()[0]
        found.append((outcome.sent, outcome.union, outcome.view_changed, outcome.age_max, round(outcome.age_mean, 3)))
    assert found == FIGURES


FIGURES = [(1600, 3537, 1735, 1, 1.0), (1920, 4258, 2216, 2, 1.953), (2117, 4618, 2408, 3, 2.849), (2206, 4837, 2574, 4, 3.685)]


def test_a_report_of_a_rank_whose_shards_are_all_empty_is_one_as_well():
    report = OuterOptimizer([("w", torch.nn.Parameter(torch.zeros(0)))]).round()
    assert (report.elements, report.density) == (0, 0)
    assert str(report).startswith("round 1: 0.00% sent")


# --- the table of methods ---


def test_a_method_is_found_by_name_and_only_pulseloco_has_value_dtypes():
    assert method_of("pulseloco").wire == Sparse()
    assert method_of("pulseloco", "bfloat16").wire == Sparse("bfloat16")
    assert method_of(METHODS["diloco"]) is METHODS["diloco"]
    for wrong in (("ddp",), ("diloco", "bfloat16"), ("pulseloco", "int8"), (METHODS["pulseloco"], "bfloat16")):
        with pytest.raises(ValueError, match="known are|only pulseloco|a method of your own"):
            method_of(*wrong)


def test_methods_keep_error_feedback_exactly_if_they_leave_something_behind():
    assert {name for name, method in METHODS.items() if not method.keeps} == {"diloco", "localsgd"}
    assert Trainer(None, method="diloco").outer.state_dict()["feedback"] is None
    assert Trainer(None, method="diloco-int8").outer.state_dict()["feedback"] is not None
    assert Trainer(None, residual="masters").outer.state_dict()["feedback"] is None
