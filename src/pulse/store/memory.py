"""A store in this process: the twin that tests use in place of the others."""

from __future__ import annotations

import threading

from pulse.errors import AlreadyExists, NotFound
from pulse.store.base import check_key


class MemoryStore:
    """Objects in a dict behind a lock. Keeps what it is given only as long as the process lives."""

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """See `ObjectStore.put`."""
        with self._lock:
            if if_absent and key in self._objects:
                raise AlreadyExists(f"{self.url}: {key} exists")
            self._objects[check_key(key)] = bytes(data)

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `ObjectStore.get`."""
        with self._lock:
            if key not in self._objects:
                raise NotFound(f"{self.url}: no object {check_key(key)}")
            return self._objects[key][start:stop]

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        return len(self.get(key))

    def list(self, prefix: str = "") -> list[str]:
        """See `ObjectStore.list`."""
        folder = f"{check_key(prefix)}/" if prefix else ""
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(folder))

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self._lock:
            self._objects.pop(check_key(key), None)
