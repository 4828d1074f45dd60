"""A store in a folder, on one machine or a POSIX network file system.

Which crash it survives: a put writes a hidden temporary file, syncs it, then links it under its name (put-if-absent) or renames it
over the name, then syncs the folder. So after a killed process or a lost power supply every object is whole and as it was put, or
absent; at worst a hidden `.tmp-*` file is left, which no get or list shows. A disk or file system that lies about fsync is beyond it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from pulse.errors import AlreadyExists, NotFound, StoreUnavailable, StoreUnsuitable
from pulse.files import sync_folder, write_synced
from pulse.store.base import check_key

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_FOR_GOOD = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR)
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class LocalStore:
    """Objects as files below `root`, which is made by the first put."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.url = self.root.as_uri()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """See `ObjectStore.put`."""
        path = self._path(key)
        with self._translated(key):
            self._make_folder(path.parent)
            temporary = path.parent / f".tmp-{uuid.uuid4().hex}"
            try:
                write_synced(temporary, data)
                if if_absent:
                    self._link(temporary, path, key)
                else:
                    temporary.replace(path)
                sync_folder(path.parent)
            finally:
                temporary.unlink(missing_ok=True)

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `ObjectStore.get`."""
        with self._translated(key), self._existing(key), self._path(key).open("rb") as file:
            size = os.fstat(file.fileno()).st_size  # `stop` may claim anything, and a read makes room for what it is asked for
            file.seek(start)
            return file.read(max((size if stop is None else min(stop, size)) - start, 0))

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        with self._translated(key), self._existing(key), self._path(key).open("rb") as file:
            return os.fstat(file.fileno()).st_size

    def list(self, prefix: str = "") -> list[str]:
        """See `ObjectStore.list`."""
        folder = self._path(prefix) if prefix else self.root
        keys = (path.relative_to(self.root) for path in folder.rglob("*") if path.is_file())
        return sorted(key.as_posix() for key in keys if not any(segment.startswith(".") for segment in key.parts))

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self._translated(key), contextlib.suppress(*_NO_FILE):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _link(self, temporary: Path, path: Path, key: str) -> None:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise AlreadyExists(f"{self.url}: {key} exists") from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise StoreUnsuitable(
                f"{self.url}: this file system has no hard links ({error.strerror}), so no put-if-absent; "
                "use another store, or single_writer=True (--single-writer) if nobody else publishes there"
            ) from error
        temporary.unlink()

    def _make_folder(self, folder: Path) -> None:
        """Make the folder and its parents durable too: a synced file in an unsynced folder can vanish."""
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for made in reversed(missing):
            made.mkdir(exist_ok=True)
            sync_folder(made.parent)

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FOR_GOOD:
                raise StoreUnsuitable(f"{self.url}: {key}: {error.strerror}; use another folder, or mend its permissions") from error
            advice = "make room there and retry" if error.errno in _FULL else "retry when that is mended"
            raise StoreUnavailable(f"{self.url}: {key}: {error.strerror or error}; {advice}") from error

    @contextlib.contextmanager
    def _existing(self, key: str) -> Iterator[None]:
        try:
            yield
        except _NO_FILE as error:
            raise NotFound(f"{self.url}: no object {key}") from error
