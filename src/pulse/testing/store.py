"""What every object store promises, as tests.

Derive a class and say how a store is made; pytest runs the rest:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            return MyStore(...)

A store that can only be read derives from `ReadContract` and says how objects come into it (`filled`).
"""

# ruff: noqa: D102  a test's name is its sentence

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import pytest

from pulse.errors import AlreadyExists, InvalidKey, NotFound, StoreUnsuitable
from pulse.store import ObjectStore

Filled = Callable[[Mapping[str, bytes]], ObjectStore]

BAD_KEYS = (
    "", "/", "/x", "x/", "a//b", ".", "..", "../x", "a/../b", "a/..", "./x", "a/./b", ".x", "a/.x", "-x", "~/x", "x y", "x\\y",
    "x\0", "x\n", "\n", "x?y", "x#y", "x%2e", "x:y", "*", "ä", "x/\u2024\u2024/y", "x" * 201, "/".join(["x" * 100] * 6),
)  # fmt: skip
BIG = 12_000_000  # bytes: beyond what any of the stores reads or writes at a time


class ReadContract:
    """What reading promises."""

    @pytest.fixture
    def filled(self) -> Filled:
        """A function that puts objects into the store and returns it."""
        raise NotImplementedError

    def test_an_object_is_read_as_it_was_put(self, filled: Filled) -> None:
        store = filled({"a": b"one", "folder/b.json": bytes(range(256)), "empty": b""})
        assert (store.get("a"), store.get("folder/b.json"), store.get("empty")) == (b"one", bytes(range(256)), b"")
        assert [store.size(key) for key in ("a", "folder/b.json", "empty")] == [3, 256, 0]

    def test_a_missing_object_is_not_found(self, filled: Filled) -> None:
        store = filled({"folder/a": b"1"})
        for key in ("b", "folder/b", "other/a", "folder/a/b"):
            with pytest.raises(NotFound, match=key):
                store.get(key)
            with pytest.raises(NotFound, match=key):
                store.get(key, start=1, stop=2)
            with pytest.raises(NotFound, match=key):
                store.size(key)

    @pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 10**12])
    @pytest.mark.parametrize("stop", [None, 0, 1, 9, 10, 11, 10**12])
    def test_a_range_is_what_a_slice_is_also_beyond_the_end(self, filled: Filled, start: int, stop: int | None) -> None:
        data = b"0123456789"
        assert filled({"a": data}).get("a", start=start, stop=stop) == data[start:stop]

    def test_a_big_object_is_read_whole_and_in_part(self, filled: Filled) -> None:
        data = (bytes(range(251)) * (BIG // 251 + 1))[:BIG]
        store = filled({"big": data})
        assert store.get("big") == data
        assert store.get("big", stop=BIG + 1) == data
        assert store.get("big", stop=BIG // 2) == data[: BIG // 2]
        assert store.get("big", start=BIG - 5, stop=BIG + 5) == data[-5:]
        assert store.size("big") == BIG

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_a_key_that_could_leave_the_store_is_refused_by_every_verb(self, filled: Filled, key: str) -> None:
        store = filled({"x": b"1"})
        with pytest.raises(InvalidKey):
            store.get(key)
        with pytest.raises(InvalidKey):
            store.get(key, start=1, stop=2)
        with pytest.raises(InvalidKey):
            store.size(key)
        with pytest.raises((InvalidKey, StoreUnsuitable)):
            store.put(key, b"2")
        with pytest.raises((InvalidKey, StoreUnsuitable)):
            store.put(key, b"2", if_absent=True)
        with pytest.raises((InvalidKey, StoreUnsuitable)):
            store.delete(key)
        assert store.get("x") == b"1"

    def test_many_threads_read_at_once(self, filled: Filled) -> None:
        store = filled({f"key-{i}": b"%d" % i * 1000 for i in range(8)})
        assert all(in_threads(16, lambda i: store.get(f"key-{i % 8}") == b"%d" % (i % 8) * 1000))


class StoreContract(ReadContract):
    """What reading and writing promise."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        """An empty store."""
        raise NotImplementedError

    @pytest.fixture
    def filled(self, store: ObjectStore) -> Filled:
        """Fill the store by putting."""

        def fill(objects: Mapping[str, bytes]) -> ObjectStore:
            for key, data in objects.items():
                store.put(key, data)
            return store

        return fill

    def test_it_is_an_object_store_with_an_address(self, store: ObjectStore) -> None:
        assert isinstance(store, ObjectStore)
        assert store.url

    def test_a_put_replaces(self, store: ObjectStore) -> None:
        for data in (b"one", b"", memoryview(bytearray(b"three"))):
            store.put("a", data)
            assert store.get("a") == bytes(data)

    def test_put_if_absent_does_not_replace(self, store: ObjectStore) -> None:
        store.put("a", b"first", if_absent=True)
        for data in (b"second", b"first"):
            with pytest.raises(AlreadyExists, match="a"):
                store.put("a", data, if_absent=True)
        assert store.get("a") == b"first"

    def test_put_if_absent_has_one_winner_of_sixteen_threads(self, store: ObjectStore) -> None:
        for attempt in range(5):
            barrier = threading.Barrier(16)

            def put(number: int, key: str = f"folder/{attempt}", barrier: threading.Barrier = barrier) -> bool:
                barrier.wait()
                try:
                    store.put(key, b"%02d" % number * 5000, if_absent=True)
                except AlreadyExists:
                    return False
                return True

            winners = [number for number, won in enumerate(in_threads(16, put)) if won]
            assert len(winners) == 1
            assert store.get(f"folder/{attempt}") == b"%02d" % winners[0] * 5000

    def test_no_reader_sees_a_part_of_a_put(self, store: ObjectStore) -> None:
        size, rounds = 1_000_000, 12
        store.put("a", bytes(size))
        done = threading.Event()

        def act(number: int) -> bool:
            if number == 0:
                for i in range(rounds):
                    store.put("a", bytes([i]) * (size + i))
                done.set()
                return True
            whole = True
            while not done.is_set():
                data = store.get("a")
                whole &= len(data) >= size and data == data[:1] * len(data)
            return whole

        assert all(in_threads(3, act))
        assert store.get("a") == bytes([rounds - 1]) * (size + rounds - 1)

    def test_a_list_is_of_whole_folders_and_sorted(self, store: ObjectStore) -> None:
        assert store.list() == []
        assert store.list("nothing") == []
        keys = ["b", "a/2", "a/1", "a/deep/3", "ab/1"]
        for key in keys:
            store.put(key, b"")
        assert store.list() == sorted(keys)
        assert store.list("a") == ["a/1", "a/2", "a/deep/3"]
        assert store.list("a/deep") == ["a/deep/3"]
        assert store.list("b") == store.list("a/1") == store.list("c") == []
        with pytest.raises(InvalidKey):
            store.list("../")

    def test_what_is_deleted_is_gone_and_can_be_put_again(self, store: ObjectStore) -> None:
        store.put("folder/a", b"1")
        store.delete("folder/a")
        store.delete("folder/a")
        store.delete("never/was")
        with pytest.raises(NotFound):
            store.get("folder/a")
        assert store.list() == []
        store.put("folder/a", b"2", if_absent=True)
        assert store.get("folder/a") == b"2"


def in_threads(count: int, call: Callable[[int], bool]) -> list[bool]:
    """What `call` returns for 0 … count - 1, each in a thread of its own; False where it raised."""
    found = [False] * count

    def run(number: int) -> None:
        found[number] = call(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
