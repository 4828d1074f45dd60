"""A thin link between a trainer and the store: it takes as long as its bytes take, one after the other in each direction."""

from __future__ import annotations

import argparse
import re
import threading
import time

from pulse import ObjectStore

_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def rate_of(text: str) -> float:
    """`100mbit` as bit/s."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit(?:/s)?", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; write 100mbit, 1gbit, 2.5gbit")
    return float(found[1]) * _UNITS[found[2]]


class Link:
    """One direction: a transfer begins when the one before has ended."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def until(self, nbytes: int, now: float) -> float:
        """When that many bytes have gone through, if they are there now."""
        with self._lock:
            self._free_at = max(self._free_at, now) + 8 * nbytes / self._rate
            return self._free_at

    def carry(self, nbytes: int) -> None:
        """Return when that many bytes have gone through."""
        time.sleep(max(0.0, self.until(nbytes, time.monotonic()) - time.monotonic()))


class Shaped:
    """A store behind a link of `rate` bit/s up and as much down. What a call weighs besides its object is not counted."""

    def __init__(self, store: ObjectStore, rate: float) -> None:
        self.url = store.url
        self._store = store
        self._up, self._down = Link(rate), Link(rate)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """See `ObjectStore.put`. The object is there when it has gone through."""
        self._up.carry(len(data))
        self._store.put(key, data, if_absent=if_absent)

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `ObjectStore.get`."""
        data = self._store.get(key, start=start, stop=stop)
        self._down.carry(len(data))
        return data

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        return self._store.size(key)

    def list(self, prefix: str = "") -> list[str]:
        """See `ObjectStore.list`."""
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._store.delete(key)
