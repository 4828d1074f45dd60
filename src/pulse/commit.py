"""Making a version exist: payloads first, then its manifest, put if absent; and finding out what happened when a store did not say."""

from __future__ import annotations

import contextlib
import time
import uuid

from pulse.errors import AlreadyExists, Fenced, FormatError, StoreError, StoreUnavailable, StoreUnsuitable
from pulse.manifest import HEAD, MAX_MANIFEST, LateAnchor, Manifest, Payload, anchor_key, head_bytes, manifest_key
from pulse.versions import Versions


class Committer:
    """Commits manifests of one run as one writer.

    Opening a store that holds a run takes the run over: this writer's epoch is one higher, and a writer of a lower or equal epoch
    that finds the other's manifest in its way stops with `Fenced`.
    """

    def __init__(self, versions: Versions, *, single_writer: bool = False) -> None:
        self._versions = versions
        self._store = versions.store
        self._conditional = not single_writer
        self._attempts: set[str] = set()  # nonces of manifests for the next version of which it is unknown whether they arrived
        if self._conditional:
            self._probe()
        newest = versions.newest()
        self.head = None if newest is None else versions.manifest(newest)
        self.run = uuid.uuid4().hex if self.head is None else self.head.run
        self.epoch = 0 if self.head is None else self.head.epoch + 1

    def _probe(self) -> None:
        """Find out whether the store really refuses to replace an object, before a second publisher finds out."""
        key = f"probes/{uuid.uuid4().hex}"
        try:
            self._store.put(key, b"1", if_absent=True)
            self._store.put(key, b"2", if_absent=True)
        except AlreadyExists:
            return
        finally:
            with contextlib.suppress(StoreError):
                self._store.delete(key)
        raise StoreUnsuitable(
            f"{self._store.url} ignores put-if-absent, so two publishers could overwrite each other; "
            "use another store, or single_writer=True (--single-writer) if nobody else publishes there"
        )

    @property
    def next_version(self) -> int:
        """The version that the next commit makes."""
        return 0 if self.head is None else self.head.version + 1

    @property
    def head_sha256(self) -> str | None:
        """SHA-256 of the newest manifest."""
        return None if self.head is None else self._versions.manifest_sha256(self.head.version)

    def put_payload(self, data: bytes | memoryview) -> Payload:
        """Store some bytes under their own digest."""
        payload = Payload.of(data)
        try:
            self._store.put(payload.key, data, if_absent=self._conditional)
        except AlreadyExists:
            # Equal content has an equal key; only an object that some crash left incomplete is put again.
            if self._store.size(payload.key) != payload.size:
                self._store.put(payload.key, data)
        return payload

    def put_late_anchor(self, late: LateAnchor) -> None:
        """Name the anchor of a version that exists."""
        with contextlib.suppress(AlreadyExists):  # another publisher of this run made one; any anchor of a version is as good
            self._store.put(anchor_key(late.version), late.to_bytes(), if_absent=self._conditional)

    def commit(self, manifest: Manifest) -> Manifest:
        """Make the next version exist; returns the manifest of this writer that now holds that place.

        That is an earlier one of this writer if its put was reported as failed and had arrived all the same. Raises `Fenced` if
        another publisher has the place and this one must stop, `Overtaken` if one of a lower epoch has it, and `StoreUnavailable`
        while it is unknown whether the manifest arrived; the next commit finds out.
        """
        data = manifest.to_bytes()
        if len(data) > MAX_MANIFEST:
            raise FormatError(f"a manifest of {len(data)} bytes; {MAX_MANIFEST} are allowed: shorten the metadata or the view")
        Manifest.from_bytes(data)  # a manifest that no reader accepts would end the chain for good
        if not self._conditional and (found := self._versions.find(manifest.version)) is not None:
            return self._settle(found)
        if self.head is not None:
            self._versions.must_hold(self.head.version)
        self._attempts.add(manifest.nonce)
        try:
            self._store.put(manifest_key(manifest.version), data, if_absent=self._conditional)
        except AlreadyExists:
            pass
        except StoreUnavailable:
            if self._versions.find(manifest.version) is None:
                raise
        return self._settle(self._versions.manifest(manifest.version))

    def _settle(self, found: Manifest) -> Manifest:
        """Decide what the manifest found in this writer's place means."""
        if found.nonce in self._attempts:
            self._advance(found)
            with contextlib.suppress(StoreError):  # a hint: the version is committed without it
                self._store.put(HEAD, head_bytes(found.version))
            return found
        newest = self._versions.newest(found.version)
        head = found if newest is None else self._versions.manifest(newest)
        if head.epoch >= self.epoch:
            raise Fenced(
                f"{self._store.url}: version {head.version} was published by another publisher (epoch {head.epoch}, this one has "
                f"{self.epoch}): it has taken over the run. Stop this one; nothing of the run was changed"
            )
        self._advance(head)
        raise Overtaken(f"version {found.version} was published by a writer of the lower epoch {found.epoch}")

    def _advance(self, head: Manifest) -> None:
        self.head = head
        self._attempts.clear()


class Overtaken(Exception):
    """A writer of a lower epoch committed the version first; `head` is now what it left."""


def new_nonce() -> str:
    """A name for one attempt to commit."""
    return uuid.uuid4().hex


def now_ms() -> int:
    """Wall-clock time in milliseconds since 1970, as manifests record it."""
    return time.time_ns() // 1_000_000
