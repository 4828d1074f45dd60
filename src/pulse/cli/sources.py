"""What users write for a set of weights: a file, a directory, or a version of a store."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from pulse import checkpoint
from pulse.bits import TensorBits
from pulse.errors import FileError, NoPath
from pulse.store import ObjectStore, open_store
from pulse.versions import Versions

_AT = re.compile(r"(?P<store>.+)@(?P<version>\d+|step:\d+|newest)$")


def split_version(source: str) -> tuple[str, str | None]:
    """`STORE@412`, `STORE@step:137` or `STORE@newest` as its two halves; anything else, or a path that exists, has no second half."""
    found = _AT.match(source)
    if found is None or Path(source).exists():
        return source, None
    return found["store"], found["version"]


def store_version(source: str) -> tuple[ObjectStore, int]:
    """The store and version of `STORE[@VERSION]`; the newest one if none is named."""
    url, wanted = split_version(source)
    store = existing_store(url)
    versions = Versions(store)
    newest = versions.newest()
    if newest is None:
        raise NoPath(f"{store.url}: nothing has been published here")
    if wanted is None or wanted == "newest":
        return store, newest
    if wanted.startswith("step:"):
        return store, _at_step(versions, newest, int(wanted.removeprefix("step:")))
    if int(wanted) > newest:
        raise NoPath(f"{store.url}: there is no version {wanted}; the newest is {newest}")
    return store, int(wanted)


def named_store(url: str) -> ObjectStore:
    """The store at `url`, which names no version; `FileError` if it looks as if it did."""
    if split_version(url)[1] is not None:
        raise FileError(f"{url}: a store is wanted here, without @VERSION")
    return open_store(url)


def existing_store(url: str) -> ObjectStore:
    """The store at `url`; a folder that is not there holds nothing, and is more likely a typing mistake."""
    store = named_store(url)
    if store.url.startswith("file://") and "://" not in url and not Path(url).is_dir():
        hint = "; VERSION is a number, step:N, or newest" if "@" in url else ""
        raise FileError(f"{url}: no such folder, so no store{hint}")
    return store


def _at_step(versions: Versions, newest: int, step: int) -> int:
    """The newest version of that trainer step."""
    for version in range(newest, -1, -1):
        if versions.manifest(version).step == step:
            return version
    raise NoPath(f"{versions.store.url}: no version of step {step}")


def read_weights(source: str, progress: Callable[[int, int], None] | None = None) -> dict[str, TensorBits]:
    """The tensors of a `.safetensors` file, a Hugging Face directory, or `STORE@VERSION`."""
    _, wanted = split_version(source)
    if wanted is None:
        if not Path(source).exists():
            raise FileError(f"{source}: no such file or directory (a version of a store is written STORE@VERSION)")
        return checkpoint.read(source)
    store, version = store_version(source)
    return Versions(store).restore(version, progress)
