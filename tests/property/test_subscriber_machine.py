"""A publisher and several subscribers through restarts, failures and torn applies, against a list of what each version was."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from pulse import MemoryWeights, Publisher, Subscriber, Update, codec
from pulse.bits import TensorBits
from pulse.digest import digest_of
from pulse.errors import BaseMismatch, DigestMismatch, StoreUnavailable, TornUpdate
from pulse.patch import Positions
from pulse.store import MemoryStore
from pulse.testing.faults import FaultyStore, never
from pulse.versions import Versions
from tests.chains import Bits, Trainer, copied, random_bits

WHICH = st.integers(0, 1)


class Tearable(MemoryWeights):
    """Weights of which a write can be made to fail; `None`: none does."""

    left: int | None = None

    def scatter(self, name: str, positions: Positions, values: NDArray[Any]) -> None:
        self._write()
        super().scatter(name, positions, values)

    def assign(self, name: str, bits: TensorBits) -> None:
        self._write()
        super().assign(name, bits)

    def _write(self) -> None:
        if self.left == 0:
            raise RuntimeError("torn")
        if self.left is not None:
            self.left -= 1


class Follower:
    """A subscriber, its weights, and the version that the model says they are; None: none, or torn."""

    def __init__(self, store: MemoryStore, seed: int) -> None:
        self.weights = Tearable(random_bits(seed))
        self.subscriber = Subscriber(store, self.weights, verify_every=4)
        self.holds: int | None = None
        self.torn: Update | None = None
        self.fetched: list[Update] = []


class Chain(RuleBasedStateMachine):
    """`history[v]` is what version v is. An uncertain publish leaves two possibilities until someone looks."""

    @initialize()
    def begin(self) -> None:
        self.inner = MemoryStore()
        self.trainer = Trainer(seed=1)
        self.history: list[Bits] = []
        self.followers = [Follower(self.inner, seed) for seed in (8, 9)]
        self.open()
        self.publish(0.1)

    def open(self) -> None:
        self.store = FaultyStore(self.inner)
        self.publisher = Publisher(self.store, self.trainer.weights, anchor_every=3)

    # --- the trainer ---

    @rule(share=st.sampled_from([0.0, 0.02, 0.2, 0.9]), encoding=st.sampled_from(codec.ENCODINGS))
    def publish(self, share: float, encoding: codec.Encoding = "portable") -> None:
        self.publisher._encoding = encoding
        self.trainer.step(share)
        receipt = self.publisher.publish()
        self.look()
        assert receipt.version == len(self.history) - 1
        assert self.history[-1] == self.trainer.bits()

    @rule(at=st.integers(0, 6), when=st.sampled_from(["before", "after", "late"]))
    def fail_to_publish(self, at: int, when: str) -> None:
        self.trainer.step(0.1)
        start = len(self.store.calls)
        self.store._when = when  # type: ignore[assignment]
        self.store.fails = lambda call: call.number >= start + at
        with contextlib.suppress(StoreUnavailable):
            self.publisher.publish()
        if self.publisher._anchoring is not None:
            self.publisher._anchoring.exception()
        self.store.fails = never
        self.look()

    @rule()
    def late_puts_arrive(self) -> None:
        self.store.arrive()
        self.look()

    @rule(lost=st.booleans())
    def restart_the_publisher(self, lost: bool) -> None:
        with contextlib.suppress(StoreUnavailable):
            self.publisher.close()
        self.store.arrive()
        self.look()
        if lost:  # it comes back from an older checkpoint of its own
            self.trainer = Trainer(seed=len(self.history))
        self.open()
        receipt = self.publisher.publish()
        same = self.history[-1] == self.trainer.bits()
        self.look()
        assert receipt.kind == ("patch" if same else "anchor")

    def look(self) -> None:
        """Write down the versions that exist now; each must be what the trainer had, which a restore proves by bits."""
        versions = Versions(self.inner)
        newest = versions.newest()
        for version in range(len(self.history), 0 if newest is None else newest + 1):
            tensors = versions.restore(version)
            assert digest_of(tensors) == versions.manifest(version).state_digest
            self.history.append({name: bits.copy() for name, bits in tensors.items()})

    # --- followers ---

    @rule(which=WHICH, back=st.none() | st.none() | st.integers(0, 3))
    def fetch(self, which: int, back: int | None) -> None:
        follower = self.followers[which]
        version = None if back is None else max(0, len(self.history) - 1 - back)
        before = copied(follower.weights)
        update = follower.subscriber.fetch(version)
        assert copied(follower.weights) == before
        expected = len(self.history) - 1 if version is None else version
        assert (update is None) == (follower.holds == expected) or (update is not None and update.changed == 0)
        assert update is None or update.version == expected
        follower.holds = follower.subscriber.version
        if update is not None:
            follower.fetched = [*follower.fetched[-3:], update]

    @rule(which=WHICH, newest=st.booleans(), tear_at=st.none() | st.integers(0, 3))
    def apply(self, which: int, newest: bool, tear_at: int | None) -> None:
        follower = self.followers[which]
        if not follower.fetched:
            return
        update = follower.fetched.pop(-1 if newest else 0)
        before = copied(follower.weights)
        follower.weights.left = tear_at
        try:
            follower.subscriber.apply(update)
        except (BaseMismatch, TornUpdate):
            assert copied(follower.weights) == before
        except RuntimeError:
            follower.holds, follower.torn = None, update
        else:
            follower.holds, follower.torn = update.version, None
            assert copied(follower.weights) == self.history[update.version]
        follower.weights.left = None

    @precondition(lambda self: any(follower.torn is not None for follower in self.followers))
    @rule(which=WHICH)
    def apply_the_torn_one_again(self, which: int) -> None:
        follower = self.followers[which]
        if follower.torn is not None:
            follower.subscriber.apply(follower.torn)
            follower.holds, follower.torn = follower.torn.version, None

    @rule(which=WHICH, bit=st.integers(0, 15))
    def rot(self, which: int, bit: int) -> None:
        follower = self.followers[which]
        if follower.subscriber.version is not None:
            follower.weights.tensors["frozen.weight"].flat[3] ^= 1 << bit
            with pytest.raises(DigestMismatch, match=r"frozen\.weight"):
                follower.subscriber.verify()
            follower.holds = None

    @rule(which=WHICH)
    def restart_a_follower(self, which: int) -> None:
        follower = self.followers[which]
        follower.subscriber = Subscriber(self.inner, follower.weights, held=follower.holds, verify_every=4)
        follower.holds = follower.torn = None  # what was fetched before stays, to be refused

    @rule(which=WHICH)
    def catch_up(self, which: int) -> None:
        follower = self.followers[which]
        update = follower.subscriber.fetch()
        if update is not None:
            follower.subscriber.apply(update)
        follower.holds, follower.torn = follower.subscriber.version, None
        assert follower.holds == len(self.history) - 1

    @rule(which=WHICH)
    def hold_an_update_back(self, which: int) -> None:
        follower = self.followers[which]
        update = follower.subscriber.fetch()
        self.publish(0.1)
        self.catch_up(which)
        if update is not None:
            with pytest.raises(BaseMismatch):
                follower.subscriber.apply(update)

    @invariant()
    def followers_are_what_they_say(self) -> None:
        for follower in self.followers:
            assert follower.subscriber.version == follower.holds
            if follower.holds is not None:
                assert copied(follower.weights) == self.history[follower.holds]

    @invariant()
    def the_chain_has_no_hole(self) -> None:
        newest = Versions(self.inner).newest()
        assert newest == len(self.history) - 1

    def teardown(self) -> None:
        if hasattr(self, "publisher"):
            with contextlib.suppress(StoreUnavailable):
                self.publisher.close()


Chain.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestChain = Chain.TestCase
