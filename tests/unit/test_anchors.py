"""Compressed anchors: the same bits and the same files as plain ones, in less; and nothing that goes wrong with one is served."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse import MemoryWeights, Publisher, Subscriber, checkpoint, codec, follow
from pulse.anchors import companions, compressed, weight_files
from pulse.bits import TensorBits, dtype_of
from pulse.canonical import from_json, to_json
from pulse.codec.literals import pack_whole
from pulse.codec.sections import pack_planes, unpack_planes
from pulse.codec.whole import decode_whole, encode_whole
from pulse.digest import sha256
from pulse.errors import FileError, FormatError, PulseError, UnsupportedFormat
from pulse.manifest import FORMAT, FORMAT_COMPRESSED, Anchor, LateAnchor, Manifest, anchor_key, manifest_key
from pulse.patch import Patch, diff
from pulse.store import MemoryStore
from pulse.testing import strategies
from pulse.versions import Versions
from tests.chains import Bits, assert_linear, copied, published, random_bits, receiver
from tests.chains import follow as followed

TRACE = Path(__file__).parents[1] / "data" / "trace" / "step-010.safetensors"


def nbytes(tensors: Bits) -> int:
    return sum(bits.spec.nbytes for bits in tensors.values())


def normal(seed: int, size: int, dtype: str = "BF16") -> TensorBits:
    """Weights as networks have them: a normal distribution around zero."""
    values = (0.02 * np.random.default_rng(seed).standard_normal(size)).astype("<f4").view("<u4")
    return TensorBits(dtype, (size,), (values >> 16).astype("<u2") if dtype == "BF16" else values)


def anchors(store: MemoryStore) -> dict[int, Anchor]:
    """Every anchor in a store, by version: late ones win."""
    reader, found = Versions(store), {}
    for version in range((reader.newest() or 0) + 1):
        late, own = reader.late_anchor(version), reader.manifest(version).anchor
        if (anchor := late.anchor if late else own) is not None:
            found[version] = anchor
    return found


# --- the layout ---


@given(strategies.weights())
def test_any_tensors_come_out_as_they_went_in(tensors: Bits) -> None:
    blob = encode_whole(tensors)
    assert decode_whole(blob, nbytes(tensors), "w") == tensors
    with pytest.raises(FormatError, match="w: "):
        decode_whole(blob[:-1], nbytes(tensors), "w")


@given(strategies.tensors())
def test_packed_planes_of_any_dtype_are_planes_as_every_reader_unpacks_them(bits: TensorBits) -> None:
    dtype = dtype_of(bits.dtype)
    sections = pack_whole(bits.flat, dtype)
    assert np.array_equal(unpack_planes(sections, bits.flat.size, dtype.unsigned, "w"), bits.flat)
    assert sum(map(len, sections)) <= bits.flat.nbytes


@pytest.mark.parametrize("pattern", ["one value", "a period", "every pattern", "zeros"])
def test_packed_planes_of_weights_that_repeat_are_small_and_of_others_never_larger_than_raw(pattern: str) -> None:
    flat = {
        "one value": np.full(1 << 18, 0x3F80, "<u2"),
        "a period": np.tile(np.arange(512, dtype="<u2"), 512),
        "every pattern": np.random.default_rng(0).permutation(1 << 16).astype("<u2"),
        "zeros": np.zeros(1 << 18, "<u2"),
    }[pattern]
    sections = pack_whole(flat, dtype_of("BF16"))
    assert np.array_equal(unpack_planes(sections, flat.size, flat.dtype, "w"), flat)
    assert sum(map(len, sections)) <= (flat.nbytes if pattern == "every pattern" else flat.nbytes // 20)


@pytest.mark.parametrize(("dtype", "limit"), [("BF16", 0.68), ("F32", 0.85)])
def test_an_exponent_costs_about_its_entropy(dtype: str, limit: float) -> None:
    bits = normal(0, 1 << 20, dtype)
    size = sum(map(len, pack_whole(bits.flat, dtype_of(dtype))))
    assert size <= limit * bits.spec.nbytes
    assert size < sum(map(len, pack_planes(bits.flat)))


def test_real_weights_take_at_most_seven_tenths_of_their_size() -> None:
    tensors = checkpoint.read(TRACE)
    blob = encode_whole(tensors)
    assert len(blob) <= 0.70 * nbytes(tensors)
    assert decode_whole(blob, nbytes(tensors), "w") == tensors


@given(strategies.weights(max_size=6))
def test_a_compressed_file_is_never_larger_than_plain_and_a_few_hundred_bytes(tensors: Bits) -> None:
    plain = checkpoint.serialize(tensors)
    [(name, data)] = compressed([("model.safetensors", plain)])
    assert name == "model.safetensors.pulse"
    assert len(data) <= len(plain) + 300


def test_what_does_not_compress_costs_a_few_hundred_bytes_at_most() -> None:
    noise = random_bits(1, {f"layer.{i}.{dtype}": (dtype, (200, 7)) for i in range(9) for dtype in ("BF16", "F32", "F8_E4M3", "I64", "U8")})
    plain = checkpoint.serialize(noise)
    [(_, data)] = compressed([("model.safetensors", plain)])
    assert len(data) <= len(plain) + 300


@pytest.mark.parametrize("limit", [1, 100, 1 << 20])
def test_a_compressed_directory_decodes_to_the_files_of_the_plain_one(limit: int) -> None:
    tensors = random_bits(3)
    plain = list(weight_files(tensors, limit))
    for (name, data), (packed_name, packed) in zip(plain, compressed(plain), strict=True):
        if name.endswith(".safetensors"):
            assert packed_name == name + ".pulse"
            assert checkpoint.serialize(decode_whole(packed, nbytes(tensors), name)) == data
        else:
            assert (packed_name, packed) == (name, data)


# --- in a run ---


@pytest.mark.parametrize("shard_bytes", [1, 100, 1 << 20])
def test_every_version_is_reached_over_compressed_anchors(shard_bytes: int) -> None:
    store = MemoryStore()
    _, publisher, history = published(store, 6, anchor_every=2, compress_anchors=True, shard_bytes=shard_bytes)
    publisher.close()
    found = anchors(store)
    assert {0, 2} <= set(found)
    assert all(anchor.compressed for anchor in found.values())
    assert assert_linear(store, history) == 5
    for version, bits in enumerate(history):
        assert followed(store, version) == (version, bits)


def test_a_publisher_may_change_between_plain_and_compressed_anchors_at_any_time() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 2, anchor_every=1)
    publisher.close()
    for compress in (True, False, True):
        publisher = Publisher(store, trainer.weights, anchor_every=1, compress_anchors=compress)
        trainer.step()
        assert publisher.publish().kind == "patch"
        history.append(trainer.bits())
        publisher.close()
    assert {version: anchor.compressed for version, anchor in anchors(store).items()} == {0: False, 1: False, 2: True, 3: False, 4: True}
    assert assert_linear(store, history) == 4


def test_a_compressed_anchor_costs_less_and_is_counted_as_what_is_downloaded() -> None:
    weights = MemoryWeights({"w": normal(0, 50_000)})
    receipts = {}
    for compress in (False, True):
        store = MemoryStore()
        receipts[compress] = Publisher(store, weights, compress_anchors=compress).publish()
        update = Subscriber(store, MemoryWeights({"w": normal(1, 50_000)})).fetch()
        assert update is not None
        assert update.nbytes == receipts[compress].nbytes == anchors(store)[0].nbytes
    assert receipts[True].nbytes < 0.71 * receipts[True].full_nbytes < receipts[False].nbytes
    assert receipts[True].state_digest == receipts[False].state_digest


def test_a_follower_that_is_far_behind_takes_a_compressed_anchor_that_is_smaller_than_the_patches() -> None:
    store = MemoryStore()
    weights = MemoryWeights({"w": normal(0, 50_000), "unused": TensorBits("BF16", (50_000,), np.zeros(50_000, "<u2"))})
    reader = MemoryWeights(copied(weights))
    publisher = Publisher(store, weights, anchor_every=8, compress_anchors=True)
    publisher.publish()
    rng = np.random.default_rng(1)
    for _ in range(8):
        weights.tensors["w"].flat[rng.choice(50_000, 11_000, replace=False)] ^= rng.integers(1, 128, 11_000, "<u2")
        publisher.publish()
    publisher.close()
    patches = sum(Versions(store).manifest(version).nbytes for version in range(1, 9))
    assert anchors(store)[8].nbytes < patches < nbytes(weights.tensors)
    update = Subscriber(store, reader, held=0).fetch()
    assert update is not None
    assert (update.kind, update.nbytes) == ("anchor", anchors(store)[8].nbytes)


def test_what_is_pulled_and_followed_is_byte_for_byte_what_plain_anchors_give(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    stores = {"plain": MemoryStore(), "compressed": MemoryStore()}
    for kind, store in stores.items():
        _, publisher, _ = published(store, 4, anchor_every=2, files=[tmp_path / "config.json"], compress_anchors=kind == "compressed")
        publisher.close()
    trees = {}
    for kind, store in stores.items():
        for version in range(4):
            follow.pull(store, version, tmp_path / kind / str(version))
        follow.pull(store, 2, tmp_path / kind / "one.safetensors")
        with follow.DirectoryFollower(store, tmp_path / kind / "followed") as follower:
            assert follower.advance(0) is not None
        files = [path for path in sorted((tmp_path / kind).rglob("*")) if path.is_file() and path.name != "pulse.json"]
        trees[kind] = {path.relative_to(tmp_path / kind).as_posix(): path.read_bytes() for path in files}
    assert len(trees["plain"]) == 4 * 2 + 1 + 2 + 1  # pulled, one file, followed, its lock
    assert trees["plain"] == trees["compressed"]
    pulled = {path: data for path, data in trees["plain"].items() if path.endswith("model.safetensors")}
    stored = Versions(stores["plain"]).files(anchors(stores["plain"])[2])
    assert pulled["2/model.safetensors"] == next(data for file, data in stored if file.name == "model.safetensors")


def test_a_file_that_would_take_the_place_of_compressed_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.pulse").write_bytes(b"")
    (tmp_path / "step.pulse").write_bytes(b"")
    with pytest.raises(FileError, match="among the anchor's own weights"):
        companions([tmp_path / "model.safetensors.pulse"])
    assert set(companions([tmp_path / "step.pulse"])) == {"step.pulse"}


# --- what older readers are told ---


def test_only_what_names_a_compressed_anchor_has_the_newer_format() -> None:
    for compress in (False, True):
        store = MemoryStore()
        _, publisher, _ = published(store, 3, anchor_every=2, compress_anchors=compress)
        publisher.close()
        newer = FORMAT_COMPRESSED if compress else FORMAT
        formats = {key: from_json(store.get(key), key)["format"] for key in (*map(manifest_key, range(3)), anchor_key(2), "head.json")}
        assert list(formats.values()) == [newer, FORMAT, FORMAT, newer, FORMAT]
        late = LateAnchor.from_bytes(store.get(anchor_key(2)))
        assert late.to_bytes() == store.get(anchor_key(2))


@pytest.mark.parametrize("compress", [False, True])
def test_a_format_that_does_not_go_with_the_anchor_is_refused(compress: bool) -> None:
    store = MemoryStore()
    _, publisher, _ = published(store, 3, anchor_every=2, compress_anchors=compress)
    publisher.close()
    for key, read in ((manifest_key(0), Manifest.from_bytes), (anchor_key(2), LateAnchor.from_bytes)):
        value = from_json(store.get(key), key)
        for wrong in (1 - value["format"], 2, -1, None, True, 1.0):
            with pytest.raises(UnsupportedFormat, match="format"):
                read(to_json({**value, "format": wrong}))


# --- what goes wrong ---

DAMAGES = {
    "half written": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "one bit flipped": lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    "missing": lambda data: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_compressed_anchor_that_is_damaged_is_passed_by_for_an_older_one(damage: str) -> None:
    store = MemoryStore()
    _, publisher, history = published(store, 4, anchor_every=2, compress_anchors=True)
    publisher.close()
    found = anchors(store)
    newest = max(found)
    assert newest > 0
    key = found[newest].weights[0].payload.key
    data = DAMAGES[damage](store.get(key))
    store.delete(key) if data is None else store.put(key, data)
    assert followed(store) == (3, history[3])
    tensors, way = Versions(store).restore_and_plan(3)
    assert tensors == history[3]
    assert way.start is not None
    assert way.start.version < newest


def poisoned(store: MemoryStore, data: bytes) -> None:
    """Put these bytes in the place of version 0's weights, with a manifest that vouches for them."""
    value = from_json(store.get(manifest_key(0)), "manifest")
    value["anchor"]["weights"][0]["payload"] = {"size": len(data), "sha256": sha256(data)}
    store.put(f"payloads/{sha256(data)}", data)
    store.put(manifest_key(0), to_json(value))


def first(compress: bool = True) -> tuple[MemoryStore, Bits, bytes]:
    """A store of one version, its bits, and the bytes of its weights."""
    store = MemoryStore()
    _, publisher, history = published(store, 1, compress_anchors=compress)
    publisher.close()
    return store, history[0], store.get(anchors(store)[0].weights[0].payload.key)


def refused(store: MemoryStore, match: str, error: type[PulseError] = FormatError) -> None:
    weights = receiver()
    before = copied(weights)
    with pytest.raises(error, match=match):
        Subscriber(store, weights).fetch()
    assert copied(weights) == before


@pytest.mark.parametrize(
    "lie", ["a patch", "a removal", "another tensor", "one too few", "one flipped bit", "plain safetensors", "nothing"]
)
def test_a_compressed_anchor_that_is_something_else_is_refused_though_its_digest_is_right(lie: str) -> None:
    store, bits, _ = first()
    flipped = {name: tensor.copy() for name, tensor in bits.items()}
    flipped["embed.weight"].flat[7] ^= 1
    data, match = {
        "a patch": (codec.encode(diff(bits, flipped), bits, encoding="absolute"), "where whole ones are expected"),
        "a removal": (codec.encode(Patch(whole=bits, removed=("x",)), encoding="absolute"), "where whole ones are expected"),
        "another tensor": (encode_whole(bits | random_bits(1, {"new": ("U8", (1,))})), "the limit is|not those of its index"),
        "one too few": (encode_whole({name: bits[name] for name in list(bits)[1:]}), "not those of its index"),
        "one flipped bit": (encode_whole(flipped), "version 0: state"),
        "plain safetensors": (checkpoint.serialize(bits), "model.safetensors.pulse: not a patch"),
        "nothing": (b"", "model.safetensors.pulse: not a patch"),
    }[lie]
    poisoned(store, data)
    refused(store, match)


@given(st.data())
def test_no_mutation_of_a_compressed_file_is_more_than_a_format_error(data: st.DataObject) -> None:
    """The manifest vouches for every one of them, as a publisher gone wrong would; the container's trailer does, too, in half of them."""
    store, bits, good = first()
    at = data.draw(st.integers(0, len(good) - 33))
    body = good[:-32]
    match data.draw(st.sampled_from(["flip", "cut", "extend", "insert"])):
        case "flip":
            body = body[:at] + bytes([body[at] ^ 1 << data.draw(st.integers(0, 7))]) + body[at + 1 :]
        case "cut":
            body = body[:at]
        case "extend":
            body += data.draw(st.binary(min_size=1, max_size=40))
        case "insert":
            body = body[:at] + data.draw(st.binary(min_size=1, max_size=9)) + body[at:]
    sealed = bytes.fromhex(sha256(body)) if data.draw(st.booleans()) else good[-32:]
    poisoned(store, body + sealed)
    weights = receiver()
    before = copied(weights)
    with pytest.raises(FormatError):
        Subscriber(store, weights).fetch()
    assert copied(weights) == before


def test_a_header_that_claims_more_than_the_index_takes_no_memory() -> None:
    store, bits, _ = first()
    lie = encode_whole({"embed.weight": TensorBits("BF16", (1 << 25,), np.zeros(1 << 25, "<u2"))})
    assert len(lie) < 10_000
    poisoned(store, lie)
    tracemalloc.start()
    try:
        refused(store, "the limit is")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000


def test_a_plain_name_with_compressed_bytes_and_the_other_way_round_are_refused() -> None:
    store, bits, _ = first(compress=False)
    poisoned(store, encode_whole(bits))
    refused(store, "not a safetensors file")


def test_a_publisher_that_takes_over_from_compressed_anchors_goes_on_with_patches(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    store = MemoryStore()
    trainer, publisher, history = published(store, 2, compress_anchors=True, files=[tmp_path / "config.json"])
    publisher.close()
    other = Publisher(store, trainer.weights)
    trainer.step()
    assert other.publish().kind == "patch"
    assert followed(store) == (2, trainer.bits())
