"""Following a chain: every way to a version ends at the trainer's bits, and nothing that goes wrong is served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pulse import MemoryWeights, Publisher, Subscriber, codec, decode, encode
from pulse.bits import TensorBits
from pulse.canonical import from_json, to_json
from pulse.digest import sha256
from pulse.errors import (
    BaseMismatch,
    ChainError,
    DigestMismatch,
    FormatError,
    NoPath,
    NotFound,
    PulseError,
    StoreUnavailable,
    TornUpdate,
    UnsupportedFormat,
    WeightsMismatch,
)
from pulse.manifest import anchor_key, manifest_key
from pulse.patch import Part, Positions, TensorPatch
from pulse.store import MemoryStore
from pulse.testing.faults import Call, FaultyStore, never
from pulse.versions import Versions
from tests.chains import SHAPES, Bits, advance, copied, follow, published, random_bits, receiver


class Fragile(MemoryWeights):
    """Weights of which the n-th write fails, after having written a part."""

    fail_at: int | None = None
    writes = 0

    def scatter(self, name: str, positions: Positions, values: NDArray[Any]) -> None:
        half = positions.size // 2 if self._due() else positions.size
        super().scatter(name, positions[:half], values[:half])
        self._fail_if(half != positions.size or self.writes - 1 == self.fail_at)

    def assign(self, name: str, bits: TensorBits) -> None:
        due = self._due()
        if due:
            self.tensors[name].flat[: bits.flat.size // 2] = bits.flat[: bits.flat.size // 2]
        else:
            super().assign(name, bits)
        self._fail_if(due)

    def _due(self) -> bool:
        return self.fail_at == self.writes

    def _fail_if(self, due: bool) -> None:
        self.writes += 1
        if due:
            raise RuntimeError("the engine failed in the middle of a write")


def started(store: Any, weights: MemoryWeights | None = None, **options: Any) -> tuple[Subscriber, MemoryWeights]:
    weights = weights or receiver()
    return Subscriber(store, weights, **options), weights


# --- the ways that lead to a version ---


def test_an_empty_store_has_nothing_to_fetch() -> None:
    subscriber, _ = started(MemoryStore())
    assert subscriber.fetch() is None
    assert subscriber.version is None
    assert subscriber.state_digest is None


def test_a_version_that_does_not_exist_cannot_be_fetched() -> None:
    store = MemoryStore()
    published(store, 2)
    subscriber, _ = started(store)
    with pytest.raises(NoPath, match="no version 7"):
        subscriber.fetch(7)


def test_a_cold_start_takes_an_anchor_and_says_why() -> None:
    store = MemoryStore()
    _, _, history = published(store, 3)
    subscriber, weights = started(store)
    update = subscriber.fetch()
    assert update is not None
    assert (update.version, update.base, update.kind, update.patches, update.reason) == (2, None, "anchor", 2, "first version here")
    assert copied(weights) != history[2]
    subscriber.apply(update)
    assert copied(weights) == history[2]
    assert (subscriber.version, subscriber.state_digest) == (2, update.state_digest)
    assert subscriber.fetch() is None


@pytest.mark.parametrize("encoding", ["portable", "contextual"])
@pytest.mark.parametrize("gap", range(1, 21))
def test_a_gap_of_any_size_is_caught_up_by_patches(gap: int, encoding: str) -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 1, encoding=encoding)
    subscriber, weights = started(store)
    advance(subscriber)
    for _ in range(gap):
        trainer.step(0.01)
        publisher.publish(metadata={"gap": gap})
        history.append(trainer.bits())
    update = subscriber.fetch()
    assert update is not None
    assert (update.base, update.kind, update.patches, update.metadata) == (0, "patch", gap, {"gap": gap})
    subscriber.apply(update)
    assert copied(weights) == history[gap]


@pytest.mark.parametrize("to", range(8))
@pytest.mark.parametrize("held", range(8))
def test_any_version_is_reached_from_any_other_also_backwards(held: int, to: int) -> None:
    store = MemoryStore()
    _, publisher, history = published(store, 8, anchor_every=3)
    publisher.close()
    subscriber, weights = started(store)
    for version in (held, to):
        if (update := subscriber.fetch(version)) is not None:
            subscriber.apply(update)
        assert copied(weights) == history[version]
        assert subscriber.version == version
    assert follow(store, to) == (to, history[to])


def test_encodings_may_change_along_a_chain() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 1)
    subscriber, weights = started(store)
    advance(subscriber)
    for number in range(9):
        publisher._encoding = ("portable", "contextual", "absolute", "absolute", "portable", "contextual", "contextual")[number % 7]
        trainer.step(0.6 if number in (3, 6) else 0.05)  # most of it changed: then tensors are carried whole
        publisher.publish()
        history.append(trainer.bits())
    for version in (2, 3, 8, 9):
        update = subscriber.fetch(version)
        assert update is not None
        subscriber.apply(update)
        assert copied(weights) == history[version]
    assert follow(store) == (9, history[9])


@pytest.mark.parametrize(
    "encodings",
    [
        ("absolute", "portable"),
        ("portable", "absolute"),
        ("absolute", "portable", "absolute", "portable"),
        ("contextual", "contextual"),
        ("portable", "contextual", "portable"),
        ("contextual", "absolute", "contextual"),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_encodings_may_change_between_two_patches_that_write_the_same_places(encodings: tuple[str, ...], whole: bool) -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    subscriber, weights = started(store)
    advance(subscriber)
    for number, encoding in enumerate(encodings):
        publisher._encoding = encoding  # type: ignore[assignment]
        embed = trainer.weights.tensors["embed.weight"].flat
        embed[: 100 if whole and number == 0 else 3] += np.uint16(1 + number)
        publisher.publish()
    update = subscriber.fetch()
    assert update is not None
    assert (update.kind, update.patches) == ("patch", len(encodings))
    subscriber.apply(update)
    assert copied(weights) == trainer.bits()


def test_a_change_that_is_taken_back_within_a_gap_is_no_change() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    subscriber, weights = started(store)
    advance(subscriber)
    before = trainer.bits()
    trainer.step()
    publisher.publish()
    for name, bits in before.items():
        trainer.weights.tensors[name].flat[:] = bits.flat
    publisher.publish()
    update = subscriber.fetch()
    assert update is not None
    assert update.changed == 0
    subscriber.apply(update)
    assert (subscriber.version, copied(weights)) == (2, before)


def test_weights_that_already_are_the_version_need_no_download() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 3)
    subscriber, weights = started(store, MemoryWeights(trainer.bits()))
    update = subscriber.fetch()
    assert update is not None
    assert (update.version, update.kind, update.nbytes, update.changed, update.patches) == (2, "patch", 0, 0, 0)
    subscriber.apply(update)
    assert subscriber.version == 2
    trainer.step()
    publisher.publish()
    update = subscriber.fetch()
    assert update is not None
    assert update.kind == "patch"
    subscriber.apply(update)
    assert copied(weights) == trainer.bits() != history[2]


def test_weights_that_are_an_older_version_and_said_to_be_go_on_with_patches() -> None:
    store = MemoryStore()
    _, _, history = published(store, 4)
    subscriber, weights = started(store, MemoryWeights(history[1]), held=1)
    update = subscriber.fetch()
    assert update is not None
    assert (update.base, update.kind, update.patches) == (1, "patch", 2)
    subscriber.apply(update)
    assert copied(weights) == history[3]


def test_weights_that_are_not_what_they_are_said_to_be_get_an_anchor() -> None:
    store = MemoryStore()
    _, _, history = published(store, 4)
    history[1]["scale"].flat[0] ^= 1
    subscriber, weights = started(store, MemoryWeights(history[1]), held=1)
    update = subscriber.fetch()
    assert update is not None
    assert update.kind == "anchor"
    subscriber.apply(update)
    assert copied(weights) == history[3]


# --- waiting ---


def test_wait_returns_what_comes_while_it_waits() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    subscriber, weights = started(store)
    advance(subscriber)
    trainer.step()
    timer = threading.Timer(0.1, publisher.publish)
    timer.start()
    update = subscriber.wait(10, poll=0.02)
    timer.join()
    assert update is not None
    subscriber.apply(update)
    assert copied(weights) == trainer.bits()


@pytest.mark.timeout(60)
def test_wait_gives_up_in_time() -> None:
    store = MemoryStore()
    published(store, 1)
    subscriber, _ = started(store)
    advance(subscriber)
    begun = time.monotonic()
    assert subscriber.wait(0.15, poll=1000) is None
    assert time.monotonic() - begun > 0.1
    assert subscriber.wait(0) is None


def test_wait_bears_a_store_that_is_away_and_says_so_at_the_end() -> None:
    inner = MemoryStore()
    published(inner, 1)
    store = FaultyStore(inner, lambda call: call.number < 5)
    subscriber, _ = started(store)
    assert subscriber.wait(10, poll=0.01) is not None
    store.fails = lambda call: True
    with pytest.raises(StoreUnavailable):
        subscriber.wait(0.05, poll=0.01)


# --- an apply that is interrupted ---


def tear(versions: int, fail_at: int, gap: int = 1, share: float = 0.1) -> tuple[Any, Publisher, Subscriber, Fragile, list[Bits], Any]:
    """A follower at `versions` - 1 whose apply of the next version fails at that write; None if there are fewer writes."""
    store = MemoryStore()
    trainer, publisher, history = published(store, versions)
    weights = Fragile(random_bits(99))
    subscriber, _ = started(store, weights)
    if versions > 1:
        update = subscriber.fetch()
        assert update is not None
        subscriber.apply(update)
    for _ in range(gap):
        trainer.step(share)
        publisher.publish()
        history.append(trainer.bits())
    weights.writes, weights.fail_at = 0, fail_at
    update = subscriber.fetch()
    assert update is not None
    try:
        subscriber.apply(update)
    except RuntimeError:
        weights.fail_at = None
        return trainer, publisher, subscriber, weights, history, update
    return None, publisher, subscriber, weights, history, update


@pytest.mark.parametrize("versions", [1, 3], ids=["cold", "warm"])
@pytest.mark.parametrize("share", [0.2, 0.9])
@pytest.mark.parametrize("cure", ["the same update again", "a fresh update", "the same update after a newer version came", "a new process"])
def test_an_apply_that_fails_at_any_write_is_fenced_until_it_is_repaired(versions: int, share: float, cure: str) -> None:
    for fail_at in range(20):
        trainer, publisher, subscriber, weights, history, update = tear(versions, fail_at, share=share)
        if trainer is None:
            assert fail_at >= 2
            return
        assert subscriber.version is None
        assert subscriber.state_digest is None
        with pytest.raises(TornUpdate, match="half applied"):
            subscriber.verify()
        if cure == "the same update again":
            subscriber.apply(update)
        elif cure == "a fresh update":
            fresh = subscriber.fetch()
            assert fresh is not None
            assert fresh.kind == "anchor"
            assert "interrupted" in fresh.reason
            subscriber.apply(fresh)
            with pytest.raises(BaseMismatch):
                subscriber.apply(update)
        elif cure == "the same update after a newer version came":
            trainer.step()
            publisher.publish()
            subscriber.apply(update)
            assert copied(weights) == history[-1]
            history.append(trainer.bits())
            advance(subscriber)
        else:
            subscriber, _ = started(publisher._versions.store, weights, held=versions - 1)
            advance(subscriber)
        assert copied(weights) == history[-1]
        assert subscriber.version == len(history) - 1
        subscriber.verify()
        trainer.step()
        publisher.publish()
        advance(subscriber)
        assert copied(weights) == trainer.bits()
    pytest.fail("more writes than there are tensors")


def test_after_a_torn_apply_every_other_update_is_refused() -> None:
    trainer, publisher, subscriber, weights, history, update = tear(2, 1)
    other = Subscriber(publisher._versions.store, receiver()).fetch()
    assert other is not None
    before = copied(weights)
    with pytest.raises(TornUpdate, match="version 2 is half applied: apply it again, or fetch"):
        subscriber.apply(other)
    assert copied(weights) == before


def test_a_repair_that_is_torn_itself_can_be_repeated() -> None:
    trainer, publisher, subscriber, weights, history, update = tear(2, 1)
    repair = subscriber.fetch()
    assert repair is not None
    weights.writes, weights.fail_at = 0, 0
    with pytest.raises(RuntimeError):
        subscriber.apply(repair)
    weights.fail_at = None
    with pytest.raises(TornUpdate):
        subscriber.apply(update)
    subscriber.apply(repair)
    assert copied(weights) == history[-1]


def test_weights_that_do_not_keep_what_is_written_are_found_out() -> None:
    class Deaf(MemoryWeights):
        def scatter(self, name: str, positions: Positions, values: NDArray[Any]) -> None:
            """Do nothing."""

    store = MemoryStore()
    trainer, publisher, history = published(store, 1)
    subscriber, _ = started(store, Deaf(history[0]))
    advance(subscriber)
    trainer.step(0.1)
    publisher.publish()
    update = subscriber.fetch()
    assert update is not None
    with pytest.raises(TornUpdate, match="do not hold what was written"):
        subscriber.apply(update)
    assert subscriber.version is None


# --- updates for weights that are no more ---


def test_an_update_fetched_before_another_apply_is_refused_and_changes_nothing() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    subscriber, weights = started(store)
    advance(subscriber)
    trainer.step()
    publisher.publish()
    stale = subscriber.fetch()
    trainer.step()
    publisher.publish()
    advance(subscriber)
    before = copied(weights)
    assert stale is not None
    with pytest.raises(BaseMismatch, match=r"was not fetched for these weights as they are now \(version 2\).*Fetch again"):
        subscriber.apply(stale)
    assert copied(weights) == before
    assert subscriber.version == 2


def test_an_update_is_applied_once() -> None:
    store = MemoryStore()
    published(store, 1)
    subscriber, _ = started(store)
    update = subscriber.fetch()
    assert update is not None
    subscriber.apply(update)
    with pytest.raises(BaseMismatch):
        subscriber.apply(update)


def test_an_update_fetched_by_another_subscriber_is_refused() -> None:
    store = MemoryStore()
    published(store, 2)
    update = started(store)[0].fetch()
    subscriber, weights = started(store, receiver(seed=3))
    before = copied(weights)
    assert update is not None
    with pytest.raises(BaseMismatch):
        subscriber.apply(update)
    assert copied(weights) == before


def test_an_apply_in_the_middle_of_a_fetch_makes_it_fetch_again() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner)
    trainer, publisher, _ = published(inner, 1)
    subscriber, weights = started(store)
    advance(subscriber)
    base = trainer.bits()
    trainer.step()
    publisher.publish()
    update = subscriber.fetch()
    for name, bits in base.items():  # version 2 takes back what version 1 changed: steps cancel, and old bits would stay
        trainer.weights.tensors[name].flat[:] = bits.flat
    publisher.publish()

    def apply_meanwhile(call: Call) -> bool:
        if call.key.startswith("payloads/"):
            store.fails = never
            assert update is not None
            subscriber.apply(update)
        return False

    store.fails = apply_meanwhile
    second = subscriber.fetch()
    assert second is not None
    assert second.base == 1
    subscriber.apply(second)
    assert copied(weights) == trainer.bits()


@pytest.mark.parametrize("encoding", ["portable", "contextual"])
def test_fetches_and_applies_in_two_threads_never_serve_a_wrong_version(encoding: str) -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 1, encoding=encoding)
    subscriber, weights = started(store, verify_every=3)
    found: list[Any] = []
    stop = threading.Event()
    errors: list[BaseException] = []

    def fetch() -> None:
        try:
            while not stop.is_set():
                if (update := subscriber.fetch()) is not None:
                    found.append(update)
        except BaseException as error:  # noqa: BLE001  shown by the test
            errors.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    refused = 0
    for _ in range(60):
        trainer.step(0.3)
        publisher.publish()
        history.append(trainer.bits())
        deadline = time.monotonic() + 10
        while subscriber.version != len(history) - 1 and time.monotonic() < deadline and not errors:
            while found:
                try:
                    subscriber.apply(found.pop())
                except BaseMismatch:
                    refused += 1
                else:
                    assert copied(weights) == history[subscriber.version or 0]
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert subscriber.version == 60
    assert copied(weights) == trainer.bits()


def test_weights_that_were_replaced_under_the_subscriber_are_refused_by_name() -> None:
    store = MemoryStore()
    published(store, 1)
    subscriber, weights = started(store)
    update = subscriber.fetch()
    weights.tensors["norm.weight"] = random_bits(1, {"norm.weight": ("F32", (8,))})["norm.weight"]
    assert update is not None
    with pytest.raises(WeightsMismatch, match=r"norm.weight: published as F32\[7\], here it is F32\[8\]"):
        subscriber.apply(update)


# --- weights that rot ---


@pytest.mark.parametrize("name", [name for name, (_, shape) in SHAPES.items() if 0 not in shape])
def test_one_flipped_bit_is_found_by_verify_and_repaired_by_the_next_fetch(name: str) -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 2)
    subscriber, weights = started(store)
    with pytest.raises(BaseMismatch, match="fetch and apply one first"):
        subscriber.verify()
    advance(subscriber)
    subscriber.verify()
    weights.tensors[name].flat[-1] ^= 1
    with pytest.raises(DigestMismatch, match=f"not version 1: {name} changed"):
        subscriber.verify()
    assert subscriber.version is None
    update = subscriber.fetch()
    assert update is not None
    assert (update.kind, update.changed) == ("anchor", 1)
    assert f"1 live tensors were not as version 1 left them ({name}" in update.reason
    subscriber.apply(update)
    assert copied(weights) == history[1]
    subscriber.verify()


def test_rot_is_found_every_so_many_versions_without_being_asked_for() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    subscriber, weights = started(store, verify_every=3)
    advance(subscriber)
    weights.tensors["frozen.weight"].flat[2] ^= 0x8000  # no patch touches it
    kinds = []
    for _ in range(5):
        trainer.step(0.05)
        publisher.publish()
        update = subscriber.fetch()
        assert update is not None
        kinds.append(update.kind)
        subscriber.apply(update)
    assert kinds == ["patch"] * 3 + ["anchor", "patch"]
    assert copied(weights) == trainer.bits()


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
def test_rot_where_a_patch_writes_is_found_at_once(encoding: str) -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1, encoding=encoding)
    subscriber, weights = started(store)
    advance(subscriber)
    weights.tensors["embed.weight"].flat[5] ^= 1
    trainer.weights.tensors["embed.weight"].flat[5] ^= 2
    publisher.publish()
    update = subscriber.fetch()
    assert update is not None
    assert (update.kind, "embed.weight" in update.reason) == ("anchor", True)
    subscriber.apply(update)
    assert copied(weights) == trainer.bits()


def test_rot_where_a_contextual_patch_only_counts_is_found_at_once() -> None:
    store = MemoryStore()
    rng = np.random.default_rng(0)
    trained = MemoryWeights({"w": rng.normal(size=20_000).astype(np.float32)})
    publisher = Publisher(store, trained, encoding="contextual")
    publisher.publish()
    weights = MemoryWeights({"w": np.zeros(20_000, np.float32)})
    subscriber = Subscriber(store, weights)
    advance(subscriber)
    small = np.flatnonzero((trained.tensors["w"].flat & 0x7FFFFFFF) < 0x3D000000)  # those below 1/32 change, and no others
    trained.tensors["w"].flat[small] ^= 1
    publisher.publish()
    weights.tensors["w"].flat[np.setdiff1d(np.arange(9), small)] = 1  # tiny now, so that the classes count otherwise
    update = subscriber.fetch()
    assert update is not None
    assert (update.kind, "w" in update.reason) == ("anchor", True)
    subscriber.apply(update)
    assert copied(weights) == copied(trained)


def test_weights_dropped_by_a_sleeping_engine_are_noticed_and_fetched_anew() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 2)
    subscriber, weights = started(store)
    advance(subscriber)
    for bits in weights.tensors.values():
        bits.flat[:] = 0
    trainer.step()
    publisher.publish()
    update = subscriber.fetch()
    assert update is not None
    assert update.kind == "anchor"
    subscriber.apply(update)
    assert copied(weights) == trainer.bits()


# --- objects that are damaged ---


def rewritten(store: MemoryStore, key: str, change: Callable[[bytes], bytes | None]) -> None:
    data = change(store.get(key))
    store.delete(key) if data is None else store.put(key, data)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes | None], tuple[type, ...]]] = {
    "half written": (lambda data: data[: len(data) // 2], (DigestMismatch,)),
    "empty": (lambda data: b"", (DigestMismatch,)),
    "too long": (lambda data: data + b"\0", (DigestMismatch,)),
    "one bit flipped": (lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:], (DigestMismatch,)),
    "replaced": (lambda data: bytes(len(data)), (DigestMismatch,)),
    "missing": (lambda data: None, (NotFound,)),
}


@pytest.mark.parametrize("which", ["patch", "tensors", "anchor", "compressed anchor"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_payload_is_refused_before_anything_is_written(which: str, damage: str) -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 2, compress_anchors=which == "compressed anchor")
    cold = which.endswith("anchor")
    subscriber, weights = started(store)
    if not cold:
        advance(subscriber)
    trainer.step()
    publisher.publish()
    if which == "tensors":  # a fresh reader, which has not read the index before
        subscriber, weights = started(store, MemoryWeights(history[1]), held=1)
    manifest = Versions(store).manifest(0 if cold else 2)
    payload = manifest.anchor.weights[0].payload if cold and manifest.anchor else getattr(manifest, "tensors" if cold else which)
    change, errors = DAMAGES[damage]
    good = store.get(payload.key)
    rewritten(store, payload.key, change)
    before, version = copied(weights), subscriber.version
    for _ in range(2):
        with pytest.raises(errors, match=payload.sha256[:16]):
            subscriber.fetch()
    assert copied(weights) == before
    assert subscriber.version == version
    store.put(payload.key, good)
    advance(subscriber)
    assert copied(weights) == trainer.bits()


def test_a_put_that_tore_silently_is_found_by_whoever_fetches() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, when="torn")
    trainer, publisher, history = published(store, 2, anchor_every=1000)
    subscriber, weights = started(inner)
    advance(subscriber)
    store.fails = lambda call: call.key.startswith("payloads/") and call.verb == "put"
    trainer.step()
    publisher.publish()
    store.fails = never
    with pytest.raises(DigestMismatch, match="half written or replaced"):
        subscriber.fetch()
    assert copied(weights) == history[1]
    again = Publisher(inner, receiver(seed=7))  # an anchor, for whatever reason, heals the chain
    again.publish()
    advance(subscriber)
    assert copied(weights) == random_bits(7)


def test_a_torn_payload_is_put_again_by_the_next_who_has_the_same_content() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, lambda call: call.key.startswith("payloads/") and call.verb == "put", when="torn")
    trainer, publisher, _ = published(store, 1)
    with pytest.raises(DigestMismatch):
        follow(inner)
    newer = Publisher(inner, MemoryWeights(trainer.bits() | {"scale": TensorBits("F16", (), np.array([1], "<u2"))}))
    newer.publish()
    last = Publisher(inner, trainer.weights)
    assert last.publish().kind == "anchor"
    assert follow(inner, 0)[1] == follow(inner)[1] == trainer.bits()


MANIFEST_DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], type]] = {
    "of a newer format": (lambda value: value.update(format=1), UnsupportedFormat),
    "with links": (lambda value: value.update(links=[0]), UnsupportedFormat),
    "signed": (lambda value: value.update(signature="x"), UnsupportedFormat),
    "with an unknown field": (lambda value: value.update(extra=1), FormatError),
    "of another version": (lambda value: value.update(version=3, base=2), FormatError),
    "of another run": (lambda value: value.update(run="other"), ChainError),
    "after another manifest": (lambda value: value.update(previous="0" * 64), ChainError),
    "with another digest": (lambda value: value.update(state_digest="0" * 32), DigestMismatch),
    "with a size that lies": (lambda value: value["patch"].update(size=2**62), DigestMismatch),
}


@pytest.mark.parametrize("damage", MANIFEST_DAMAGES)
def test_a_manifest_that_cannot_be_trusted_is_refused_before_anything_is_written(damage: str) -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 2)
    subscriber, weights = started(store)
    advance(subscriber)
    trainer.step()
    publisher.publish()
    good = store.get(manifest_key(2))
    value = from_json(good, "manifest")
    change, error = MANIFEST_DAMAGES[damage]
    change(value)
    store.put(manifest_key(2), to_json(value))
    with pytest.raises(error):
        subscriber.fetch()
    assert copied(weights) == history[1]
    assert subscriber.version == 1
    store.put(manifest_key(2), good)
    subscriber, _ = started(store, weights, held=1)
    advance(subscriber)
    assert copied(weights) == trainer.bits()


@pytest.mark.parametrize("data", [b"", b"half a mani", b"<html>not found</html>", bytes(2 << 20)])
def test_a_manifest_that_is_no_manifest_is_refused(data: bytes) -> None:
    store = MemoryStore()
    published(store, 2)
    subscriber, weights = started(store)
    advance(subscriber)
    before = copied(weights)
    store.put(manifest_key(2), data)
    with pytest.raises(FormatError, match="manifests/000000000002.json"):
        subscriber.fetch()
    assert copied(weights) == before


def test_a_store_that_was_emptied_and_filled_again_is_another_chain() -> None:
    store = MemoryStore()
    published(store, 3)
    subscriber, weights = started(store)
    advance(subscriber)
    before = copied(weights)
    for key in store.list():
        store.delete(key)
    with pytest.raises(ChainError, match="emptied or replaced. Start again"):
        subscriber.fetch()
    _, publisher, history = published(store, 2, seed=4)
    with pytest.raises(ChainError, match="emptied or replaced. Start again"):
        subscriber.fetch()
    _, publisher, history = published(store, 3, seed=4)
    with pytest.raises(ChainError, match="The chain was replaced"):
        subscriber.fetch()
    assert copied(weights) == before
    fresh, _ = started(store, weights)
    advance(fresh)
    assert copied(weights) == history[-1]


def forged(store: MemoryStore, version: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and make the later ones follow it."""
    value = from_json(store.get(manifest_key(version)), "manifest")
    change(value)
    while True:
        data = to_json(value)
        store.put(manifest_key(version), data)
        version += 1
        try:
            value = from_json(store.get(manifest_key(version)), "manifest")
        except NotFound:
            return
        value["previous"] = sha256(data)


def put_payload(store: MemoryStore, data: bytes) -> dict[str, Any]:
    store.put(f"payloads/{sha256(data)}", data)
    return {"size": len(data), "sha256": sha256(data)}


def swapped(value: dict[str, Any]) -> None:
    value["tensors"]["embed.weight"], value["tensors"]["scale"] = value["tensors"]["scale"], value["tensors"]["embed.weight"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda value: value["tensors"].pop("scale"), WeightsMismatch),
        (lambda value: value["tensors"].update(new=["BF16", [2], "0" * 32]), WeightsMismatch),
        (swapped, WeightsMismatch),
        (lambda value: value["aliases"].update(scale2="scale"), None),
        (lambda value: value["tensors"].update({"scale": ["F16", [10**18], "0" * 32]}), WeightsMismatch),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_an_index_that_lies_about_the_tensors_is_refused(change: Callable[[dict[str, Any]], Any], error: type | None, warm: bool) -> None:
    store = MemoryStore()
    _, _, history = published(store, 2)
    value = from_json(store.get(Versions(store).manifest(0).tensors.key), "index")
    change(value)
    payload = put_payload(store, to_json(value))
    for version in range(2):
        forged(store, version, lambda manifest: manifest.update(tensors=payload))
    subscriber, weights = started(store, MemoryWeights(history[0]) if warm else None, held=0 if warm else None)
    before = copied(weights)
    if error is None:  # one more name for a tensor harms nobody
        advance(subscriber)
        assert copied(weights) == history[1]
        return
    with pytest.raises(error):
        subscriber.fetch()
    assert copied(weights) == before


def test_an_anchor_whose_tensors_are_not_those_of_its_index_is_refused() -> None:
    store = MemoryStore()
    trainer, _, _ = published(store, 1)
    other = MemoryStore()
    Publisher(other, MemoryWeights(random_bits(1, {"embed.weight": ("BF16", (16, 8))}))).publish()
    payload = Versions(other).manifest(0).anchor.weights[0].payload  # type: ignore[union-attr]
    described = put_payload(store, other.get(payload.key))
    forged(store, 0, lambda value: value["anchor"]["weights"][0].update(payload=described))
    subscriber, weights = started(store)
    before = copied(weights)
    with pytest.raises(FormatError, match="not those of its index"):
        subscriber.fetch()
    assert copied(weights) == before


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("lie", ["adds", "removes", "reshapes", "touches an unknown tensor"])
def test_a_patch_that_changes_which_tensors_there_are_is_refused(lie: str, warm: bool) -> None:
    store = MemoryStore()
    _, _, history = published(store, 2, encoding="absolute")
    patch = Versions(store).manifest(1).patch
    assert patch is not None
    honest = decode(store.get(patch.key))
    new = random_bits(0, {"new": ("F32", (3,)), "frozen.weight": ("BF16", (4,))})
    part = TensorPatch(Part("new", new["new"].spec), np.array([1], np.uint64), np.array([1], "<u4"))
    content = {
        "adds": replace(honest, whole={**honest.whole, "new": new["new"]}),
        "removes": replace(honest, removed=("frozen.weight",)),
        "reshapes": replace(honest, whole={**honest.whole, "frozen.weight": new["frozen.weight"]}),
        "touches an unknown tensor": replace(honest, changes=(*honest.changes, part)),
    }[lie]
    described = put_payload(store, encode(content, encoding="absolute"))
    forged(store, 1, lambda value: value.update(patch=described))
    subscriber, weights = started(store, MemoryWeights(history[0]) if warm else None, held=0 if warm else None)
    before = copied(weights)
    with pytest.raises((FormatError, WeightsMismatch), match="adds, removes or reshapes|here it is missing"):
        subscriber.fetch()
    assert copied(weights) == before


@pytest.mark.parametrize("side", ["base", "result"])
def test_a_patch_whose_own_digests_are_not_those_of_the_chain_is_refused(side: str) -> None:
    store = MemoryStore()
    _, _, history = published(store, 2, encoding="absolute")
    patch = Versions(store).manifest(1).patch
    assert patch is not None
    content = replace(decode(store.get(patch.key)), **{side: "0" * 32})
    described = put_payload(store, encode(content, encoding="absolute"))
    forged(store, 1, lambda value: value.update(patch=described))
    subscriber, weights = started(store, MemoryWeights(history[0]), held=0)
    with pytest.raises(DigestMismatch, match=f"its {side}"):
        subscriber.fetch()
    assert copied(weights) == history[0]


@pytest.mark.parametrize("field", ["run", "version", "state_digest"])
def test_a_late_anchor_of_something_else_is_refused(field: str) -> None:
    store = MemoryStore()
    _, publisher, _ = published(store, 3, anchor_every=2)
    publisher.close()
    trainer = receiver()
    Publisher(store, trainer).close()
    value = from_json(store.get(anchor_key(2)), "anchor")
    value[field] = {"run": "other", "version": 1, "state_digest": "0" * 32}[field]
    store.put(anchor_key(2), to_json(value))
    with pytest.raises(FormatError, match="not an anchor of version 2"):
        Versions(store).late_anchor(2)


@given(st.data())
def test_no_damage_to_any_object_makes_a_follower_serve_other_bits_than_a_version(data: st.DataObject) -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 2, compress_anchors=data.draw(st.booleans()))
    subscriber, weights = started(store)
    advance(subscriber)
    trainer.step()
    publisher.publish()
    history.append(trainer.bits())
    key = data.draw(st.sampled_from(store.list()))
    good = store.get(key)
    at = data.draw(st.integers(0, len(good) - 1))
    damage = data.draw(st.sampled_from(["flip", "cut", "extend"]))
    bad = {
        "flip": good[:at] + bytes([good[at] ^ 1 << data.draw(st.integers(0, 7))]) + good[at + 1 :],
        "cut": good[:at],
        "extend": good + good[:1],
    }
    store.put(key, bad[damage])
    for follower, held in ((subscriber, weights), started(store)):
        before = copied(held)
        try:
            advance(follower)
        except PulseError:
            assert copied(held) == before
        else:
            assert copied(held) == history[follower.version if follower.version is not None else -1]


# --- receivers that do not fit ---


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"norm.weight": ("BF16", (7,))}, r"norm.weight: published as F32\[7\], here it is BF16\[7\]; publish with a view"),
        ({"norm.weight": ("F32", (8,))}, r"norm.weight: published as F32\[7\], here it is F32\[8\]; the two sides have different models"),
        ({"norm.weight": None}, "published, but missing here: norm.weight"),
        ({"lm_head.weight": ("BF16", (2,))}, "here, but not published: lm_head.weight"),
    ],
)
def test_a_receiver_of_other_tensors_is_refused_by_their_names(change: dict[str, Any], text: str) -> None:
    store = MemoryStore()
    published(store, 2)
    shapes = {name: shape for name, shape in (SHAPES | change).items() if shape is not None}
    subscriber, weights = started(store, MemoryWeights(random_bits(0, shapes)))
    before = copied(weights)
    with pytest.raises(WeightsMismatch, match=text):
        subscriber.fetch()
    assert copied(weights) == before


def test_tensors_that_change_along_the_chain_are_refused_by_name_and_taken_by_who_has_them() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 2)
    subscriber, weights = started(store)
    advance(subscriber)
    trainer.weights.tensors |= random_bits(3, {"new.weight": ("BF16", (3,))})
    receipt = publisher.publish()
    assert (receipt.kind, receipt.reason) == ("anchor", "names, shapes, dtypes or ties changed")
    with pytest.raises(WeightsMismatch, match="new.weight"):
        subscriber.fetch()
    assert copied(weights) == history[1]
    assert subscriber.version == 1
    other, grown = started(store, MemoryWeights(random_bits(8, SHAPES | {"new.weight": ("BF16", (3,))})))
    advance(other)
    assert copied(grown) == trainer.bits()
