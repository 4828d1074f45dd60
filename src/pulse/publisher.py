"""The trainer's side: every version as a patch to the one before, anchors in between, each committed by its manifest."""

from __future__ import annotations

import json
import math
import operator
import os
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

from pulse import checkpoint, codec
from pulse.anchors import companions, described, put_anchor, weight_files
from pulse.bits import TensorBits
from pulse.canonical import to_json
from pulse.commit import Committer, Overtaken, new_nonce, now_ms
from pulse.digest import state_digest, tensor_sums
from pulse.economics import Choice
from pulse.errors import FormatError, NoPath, NotFound
from pulse.manifest import File, LateAnchor, Manifest, Payload, TensorIndex
from pulse.pace import Pace
from pulse.patch import Patch, diff, scatter
from pulse.snapshot import Snapshot, as_anchor, changes_since, everything, fits
from pulse.store import ObjectStore, open_store
from pulse.versions import Versions
from pulse.weights import Weights, must_be_weights


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a publish did.

    encoding: of the patch; "whole" for an anchor. encoding_reason: why, where the publisher chose it. reason: why an anchor was published
    where a patch might be expected. nbytes: bytes that followers download for this version. newest_anchor: known at the commit; if it
    falls far behind the version, anchors fail to be stored, and `close` will say why. seconds: diff (in the caller), encode, upload,
    commit.
    """

    version: int
    kind: Literal["anchor", "patch"]
    step: int | None
    changed: int
    units: int
    nbytes: int
    full_nbytes: int
    state_digest: str
    newest_anchor: int
    encoding: str
    encoding_reason: str
    reason: str
    seconds: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Size of the whole view over what was sent."""
        return self.full_nbytes / self.nbytes if self.nbytes else float("inf")

    @property
    def density(self) -> float:
        """Share of the units that changed."""
        return self.changed / self.units if self.units else 0.0


def check_options(anchor_every: int, encoding: str, link: float | None) -> None:
    """Raise `ValueError` for options that no publisher could work with."""
    if anchor_every < 1:
        raise ValueError("anchor_every must be 1 or more")
    if encoding not in (*codec.ENCODINGS, "auto"):
        raise ValueError(f"encoding {encoding!r}; known are {', '.join(codec.ENCODINGS)} and auto")
    if link is not None and (isinstance(link, bool | str) or not 0 < link < math.inf):
        raise ValueError(f"link={link!r}: a number of bits per second is wanted, such as 1e9")


class Publisher:
    """Publishes versions of `weights` into `store`.

    The first version is an anchor; each later one is a patch, and after every `anchor_every` versions an anchor is added in the
    background. `files` are put beside every anchor (a tokenizer directory, config files), so that what followers restore loads; a
    publisher that continues a run with other files begins with an anchor, and one without any keeps those that are there.

    A publish that fails changes nothing: the baseline (what the world last saw) stays, so the next one contains those changes too.
    A publisher that opens a store which holds a run already continues it with a higher epoch, and the older one stops with `Fenced`:
    if the weights equal the newest version it goes on with patches, otherwise with an anchor. `baseline` is for those who have the
    newest version's bits beside weights that have moved on: then patches go on, too.

    `encoding="auto"` writes patches in the encoding that arrives first: contextual on slow links, portable on fast ones, by what recent
    uploads and encodings took here. `link` (bit/s) says how fast the slowest link to a receiver is, where that is not this one.

    Memory: one copy of the view on the host (the baseline), and another one while an anchor is being made and uploaded.
    `compress_anchors=True` stores anchors in about two thirds of their size, for slow links, at the price of the time that takes.
    `single_writer=True` accepts a store without put-if-absent: then nothing protects the run from a second publisher.
    """

    def __init__(
        self,
        store: ObjectStore | str | os.PathLike[str],
        weights: Weights,
        *,
        anchor_every: int = 50,
        files: Iterable[str | os.PathLike[str]] | str | os.PathLike[str] = (),
        encoding: codec.Encoding | Literal["auto"] = "auto",
        link: float | None = None,
        baseline: Mapping[str, TensorBits] | None = None,
        single_writer: bool = False,
        compress_anchors: bool = False,
        shard_bytes: int = checkpoint.SHARD_BYTES,
    ) -> None:
        check_options(anchor_every, encoding, link)
        must_be_weights(weights)
        self._versions = Versions(open_store(store))
        self._committer = Committer(self._versions, single_writer=single_writer)
        self._weights = weights
        self._anchor_every = anchor_every
        self._files = companions([files] if isinstance(files, str | os.PathLike) else files)
        self._kept: tuple[File, ...] = ()  # files of the run's newest anchor, where none are given here
        self._encoding = encoding
        self._pace = Pace(link)
        self._compress_anchors = compress_anchors
        self._shard_bytes = shard_bytes
        self._worker = ThreadPoolExecutor(1, "pulse-publish")
        self._uploader = ThreadPoolExecutor(1, "pulse-anchor")
        self._submitting = threading.Lock()
        self._closed = False
        self._last: Future[Receipt] | None = None
        self._anchoring: Future[None] | None = None
        self._copied = threading.Event()  # nothing reads the baseline for an anchor
        self._copied.set()
        self._newest_anchor = 0
        self._pending: dict[str, Snapshot] = {}  # by nonce: attempts of which it is unknown whether they arrived
        self._baseline: dict[str, TensorBits] | None = None  # None: it is not known here what the world last saw
        self._index = TensorIndex({}, {}, {})  # of the baseline
        self._stored_index = Payload(0, "")
        self._reason = "first version"  # why there is no baseline
        self._take_over(baseline)

    def _take_over(self, baseline: Mapping[str, TensorBits] | None) -> None:
        """Continue the run that the store holds, if it holds one."""
        head = self._committer.head
        if head is None:
            return
        try:
            index = self._versions.index(head.tensors)
            start = self._versions.plan(head.version).start
        except (NotFound, NoPath, FormatError) as error:
            self._reason = f"version {head.version}, at which the run is continued, cannot be read: {error}"
            return
        self._kept = start.anchor.files if start is not None else ()
        if self._files and described(self._files) != self._kept:
            self._reason = "the files beside the weights are others now"
            return
        tensors = baseline or {name: self._weights.read(name) for name in self._weights.specs()}
        specs = {name: bits.spec for name, bits in tensors.items()}
        sums = tensor_sums(tensors)
        if dict(index.specs) == specs and state_digest(specs, sums) == head.state_digest:
            self._baseline = {name: bits.copy() for name, bits in tensors.items()}
            self._index = replace(index, sums=sums)
            self._stored_index = head.tensors
            self._newest_anchor = self._versions.newest_anchor(head)
        else:
            self._reason = f"these weights are not version {head.version}, at which the run is continued"

    @property
    def version(self) -> int | None:
        """The newest version known to be committed."""
        return self._committer.head.version if self._committer.head is not None else None

    def publish(self, step: int | None = None, metadata: Mapping[str, Any] | None = None) -> Receipt:
        """Publish the weights as they are now, and return when the version is committed."""
        return self.submit(step, metadata).result()

    def submit(self, step: int | None = None, metadata: Mapping[str, Any] | None = None) -> Future[Receipt]:
        """Publish the weights as they are now; encoding and upload go on in the background.

        What changed is read before this returns, so the weights may then be trained on. A publish still under way is waited for
        first. If a version fails, its future raises, and the next version contains its changes.
        """
        if step is not None and (step := int(operator.index(step))) < 0:
            raise ValueError(f"step must be 0 or more, not {step}")
        details = json.loads(to_json(dict(metadata or {})))  # what is no JSON is refused here, and nobody else can change it later
        with self._submitting:
            if self._closed:
                raise RuntimeError("this publisher is closed; make a new one to go on")
            if self._last is not None:
                wait([self._last])
            started = time.perf_counter()
            snapshot = self._snapshot()
            snapshot = replace(snapshot, seconds=time.perf_counter() - started)
            self._last = self._worker.submit(self._publish, snapshot, step, details)
            return self._last

    def close(self) -> None:
        """Wait for what is under way. Raises if the last anchor could not be stored; publishes raise through their futures."""
        with self._submitting:
            self._closed = True
        self._worker.shutdown()
        self._uploader.shutdown()
        if self._anchoring is not None:
            self._anchoring.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _snapshot(self) -> Snapshot:
        """Compare with the baseline, or copy everything where a patch would not do."""
        if self._baseline is None:
            return everything(self._weights, self._reason)
        if not fits(self._index, self._weights.specs(), self._weights.aliases):
            return everything(self._weights, "names, shapes, dtypes or ties changed")
        return changes_since(self._weights, self._baseline, self._index)

    def _publish(self, snapshot: Snapshot, step: int | None, metadata: dict[str, Any]) -> Receipt:
        """Store the payload, commit the manifest, and only then let the baseline advance."""
        while True:
            manifest, how, seconds = self._stored(snapshot, step, metadata)
            started = time.perf_counter()
            self._pending[manifest.nonce] = snapshot
            try:
                found = self._committer.commit(manifest)
            except Overtaken as error:
                self._pending.clear()
                self._reason = str(error)
                snapshot, self._baseline = as_anchor(snapshot, self._baseline, self._reason), None
                continue
            committed = self._pending[found.nonce]
            self._pending.clear()
            if found.nonce != manifest.nonce:  # an earlier attempt had arrived: what is new goes on top of it
                snapshot = as_anchor(snapshot, self._baseline, snapshot.reason)
                self._advance(found, committed)
                snapshot = self._on_top(snapshot)
                continue
            seconds |= {"diff": snapshot.seconds, "commit": time.perf_counter() - started}
            self._advance(found, committed)
            return _receipt(found, how, snapshot.reason, seconds)

    def _stored(self, snapshot: Snapshot, step: int | None, metadata: dict[str, Any]) -> tuple[Manifest, Choice, dict[str, float]]:
        """The manifest for a snapshot, its payloads stored; how a patch is encoded, and the seconds that it took."""
        committer, put = self._committer, self._put
        started = encoded = time.perf_counter()
        content: dict[str, Any]
        units = sum(spec.units for spec in snapshot.index.specs.values())
        if snapshot.kind == "patch":
            how = self._how(units, snapshot.patch.changed)
            blob = codec.encode(snapshot.patch, self._baseline, encoding=cast("codec.Encoding", how.encoding))
            encoded = time.perf_counter()
            self._pace.encoded(how.encoding, len(blob), units, snapshot.patch.changed, snapshot.seconds + encoded - started)
            content = {"patch": put(blob), "anchor": None, "tensors": self._stored_index, "newest_anchor": self._newest_anchor}
        else:
            how = Choice("whole", {}, "")
            files = weight_files(snapshot.patch.whole, self._shard_bytes)
            anchor = put_anchor(put, files, self._files, self._kept, compress=self._compress_anchors)
            content = {"patch": None, "anchor": anchor, "tensors": put(snapshot.index.to_bytes()), "newest_anchor": committer.next_version}
        manifest = Manifest(
            run=committer.run,
            version=committer.next_version,
            base=committer.next_version - 1 if snapshot.kind == "patch" else None,
            epoch=committer.epoch,
            nonce=new_nonce(),
            step=step,
            created=now_ms(),
            previous=committer.head_sha256,
            state_digest=snapshot.state_digest,
            view=self._weights.view,
            changed=snapshot.patch.changed,
            units=units,
            full_nbytes=sum(spec.nbytes for spec in snapshot.index.specs.values()),
            metadata=metadata,
            **content,
        )
        return manifest, how, {"encode": encoded - started, "upload": time.perf_counter() - encoded}

    def _how(self, units: int, changed: int) -> Choice:
        """The encoding for a patch, and why."""
        if self._encoding == "auto":
            return self._pace.choose(units, changed)
        return Choice(self._encoding, {}, "")

    def _put(self, data: bytes | memoryview) -> Payload:
        """Store a payload, and note how long that took."""
        started = time.perf_counter()
        payload = self._committer.put_payload(data)
        self._pace.sent(len(data), time.perf_counter() - started)
        return payload

    def _advance(self, manifest: Manifest, snapshot: Snapshot) -> None:
        """The world has seen `manifest`: let the baseline follow, and make an anchor if one is due."""
        if self._baseline is None or snapshot.kind == "anchor":
            self._baseline = dict(snapshot.patch.whole)
            self._newest_anchor = manifest.version
        else:
            self._copied.wait()  # an anchor under way is of the version that is about to go
            _apply_in_place(snapshot.patch, self._baseline)
        self._index, self._stored_index = snapshot.index, manifest.tensors
        idle = self._anchoring is None or self._anchoring.done()
        if idle and manifest.version - self._newest_anchor >= self._anchor_every:
            self._copied.clear()
            self._anchoring = self._uploader.submit(self._add_anchor, manifest, self._baseline, snapshot.index)

    def _add_anchor(self, manifest: Manifest, baseline: Mapping[str, TensorBits], index: TensorIndex) -> None:
        """Store an already published version whole, from a copy, so that the next one need not wait for the store."""
        try:
            files = list(weight_files(baseline, self._shard_bytes))
        finally:
            self._copied.set()
        put = self._put
        anchor = put_anchor(put, files, self._files, self._kept, compress=self._compress_anchors)
        late = LateAnchor(manifest.run, manifest.version, manifest.state_digest, anchor, put(index.to_bytes()))
        self._committer.put_late_anchor(late)
        self._newest_anchor = max(self._newest_anchor, manifest.version)

    def _on_top(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot of all bits as a patch to the baseline, if a patch will do."""
        if self._baseline is None or not fits(self._index, snapshot.index.specs, snapshot.index.aliases):
            return snapshot
        index = replace(self._index, sums=snapshot.index.sums)
        return replace(snapshot, kind="patch", reason="", patch=diff(self._baseline, snapshot.patch.whole), index=index)


def _apply_in_place(patch: Patch, tensors: dict[str, TensorBits]) -> None:
    """Write an absolute patch into tensors that nobody else holds."""
    for change in patch.changes:
        scatter(tensors[change.part.name].flat, change.located, change.values)
    tensors.update(patch.whole)


def _receipt(manifest: Manifest, how: Choice, reason: str, seconds: Mapping[str, float]) -> Receipt:
    return Receipt(
        version=manifest.version,
        kind=manifest.kind,
        step=manifest.step,
        changed=manifest.changed,
        units=manifest.units,
        nbytes=manifest.nbytes,
        full_nbytes=manifest.full_nbytes,
        state_digest=manifest.state_digest,
        newest_anchor=manifest.newest_anchor,
        encoding=how.encoding,
        encoding_reason=how.reason,
        reason=reason,
        seconds=seconds,
    )
