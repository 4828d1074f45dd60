"""A publish that fails or dies at any of its calls to the store: the world sees the old version or the new one, and nothing is lost."""

from __future__ import annotations

import contextlib

import pytest

from pulse import Publisher, Subscriber
from pulse.errors import StoreUnavailable
from pulse.store import MemoryStore
from pulse.testing.faults import Died, FaultyStore, never
from tests.chains import Bits, Trainer, advance, assert_linear, copied, follow, receiver

SCENARIOS = {"first anchor": 0, "patch": 1, "patch with a late anchor": 2}  # versions before the one that fails
ANCHOR_EVERY = 2


class Run:
    """A publisher on a store that can be made to fail, followed by somebody who reads the store behind it."""

    def __init__(self, before: int, when: str, error: type[BaseException]) -> None:
        self.inner = MemoryStore()
        self.store = FaultyStore(self.inner, when=when, error=error)  # type: ignore[arg-type]
        self.trainer = Trainer()
        self.publisher = Publisher(self.store, self.trainer.weights, anchor_every=ANCHOR_EVERY)
        self.old: Bits | None = None
        for _ in range(before):
            self.publisher.publish()
            self.old = self.trainer.bits()
            self.trainer.step()
        self.follower = receiver()
        self.subscriber = Subscriber(self.inner, self.follower)
        advance(self.subscriber)
        self.new = self.trainer.bits()

    def publish(self, fail_at: int | None) -> bool:
        """Publish and wait for the late anchor, if one is due; whether the publish says that it succeeded."""
        start = len(self.store.calls)
        self.store.fails = never if fail_at is None else lambda call: call.number == start + fail_at
        try:
            self.publisher.publish()
        except (StoreUnavailable, Died):
            return False
        finally:
            if self.publisher._anchoring is not None:
                self.publisher._anchoring.exception()
            self.store.fails = never
        return True

    def close(self) -> None:
        with contextlib.suppress(StoreUnavailable, Died):
            self.publisher.close()


def calls_of(before: int) -> int:
    run = Run(before, "before", StoreUnavailable)
    start = len(run.store.calls)
    assert run.publish(None)
    run.close()
    return len(run.store.calls) - start


@pytest.mark.parametrize("error", [StoreUnavailable, Died], ids=["unavailable", "death"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("before", SCENARIOS.values(), ids=SCENARIOS)
def test_whatever_call_fails_followers_reach_the_old_or_the_new_version_and_the_publisher_goes_on(
    before: int, when: str, error: type[BaseException]
) -> None:
    total = calls_of(before)
    assert total >= 4
    outcomes = set()
    for number in range(total):
        run = Run(before, when, error)
        said = run.publish(number)

        update = Subscriber(run.inner, receiver()).fetch()
        seen = None if update is None else follow(run.inner)
        assert seen in ((before, run.new), None if run.old is None else (before - 1, run.old)), number
        if said:
            assert seen == (before, run.new), number
        outcomes.add(seen == (before, run.new))

        publisher = run.publisher if error is StoreUnavailable else Publisher(run.inner, run.trainer.weights, anchor_every=ANCHOR_EVERY)
        run.trainer.step()
        receipt = publisher.publish()
        if error is StoreUnavailable and run.old is not None:
            assert receipt.kind == "patch", number
        advance(run.subscriber)
        assert copied(run.follower) == run.trainer.bits(), number
        assert run.subscriber.version == receipt.version, number
        assert follow(run.inner) == (receipt.version, run.trainer.bits()), number
        publisher.close()
        run.close()
        assert_linear(run.inner)
    assert outcomes == {True, False}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("before", SCENARIOS.values(), ids=SCENARIOS)
def test_a_publisher_that_dies_while_it_opens_the_store_changes_nothing(before: int, when: str) -> None:
    opened = Run(before, "before", Died)
    start = len(opened.store.calls)
    Publisher(opened.store, opened.trainer.weights).close()
    total = len(opened.store.calls) - start
    opened.close()
    for number in range(total):
        run = Run(before, when, Died)
        start = len(run.store.calls)
        run.store.fails = lambda call, at=start + number: call.number == at
        with pytest.raises(Died):
            Publisher(run.store, run.trainer.weights)
        run.store.fails = never
        run.close()
        assert run.subscriber.fetch() is None
        with Publisher(run.inner, run.trainer.weights) as publisher:
            assert publisher.publish().version == before
        assert follow(run.inner) == (before, run.trainer.bits())


@pytest.mark.parametrize("fails", [1, 2, 5])
def test_several_failures_in_a_row_lose_nothing(fails: int) -> None:
    run = Run(2, "before", StoreUnavailable)
    for _ in range(fails):
        run.store.fails = lambda call: call.verb == "put"
        run.trainer.step()
        with pytest.raises(StoreUnavailable):
            run.publisher.publish()
        run.store.fails = never
    run.trainer.step()
    assert run.publisher.publish().version == 2
    advance(run.subscriber)
    assert copied(run.follower) == run.trainer.bits()
    run.close()
