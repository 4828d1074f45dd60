"""Ranks that stop anywhere and go on: from a saved state as if nothing had been, without one as newcomers; what others hold is never lost."""

from __future__ import annotations

import functools
import io
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pulse.errors import ExchangeError, RankMissing, TornUpdate
from pulse.exchange import MemoryExchange, StoreExchange
from pulse.store import MemoryStore
from pulse.testing.faults import Died
from tests.fault.loco_processes import live, process
from tests.nursery import Nursery
from tests.trainers import Breaking, Trainer, assert_same, digests, in_threads, same_bits, trained

CALLS = ("meet", "payload", "vote", "proof")
OPTIONS = [{}, {"residual": "masters"}, {"value_dtype": "float8"}, {"share": "scatter", "method": "sparseloco"}, {"method": "diloco"}]
OPTIONS += [{"outer": lambda parameters: torch.optim.Adam(parameters, lr=1e-5)}]


# --- all stop, and all go on ---


def restored(saved, **options) -> list[Trainer]:
    """New trainers, as new processes, over a new exchange."""

    def act(exchange):
        trainer = Trainer(exchange, seed=5, **options)
        through = io.BytesIO()
        torch.save(saved[exchange.rank], through)
        through.seek(0)
        trainer.load(torch.load(through, weights_only=True))
        return trainer

    return in_threads(MemoryExchange.group(len(saved), timeout=60), act)


@functools.cache
def undisturbed(ranks: int, windows: int, option: int = 0) -> list[Trainer]:
    """Trainers that nothing has happened to; not to be changed."""
    return trained(ranks, windows, **OPTIONS[option])


def all_at_once(trainers, act) -> None:
    with ThreadPoolExecutor(len(trainers)) as pool:
        list(pool.map(act, trainers))


@pytest.mark.parametrize("option", range(len(OPTIONS)))
@pytest.mark.parametrize("steps", [0, 1, 3, 5], ids="after {} steps".format)
def test_all_stop_after_any_step_and_go_on_as_if_nothing_had_been(steps, option):
    whole, options = undisturbed(2, 3, option), OPTIONS[option]
    stopped = trained(2, act=lambda trainer: (trainer.outer.start(), trainer.train(steps)), **options)
    resumed = restored([trainer.saved() for trainer in stopped], **options)
    all_at_once(resumed, lambda trainer: trainer.train(9 - steps))
    for one, other in zip(resumed, whole, strict=True):
        assert_same(one.bits(), other.bits())
    assert digests(resumed)[0] == digests(whole)[0][steps // 3 :]


@pytest.mark.parametrize("option", [0, 1])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", CALLS)
def test_all_stop_in_any_phase_of_a_round_and_go_on_as_if_nothing_had_been(what, after, option):
    whole, options, broken = undisturbed(3, 3, option), OPTIONS[option], []

    def act(exchange):
        breaking = Breaking(exchange, what, ExchangeError("the link is gone"), nth=2 if what == "meet" else 1, after=after)
        trainer = Trainer(breaking, **options)
        trainer.outer.start()
        trainer.train(5)
        trainer.inner_step()
        try:
            trainer.note(trainer.outer.step())
        except ExchangeError as error:
            broken.append(error)
        return trainer

    stopped = in_threads(MemoryExchange.group(3, timeout=60), act)
    committed = what == "proof"  # then the round is, and only the comparison is missing
    assert len(broken) == (0 if committed else 3)
    resumed = restored([trainer.saved() for trainer in stopped], **options)
    if not committed:
        all_at_once(resumed, lambda trainer: trainer.note(trainer.outer.round()))
    all_at_once(resumed, lambda trainer: trainer.train(3))
    for one, other in zip(resumed, whole, strict=True):
        assert_same(one.bits(), other.bits())


def test_after_a_failure_a_new_exchange_is_all_that_is_needed():
    together = threading.Barrier(3)

    def act(exchange):
        trainer = Trainer(exchange)
        trainer.outer.start()
        trainer.train(5)
        trainer.inner_step()
        exchange.timeout = 3.0
        together.wait()
        if exchange.rank == 2:  # it does not come
            return trainer
        with pytest.raises(RankMissing, match="rank 2 did not come") as caught:
            trainer.outer.step()
        assert caught.value.missing == (2,)
        with pytest.raises(ExchangeError, match="[Mm]ake another exchange|new one"):
            trainer.outer.round()
        return trainer

    trainers = in_threads(MemoryExchange.group(3, timeout=60), act)
    for trainer, exchange in zip(trainers, MemoryExchange.group(3, timeout=60), strict=True):
        trainer.outer.exchange = exchange
    all_at_once(trainers, lambda trainer: trainer.note(trainer.outer.step() if trainer.rank == 2 else trainer.outer.round()))
    all_at_once(trainers, lambda trainer: trainer.train(3))
    for one, other in zip(trainers, undisturbed(3, 3), strict=True):
        assert_same(one.bits(), other.bits())


@pytest.mark.parametrize(("ranks", "inner_steps"), [(2, 3), (3, 2), (2, 5)])
def test_fewer_ranks_or_other_windows_may_go_on_and_nothing_is_rescaled(ranks, inner_steps):
    before = trained(3, act=lambda trainer: (trainer.outer.start(), trainer.train(5)))
    saved = [trainer.saved() for trainer in before[:ranks]]
    resumed = restored(saved, inner_steps=inner_steps)
    for trainer, old in zip(resumed, saved, strict=True):
        assert all(same_bits(tensor, old["outer"]["feedback"][name]) for name, tensor in trainer.outer.state_dict()["feedback"].items())
    all_at_once(resumed, lambda trainer: trainer.train(2 * inner_steps))
    all_at_once(resumed, Trainer.finish)
    rows = digests(resumed)
    assert all(row == rows[0] for row in rows)
    assert [report.round for report in resumed[0].reports] == [2, 3, 4]
    assert resumed[0].reports[0].inner_steps == max(inner_steps, 3)  # two had been taken before


# --- one stops, or is wrong, and the others go on ---


def newcomer(rank: int, ranks: int, seed: int = 7, saved=None, **options) -> tuple[list[Trainer], Trainer, list[int]]:
    """A run of three windows in which one rank is replaced after two by a process that knows nothing, or what was saved after one."""
    calls: list[int] = []
    joined: list[Trainer] = []
    both = threading.Barrier(ranks)

    def act(exchange):
        trainer = Trainer(exchange, **options)
        trainer.outer.start()
        trainer.train(3)
        old = trainer.saved()
        trainer.train(3)
        both.wait()
        if exchange.rank == rank:
            trainer = Trainer(exchange.restarted(), seed=seed, on_resync=lambda: calls.append(rank), **options)
            if saved:
                trainer.load(old)
            trainer.note(trainer.outer.start())
            joined.append(trainer)
            assert trainer.outer._rank.steps == 0
        else:
            trainer.train(3)
        trainer.train(3)
        return trainer

    return in_threads(MemoryExchange.group(ranks, timeout=60), act), joined[0], calls


@pytest.mark.parametrize("saved", [False, True], ids=["fresh", "behind"])
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (3, 1), (3, 0)])
def test_a_rank_that_comes_back_takes_over_anchor_momentum_and_round_and_never_wins(ranks, rank, saved):
    trainers, joined, calls = newcomer(rank, ranks, saved=saved)
    assert calls == [rank]
    rows = digests(trainers)
    others = [r for r in range(ranks) if r != rank]
    assert [report.round for report in joined.reports] == [3, 4]  # it took part in the third, with nothing to say
    assert joined.reports[0].sent == joined.reports[0].inner_steps == joined.reports[0].feedback_norm == 0
    assert all(rows[r][-2:] == rows[rank] for r in others)
    assert rows[others[0]][:2] == digests(undisturbed(ranks, 3))[0][:2]  # what had been learnt is what counts
    for r in range(ranks):
        assert [report.resynced for report in trainers[r].reports[-2:]] == [(rank,), ()]
    state, wanted = joined.outer.state_dict(), trainers[others[0]].outer.state_dict()
    assert all(same_bits(a, b) for a, b in zip(state["outer"]["momentum"], wanted["outer"]["momentum"], strict=True))


def test_a_rank_that_has_loaded_a_state_meets_the_others_at_its_first_step():
    """So that it does not train a whole window from weights that are old."""
    both = threading.Barrier(2)

    def act(exchange):
        trainer = Trainer(exchange)
        trainer.outer.start()
        trainer.train(3)
        old = trainer.saved()
        trainer.train(3)
        both.wait()
        if exchange.rank == 1:
            trainer = Trainer(exchange.restarted())
            trainer.load(old)
            trainer.train(1)
        else:
            trainer.train(3)
        assert trainer.outer.rounds == 3
        return trainer

    first, second = in_threads(MemoryExchange.group(2, timeout=60), act)
    assert first.outer.digest == second.outer.digest


@pytest.mark.parametrize("method", ["diloco", "diloco-int4", "sparseloco"])
def test_a_rank_may_join_with_every_method(method):
    trainers, _, _ = newcomer(1, 3, method=method)
    assert len({trainer.outer.digest for trainer in trainers}) == 1


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (3, 0), (4, 3)])
def test_a_rank_whose_anchor_was_damaged_is_named_and_takes_over_another(ranks, rank):
    def act(trainer):
        trainer.outer.start()
        trainer.train(6)
        if trainer.rank == rank:
            trainer.outer.anchor["up.weight"][2, 3] += 0.5
        trainer.train(6)

    trainers = trained(ranks, act=act)
    rows = digests(trainers)
    assert all(row == rows[0] for row in rows)
    assert rows[0][:2] == digests(undisturbed(ranks, 3))[0][:2]
    for trainer in trainers:
        assert [report.resynced for report in trainer.reports] == [(), (), (rank,), ()]
        assert not any(report.differing for report in trainer.reports)
    assert trainers[rank].reports[2].inner_steps == 0  # its window was of another anchor
    assert all(trainer.reports[2].inner_steps == 3 for trainer in trainers if trainer.rank != rank)


def test_a_rank_that_is_interrupted_while_it_applies_a_round_takes_over_what_the_others_made_of_it():
    def interrupted(anchor, gradients):
        anchor[0].add_(next(gradients))
        raise KeyboardInterrupt

    def act(exchange):
        trainer = Trainer(exchange)
        trainer.outer.start()
        trainer.train(5)
        if exchange.rank == 1:
            outer_step = trainer.outer._rank.state.outer
            step, outer_step.step = outer_step.step, interrupted
            with pytest.raises(KeyboardInterrupt):
                trainer.train(1)
            outer_step.step = step
            with pytest.raises(TornUpdate):
                trainer.outer.state_dict()
            trainer.outer.exchange = exchange.restarted()
            trainer.note(trainer.outer.start())
            trainer.train(3)
        else:
            trainer.train(7)
        trainer.finish()
        return trainer

    trainers = in_threads(MemoryExchange.group(3, timeout=60), act)
    assert digests(trainers)[0][1] == digests(undisturbed(3, 3))[0][1]
    assert digests(trainers)[0] == digests(trainers)[2]
    assert digests(trainers)[0][2:] == digests(trainers)[1][1:]
    assert [report.resynced for report in trainers[0].reports] == [(), (), (1,), ()]


@pytest.mark.parametrize(("ranks", "rank"), [(3, 0), (4, 2)])
def test_a_rank_that_computed_something_else_is_named_in_the_round_and_takes_over_after_it(ranks, rank):
    def act(trainer):
        trainer.outer.start()
        trainer.train(3)
        if trainer.rank == rank:
            trainer.outer._rank.state.outer._buffers[1].add_(1.0)  # its momentum, which nobody sees until the anchor shows it
        trainer.train(6)

    trainers = trained(ranks, act=act)
    for trainer in trainers:
        assert [report.differing for report in trainer.reports] == [(), (rank,), ()]
        assert [report.resynced for report in trainer.reports] == [(), (), (rank,)]
    assert len({row[1] for row in digests(trainers)}) == 2
    assert len({row[2] for row in digests(trainers)}) == 1
    assert len({trainer.outer.digest for trainer in trainers}) == 1


def test_a_rank_that_takes_over_when_all_are_done_is_done_as_well():
    def act(trainer):
        trainer.outer.start()
        trainer.train(6)
        if trainer.rank == 1:
            trainer.outer.anchor["up.weight"][2, 3] += 0.5
        trainer.finish()

    trainers = trained(3, act=act)
    assert {trainer.outer.digest for trainer in trainers} == {digests(undisturbed(3, 3))[0][1]}
    assert all(same_bits(trainer.model.up.weight, trainers[0].model.up.weight) for trainer in trainers)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_falls_behind_at_the_very_end_catches_up_and_the_others_wait_for_it(rank):
    """They have no data left, it has: it trains on, and they take part."""
    both = threading.Barrier(2)

    def act(exchange):
        trainer = Trainer(exchange)
        trainer.outer.start()
        trainer.train(3)
        old = trainer.saved()
        trainer.train(3)
        both.wait()
        if exchange.rank == rank:
            trainer = Trainer(exchange.restarted())
            trainer.load(old)
            trainer.note(trainer.outer.start())
            trainer.train(2)
        trainer.finish()
        return trainer

    trainers = in_threads(MemoryExchange.group(2, timeout=60), act)
    assert trainers[0].outer.digest == trainers[1].outer.digest
    assert [report.round for report in trainers[rank].reports] == [3]
    assert [report.round for report in trainers[1 - rank].reports] == [1, 2, 3]


# --- killed in any phase, through a store ---

STEPS = 12


def with_a_death(what: str, nth: int, after: bool, *, fresh: bool = False, **options) -> tuple[list[Trainer], list[bool]]:
    """Three ranks over a store; rank 1 dies at one call, and comes back with what it saved, or with nothing."""
    store, died, kept = MemoryStore(), [False], {}

    def trainer_of(rank, dying):
        exchange = StoreExchange(store, rank, 3, run="r", timeout=60, poll=0.005)
        return Trainer(Breaking(exchange, what, Died(), nth=nth, after=after) if dying else exchange, **options)

    def act(rank):
        def save(trainer):
            kept[rank] = trainer.saved()

        trainer = trainer_of(rank, rank == 1)
        try:
            live(trainer, STEPS, save)
        except Died:
            died[0] = True
            old, trainer = trainer, trainer_of(rank, dying=False)
            if rank in kept and not fresh:
                trainer.load(kept[rank])
            live(trainer, STEPS, save)
            trainer.reports = old.reports + trainer.reports
        return trainer

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(act, range(3))), died


def ends_alike(trainers, died) -> None:
    assert died[0]
    assert len({trainer.outer.digest for trainer in trainers}) == 1
    by_round = [{report.round: report.digest for report in trainer.reports} for trainer in trainers]
    for number in by_round[0]:
        assert len({row[number] for row in by_round if number in row}) == 1
    for trainer in (trainers[0], trainers[2]):
        assert [report.round for report in trainer.reports] == list(range(1, trainer.outer.rounds + 1))
        assert all(report.inner_steps == 3 for report in trainer.reports[: STEPS // 3])


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", CALLS)
def test_a_rank_is_killed_in_any_phase_and_comes_back_with_what_it_saved(what, after):
    trainers, died = with_a_death(what, 2 if what == "meet" else 1, after)
    ends_alike(trainers, died)
    if what == "proof" or (what, after) == ("vote", True):  # it had voted, so the others have committed the second round; it takes it over
        assert digests(trainers)[0][:2] == digests(undisturbed(3, STEPS // 3))[0][:2]
        assert trainers[0].reports[2].resynced == (1,)
    else:  # it had not, so the round was begun again when it was back: nothing was lost at all
        assert digests(trainers)[0] == digests(undisturbed(3, STEPS // 3))[0]
        for one, other in zip(trainers, undisturbed(3, STEPS // 3), strict=True):
            assert_same(one.bits(), other.bits())


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", CALLS)
def test_a_rank_is_killed_in_any_phase_and_comes_back_with_nothing(what, after):
    trainers, died = with_a_death(what, 2 if what == "meet" else 1, after, fresh=True, seed=0)
    ends_alike(trainers, died)
    assert digests(trainers)[0][0] == digests(undisturbed(3, STEPS // 3))[0][0]
    assert any(1 in report.resynced for report in trainers[0].reports)


@pytest.mark.parametrize("what", ["payload", "sum", "vote"])
def test_a_rank_is_killed_while_ranges_are_added_up(what):
    trainers, died = with_a_death(what, 1, after=False, share="scatter")
    ends_alike(trainers, died)
    assert digests(trainers)[0] == digests(undisturbed(3, STEPS // 3))[0]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_newcomer_is_killed_while_it_takes_over_and_comes_again(after):
    """Twice dead: after it has voted in the second round, and while it takes over what it has missed."""
    store, deaths, kept = MemoryStore(), [], {}

    def act(rank):
        plan = [("vote", 1, True), ("resync", 0, after)] if rank == 1 else []
        for number in range(3):
            exchange = StoreExchange(store, rank, 3, run="r", timeout=60, poll=0.005)
            what, nth, late = plan[number] if number < len(plan) else ("never", 0, False)
            trainer = Trainer(Breaking(exchange, what, Died(), nth=nth, after=late))
            if rank in kept:
                trainer.load(kept[rank])
            try:
                live(trainer, STEPS, lambda trainer: kept.__setitem__(rank, trainer.saved()))
            except Died:
                deaths.append(what)
            else:
                return trainer
        raise AssertionError(deaths)

    with ThreadPoolExecutor(3) as pool:
        trainers = list(pool.map(act, range(3)))
    assert deaths == ["vote", "resync"]
    assert len({trainer.outer.digest for trainer in trainers}) == 1
    assert all(report.inner_steps == 3 for report in trainers[0].reports[: STEPS // 3])


@pytest.fixture(scope="module")
def nursery():
    found = Nursery("tests.fault.loco_processes")
    yield found
    found.close()


def test_processes_are_killed_inside_a_window_and_after_a_vote_and_all_end_with_the_same_weights(tmp_path, nursery):
    kills = [[None], [4, None], [("vote", 2, True), None]]
    lives = [[(str(tmp_path), rank, 3, STEPS, kill) for kill in of_rank] for rank, of_rank in enumerate(kills)]
    assert nursery.lived(process, *lives) == [[0], [-signal.SIGKILL, 0], [-signal.SIGKILL, 0]]
    rows = [(tmp_path / f"{rank}.txt").read_text().splitlines() for rank in range(3)]
    assert len({row[-1] for row in rows}) == 1
    by_round = [dict(line.split()[:2] for line in row) for row in rows]
    assert [by_round[0][str(number)] for number in (1, 2, 3)] == digests(undisturbed(3, STEPS // 3))[0][:3]
    for number in by_round[0]:
        assert len({row[number] for row in by_round if number in row}) == 1
    assert any(line.endswith("(2,)") for line in rows[0])
