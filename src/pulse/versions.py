"""A store read as a chain of versions: every object that comes out of here has been checked against what names it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from pulse import chain, checkpoint, codec
from pulse.bits import Spec, TensorBits
from pulse.codec.whole import decode_whole
from pulse.digest import check, digest_of, sha256
from pulse.errors import BaseMismatch, ChainError, DigestMismatch, FormatError, NoPath, NotFound
from pulse.manifest import (
    COMPRESSED,
    HEAD,
    MAX_MANIFEST,
    Anchor,
    File,
    LateAnchor,
    Manifest,
    Payload,
    TensorIndex,
    anchor_key,
    manifest_key,
    parse_head,
)
from pulse.patch import Patch, resolve, scatter
from pulse.store import ObjectStore

Progress = Callable[[int, int], None]  # bytes done, bytes in all
_LOOK_BACK = 200  # versions, at most, over which a publisher that takes over looks for an anchor that no manifest names yet


class Versions:
    """Reads manifests, anchors and payloads. Keeps what it has read of manifests (they never change), never that one was missing."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._manifests: dict[int, tuple[Manifest, str]] = {}
        self._index: tuple[Payload, TensorIndex] | None = None

    def find(self, version: int) -> Manifest | None:
        """The manifest of a version, or None if there is no such version (yet)."""
        if version not in self._manifests:
            key = manifest_key(version)
            try:
                data = self.store.get(key, stop=MAX_MANIFEST + 1)
            except NotFound:
                return None
            if len(data) > MAX_MANIFEST:
                raise FormatError(f"{key}: more than {MAX_MANIFEST} bytes is no manifest")
            manifest = Manifest.from_bytes(data, key)
            if manifest.version != version:
                raise FormatError(f"{key}: says that it is version {manifest.version}")
            self._manifests[version] = manifest, sha256(data)
            self._check_links(version)
        return self._manifests[version][0]

    def _check_links(self, version: int) -> None:
        """Neighbouring manifests must name each other: a store that was emptied and filled again is another chain."""
        for older, newer in ((version - 1, version), (version, version + 1)):
            if older in self._manifests and newer in self._manifests:
                manifest, found = self._manifests[newer][0], self._manifests[older][1]
                if manifest.previous != found or manifest.run != self._manifests[older][0].run:
                    self._manifests.pop(version, None)
                    raise ChainError(
                        f"{self.store.url}: version {newer} (run {manifest.run}) does not continue the version {older} that was read "
                        f"before: expected the manifest before it to have SHA-256 {found}, found {manifest.previous}. "
                        "The chain was replaced (start again with a new subscriber or publisher), or one of the two was altered"
                    )

    def manifest(self, version: int) -> Manifest:
        """The manifest of a version that must exist."""
        manifest = self.find(version)
        if manifest is None:
            raise NoPath(f"{self.store.url}: there is no version {version}")
        return manifest

    def manifest_sha256(self, version: int) -> str:
        """SHA-256 of the manifest's bytes."""
        self.manifest(version)
        return self._manifests[version][1]

    def newest(self, since: int | None = None) -> int | None:
        """The newest version, or None in an empty store. `since`: a version that is known to exist."""
        if since is not None:
            while self.find(since + 1) is not None:
                since += 1
            self.must_hold(since)
            return since
        hint = 0
        with contextlib.suppress(NotFound, FormatError):  # only a hint: a damaged one must not stop anybody
            hint = parse_head(self.store.get(HEAD, stop=MAX_MANIFEST))
        return chain.newest(lambda version: self.find(version) is not None, hint)

    def must_hold(self, version: int) -> None:
        """Raise `ChainError` if the store has lost a version that was read from it: it was emptied, or is another one now."""
        try:
            self.store.size(manifest_key(version))
        except NotFound as error:
            raise ChainError(
                f"{self.store.url}: version {version} was here and is gone: the store was emptied or replaced. "
                "Start again with a new subscriber or publisher"
            ) from error

    def late_anchor(self, version: int) -> LateAnchor | None:
        """The anchor made later for a version, if there is one."""
        key = anchor_key(version)
        try:
            found = LateAnchor.from_bytes(self.store.get(key, stop=MAX_MANIFEST), key)
        except NotFound:
            return None
        manifest = self.manifest(version)
        if (found.run, found.version, found.state_digest) != (manifest.run, version, manifest.state_digest):
            raise FormatError(f"{key}: not an anchor of version {version} of run {manifest.run}")
        return found

    def payload(self, payload: Payload, what: str) -> bytes:
        """The bytes of a payload, proven to be the ones that were named."""
        data = self.store.get(payload.key, stop=payload.size + 1)
        if len(data) != payload.size:
            more = "more" if len(data) > payload.size else f"only {len(data)}"
            where = f"{what} ({payload.key})"
            raise DigestMismatch(f"{where}: expected {payload.size} bytes, found {more}: half written or replaced; fetch again")
        check(f"{what} ({payload.key})", payload.sha256, sha256(data))
        return data

    def index(self, payload: Payload) -> TensorIndex:
        """A tensor index; the last one is kept, since versions in a row share theirs."""
        if self._index is None or self._index[0] != payload:
            self._index = payload, TensorIndex.from_bytes(self.payload(payload, "tensor index"))
        return self._index[1]

    def plan(self, target: int, held: int | None = None) -> chain.Plan:
        """How to reach `target`, from `held` if that is a version."""
        if held is not None and (patches := self._cheap_patches(target, held)):
            return chain.plan(held, patches)
        anchored, late = self._anchor_before(target)
        first = min(anchored, target if held is None else held + 1)
        manifests = [self.manifest(version) for version in range(first, target + 1)]
        return chain.plan(held, manifests, [] if late is None else [late])

    def _cheap_patches(self, target: int, held: int) -> list[Manifest]:
        """The patches from `held` to `target` if they are smaller than any anchor would be: then there is no need to look for one."""
        patches: list[Manifest] = []
        left = self.manifest(target).full_nbytes // 2  # compressed anchors of real weights take more than half
        for version in range(target, held, -1):
            manifest = self.manifest(version)
            left -= manifest.nbytes
            if manifest.patch is None or left < 0:
                return []
            patches.insert(0, manifest)
        return patches

    def newest_anchor(self, head: Manifest) -> int:
        """The newest version that is stored whole, also if its anchor was made after `head` was committed."""
        for version in range(head.version, max(head.newest_anchor, head.version - _LOOK_BACK), -1):
            with contextlib.suppress(FormatError):
                if self.late_anchor(version) is not None:
                    return version
        return head.newest_anchor

    def _anchor_before(self, target: int) -> tuple[int, LateAnchor | None]:
        """Where an anchor lies at or before `target`, and if it was made later, that."""
        manifest = self.manifest(target)
        while manifest.anchor is None:
            with contextlib.suppress(FormatError):  # a damaged one is as good as none: there are older ones
                if (late := self.late_anchor(manifest.version)) is not None:
                    return manifest.version, late
            manifest = self.manifest(manifest.newest_anchor)
        return manifest.version, None

    def patch(self, manifest: Manifest, specs: Mapping[str, Spec], base: Mapping[str, TensorBits]) -> Patch:
        """The patch of a version, checked to be for its base and for tensors of these specs.

        base: the tensors that it applies to; only a contextual patch reads them, each once or a few times.
        """
        if manifest.patch is None:
            raise NoPath(f"version {manifest.version} is an anchor, not a patch")
        what = f"patch of version {manifest.version}"
        blob = self.payload(manifest.patch, what)
        header = codec.read_header(blob)
        codec.check_specs(header, specs)
        if header.removed or any(specs.get(name) != spec for name, spec in header.whole):
            raise FormatError(f"{what}: adds, removes or reshapes tensors, which only an anchor does")
        needed = base if header.encoding == "contextual" else None
        try:
            patch = codec.decode(blob, needed, max_bytes=16 * sum(spec.nbytes for spec in specs.values()) + (1 << 20))
        except BaseMismatch as error:
            raise BaseMismatch(f"{what}: {error}") from error
        check(f"{what}: its result", manifest.state_digest, patch.result or "none")
        check(f"{what}: its base", self.manifest(manifest.version - 1).state_digest, patch.base or "none")
        return patch

    def files(self, anchor: Anchor) -> Iterator[tuple[File, bytes]]:
        """The anchor's weight files and companions, one after the other."""
        for file in (*anchor.weights, *anchor.files):
            yield file, self.payload(file.payload, file.name)

    def anchor_tensors(self, anchor: Anchor, index: TensorIndex) -> dict[str, TensorBits]:
        """The tensors of an anchor, proven to be those of its index."""
        tensors: dict[str, TensorBits] = {}
        nbytes = sum(spec.nbytes for spec in index.specs.values())
        for file in anchor.weights:
            if file.name.endswith(COMPRESSED):
                tensors |= decode_whole(self.payload(file.payload, file.name), nbytes, file.name)
            elif file.name.endswith(".safetensors"):
                tensors |= checkpoint.parse(memoryview(self.payload(file.payload, file.name)), file.name)
        if {name: bits.spec for name, bits in tensors.items()} != dict(index.specs):
            raise FormatError("an anchor's tensors are not those of its index")
        return tensors

    def restore(self, target: int, progress: Progress | None = None) -> dict[str, TensorBits]:
        """All tensors of a version, from an anchor and patches, its state digest proven."""
        return self.restore_and_plan(target, progress)[0]

    def restore_and_plan(self, target: int, progress: Progress | None = None) -> tuple[dict[str, TensorBits], chain.Plan]:
        """`restore`, and the way that it took: past anchors that are damaged or gone, to an older one if patches lead on from there."""
        way = self.plan(target)
        failure: NotFound | FormatError | None = None
        while True:
            try:
                return self._restored(target, way, progress or _unreported), way
            except (NotFound, FormatError) as error:
                failure = failure or error
                older = self._from_older(target, way)
                if older is None:
                    raise failure from error
                way = older

    def _from_older(self, target: int, way: chain.Plan) -> chain.Plan | None:
        """The next way to try, from the anchor before the one that `way` starts from."""
        if way.start is None or self.manifest(way.start.version).patch is None:
            return None
        anchored, late = self._anchor_before(way.start.version - 1)
        manifests = [self.manifest(version) for version in range(anchored, target + 1)]
        return chain.plan(None, manifests, [late] if late is not None else [])

    def _restored(self, target: int, way: chain.Plan, report: Progress) -> dict[str, TensorBits]:
        if way.start is None:
            raise NoPath(f"no anchor leads to version {target}")
        tensors = self.anchor_tensors(way.start.anchor, self.index(way.start.tensors))
        done = way.start.anchor.nbytes
        owned: set[str] = set()
        for manifest in way.patches:
            report(done, way.nbytes)
            _write(self.patch(manifest, {name: bits.spec for name, bits in tensors.items()}, tensors), tensors, owned)
            done += manifest.nbytes
        report(done, way.nbytes)
        check(f"version {target}: state", self.manifest(target).state_digest, digest_of(tensors))
        return tensors


def _unreported(done: int, total: int) -> None:
    """Report progress to nobody."""


def _write(patch: Patch, tensors: dict[str, TensorBits], owned: set[str]) -> None:
    """Apply a patch in place: what is not `owned` yet is copied first, so that many patches cost one copy."""
    for change in resolve(patch, tensors).changes:
        name = change.part.name
        if name not in owned:
            tensors[name] = tensors[name].copy()
            owned.add(name)
        scatter(tensors[name].flat, change.located, change.values)
    tensors.update(patch.whole)
    owned.update(patch.whole)
