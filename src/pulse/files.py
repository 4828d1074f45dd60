"""Local files, written so that a crash leaves what was there or all of what should be."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pulse.errors import FileError


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """A new file that is on the disk when this returns. `OSError` as it comes."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make what was created or renamed in a folder durable. `OSError` as it comes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """A whole file; `FileError` where that cannot be."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error


def write_file(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write a file so that, whatever happens, `path` is as it was or whole. `FileError` where that cannot be."""
    write_files([(Path(path), data)])


def write_files(files: Iterable[tuple[Path, bytes | memoryview]]) -> None:
    """`write_file` for several: none is put in its place before all are on the disk."""
    staged: list[tuple[Path, Path]] = []
    try:
        for path, data in files:
            temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
            staged.append((temporary, path))
            with writing(path):
                write_synced(temporary, data)
        for temporary, path in staged:
            with writing(path):
                temporary.replace(path)
                sync_folder(path.parent)
    finally:
        for temporary, _ in staged:
            with suppress(OSError):
                temporary.unlink()


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Operating system errors while something is written at `path`, as `FileError`."""
    try:
        yield
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}; what was there is unchanged") from error
