"""Bugs that other systems shipped (`shared/field/sync.md`, section 5), each shown not to be here. What is proven at length is elsewhere."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pulse import MemoryWeights, Publisher, Subscriber
from pulse.bits import TensorBits
from pulse.canonical import from_json, to_json
from pulse.digest import digest_of
from pulse.errors import BaseMismatch, DigestMismatch, NoPath, NotFound, StoreUnavailable, TornUpdate, WeightsMismatch
from pulse.manifest import anchor_key, manifest_key
from pulse.patch import Positions
from pulse.store import LocalStore, MemoryStore
from pulse.testing.faults import Died, FaultyStore, never
from pulse.torch import ModuleWeights
from pulse.torch.tensors import tensor_bits
from pulse.versions import Versions
from tests.chains import Trainer, advance, assert_linear, copied, follow, published, random_bits, receiver


class FailsOnce(MemoryWeights):
    """An engine whose first write fails."""

    failed = False

    def scatter(self, name: str, positions: Positions, values: NDArray[Any]) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("the engine refused")
        super().scatter(name, positions, values)


def follower(store: Any, weights: MemoryWeights | None = None) -> tuple[Subscriber, MemoryWeights]:
    weights = weights or receiver()
    subscriber = Subscriber(store, weights)
    advance(subscriber)
    return subscriber, weights


def test_slime_2104_a_receiver_that_failed_to_apply_one_version_still_converges_with_the_next() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 1)
    failing = FailsOnce(history[0])
    subscriber = Subscriber(store, failing, held=0)
    trainer.step()
    publisher.publish()
    update = subscriber.fetch()
    assert update is not None
    with pytest.raises(RuntimeError, match="refused"):
        subscriber.apply(update)
    assert subscriber.version is None
    trainer.step()
    publisher.publish()
    advance(subscriber)
    assert copied(failing) == trainer.bits()


def test_prime_rl_3386_a_publisher_killed_between_payload_and_manifest_skips_no_changes() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, error=Died)
    trainer, publisher, _ = published(store, 1)
    subscriber, weights = follower(inner)
    store.fails = lambda call: call.key == manifest_key(1)
    trainer.step()
    with pytest.raises(Died):
        publisher.publish()
    trainer.step()
    Publisher(inner, trainer.weights).publish()
    advance(subscriber)
    assert copied(weights) == trainer.bits()


def test_trl_5932_a_periodic_anchor_has_the_tensors_that_did_not_change() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 6, anchor_every=5)
    publisher.close()
    reader = Versions(store)
    late = reader.late_anchor(5)
    assert late is not None
    assert reader.anchor_tensors(late.anchor, reader.index(late.tensors)) == history[5]
    assert history[5]["frozen.weight"] == history[0]["frozen.weight"]


def test_trl_5937_an_update_that_failed_is_not_reported_as_the_version() -> None:
    store = MemoryStore()
    _, _, history = published(store, 2)
    weights = FailsOnce(history[0])
    subscriber = Subscriber(store, weights, held=0)
    update = subscriber.fetch()
    assert update is not None
    with pytest.raises(RuntimeError):
        subscriber.apply(update)
    assert (subscriber.version, subscriber.state_digest) == (None, None)
    with pytest.raises(TornUpdate):
        subscriber.verify()
    subscriber.apply(update)
    assert copied(weights) == history[subscriber.version or 0] == history[1]


def test_tokenspeed_1373_an_empty_or_failed_transfer_is_an_error_and_loads_nothing() -> None:
    inner = MemoryStore()
    _, _, _ = published(inner, 1)
    weights = receiver()
    before = copied(weights)
    store = FaultyStore(inner, lambda call: call.key.startswith("payloads/"))
    with pytest.raises(StoreUnavailable):
        Subscriber(store, weights).fetch()
    for key in inner.list("payloads"):
        inner.put(key, b"")
    with pytest.raises(DigestMismatch):
        Subscriber(inner, weights).fetch()
    assert copied(weights) == before


def test_tokenspeed_1373_a_write_that_does_not_arrive_is_found_before_the_version_is_reported() -> None:
    class Lossy(MemoryWeights):
        def assign(self, name: str, bits: TensorBits) -> None:
            """Report success and load nothing."""

    store = MemoryStore()
    published(store, 1)
    subscriber = Subscriber(store, Lossy(random_bits(99)))
    update = subscriber.fetch()
    assert update is not None
    with pytest.raises(TornUpdate, match="do not hold what was written"):
        subscriber.apply(update)
    assert subscriber.version is None


def test_skyrl_1902_a_chain_whose_patches_are_gone_is_entered_at_a_living_anchor_or_refused() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 5, anchor_every=4)
    publisher.close()
    reader = Versions(store)
    for version in range(1, 4):
        patch = reader.manifest(version).patch
        assert patch is not None
        store.delete(patch.key)
    trainer.step()
    Publisher(store, MemoryWeights(history[4])).publish()
    assert follow(store) == (5, history[4])
    store.delete(anchor_key(4))
    with pytest.raises((NoPath, NotFound)):
        follow(store)


def test_open_instruct_1627_a_trainer_that_resumes_at_step_137_first_publishes_an_anchor_of_what_it_restored() -> None:
    store = MemoryStore()
    _, publisher, _ = published(store, 3)
    publisher.close()
    restored = Trainer(seed=137)
    receipt = Publisher(store, restored.weights).publish(step=137)
    assert (receipt.kind, receipt.step, receipt.version) == ("anchor", 137, 3)
    assert follow(store) == (3, restored.bits())
    fresh = MemoryStore()
    assert Publisher(fresh, restored.weights).publish(step=137).kind == "anchor"
    assert follow(fresh) == (0, restored.bits())


def test_skyrl_1605_a_second_publish_while_one_is_active_queues() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    futures = []
    history = []
    for _ in range(5):
        trainer.step()
        history.append(trainer.bits())
        futures.append(publisher.submit())
    assert [future.result().version for future in futures] == [1, 2, 3, 4, 5]
    assert [follow(store, version)[1] for version in range(1, 6)] == history


def test_skyrl_1605_a_second_apply_while_one_is_active_is_refused() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 2)
    entered, go = threading.Event(), threading.Event()

    class Slow(MemoryWeights):
        def scatter(self, name: str, positions: Positions, values: NDArray[Any]) -> None:
            entered.set()
            assert go.wait(10)
            super().scatter(name, positions, values)

    weights = Slow(history[0])
    subscriber = Subscriber(store, weights, held=0)
    first, second = subscriber.fetch(), subscriber.fetch()
    assert first is not None
    assert second is not None
    thread = threading.Thread(target=subscriber.apply, args=(first,))
    thread.start()
    assert entered.wait(10)
    threading.Timer(0.05, go.set).start()
    with pytest.raises(BaseMismatch):
        subscriber.apply(second)
    thread.join()
    assert (subscriber.version, copied(weights)) == (1, history[1])


def test_openrlhf_1348_a_dtype_that_differs_is_an_error_with_advice_and_a_view_is_a_cast() -> None:
    masters = torch.nn.Linear(4, 4)
    policy = copy.deepcopy(masters).to(torch.bfloat16)
    before = tensor_bits(policy.weight).copy()
    store = MemoryStore()
    Publisher(store, ModuleWeights(masters)).publish()
    with pytest.raises(WeightsMismatch, match=r"published as F32\[4\], here it is BF16\[4\]; publish with a view"):
        Subscriber(store, ModuleWeights(policy)).fetch()
    assert tensor_bits(policy.weight) == before
    viewed = MemoryStore()
    with torch.no_grad():
        masters.weight += 0.1
    Publisher(viewed, ModuleWeights(masters, view=torch.bfloat16)).publish()
    advance(Subscriber(viewed, ModuleWeights(policy)))
    assert torch.equal(policy.weight, masters.weight.to(torch.bfloat16))


def test_vllm_51665_an_untied_head_follows_the_embedding_it_is_published_with_and_counts_once() -> None:
    class Model(torch.nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.embed, self.lm_head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
            if tied:
                self.lm_head.weight = self.embed.weight

    source, target = Model(tied=True), Model(tied=False)
    store = MemoryStore()
    publisher, subscriber = Publisher(store, ModuleWeights(source)), Subscriber(store, ModuleWeights(target))
    for _ in range(2):
        receipt = publisher.publish()
        advance(subscriber)
        assert torch.equal(target.lm_head.weight, source.embed.weight)
        assert torch.equal(target.embed.weight, source.embed.weight)
        assert receipt.state_digest == subscriber.state_digest == digest_of({"embed.weight": tensor_bits(source.embed.weight)})
        with torch.no_grad():
            source.embed.weight[2, 2] += 1


def test_sglang_32279_a_shard_that_is_missing_is_an_error_before_any_write() -> None:
    store = MemoryStore()
    published(store, 1, shard_bytes=64)
    anchor = Versions(store).manifest(0).anchor
    assert anchor is not None
    assert len(anchor.weights) > 3
    for file in anchor.weights:
        if not file.name.endswith(".safetensors"):
            continue
        data = store.get(file.payload.key)
        weights = receiver()
        before = copied(weights)
        store.delete(file.payload.key)
        with pytest.raises(NotFound):
            Subscriber(store, weights).fetch()
        store.put(file.payload.key, data[:-1])
        with pytest.raises(DigestMismatch):
            Subscriber(store, weights).fetch()
        assert copied(weights) == before
        store.put(file.payload.key, data)
    assert follow(store)[0] == 0


def test_makermods_33_objects_cut_at_any_byte_show_the_old_version_or_an_error_and_never_a_mixture() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 1)
    names = set(store.list())
    trainer.step()
    publisher.publish()
    new = {key: store.get(key) for key in store.list() if key not in names} | {"head.json": store.get("head.json")}
    patch, manifest = sorted(new, key=lambda key: (key == "head.json", not key.startswith("payloads/")))[:2]
    for key in new:
        store.delete(key)
    for done in range(3):  # in the order in which they are put: payload, manifest, pointer
        key = (patch, manifest, "head.json")[done]
        for cut in range(0, len(new[key]), 37):
            store.put(key, new[key][:cut])
            weights = MemoryWeights(history[0])
            subscriber = Subscriber(store, weights, held=0)
            try:
                advance(subscriber)
            except Exception as error:  # noqa: BLE001  of the drawn tree, which the next line says
                assert type(error).__module__ == "pulse.errors"
            assert copied(weights) in (history[0], trainer.bits())
        store.put(key, new[key])
    assert follow(store) == (1, trainer.bits())


def test_trl_5312_an_engine_that_lost_its_weights_while_it_slept_is_noticed_and_gets_an_anchor() -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    subscriber, weights = follower(store)
    for bits in weights.tensors.values():
        bits.flat[:] = 0
    with pytest.raises(DigestMismatch):
        subscriber.verify()
    trainer.step()
    publisher.publish()
    advance(subscriber)
    assert copied(weights) == trainer.bits()


def test_stitch_29_many_processes_that_write_the_same_objects_into_one_folder_leave_them_whole_though_one_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from pulse.store import LocalStore; from pulse.errors import AlreadyExists\n"
        "s = LocalStore(sys.argv[1]); print('ready', flush=True)\n"
        "for i in range(40):\n"
        "    try: s.put(f'payloads/deep/{i}', bytes([i]) * 400_000, if_absent=True)\n"
        "    except AlreadyExists: pass\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(4)]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()
    writers[0].kill()
    assert [writer.wait() for writer in writers[1:]] == [0, 0, 0]
    writers[0].wait()
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
    store = LocalStore(tmp_path)
    assert len(store.list()) == 40
    assert all(store.get(f"payloads/deep/{i}") == bytes([i]) * 400_000 for i in range(40))


def test_modelexpress_727_a_disk_too_small_for_one_anchor_is_a_clear_error_and_nothing_is_published(small_disk: Path) -> None:
    store = LocalStore(small_disk / "store")
    large = MemoryWeights({"w": np.random.default_rng(0).integers(0, 2**32, 400_000, np.uint32)})
    publisher = Publisher(store, large)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="No space left on device; make room there and retry"):
            publisher.publish()
    assert store.list() == []
    assert not list(small_disk.rglob(".tmp-*"))
    assert Subscriber(store, MemoryWeights(large.tensors)).fetch() is None


def test_vime_278_the_first_sync_and_one_without_changes_have_whole_receipts() -> None:
    _, publisher, _ = published(MemoryStore(), 0)
    receipts = [publisher.publish(), publisher.publish()]
    for receipt in receipts:
        assert receipt.ratio > 0
        assert 0 <= receipt.density <= 1
        assert set(receipt.seconds) == {"diff", "encode", "upload", "commit"}
    assert [(receipt.kind, receipt.changed > 0) for receipt in receipts] == [("anchor", True), ("patch", False)]


def test_nccl_740_corruption_below_the_store_and_below_the_weights_is_found_by_the_digest_of_what_was_applied() -> None:
    class Flips(MemoryWeights):
        def scatter(self, name: str, positions: Positions, values: NDArray[Any]) -> None:
            super().scatter(name, positions, values ^ values.dtype.type(1))

    store = MemoryStore()
    trainer, publisher, history = published(store, 1)
    subscriber = Subscriber(store, Flips(history[0]), held=0)
    trainer.step()
    publisher.publish()
    update = subscriber.fetch()
    assert update is not None
    with pytest.raises(TornUpdate):
        subscriber.apply(update)
    weights = MemoryWeights(history[0])
    steady = Subscriber(store, weights, held=0)
    advance(steady)
    weights.tensors["frozen.weight"].flat[0] ^= 1 << 9
    with pytest.raises(DigestMismatch, match=r"frozen\.weight"):
        steady.verify()


# --- latent defects, found by reading ---


@pytest.mark.parametrize("pattern", [0x7FC0, 0x7F81, 0xFFC1, 0xFFFF, 0x7F80, 0xFF80, 0x0001, 0x8001])
def test_verl_delta_loader_a_weight_that_becomes_nan_or_infinite_or_subnormal_arrives_bit_for_bit(pattern: int) -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    subscriber, weights = follower(store)
    for step in range(3):
        trainer.weights.tensors["embed.weight"].flat[step] = pattern
        publisher.publish()
        advance(subscriber)
        assert copied(weights) == trainer.bits()
    assert publisher.publish().changed == 0  # NaN equals itself


def test_float_compare_a_zero_that_changes_its_sign_is_a_change() -> None:
    store = MemoryStore()
    source, target = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    torch.nn.init.zeros_(source.weight)
    publisher, subscriber = Publisher(store, ModuleWeights(source)), Subscriber(store, ModuleWeights(target))
    publisher.publish()
    advance(subscriber)
    with torch.no_grad():
        source.weight[1, 1] = -0.0
    assert publisher.publish().changed == 1
    advance(subscriber)
    assert torch.signbit(target.weight).nonzero().tolist() == [[1, 1]]


def test_skyrl_publisher_a_version_whose_upload_failed_is_contained_in_the_next() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner)
    trainer, publisher, _ = published(store, 1)
    subscriber, weights = follower(inner)
    store.fails = lambda call: call.verb == "put"
    trainer.weights.tensors["embed.weight"].flat[7] ^= 1
    with pytest.raises(StoreUnavailable):
        publisher.publish()
    assert publisher.version == 0
    store.fails = never
    receipt = publisher.publish()
    assert (receipt.version, receipt.changed) == (1, 1)
    advance(subscriber)
    assert copied(weights) == trainer.bits()


def test_skyrl_write_state_the_pointer_is_no_state_and_may_be_half_written() -> None:
    store = MemoryStore()
    _, publisher, history = published(store, 3)
    head = store.get("head.json")
    for cut in range(len(head)):
        store.put("head.json", head[:cut])
        assert Versions(store).newest() == 2
    assert follow(store) == (2, history[2])
    Publisher(store, MemoryWeights(history[2])).publish()
    assert assert_linear(store) == 3


@pytest.mark.parametrize("side", ["the publisher", "the receiver"])
def test_skyrl_receiver_a_tensor_that_only_one_side_has_is_an_error_that_names_it(side: str) -> None:
    shapes: dict[str, Any] = {"embed.weight": ("BF16", (4, 2))}
    both = [MemoryWeights(random_bits(0, shapes)), MemoryWeights(random_bits(0, shapes | {"lm_head.weight": ("BF16", (4, 2))}))]
    source, target = both[:: -1 if side == "the publisher" else 1]
    store = MemoryStore()
    Publisher(store, source).publish()
    before = copied(target)
    with pytest.raises(WeightsMismatch, match=r"lm_head\.weight"):
        Subscriber(store, target).fetch()
    assert copied(target) == before


def test_slime_xor_applying_the_same_update_twice_after_a_crash_does_not_undo_it() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 2)

    class CrashesLate(MemoryWeights):
        crashed = False

        def gather(self, name: str, positions: Positions) -> NDArray[Any]:
            if self.armed and not self.crashed:
                self.crashed = True
                raise RuntimeError("crash after everything was written")
            return super().gather(name, positions)

        armed = False

    weights = CrashesLate(history[0])
    subscriber = Subscriber(store, weights, held=0)
    update = subscriber.fetch()
    assert update is not None
    weights.armed = True
    with pytest.raises(RuntimeError, match="crash"):
        subscriber.apply(update)
    assert subscriber.version is None
    subscriber.apply(update)
    assert (subscriber.version, copied(weights)) == (1, history[1])
    subscriber.verify()


def test_trl_iterator_the_receiver_is_told_every_name_that_it_must_have_also_frozen_and_tied_ones_and_buffers() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, bias=False))
    module[2].weight = module[0].weight
    module[0].requires_grad_(requires_grad=False)
    store = MemoryStore()
    Publisher(store, ModuleWeights(module)).publish()
    index = Versions(store).index(Versions(store).manifest(0).tensors)
    assert set(index.specs) | set(index.aliases) == set(module.state_dict())
    assert index.aliases == {"2.weight": "0.weight"}


def test_vllm_loader_nothing_global_is_patched_to_apply() -> None:
    store = MemoryStore()
    source, target = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    Publisher(store, ModuleWeights(source)).publish()
    subscriber = Subscriber(store, ModuleWeights(target))
    update = subscriber.fetch()
    before = (torch.Tensor.copy_, torch.nn.Parameter.__dict__.get("copy_"))
    assert update is not None
    subscriber.apply(update)
    assert (torch.Tensor.copy_, torch.nn.Parameter.__dict__.get("copy_")) == before


def test_a_manifest_of_an_unsigned_chain_cannot_claim_to_be_signed() -> None:
    store = MemoryStore()
    published(store, 1)
    value = from_json(store.get(manifest_key(0)), "manifest")
    value["signature"] = "trust me"
    store.put(manifest_key(0), to_json(value))
    with pytest.raises(Exception, match="signature"):
        Versions(store).manifest(0)


def test_slime_u4_and_verl_int32_positions_beyond_2_to_the_32_survive_the_wire() -> None:
    from pulse import codec
    from pulse.bits import Spec
    from pulse.patch import Part, Patch, TensorPatch

    spec = Spec("BF16", (1 << 33,))
    positions = np.array([0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 7, (1 << 33) - 1], np.uint64)
    patch = Patch((TensorPatch(Part("w", spec), positions, np.arange(1, 8, dtype=np.uint16)),), values="steps")
    assert codec.decode(codec.encode(patch)) == patch
    shard = Part("w", spec, span=(1 << 32, 1 << 33))
    assert shard.locate(np.array([3], np.uint64)).tolist() == [(1 << 32) + 3]
