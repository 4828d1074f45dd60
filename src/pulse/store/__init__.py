"""Object stores: a local folder, memory, and clouds and HTTP through obstore, behind one protocol."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from pulse.errors import StoreUnsuitable
from pulse.store.base import ObjectStore, check_key
from pulse.store.local import LocalStore
from pulse.store.memory import MemoryStore

__all__ = ["LocalStore", "MemoryStore", "ObjectStore", "check_key", "open_store"]

_REMOTE = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")
_memory: dict[str, MemoryStore] = {}  # memory://NAME is one store for the whole process, or it could not be shared


def open_store(url: ObjectStore | str | os.PathLike[str]) -> ObjectStore:
    """The store at `url`: a path, `file:///…`, `memory://NAME`, `s3://…`, `gs://…`, `az://…`, or `https://…` (read only).

    A store is returned as it is. Nothing is created or contacted yet. Raises `StoreUnsuitable` for an address that is none of these.
    """
    if isinstance(url, ObjectStore):
        return url
    text = os.fspath(url)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if not text:
        raise StoreUnsuitable("the store has an empty address")
    if not scheme:
        return LocalStore(text)
    if scheme == "file":
        if urlsplit(text).netloc not in {"", "localhost"}:
            raise StoreUnsuitable(f"{text}: a file address has three slashes: file:///path")
        return LocalStore(unquote(urlsplit(text).path))
    if scheme == "memory":
        return _memory.setdefault(text, MemoryStore(text.removeprefix("memory://")))
    if scheme in _REMOTE:
        from pulse.store.remote import RemoteStore

        return RemoteStore(text)
    raise StoreUnsuitable(f"{text}: no store of kind {scheme!r}; known are a path, file, memory, {', '.join(_REMOTE)}")
