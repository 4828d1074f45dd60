"""S3, GCS, Azure and plain HTTP, through obstore."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import HTTPStore, from_url

from pulse.errors import AlreadyExists, NotFound, StoreUnavailable, StoreUnsuitable
from pulse.store.base import check_key


class RemoteStore:
    """An object store of a cloud, or a plain HTTP server (read only). Credentials come from the environment, as obstore reads them."""

    def __init__(self, url: str, **options: Any) -> None:  # noqa: ANN401  obstore's own options
        self.url = url.rstrip("/")
        self._read_only = url.startswith(("http://", "https://"))
        try:
            self._store: Any = HTTPStore.from_url(url, **options) if self._read_only else from_url(url, **options)
        except (exceptions.BaseError, ValueError) as error:
            raise StoreUnsuitable(f"{url}: {_first_line(error)}") from error

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """See `ObjectStore.put`."""
        if self._read_only:
            raise StoreUnsuitable(f"{self.url} is read only: plain HTTP has no put-if-absent; publish to a bucket or a folder")
        with self._translated(key):
            # One request: multipart uploads cannot be conditional, and abandoned parts cost money until someone removes them.
            obstore.put(self._store, check_key(key), bytes(data), mode="create" if if_absent else "overwrite", use_multipart=False)

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `ObjectStore.get`."""
        with self._translated(key):
            if start == 0:
                return self._read(key, stop)
            end = self.size(key) if stop is None else stop
            return bytes(obstore.get_range(self._store, check_key(key), start=start, end=end)) if end > start else b""

    def _read(self, key: str, stop: int | None) -> bytes:
        """From the start, without asking for a range: plain HTTP servers need not know ranges, and the end may lie beyond the object's."""
        found = obstore.get(self._store, check_key(key))
        if stop is None:
            return bytes(found.bytes())
        pieces, size = [], 0
        for piece in found:
            pieces.append(bytes(piece))
            size += len(pieces[-1])
            if size >= stop:
                break
        return b"".join(pieces)[:stop]

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        with self._translated(key):
            return int(obstore.head(self._store, check_key(key))["size"])

    def list(self, prefix: str = "") -> list[str]:
        """See `ObjectStore.list`."""
        with self._translated(prefix):
            return sorted(found["path"] for page in obstore.list(self._store, prefix or None) for found in page)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self._translated(key), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, check_key(key))

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{self.url}: no object {key}") from error
        except exceptions.AlreadyExistsError as error:
            raise AlreadyExists(f"{self.url}: {key} exists") from error
        except exceptions.PermissionDeniedError as error:
            raise StoreUnsuitable(f"{self.url}: {key}: permission denied; check the credentials: {_first_line(error)}") from error
        except exceptions.BaseError as error:
            raise StoreUnavailable(f"{self.url}: {key}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300]
