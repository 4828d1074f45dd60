"""Stores that fail on purpose, around stores that do not.

>>> from pulse.store import MemoryStore
>>> store = FaultyStore(MemoryStore(), nth(1), when="after")
>>> store.put("a", b"1")
>>> store.put("b", b"2")
Traceback (most recent call last):
    ...
pulse.errors.StoreUnavailable: memory://: put b was made to fail
>>> store.get("b")
b'2'
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from pulse.errors import AlreadyExists, StoreError, StoreUnavailable
from pulse.store import ObjectStore

T = TypeVar("T")
When = Literal["before", "after", "late", "torn"]


class Died(BaseException):
    """Stands for the death of the process in the middle of a call: nothing on the way up catches it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call to a store: its number, from 0, its verb and its key."""

    number: int
    verb: str
    key: str


def nth(number: int) -> Callable[[Call], bool]:
    """Chooses the call of that number."""
    return lambda call: call.number == number


def never(call: Call) -> bool:  # noqa: ARG001  the signature of a choice
    """Chooses no call."""
    return False


class FaultyStore:
    """Passes calls on to `store`, except that those which `fails` chooses do not go well.

    when: "before", the call fails and has no effect; "after", it takes effect and then fails; "late", it fails, and what it would put
    arrives when `arrive` is called; "torn", a put stores the first half of its bytes and does not fail at all.
    error: makes the exception; `Died` in place of the default ends a publisher as kill -9 does.
    """

    def __init__(
        self,
        store: ObjectStore,
        fails: Callable[[Call], bool] = never,
        *,
        when: When = "before",
        error: Callable[[str], BaseException] = StoreUnavailable,
    ) -> None:
        self.url = store.url
        self.calls: list[Call] = []
        self.fails = fails
        self._store = store
        self._when = when
        self._error = error
        self._late: list[tuple[str, bytes, bool]] = []
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """See `ObjectStore.put`."""
        if not self._chosen("put", key):
            self._store.put(key, data, if_absent=if_absent)
            return
        if self._when == "torn":
            self._store.put(key, bytes(data)[: len(data) // 2], if_absent=if_absent)
            return
        if self._when == "late":
            self._late.append((key, bytes(data), if_absent))
        if self._when == "after":
            with contextlib.suppress(StoreError):  # the answer is lost, whatever it was
                self._store.put(key, data, if_absent=if_absent)
        raise self._failure("put", key)

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `ObjectStore.get`."""
        return self._passed("get", key, lambda: self._store.get(key, start=start, stop=stop))

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        return self._passed("size", key, lambda: self._store.size(key))

    def list(self, prefix: str = "") -> list[str]:
        """See `ObjectStore.list`."""
        return self._passed("list", prefix, lambda: self._store.list(prefix))

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._passed("delete", key, lambda: self._store.delete(key))

    def arrive(self) -> None:
        """Let the puts arrive that were late."""
        late, self._late = self._late, []
        for key, data, if_absent in late:
            with contextlib.suppress(AlreadyExists):
                self._store.put(key, data, if_absent=if_absent)

    def _passed(self, verb: str, key: str, call: Callable[[], T]) -> T:
        if not self._chosen(verb, key) or self._when == "torn":
            return call()
        if self._when == "after":
            with contextlib.suppress(StoreError):
                call()
        raise self._failure(verb, key)

    def _chosen(self, verb: str, key: str) -> bool:
        with self._lock:
            call = Call(len(self.calls), verb, key)
            self.calls.append(call)
        return self.fails(call)

    def _failure(self, verb: str, key: str) -> BaseException:
        return self._error(f"{self.url}: {verb} {key} was made to fail")


class CarelessStore(FaultyStore):
    """A store that ignores put-if-absent, as some that speak S3 do."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:  # noqa: ARG002  ignored, that is the point
        """Replace the object, whatever was asked for."""
        super().put(key, data)
