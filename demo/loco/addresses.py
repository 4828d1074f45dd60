"""Where trainers listen: in the store, so that workers need nothing else to find them, also one that has come back elsewhere."""

from __future__ import annotations

from pulse import ObjectStore
from pulse.errors import NotFound


def announce(store: ObjectStore, rank: int, address: str) -> None:
    """Say where a trainer listens."""
    store.put(_key(rank), address.encode())


def find(store: ObjectStore, rank: int) -> str | None:
    """Where a trainer listens, if it has said so."""
    try:
        return store.get(_key(rank)).decode()
    except NotFound:
        return None


def _key(rank: int) -> str:
    return f"trainers/{rank}"
