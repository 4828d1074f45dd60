"""A store that does not say whether a manifest arrived, and publishers that meet in one store."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from pulse import MemoryWeights, Publisher, Subscriber
from pulse.bits import TensorBits
from pulse.errors import Fenced, StoreUnavailable, StoreUnsuitable
from pulse.manifest import manifest_key
from pulse.store import MemoryStore
from pulse.testing.faults import Call, CarelessStore, FaultyStore, never
from pulse.versions import Versions
from tests.chains import Trainer, advance, assert_linear, copied, follow, published, random_bits, receiver


def of_manifest(version: int) -> Callable[[Call], bool]:
    return lambda call: call.key == manifest_key(version)


def put_of_manifest(version: int) -> Callable[[Call], bool]:
    return lambda call: call.key == manifest_key(version) and call.verb == "put"


def start(store: FaultyStore, versions: int) -> tuple[Trainer, Publisher, list]:
    """A publisher that is about to make that version, with changed weights."""
    trainer, publisher, history = published(store, versions)
    if versions:
        trainer.step()
    return trainer, publisher, history


@pytest.mark.parametrize("versions", [0, 2])
def test_a_manifest_that_arrived_though_its_put_failed_is_a_success(versions: int) -> None:
    store = FaultyStore(MemoryStore(), when="after")
    trainer, publisher, history = start(store, versions)
    store.fails = put_of_manifest(versions)
    assert publisher.publish().version == versions
    assert_linear(store, [*history, trainer.bits()])
    publisher.close()


@pytest.mark.parametrize("versions", [0, 2])
def test_a_manifest_of_which_nothing_is_known_is_found_by_the_next_publish_and_built_upon(versions: int) -> None:
    store = FaultyStore(MemoryStore(), when="after")
    trainer, publisher, history = start(store, versions)
    store.fails = of_manifest(versions)  # neither the put nor the look afterwards is answered
    with pytest.raises(StoreUnavailable):
        publisher.publish(10, {"try": 1})
    history.append(trainer.bits())
    store.fails = never
    trainer.step()
    receipt = publisher.publish(11, {"try": 2})
    history.append(trainer.bits())
    assert (receipt.version, receipt.kind, receipt.step, receipt.reason) == (versions + 1, "patch", 11, "")
    assert assert_linear(store, history) == versions + 1
    assert Versions(store).manifest(versions).metadata == {"try": 1}
    publisher.close()


@pytest.mark.parametrize("versions", [0, 2])
@pytest.mark.parametrize("moment", ["before the next attempt", "during the next attempt"])
def test_a_manifest_that_arrives_late_is_built_upon(versions: int, moment: str) -> None:
    store = FaultyStore(MemoryStore(), when="late")
    trainer, publisher, history = start(store, versions)
    store.fails = put_of_manifest(versions)
    with pytest.raises(StoreUnavailable):
        publisher.publish()
    history.append(trainer.bits())

    def arrive_at_the_last_moment(call: Call) -> bool:
        if put_of_manifest(versions)(call):
            store.arrive()
        return False

    store.fails = arrive_at_the_last_moment
    if moment == "before the next attempt":
        store.arrive()
        assert follow(store) == (versions, trainer.bits())
    trainer.step()
    assert publisher.publish().version == versions + 1
    history.append(trainer.bits())
    assert assert_linear(store, history) == versions + 1
    publisher.close()


@pytest.mark.parametrize("versions", [0, 2])
def test_a_manifest_that_arrives_after_its_successor_is_refused_by_the_store(versions: int) -> None:
    store = FaultyStore(MemoryStore(), when="late")
    trainer, publisher, history = start(store, versions)
    store.fails = put_of_manifest(versions)
    with pytest.raises(StoreUnavailable):
        publisher.publish()
    store.fails = never
    trainer.step()
    assert publisher.publish().version == versions
    store.arrive()
    trainer.step()
    history.append(follow(store)[1])
    assert publisher.publish().version == versions + 1
    assert assert_linear(store, [*history, trainer.bits()]) == versions + 1
    publisher.close()


def test_of_several_uncertain_attempts_the_one_that_arrived_counts() -> None:
    store = FaultyStore(MemoryStore(), when="late")
    trainer, publisher, history = start(store, 2)
    tries = []
    for _ in range(3):
        store.fails = put_of_manifest(2)
        with pytest.raises(StoreUnavailable):
            publisher.publish()
        tries.append(trainer.bits())
        trainer.step()
    store._late.reverse()
    store.arrive()  # the last one first, which then keeps its place
    store.fails = never
    assert publisher.publish().version == 3
    assert_linear(store, [*history, tries[2], trainer.bits()])
    publisher.close()


@pytest.mark.parametrize("change", ["added", "reshaped", "retyped", "removed"])
def test_a_late_manifest_and_tensors_that_changed_meanwhile_do_not_mix(change: str) -> None:
    store = FaultyStore(MemoryStore(), when="late")
    trainer, publisher, history = start(store, 2)
    store.fails = put_of_manifest(2)
    with pytest.raises(StoreUnavailable):
        publisher.publish()
    history.append(trainer.bits())
    store.arrive()
    store.fails = never
    tensors = trainer.weights.tensors
    if change == "added":
        tensors |= random_bits(5, {"new.weight": ("BF16", (3,))})
    elif change == "removed":
        del tensors["norm.weight"]
    else:
        tensors["norm.weight"] = TensorBits(
            "I32" if change == "retyped" else "F32", (7,) if change == "retyped" else (7, 1), tensors["norm.weight"].flat
        )
    receipt = publisher.publish()
    history.append(trainer.bits())
    assert (receipt.version, receipt.kind, receipt.reason) == (3, "anchor", "names, shapes, dtypes or ties changed")
    trainer.step()
    assert publisher.publish().kind == "patch"
    history.append(trainer.bits())
    assert assert_linear(store, history) == 4
    publisher.close()


# --- several publishers ---


def test_a_publisher_that_takes_over_fences_the_older_one() -> None:
    store = MemoryStore()
    trainer, older, _ = published(store, 2)
    newer = Publisher(store, trainer.weights)
    trainer.step()
    receipt = newer.publish()
    assert (receipt.version, receipt.kind) == (2, "patch")
    trainer.step()
    with pytest.raises(Fenced, match="version 2 was published by another publisher \\(epoch 1, this one has 0\\).*Stop this one"):
        older.publish()
    with pytest.raises(Fenced):
        older.publish()
    assert follow(store)[0] == 2
    assert newer.publish().version == 3
    assert_linear(store)


def test_of_two_publishers_that_opened_together_the_first_to_commit_stays() -> None:
    store = MemoryStore()
    trainer, _, _ = published(store, 1)
    first, second = (Publisher(store, trainer.weights) for _ in range(2))
    trainer.step()
    second.publish()
    with pytest.raises(Fenced):
        first.publish()
    assert second.publish().version == 2


def test_of_two_publishers_that_found_an_empty_store_the_first_to_commit_stays() -> None:
    store = MemoryStore()
    first, second = (Publisher(store, Trainer().weights) for _ in range(2))
    first.publish()
    with pytest.raises(Fenced):
        second.publish()
    assert first.publish().version == 1


def test_a_publisher_that_took_over_reads_again_what_the_older_one_did_in_the_meantime_and_goes_on() -> None:
    store = MemoryStore()
    trainer, older, history = published(store, 2)
    other = Trainer()
    newer = Publisher(store, other.weights)
    for _ in range(3):
        trainer.step()
        older.publish()
        history.append(trainer.bits())
    receipt = newer.publish(step=7)
    assert (receipt.version, receipt.kind, receipt.step) == (5, "anchor", 7)
    assert "version 2 was published by a writer of the lower epoch 0" in receipt.reason
    history.append(other.bits())
    other.step()
    receipt = newer.publish()
    assert (receipt.kind, receipt.reason) == ("patch", "")
    history.append(other.bits())
    assert assert_linear(store, history) == 6
    with pytest.raises(Fenced):
        older.publish()


def test_a_publisher_that_comes_back_after_a_later_takeover_is_fenced() -> None:
    store = MemoryStore()
    trainer, first, _ = published(store, 1)  # epoch 0
    asleep = Publisher(store, trainer.weights)  # epoch 1
    first.publish()
    third = Publisher(store, trainer.weights)  # epoch 1
    third.publish()
    fourth = Publisher(store, trainer.weights)  # epoch 2
    fourth.publish()
    with pytest.raises(Fenced, match="epoch 2, this one has 1"):
        asleep.publish()
    assert fourth.publish().version == 4
    assert_linear(store)


def test_an_overtaken_publisher_that_then_cannot_reach_the_store_still_starts_from_an_anchor() -> None:
    inner = MemoryStore()
    trainer, older, _ = published(inner, 1)
    store = FaultyStore(inner)
    other = Trainer()
    newer = Publisher(store, other.weights)
    trainer.step()
    older.publish()
    store.fails = put_of_manifest(2)
    with pytest.raises(StoreUnavailable):
        newer.publish()
    store.fails = never
    other.step()
    receipt = newer.publish()
    assert (receipt.version, receipt.kind) == (2, "anchor")
    assert "lower epoch" in receipt.reason
    assert follow(inner) == (2, other.bits())


def test_publishers_that_race_keep_the_chain_linear_and_every_version_restores() -> None:
    store = MemoryStore()
    errors: list[BaseException] = []
    taken = [0, 0]

    def race(number: int) -> None:
        trainer = Trainer(seed=number)
        publisher = Publisher(store, trainer.weights, anchor_every=3)
        try:
            for _ in range(40):
                try:
                    publisher.publish(metadata={"by": number})
                    taken[number] += 1
                except Fenced:
                    publisher.close()
                    publisher = Publisher(store, trainer.weights, anchor_every=3)
                trainer.step()
            publisher.close()
        except BaseException as error:  # noqa: BLE001  shown by the test
            errors.append(error)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert assert_linear(store) == sum(taken) - 1
    by = [Versions(store).manifest(version).metadata["by"] for version in range(sum(taken))]
    assert [by.count(number) for number in range(2)] == taken


# --- stores without put-if-absent ---


def test_a_store_that_ignores_put_if_absent_is_refused() -> None:
    store = CarelessStore(MemoryStore())
    with pytest.raises(StoreUnsuitable, match="ignores put-if-absent.*single_writer=True"):
        Publisher(store, Trainer().weights)
    assert store.list() == []


def test_a_single_writer_may_use_a_store_that_ignores_put_if_absent() -> None:
    store = CarelessStore(MemoryStore())
    trainer, publisher, history = published(store, 7, single_writer=True, anchor_every=2)
    publisher.close()
    assert assert_linear(store, history) == 6
    again = Publisher(store, trainer.weights, single_writer=True)
    trainer.step()
    assert again.publish().kind == "patch"
    newer = Publisher(store, trainer.weights, single_writer=True)
    assert newer.publish().version == 8
    with pytest.raises(Fenced):  # found by looking before the put
        again.publish()


def test_the_probe_leaves_nothing_behind() -> None:
    store = MemoryStore()
    Publisher(store, MemoryWeights({"w": np.zeros(3, np.float32)}))
    assert store.list() == []


def test_a_follower_that_reads_while_two_publishers_race_only_sees_versions() -> None:
    store = MemoryStore()
    trainer, older, history = published(store, 1)
    newer = Publisher(store, trainer.weights)
    weights = receiver()
    subscriber = Subscriber(store, weights)
    for publisher in (older, older, newer, newer):
        trainer.step()
        publisher.publish()
        advance(subscriber)
        assert copied(weights) == trainer.bits()
    assert subscriber.version == 4
