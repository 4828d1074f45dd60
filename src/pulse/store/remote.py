"""S3, GCS, Azure and plain HTTP, through obstore."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import HTTPStore, from_url

from pulse.errors import AlreadyExists, NotFound, StoreUnavailable, StoreUnsuitable
from pulse.store.base import check_key

# A request as a whole may take as long as a shard takes over a thin line (obstore's own 30 s would cut that off); silence may not.
# An upload is silent until it is answered, so only the reader's client has a time for silence.
_CLIENT = {"connect_timeout": timedelta(seconds=10), "timeout": timedelta(hours=1)}
_SILENCE = {"read_timeout": timedelta(seconds=30)}
_RETRY = {"max_retries": 8, "retry_timeout": timedelta(seconds=30)}


class RemoteStore:
    """An object store of a cloud, or a plain HTTP server (read only). Credentials come from the environment, as obstore reads them.

    client: an obstore store of one's own for that address, where its credentials or time-outs must be other ones.
    """

    def __init__(self, url: str, *, client: Any = None) -> None:
        self.url = url.rstrip("/")
        self._read_only = url.startswith(("http://", "https://"))
        try:
            self._reader = client or self._open(_CLIENT | _SILENCE)
            self._writer = client or (None if self._read_only else self._open(_CLIENT))
        except (exceptions.BaseError, ValueError) as error:
            raise StoreUnsuitable(f"{url}: {_first_line(error)}") from error

    def _open(self, client_options: dict[str, Any]) -> Any:
        if self._read_only:
            plain = {"allow_http": self.url.startswith("http://")}  # who writes http:// means it
            return HTTPStore.from_url(self.url, client_options={**client_options, **plain}, retry_config=_RETRY)
        return from_url(self.url, client_options=client_options, retry_config=_RETRY)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """See `ObjectStore.put`."""
        with self._writing(key):
            # One request: multipart uploads cannot be conditional, and abandoned parts cost money until someone removes them.
            obstore.put(self._writer, check_key(key), bytes(data), mode="create" if if_absent else "overwrite", use_multipart=False)

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `ObjectStore.get`."""
        with self._translated(key):
            if start == 0 or self._read_only:  # plain HTTP servers need not know ranges
                return self._read(key, stop)[start:]
            end = self.size(key)
            end = end if stop is None else min(stop, end)
            return bytes(obstore.get_range(self._reader, check_key(key), start=start, end=end)) if end > start else b""

    def _read(self, key: str, stop: int | None) -> bytes:
        """From the beginning: a range that ends beyond the object's end is an error to some servers."""
        found = obstore.get(self._reader, check_key(key))
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
            return int(obstore.head(self._reader, check_key(key))["size"])

    def list(self, prefix: str = "") -> list[str]:
        """See `ObjectStore.list`."""
        if self._read_only:
            raise StoreUnsuitable(f"{self.url} cannot be listed: plain HTTP knows no folders; the protocol needs none")
        with self._translated(prefix):
            return sorted(found["path"] for page in obstore.list(self._reader, check_key(prefix) if prefix else None) for found in page)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self._writing(key), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._writer, check_key(key))

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        if self._read_only:
            raise StoreUnsuitable(f"{self.url} is read only: plain HTTP has no put-if-absent; publish to a bucket or a folder")
        with self._translated(key):
            yield

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{self.url}: no object {key}") from error
        except exceptions.AlreadyExistsError as error:
            raise AlreadyExists(f"{self.url}: {key} exists") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            advice = "check the credentials (S3 also refuses to say that an object is missing to those who may not list the bucket)"
            raise StoreUnsuitable(f"{self.url}: {key}: permission denied; {advice}: {_first_line(error)}") from error
        except exceptions.BaseError as error:
            raise StoreUnavailable(f"{self.url}: {key}: {_first_line(error)}; retry when the store answers") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
