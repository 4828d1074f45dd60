"""Publishing in the background, anchors beside patches, restarts, and what a receipt says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse import MemoryWeights, Publisher, Subscriber
from pulse.bits import TensorBits
from pulse.errors import FileError, FormatError, NotFound, StoreUnavailable
from pulse.manifest import anchor_key, manifest_key
from pulse.store import LocalStore, MemoryStore
from pulse.testing.faults import Call, FaultyStore, never
from pulse.versions import Versions
from tests.chains import SHAPES, Trainer, advance, assert_linear, copied, follow, published, random_bits, receiver


class Held:
    """Chooses no call to fail, but holds those that `which` chooses until it is opened."""

    def __init__(self, which: Callable[[Call], bool]) -> None:
        self._which = which
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, call: Call) -> bool:
        if self._which(call):
            self.reached.set()
            assert self.open.wait(10)
        return False


def manifest_put(version: int) -> Callable[[Call], bool]:
    return lambda call: call.verb == "put" and call.key == manifest_key(version)


def late_anchor_put(call: Call) -> bool:
    return call.verb == "put" and call.key.startswith("anchors/")


# --- in the background ---


def test_a_version_holds_the_weights_as_they_were_at_submit() -> None:
    held = Held(manifest_put(1))
    store = FaultyStore(MemoryStore(), held)
    trainer, publisher, _ = published(store, 1)
    trainer.step(0.9)
    at_submit = trainer.bits()
    future = publisher.submit(1)
    assert held.reached.wait(10)
    trainer.step(0.9)
    assert not future.done()
    held.open.set()
    assert future.result(10).version == 1
    assert follow(store, 1) == (1, at_submit)
    publisher.publish()
    assert follow(store, 2) == (2, trainer.bits())
    publisher.close()


def test_the_first_version_too_holds_the_weights_as_they_were_at_submit() -> None:
    held = Held(lambda call: call.verb == "put" and call.key.startswith("payloads/"))
    store = FaultyStore(MemoryStore(), held)
    trainer = Trainer()
    publisher = Publisher(store, trainer.weights)
    at_submit = trainer.bits()
    future = publisher.submit()
    assert held.reached.wait(10)
    trainer.step(0.9)
    held.open.set()
    future.result(10)
    assert follow(store) == (0, at_submit)
    publisher.publish()
    assert follow(store) == (1, trainer.bits())
    publisher.close()


def test_a_second_submit_waits_for_the_first() -> None:
    held = Held(manifest_put(1))
    store = FaultyStore(MemoryStore(), held)
    trainer, publisher, history = published(store, 1)
    trainer.step()
    history.append(trainer.bits())
    first = publisher.submit()
    assert held.reached.wait(10)
    threading.Timer(0.1, held.open.set).start()
    trainer.step()
    history.append(trainer.bits())
    second = publisher.submit()
    assert first.done()
    assert [first.result().version, second.result(10).version] == [1, 2]
    assert assert_linear(store, history) == 2
    publisher.close()


def test_submits_from_many_threads_queue_and_every_version_is_what_the_weights_were() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    expected: dict[int, Any] = {}
    changing = threading.Lock()

    def work(number: int) -> None:
        for _ in range(10):
            with changing:
                trainer.step(0.2)
            receipt = publisher.submit(metadata={"by": number}).result()
            expected[receipt.version] = receipt.state_digest

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    publisher.close()
    assert assert_linear(store) == 40
    assert expected == {version: Versions(store).manifest(version).state_digest for version in range(1, 41)}


def test_a_failed_background_publish_raises_through_its_future_and_its_changes_come_with_the_next() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner)
    trainer, publisher, history = published(store, 1)
    store.fails = lambda call: call.verb == "put"
    trainer.step()
    future = publisher.submit()
    with pytest.raises(StoreUnavailable):
        future.result()
    store.fails = never
    assert publisher.version == 0
    receipt = publisher.publish()
    assert (receipt.version, receipt.kind) == (1, "patch")
    assert receipt.changed > 0
    assert assert_linear(inner, [*history, trainer.bits()]) == 1
    publisher.close()


def test_close_waits_for_what_is_under_way() -> None:
    held = Held(lambda call: manifest_put(2)(call) or late_anchor_put(call))
    store = FaultyStore(MemoryStore(), held)
    trainer, publisher, history = published(store, 2, anchor_every=2)
    trainer.step()
    history.append(trainer.bits())
    publisher.submit()
    assert held.reached.wait(10)
    threading.Timer(0.05, held.open.set).start()
    publisher.close()
    assert assert_linear(store, history) == 2
    assert Versions(store).late_anchor(2) is not None
    publisher.close()


def test_a_closed_publisher_publishes_no_more() -> None:
    store = MemoryStore()
    _, publisher, _ = published(store, 1)
    publisher.close()
    with pytest.raises(RuntimeError):
        publisher.publish()
    assert Versions(store).newest() == 0


# --- anchors beside patches ---


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_an_anchor_is_added_after_every_so_many_versions(every: int) -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 1, anchor_every=every)
    for _ in range(10):
        trainer.step()
        assert publisher.publish().kind == "patch"
        history.append(trainer.bits())
        if publisher._anchoring is not None:
            publisher._anchoring.result()
    publisher.close()
    reader = Versions(store)
    anchored = [version for version in range(11) if reader.late_anchor(version) is not None]
    assert anchored == list(range(every, 11, every))
    for version in anchored:
        late = reader.late_anchor(version)
        assert late is not None
        assert reader.anchor_tensors(late.anchor, reader.index(late.tensors)) == history[version]
        if version < 10:
            assert reader.manifest(version + 1).newest_anchor == version
    assert assert_linear(store, history) == 10


def test_an_anchor_that_is_slow_does_not_hold_up_patches() -> None:
    held = Held(lambda call: call.verb == "put" and threading.current_thread().name.startswith("pulse-anchor"))
    store = FaultyStore(MemoryStore(), held)
    trainer, publisher, history = published(store, 2, anchor_every=1, shard_bytes=64)
    assert held.reached.wait(10)
    for _ in range(5):
        trainer.step()
        publisher.publish()
        history.append(trainer.bits())
    held.open.set()
    publisher.close()
    reader = Versions(store)
    late = reader.late_anchor(1)
    assert late is not None
    assert reader.anchor_tensors(late.anchor, reader.index(late.tensors)) == history[1]
    assert [version for version in range(1, 7) if reader.late_anchor(version)] == [1]  # no copies queued up behind it
    assert assert_linear(store, history) == 6


def test_an_anchor_that_cannot_be_stored_does_not_stop_patches_and_is_tried_again() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, late_anchor_put)
    trainer, publisher, history = published(store, 1, anchor_every=2)
    for number in range(8):
        if number == 5:
            store.fails = never
        trainer.step()
        assert publisher.publish().version == number + 1
        history.append(trainer.bits())
        if publisher._anchoring is not None:
            publisher._anchoring.exception()
    publisher.close()
    assert sum(call.key.startswith("anchors/") and call.verb == "put" for call in store.calls) >= 5
    assert [version for version in range(9) if Versions(inner).late_anchor(version)] == [6, 8]
    assert assert_linear(inner, history) == 8


def test_an_anchor_that_never_could_be_stored_is_raised_by_close() -> None:
    inner = MemoryStore()
    trainer, publisher, history = published(FaultyStore(inner, late_anchor_put), 5, anchor_every=2)
    with pytest.raises(StoreUnavailable, match="anchors/"):
        publisher.close()
    assert assert_linear(inner, history) == 4


def test_an_anchor_that_another_publisher_has_added_is_as_good() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 2)
    publisher.close()
    for _ in range(2):
        publisher = Publisher(store, trainer.weights, anchor_every=1)
        publisher._advance(Versions(store).manifest(1), publisher._snapshot())
        publisher.close()
    assert Versions(store).late_anchor(1) is not None


# --- restarts ---


def test_a_restart_with_the_same_weights_goes_on_with_patches() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 3)
    publisher.close()
    again = Publisher(store, MemoryWeights(trainer.bits()))
    assert again.version == 2
    receipt = again.publish(step=3)
    assert (receipt.version, receipt.kind, receipt.reason, receipt.changed) == (3, "patch", "", 0)
    assert Versions(store).manifest(3).epoch == 1
    assert assert_linear(store, [*history, history[2]]) == 3


def test_a_restart_with_other_weights_publishes_an_anchor_and_says_why() -> None:
    store = MemoryStore()
    _, publisher, history = published(store, 3)
    publisher.close()
    trainer = Trainer(seed=9)
    again = Publisher(store, trainer.weights)
    receipt = again.publish(step=137)
    assert (receipt.version, receipt.kind, receipt.step) == (3, "anchor", 137)
    assert receipt.reason == "these weights are not version 2, at which the run is continued"
    history.append(trainer.bits())
    trainer.step()
    receipt = again.publish()
    assert (receipt.kind, receipt.reason) == ("patch", "")
    history.append(trainer.bits())
    assert assert_linear(store, history) == 4


def test_a_restart_with_the_newest_version_at_hand_patches_weights_that_have_moved_on() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 2)
    publisher.close()
    trainer.step()
    again = Publisher(store, trainer.weights, baseline=history[1])
    assert again.publish().kind == "patch"
    assert assert_linear(store, [*history, trainer.bits()]) == 2


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_run_whose_index_is_lost_goes_on_with_an_anchor(damage: str) -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 2)
    publisher.close()
    key = Versions(store).manifest(1).tensors.key
    store.delete(key) if damage == "missing" else store.put(key, b"{}")
    again = Publisher(store, trainer.weights)
    receipt = again.publish()
    assert (receipt.version, receipt.kind) == (2, "anchor")
    assert "cannot be read" in receipt.reason
    assert follow(store) == (2, trainer.bits())


def test_a_restart_finds_the_anchor_that_was_finished_after_the_last_commit() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 5, anchor_every=4)
    publisher.close()
    assert Versions(store).manifest(4).newest_anchor == 0
    again = Publisher(store, trainer.weights, anchor_every=4)
    trainer.step()
    again.publish()
    again.close()
    assert Versions(store).manifest(5).newest_anchor == 4
    way = Versions(store).plan(5)
    assert way.start is not None
    assert way.start.version == 4


def test_the_run_keeps_its_name_and_a_new_store_gets_a_new_one() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    Publisher(store, trainer.weights).publish()
    reader = Versions(store)
    assert reader.manifest(0).run == reader.manifest(1).run
    other = MemoryStore()
    published(other, 1)
    assert Versions(other).manifest(0).run != reader.manifest(0).run


# --- what is recorded ---


def test_step_and_metadata_are_recorded_and_reach_the_follower() -> None:
    store = MemoryStore()
    trainer = Trainer()
    publisher = Publisher(store, trainer.weights)
    metadata = {"reward": 0.5, "tags": ["a", None], "ä": {"b": True}}
    receipt = publisher.publish(step=np.int64(412), metadata=metadata)  # type: ignore[arg-type]
    metadata["reward"] = 1.0
    assert receipt.step == 412
    update = Subscriber(store, receiver()).fetch()
    assert update is not None
    assert (update.step, update.metadata) == (412, {"reward": 0.5, "tags": ["a", None], "ä": {"b": True}})
    assert publisher.publish().step is None


@pytest.mark.parametrize(
    ("step", "metadata", "error"),
    [
        (-1, None, ValueError),
        (1.5, None, TypeError),
        ("1", None, TypeError),
        (1, {"a": float("nan")}, ValueError),
        (1, {"a": object()}, TypeError),
        (1, {"a": b"x"}, TypeError),
    ],
)
def test_a_step_or_metadata_that_no_reader_accepts_is_refused_to_the_caller(step: Any, metadata: Any, error: type) -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    with pytest.raises(error):
        publisher.submit(step, metadata)
    trainer.step()
    assert publisher.publish(5, {"a": 1}).version == 1
    assert follow(store) == (1, trainer.bits())


def test_metadata_that_is_too_large_fails_before_the_commit() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    with pytest.raises(FormatError, match="shorten the metadata"):
        publisher.publish(metadata={"log": "x" * (2 << 20)})
    assert Versions(store).newest() == 0
    assert publisher.publish().version == 1


def test_a_receipt_says_what_was_done() -> None:
    store = MemoryStore()
    trainer = Trainer()
    publisher = Publisher(store, trainer.weights)
    first = publisher.publish()
    units = sum(bits.flat.size for bits in trainer.weights.tensors.values())
    nbytes = sum(bits.flat.nbytes for bits in trainer.weights.tensors.values())
    assert (first.kind, first.reason, first.units, first.changed, first.full_nbytes) == ("anchor", "first version", units, units, nbytes)
    assert first.density == 1
    assert set(first.seconds) == {"diff", "encode", "upload", "commit"}
    trainer.weights.tensors["scale"].flat[0] ^= 1
    trainer.weights.tensors["embed.weight"].flat[3] ^= 1
    second = publisher.publish()
    assert (second.kind, second.reason, second.changed, second.density) == ("patch", "", 2, 2 / units)
    assert second.nbytes == Versions(store).manifest(1).nbytes
    assert second.ratio == nbytes / second.nbytes
    assert second.state_digest == Versions(store).manifest(1).state_digest


def test_publishing_unchanged_weights_still_makes_a_version() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 1)
    weights = receiver()
    subscriber = Subscriber(store, weights)
    advance(subscriber)
    for version in range(1, 4):
        receipt = publisher.publish(step=version)
        assert (receipt.version, receipt.kind, receipt.changed) == (version, "patch", 0)
        update = subscriber.fetch()
        assert update is not None
        assert (update.version, update.changed) == (version, 0)
        subscriber.apply(update)
        assert subscriber.version == version
    assert copied(weights) == history[0]


def test_weights_without_any_tensor_can_be_published() -> None:
    store = MemoryStore()
    with Publisher(store, MemoryWeights({}), anchor_every=1) as publisher:
        assert [publisher.publish().kind for _ in range(3)] == ["anchor", "patch", "patch"]
    subscriber = Subscriber(store, MemoryWeights({}))
    advance(subscriber)
    assert subscriber.version == 2
    assert Versions(store).restore(2) == {}


def test_a_tensor_that_changed_throughout_is_sent_whole() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 1)
    weights = receiver()
    subscriber = Subscriber(store, weights)
    advance(subscriber)
    trainer.weights.tensors["embed.weight"].flat[:] ^= 1
    before = Versions(store).manifest(0)
    publisher.publish()
    trainer.weights.tensors["embed.weight"].flat[2] ^= 1  # on top of the whole one
    publisher.publish()
    assert Versions(store).manifest(1).tensors == before.tensors
    advance(subscriber)
    assert copied(weights) == trainer.bits()
    assert follow(store, 1) != follow(store, 2)


@pytest.mark.parametrize("shard_bytes", [1, 100, 1 << 20])
def test_anchors_come_in_shards_of_a_given_size(shard_bytes: int) -> None:
    store = MemoryStore()
    _, publisher, history = published(store, 3, shard_bytes=shard_bytes, anchor_every=2)
    publisher.close()
    anchor = Versions(store).manifest(0).anchor
    assert anchor is not None
    assert (len(anchor.weights) > 2) == (shard_bytes < 1000)
    assert assert_linear(store, history) == 2


# --- files beside the weights ---


def tokenizer(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"a": 1}))
    (folder / "model.safetensors").write_bytes(b"not to be copied")
    (folder / ".cache").write_bytes(b"")
    return folder


def test_files_are_put_beside_every_anchor(tmp_path: Path) -> None:
    store = MemoryStore()
    extra = tmp_path / "chat.jinja"
    extra.write_text("hello")
    _, publisher, _ = published(store, 3, anchor_every=2, files=[tokenizer(tmp_path / "tokenizer"), extra])
    publisher.close()
    reader = Versions(store)
    late = reader.late_anchor(2)
    assert late is not None
    for anchor in (reader.manifest(0).anchor, late.anchor):
        assert anchor is not None
        beside = {file.name: reader.payload(file.payload, file.name) for file in anchor.files}
        assert beside == {"tokenizer.json": b"{}", "config.json": b'{"a": 1}', "chat.jinja": b"hello"}


@pytest.mark.parametrize("name", ["my notes.txt", "äöü.txt", "-x"])
def test_a_file_that_no_reader_would_accept_is_refused_when_the_publisher_is_made(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    store = MemoryStore()
    for files in ([tmp_path], [tmp_path / name]):
        with pytest.raises(FileError, match="rename it"):
            Publisher(store, Trainer().weights, files=files)
    assert store.list() == []


def test_a_file_that_would_take_the_place_of_weights_or_of_another_file_is_refused(tmp_path: Path) -> None:
    first, second = tokenizer(tmp_path / "a"), tokenizer(tmp_path / "b")
    with pytest.raises(FileError, match="among the anchor's own weights"):
        Publisher(MemoryStore(), Trainer().weights, files=[first / "model.safetensors"])
    with pytest.raises(FileError, match="one name beside an anchor"):
        Publisher(MemoryStore(), Trainer().weights, files=[first, second / "config.json"])
    with pytest.raises(FileError, match="no such file"):
        Publisher(MemoryStore(), Trainer().weights, files=[tmp_path / "missing"])
    Publisher(MemoryStore(), Trainer().weights, files=[first, first / "config.json"])


def test_a_file_that_vanishes_stops_anchors_and_not_patches(tmp_path: Path) -> None:
    store = MemoryStore()
    folder = tokenizer(tmp_path / "t")
    trainer, publisher, history = published(store, 1, anchor_every=1, files=[folder])
    (folder / "config.json").unlink()
    trainer.step()
    assert publisher.publish().kind == "patch"
    with pytest.raises(FileError, match=r"config\.json"):
        publisher.close()
    assert assert_linear(store, [*history, trainer.bits()]) == 1


# --- limits ---


def test_an_anchor_must_come_after_at_least_one_version() -> None:
    with pytest.raises(ValueError, match="anchor_every"):
        Publisher(MemoryStore(), Trainer().weights, anchor_every=0)


def test_a_store_in_a_folder_serves_a_publisher_and_a_follower_of_another_process(tmp_path: Path) -> None:
    import subprocess
    import sys

    store = LocalStore(tmp_path / "run")
    trainer, publisher, _ = published(store, 4, anchor_every=2)
    publisher.close()
    script = (
        "import sys; from pulse import Subscriber, open_store, MemoryWeights; from tests.chains import receiver\n"
        "s = Subscriber(open_store(sys.argv[1]), receiver()); s.apply(s.wait(5)); print(s.version, s.state_digest)"
    )
    done = subprocess.run([sys.executable, "-c", script, store.url], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", Versions(store).manifest(3).state_digest]


def test_the_caller_waits_for_the_comparison_and_not_for_the_store() -> None:
    inner = MemoryStore()
    slow = FaultyStore(inner)
    trainer, publisher, _ = published(slow, 1)
    gate = threading.Event()
    slow.fails = lambda call: not gate.wait(30)
    trainer.step()
    future = publisher.submit()
    assert not future.done()
    gate.set()
    assert future.result().version == 1
    publisher.close()


def test_an_anchor_is_of_its_version_though_the_next_ones_do_not_wait_until_it_is_stored() -> None:
    inner = MemoryStore()
    gate = threading.Event()
    held = FaultyStore(inner, lambda call: threading.current_thread().name.startswith("pulse-anchor") and not gate.wait(30))
    trainer, publisher, history = published(held, 5, anchor_every=2)
    assert [receipt_version for receipt_version in range(5) if Versions(inner).late_anchor(receipt_version)] == []
    gate.set()
    publisher.close()
    late = Versions(inner).late_anchor(2)
    assert late is not None
    assert Versions(inner).anchor_tensors(late.anchor, Versions(inner).index(late.tensors)) == history[2]


def test_no_key_of_a_store_is_read_that_was_not_named_by_a_manifest_or_the_protocol() -> None:
    store = FaultyStore(MemoryStore())
    trainer, publisher, _ = published(store, 4, anchor_every=2)
    publisher.close()
    follow(store)
    assert not any(call.verb == "list" for call in store.calls)
    with pytest.raises(NotFound):
        store.get(anchor_key(3))


def test_the_baseline_is_a_copy_and_never_the_live_weights() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    for name in SHAPES:
        assert not np.shares_memory(publisher._baseline[name].flat, trainer.weights.tensors[name].flat)  # type: ignore[index]
    whole = random_bits(50)
    for name, bits in whole.items():
        trainer.weights.tensors[name] = TensorBits(bits.dtype, bits.shape, bits.flat.copy())
    publisher.publish()
    for name in SHAPES:
        assert not np.shares_memory(publisher._baseline[name].flat, trainer.weights.tensors[name].flat)  # type: ignore[index]
