"""Manifests, late anchors, indexes and hints: what is written is read, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pulse.canonical import from_json, to_json
from pulse.errors import FormatError, UnsupportedFormat
from pulse.manifest import LateAnchor, Manifest, TensorIndex, anchor_key, file_name, head_bytes, manifest_key, parse_head
from pulse.store import MemoryStore
from pulse.versions import Versions
from tests.chains import assert_linear, published


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    found = MemoryStore()
    _, publisher, _ = published(found, 4, anchor_every=3)
    publisher.close()
    return found


def test_a_manifest_is_read_as_it_was_written(store: MemoryStore) -> None:
    for version in range(4):
        data = store.get(manifest_key(version))
        manifest = Manifest.from_bytes(data)
        assert manifest.to_bytes() == data
        assert Manifest.from_bytes(replace(manifest, metadata={"ä": [1, {"b": None}], "x": 0.1}, view={"*": "BF16"}).to_bytes()).view == {
            "*": "BF16"
        }


def test_a_late_anchor_and_an_index_are_read_as_they_were_written(store: MemoryStore) -> None:
    late = LateAnchor.from_bytes(store.get(anchor_key(3)))
    assert late.to_bytes() == store.get(anchor_key(3))
    index = TensorIndex.from_bytes(store.get(late.tensors.key))
    assert index.to_bytes() == store.get(late.tensors.key)


def test_the_head_is_read_as_it_was_written() -> None:
    assert parse_head(head_bytes(412)) == 412


ANCHOR, PATCH = 0, 2


def without(name: str) -> Callable[[dict], None]:
    return lambda value: value.pop(name)


def put(*path: Any) -> Callable[[dict], None]:
    *way, last, new = path

    def change(value: Any) -> None:
        for step in way:
            value = value[step]
        value[last] = new

    return change


HEX = "0" * 64
BROKEN = {
    "a field is missing": (ANCHOR, without("nonce"), FormatError),
    "a field is unknown": (ANCHOR, put("extra", 1), FormatError),
    "a field of a payload is unknown": (PATCH, put("patch", "extra", 1), FormatError),
    "the format is newer": (ANCHOR, put("format", 2), UnsupportedFormat),
    "the format is that of another anchor": (ANCHOR, put("format", 1), UnsupportedFormat),
    "a patch has the format of a compressed anchor": (PATCH, put("format", 1), UnsupportedFormat),
    "a compressed file has the format of plain ones": (
        ANCHOR,
        put("anchor", "weights", 0, "name", "x.safetensors.pulse"),
        UnsupportedFormat,
    ),
    "the format is no number": (ANCHOR, put("format", False), UnsupportedFormat),
    "there is no format": (ANCHOR, without("format"), UnsupportedFormat),
    "there are links": (PATCH, put("links", [1]), UnsupportedFormat),
    "there is a signature": (PATCH, put("signature", "x"), UnsupportedFormat),
    "the place of links is missing": (PATCH, without("links"), UnsupportedFormat),
    "the place of the signature is missing": (PATCH, without("signature"), UnsupportedFormat),
    "a version is negative": (ANCHOR, put("version", -1), FormatError),
    "a version is a float": (ANCHOR, put("version", 0.0), FormatError),
    "a version is beyond 63 bits": (ANCHOR, put("version", 2**63), FormatError),
    "a digest has upper case": (ANCHOR, put("state_digest", "A" * 32), FormatError),
    "a digest is short": (ANCHOR, put("state_digest", "0" * 31), FormatError),
    "a hash climbs out of the store": (PATCH, put("patch", "sha256", "../../../etc/passwd".ljust(64, "0")), FormatError),
    "there is neither patch nor anchor": (PATCH, put("patch", None), FormatError),
    "there are both patch and anchor": (PATCH, put("anchor", {"files": [], "weights": []}), FormatError),
    "an anchor has a base": (ANCHOR, put("base", 0), FormatError),
    "a patch has no base": (PATCH, put("base", None), FormatError),
    "a base is not the version before": (PATCH, put("base", 0), FormatError),
    "the first version has one before it": (ANCHOR, put("previous", HEX), FormatError),
    "a later version has none before it": (PATCH, put("previous", None), FormatError),
    "the newest anchor is in the future": (PATCH, put("newest_anchor", 3), FormatError),
    "a patch calls itself the newest anchor": (PATCH, put("newest_anchor", 2), FormatError),
    "an anchor names an older one": (ANCHOR, put("newest_anchor", 1), FormatError),
    "a file climbs out of the directory": (ANCHOR, put("anchor", "weights", 0, "name", "../x"), FormatError),
    "a file is hidden": (ANCHOR, put("anchor", "weights", 0, "name", ".bashrc"), FormatError),
    "a file is absolute": (ANCHOR, put("anchor", "weights", 0, "name", "/x"), FormatError),
    "two files have one name": (ANCHOR, lambda value: value["anchor"].update(files=value["anchor"]["weights"]), FormatError),
    "the view names an unknown dtype": (ANCHOR, put("view", "BF17"), FormatError),
    "metadata is no object": (ANCHOR, put("metadata", []), FormatError),
    "a step is text": (ANCHOR, put("step", "1"), FormatError),
}


@pytest.mark.parametrize(("version", "change", "error"), BROKEN.values(), ids=BROKEN)
def test_a_manifest_is_refused_when(store: MemoryStore, version: int, change: Callable[[dict], None], error: type) -> None:
    value = from_json(store.get(manifest_key(version)), "manifest")
    change(value)
    with pytest.raises(error, match="manifest") as caught:
        Manifest.from_bytes(to_json(value))
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"null", b"[1]", b"\xff\xfe", b"{" * 100_000, b'{"format": 0}', b'{"format":NaN}', b"9" * 5000]
)
def test_what_is_no_manifest_is_a_format_error(damage: bytes) -> None:
    for read in (Manifest.from_bytes, LateAnchor.from_bytes, TensorIndex.from_bytes, parse_head):
        with pytest.raises(FormatError):
            read(damage)


def test_every_byte_of_a_manifest_counts(store: MemoryStore) -> None:
    data = store.get(manifest_key(2))
    told = [json_equal_or_refused(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :], data) for i in range(len(data))]
    assert all(told)
    for cut in (data[:-1], data + b" ", data + data):
        with pytest.raises(FormatError):
            Manifest.from_bytes(cut)


def json_equal_or_refused(damaged: bytes, data: bytes) -> bool:
    try:
        return Manifest.from_bytes(damaged) != Manifest.from_bytes(data)
    except FormatError:
        return True


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", ".x", "a/../b", "", "a/", "x\0", "ä", "a\\b", "-x", "a b", "C:x"])
def test_a_file_name_that_leaves_the_directory_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match="not a plain relative file name"):
        file_name(name)


@pytest.mark.parametrize(
    "change",
    [
        put("tensors", "embed.weight", ["BF16", [16, 8]]),
        put("tensors", "embed.weight", ["BF17", [16, 8], "0" * 32]),
        put("tensors", "embed.weight", ["BF16", [-1], "0" * 32]),
        put("tensors", "embed.weight", ["F4", [1], "0" * 32]),
        put("aliases", "head", "missing"),
        put("aliases", "scale", "embed.weight"),
        put("format", 1),
        put("format", False),
        put("extra", 1),
    ],
)
def test_an_index_that_lies_is_refused(store: MemoryStore, change: Callable[[dict], None]) -> None:
    value = from_json(store.get(Versions(store).manifest(0).tensors.key), "index")
    change(value)
    with pytest.raises(FormatError):
        TensorIndex.from_bytes(to_json(value))


@pytest.mark.parametrize("hint", [b"", b"{}", b"not json", head_bytes(0), head_bytes(3), head_bytes(2**62), b"\xff" * 2_000_000])
def test_a_hint_that_lies_costs_look_ups_and_nothing_else(hint: bytes) -> None:
    store = MemoryStore()
    _, publisher, history = published(store, 4)
    publisher.close()
    store.put("head.json", hint)
    assert Versions(store).newest() == 3
    assert assert_linear(store, history) == 3
    store.delete("head.json")
    assert Versions(store).newest() == 3
