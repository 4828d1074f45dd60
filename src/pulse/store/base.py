"""Where bytes live: five verbs on keys. A store knows no patch and no manifest."""

from __future__ import annotations

import re
from typing import Protocol, runtime_checkable

from pulse.errors import InvalidKey

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_MAX_KEY = 512


@runtime_checkable
class ObjectStore(Protocol):
    """Immutable-object storage, as small as the protocol needs it.

    Every implementation promises: a put is atomic (no reader sees a part of it), an object that a put has returned from is seen by
    the next get, and `put(if_absent=True)` lets exactly one of several writers win. Calls are safe from several threads.
    Failures are `StoreError`s; `StoreUnavailable` says that the outcome is unknown.
    """

    url: str

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """Store `data` under `key`; with `if_absent`, raise `AlreadyExists` instead of replacing an object."""

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """The object's bytes, or the range [start, stop) of them; `NotFound` if there is none."""

    def size(self, key: str) -> int:
        """The object's size in bytes; `NotFound` if there is none."""

    def list(self, prefix: str = "") -> list[str]:
        """All keys under the folder `prefix` (empty: all), sorted. For people and garbage collection: the protocol never lists."""

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""


def check_key(key: str) -> str:
    """`key`, if it is plain and relative: segments of up to 200 ASCII letters, digits, `.`, `_`, `-`, none of them starting with a dot.

    So no key leaves the store, hides in it, or means different things on different systems.
    """
    if not (0 < len(key) <= _MAX_KEY and all(_SEGMENT.fullmatch(segment) for segment in key.split("/"))):
        raise InvalidKey(f"{key!r} is not a key: up to 200 of A-Z a-z 0-9 . _ - between slashes, not starting with a dot or a dash")
    return key
