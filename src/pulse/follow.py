"""Versions as directories that any tool loads: what `pulse pull` writes once and `pulse follow` keeps up to date.

    DIR/current                     a link to the newest version's directory; it changes in one atomic step
    DIR/versions/000000000412/      model.safetensors (or shards), config and tokenizer files, pulse.json
    DIR/versions/000000000411/      the version before, for readers that still map it
    DIR/.lock                       held while something follows into DIR

A version's directory is written under another name, synced, renamed, and never changed again. So `current` always leads to a whole
version, whenever the process or the machine dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from pulse import checkpoint
from pulse.bits import TensorBits
from pulse.canonical import fields, from_json, natural, optional, state_digits, text, to_json
from pulse.chain import Plan
from pulse.digest import sha256
from pulse.errors import FileError, FormatError, NoPath, PulseError, WeightsMismatch
from pulse.files import sync_folder, write_file, writing
from pulse.manifest import File, Manifest, Payload
from pulse.store import ObjectStore
from pulse.subscriber import Subscriber
from pulse.versions import Progress, Versions
from pulse.weights import MemoryWeights

RECORD = "pulse.json"
_KEEP = 2


@dataclass(frozen=True, slots=True)
class Record:
    """What a directory says of itself in `pulse.json`."""

    run: str
    version: int
    step: int | None
    state_digest: str

    @classmethod
    def of(cls, manifest: Manifest) -> Record:
        """The record of a version."""
        return cls(manifest.run, manifest.version, manifest.step, manifest.state_digest)

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return to_json({"run": self.run, "version": self.version, "step": self.step, "state_digest": self.state_digest})

    @classmethod
    def read(cls, directory: Path) -> Record | None:
        """The record of a directory, or None if there is none that can be believed."""
        try:
            value = from_json((directory / RECORD).read_bytes(), RECORD)
            return cls(**fields(value, run=text, version=natural, step=optional(natural), state_digest=state_digits))
        except (OSError, FormatError):
            return None


def write_directory(target: Path, tensors: Mapping[str, TensorBits], files: Iterable[tuple[str, bytes]]) -> None:
    """Write a directory in the Hugging Face layout, all or nothing. `FileError` if `target` is there and not empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileError(f"{target} exists and is not empty; choose another place, or remove it first")
    building = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    with writing(target):
        building.mkdir(parents=True)
        try:
            checkpoint.write(building, tensors)
            for name, data in files:
                (building / name).parent.mkdir(parents=True, exist_ok=True)
                write_file(building / name, data)
            sync_folder(building)
            building.rename(target)  # over an empty directory at most
            sync_folder(target.parent)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def pull(store: ObjectStore, version: int | None, target: str | os.PathLike[str], progress: Progress | None = None) -> Manifest:
    """Write one version (default: the newest) as a directory, or as one file if `target` ends in `.safetensors`."""
    versions = Versions(store)
    manifest = resolve(versions, version)
    tensors, way = versions.restore_and_plan(manifest.version, progress)
    path = Path(target)
    if path.suffix == ".safetensors":
        checkpoint.write(path, tensors)
    else:
        write_directory(path, tensors, [*_companions(versions, way), (RECORD, Record.of(manifest).to_bytes())])
    return manifest


def pull_files(store: ObjectStore, target: str | os.PathLike[str], version: int | None = None) -> list[str]:
    """Write only the files beside a version's weights (config, tokenizer) into a directory: what it takes to build the model empty.

    Returns their names. Weights then come by a `Subscriber`.
    """
    versions = Versions(store)
    way = versions.plan(resolve(versions, version).version)
    found = _companions(versions, way)
    for name, data in found:
        path = Path(target) / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
    return [name for name, _ in found]


def resolve(versions: Versions, version: int | None) -> Manifest:
    """The manifest of a version, or of the newest one."""
    found = versions.newest() if version is None else version
    if found is None:
        raise NoPath(f"{versions.store.url}: nothing has been published here yet")
    return versions.manifest(found)


def _companions(versions: Versions, way: Plan, known: Path | None = None) -> list[tuple[str, bytes]]:
    """The files beside the weights, from a directory that has them already or else from the store."""
    if way.start is None:
        return []
    return [(file.name, _companion(versions, file, known)) for file in way.start.anchor.files]


def _companion(versions: Versions, file: File, known: Path | None) -> bytes:
    if known is not None and (known / file.name).is_file():
        data = (known / file.name).read_bytes()
        if Payload(len(data), sha256(data)) == file.payload:
            return data
    return versions.payload(file.payload, file.name)


@dataclass(frozen=True, slots=True)
class Followed:
    """One step of following: the version that `current` now leads to, and how it got there."""

    manifest: Manifest
    kind: Literal["patch", "anchor"]
    patches: int
    nbytes: int
    fetch_seconds: float
    write_seconds: float
    reason: str


class DirectoryFollower:
    """Keeps `directory/current` at the newest version in `store`. Memory: one copy of the weights.

    Use it as a context manager: it holds a lock, so that two processes never write into one directory.
    """

    def __init__(self, store: ObjectStore, directory: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
        self.directory = Path(directory).absolute()
        self.current = self.directory / "current"
        self._store = store
        self._versions = Versions(store)
        self._progress = progress
        self._subscriber: Subscriber | None = None
        self._weights = MemoryWeights({})
        self._lock = -1

    def __enter__(self) -> Self:
        with writing(self.directory):
            (self.directory / "versions").mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise FileError(f"{self.directory}: another process follows into this directory already") from error
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._lock)
            self._tidy()
            self._resume()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    @property
    def version(self) -> int | None:
        """The version that `current` leads to."""
        record = Record.read(self.current)
        return None if record is None else record.version

    def _resume(self) -> None:
        """Take up what `current` holds, if it is what it says and a version of this run; else start from an anchor."""
        record = Record.read(self.current)
        if record is None:
            return
        manifest = self._versions.find(record.version)
        if manifest is None or Record.of(manifest) != record:
            raise FileError(
                f"{self.current} holds version {record.version} of run {record.run}, which is not in {self._store.url}: "
                "follow that run's store, or follow into another directory (or remove this one) to take up the new run"
            )
        with contextlib.suppress(PulseError):  # damaged since: the version is then fetched anew
            self._weights = MemoryWeights(checkpoint.read(self.current))
            self._subscriber = Subscriber(self._store, self._weights, held=record.version)

    def advance(self, timeout: float, *, stopped: Callable[[], bool] = lambda: False) -> Followed | None:
        """Wait up to `timeout` seconds for something newer than `current` and let `current` lead to it; None if nothing came."""
        deadline = time.monotonic() + timeout
        while True:
            found = (
                self._cold() if self._subscriber is None else self._warm(self._subscriber, min(1.0, max(deadline - time.monotonic(), 0)))
            )
            if found is not None or stopped() or time.monotonic() >= deadline:
                return found
            if self._subscriber is None:
                time.sleep(min(0.2, max(deadline - time.monotonic(), 0)))

    def _cold(self) -> Followed | None:
        """The newest version whole."""
        started = time.perf_counter()
        newest = self._versions.newest()
        if newest is None:
            return None
        manifest = self._versions.manifest(newest)
        tensors, way = self._versions.restore_and_plan(newest, self._progress)
        self._weights = MemoryWeights(tensors)
        self._subscriber = Subscriber(self._store, self._weights, held=newest)
        reason = "first version here" if self.version is None else "the directory's weights could not be used"
        seconds = time.perf_counter() - started
        return self._publish(Followed(manifest, "anchor", len(way.patches), way.nbytes, seconds, 0.0, reason))

    def _warm(self, subscriber: Subscriber, timeout: float) -> Followed | None:
        """The newest version by what is missing."""
        try:
            update = subscriber.wait(timeout)
        except WeightsMismatch:  # the run goes on with other tensors: those come with an anchor
            self._subscriber = None
            return self._cold()
        if update is None:
            return None
        subscriber.apply(update)
        if update.version == self.version and update.changed == 0:
            return None
        manifest = self._versions.manifest(update.version)
        return self._publish(Followed(manifest, update.kind, update.patches, update.nbytes, update.seconds, 0.0, update.reason))

    def _publish(self, followed: Followed) -> Followed:
        """Write the version's directory and let `current` lead to it."""
        started = time.perf_counter()
        manifest = followed.manifest
        name = f"{manifest.version:012d}"
        if (self.directory / "versions" / name).exists():  # damaged, or left by a crash before the link moved
            name += f"-{uuid.uuid4().hex[:8]}"
        subscriber, self._subscriber = self._subscriber, None  # if writing fails, the next attempt starts from the store
        way = self._versions.plan(manifest.version)
        files = _companions(self._versions, way, self.current if self.current.exists() else None)
        target = self.directory / "versions" / name
        write_directory(target, self._weights.tensors, [*files, (RECORD, Record.of(manifest).to_bytes())])
        link = self.directory / f".current.{uuid.uuid4().hex[:8]}.tmp"
        with writing(self.current):
            link.symlink_to(Path("versions") / name)
            link.replace(self.current)
            sync_folder(self.directory)
        self._tidy()
        self._subscriber = subscriber
        return replace(followed, write_seconds=time.perf_counter() - started)

    def _tidy(self) -> None:
        """Remove what crashes left, and all versions but the current one and the one before."""
        for leftover in [*self.directory.glob(".current.*.tmp"), *(self.directory / "versions").glob(".*.tmp")]:
            if leftover.is_symlink():
                leftover.unlink(missing_ok=True)
            else:
                shutil.rmtree(leftover, ignore_errors=True)
        current = self.current.resolve().name if self.current.exists() else ""
        complete = sorted(path.name for path in (self.directory / "versions").iterdir())
        keep = {current, *[name for name in complete if name < current][-(_KEEP - 1) :]}
        for name in complete:
            if name not in keep:
                shutil.rmtree(self.directory / "versions" / name, ignore_errors=True)
