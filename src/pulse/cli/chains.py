"""`pulse publish`, `log`, `pull`, `verify`, `follow`: versions in a store."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulse.cli.console import Json, emit, factor, percent, progress, reported, size, table, warn
from pulse.cli.patches import EncodingName
from pulse.errors import DigestMismatch, FileError, FormatError, NoPath, NotFound, StoreError, StoreUnavailable, StoreUnsuitable

if TYPE_CHECKING:
    from pulse.follow import DirectoryFollower, Followed
    from pulse.manifest import Anchor, Manifest
    from pulse.versions import Versions

Store = Annotated[
    str, typer.Argument(metavar="STORE", help="A folder, file://, s3://, gs://, az://, or https:// (read only).", show_default=False)
]
StoreVersion = Annotated[
    str, typer.Argument(metavar="STORE[@VERSION]", help="VERSION: a number, step:N, or newest (the default).", show_default=False)
]


@reported
def publish(
    store: Store,
    checkpoint_path: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A .safetensors file, a Hugging Face directory, or STORE@VERSION.")
    ],
    step: Annotated[int | None, typer.Option(min=0, help="The trainer's step, recorded beside the version.")] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--files", help="A file or directory to put beside anchors; repeatable (default: CHECKPOINT's)."),
    ] = None,
    anchor_every: Annotated[int, typer.Option(min=1, help="Add an anchor after this many patches.")] = 50,
    compress_anchors: Annotated[bool, typer.Option("--compress-anchors", help="Store anchors a third smaller, for slow links.")] = False,
    encoding: Annotated[EncodingName, typer.Option(help="How the patch is written; see pulse diff.")] = EncodingName.contextual,
    single_writer: Annotated[bool, typer.Option("--single-writer", help="Accept a store without put-if-absent.")] = False,
    as_json: Json = False,
) -> None:
    """Publish a checkpoint as the next version: a patch to the newest one, or an anchor if there is none."""
    from pulse.cli.sources import named_store, read_weights
    from pulse.publisher import Publisher
    from pulse.versions import Versions
    from pulse.weights import MemoryWeights

    target = named_store(store)
    if target.url.startswith("memory://"):
        raise StoreUnsuitable(f"{store}: a store in memory ends with this command; use a folder or a URL")
    beside: list[Path] = files or ([Path(checkpoint_path)] if Path(checkpoint_path).is_dir() else [])
    options: dict[str, Any] = {"anchor_every": anchor_every, "files": beside, "encoding": encoding.value, "single_writer": single_writer}
    with progress("publishing", as_json=as_json) as report:
        tensors = read_weights(checkpoint_path, report)
        versions = Versions(target)
        newest = versions.newest()
        baseline = None if newest is None else versions.restore(newest, report)
        publisher = Publisher(target, MemoryWeights(tensors), baseline=baseline, compress_anchors=compress_anchors, **options)
        receipt = publisher.publish(step)
        try:
            publisher.close()
        except StoreError as error:
            warn(f"version {receipt.version} is committed, but its anchor could not be added (the next publish tries again): {error}")
    lines = [
        f"version {receipt.version} of {target.url}: "
        + (f"{receipt.encoding} patch" if receipt.kind == "patch" else "anchor")
        + f", {size(receipt.nbytes)}"
        + (f", {factor(receipt.full_nbytes, receipt.nbytes)} smaller than the whole" if receipt.nbytes < receipt.full_nbytes else "")
        + (f" ({receipt.reason})" if receipt.reason else ""),
        f"  {receipt.changed:,} of {receipt.units:,} weights "
        + ("stored" if receipt.kind == "anchor" else f"changed ({percent(receipt.changed, receipt.units)})"),
        f"  state digest {receipt.state_digest}",
    ]
    result = {
        "store": target.url,
        "version": receipt.version,
        "kind": receipt.kind,
        "encoding": receipt.encoding,
        "reason": receipt.reason,
        "step": receipt.step,
        "changed": receipt.changed,
        "weights": receipt.units,
        "bytes": receipt.nbytes,
        "full_bytes": receipt.full_nbytes,
        "ratio": receipt.ratio,
        "newest_anchor": receipt.newest_anchor,
        "state_digest": receipt.state_digest,
        "seconds": dict(receipt.seconds),
    }
    emit(result, lines, as_json=as_json)


@reported
def log(
    store: Store,
    number: Annotated[int, typer.Option("-n", min=1, help="How many of the newest versions to show.")] = 20,
    as_json: Json = False,
) -> None:
    """The versions in a store, newest last."""
    from pulse.cli.sources import existing_store
    from pulse.follow import resolve
    from pulse.versions import Versions

    versions = Versions(existing_store(store))
    newest = resolve(versions, None)
    shown = [versions.manifest(version) for version in range(max(0, newest.version - number + 1), newest.version + 1)]
    anchors = _anchors(versions, shown)
    rows = [_log_row(manifest, anchors) for manifest in shown]
    lines = [
        f"{versions.store.url}: run {newest.run}, versions 0 to {newest.version}, newest anchor {newest.newest_anchor}",
        *table(("version", "kind", "step", "published", "changed", "size", "smaller", "B/change", "anchor", "state digest"), rows),
    ]
    entries = [_log_entry(manifest, anchors) for manifest in shown]
    emit({"store": versions.store.url, "run": newest.run, "versions": entries}, lines, as_json=as_json)


def _anchors(versions: Versions, shown: list[Manifest]) -> dict[int, Anchor | None]:
    """The versions among these that are known to be stored whole, with their anchors; None for one that is damaged."""
    found: dict[int, Anchor | None] = {manifest.version: manifest.anchor for manifest in shown if manifest.anchor}
    for version in {manifest.newest_anchor for manifest in shown} & {manifest.version for manifest in shown} - set(found):
        found[version] = None
        with contextlib.suppress(FormatError):
            if (late := versions.late_anchor(version)) is not None:
                found[version] = late.anchor
    return found


def _log_entry(manifest: Manifest, anchors: dict[int, Anchor | None]) -> dict[str, Any]:
    anchor = anchors.get(manifest.version)
    return {
        "version": manifest.version,
        "kind": manifest.kind,
        "anchor": manifest.version in anchors,
        "anchor_bytes": None if anchor is None else anchor.nbytes,
        "anchor_compressed": None if anchor is None else anchor.compressed,
        "step": manifest.step,
        "created_ms": manifest.created,
        "changed": manifest.changed,
        "weights": manifest.units,
        "bytes": manifest.nbytes,
        "full_bytes": manifest.full_nbytes,
        "epoch": manifest.epoch,
        "state_digest": manifest.state_digest,
        "metadata": dict(manifest.metadata),
    }


def _log_row(manifest: Manifest, anchors: dict[int, Anchor | None]) -> tuple[str, ...]:
    patch, anchor = manifest.kind == "patch", anchors.get(manifest.version)
    whole = "-" if manifest.version not in anchors else "damaged" if anchor is None else size(anchor.nbytes)
    return (
        str(manifest.version),
        manifest.kind + ("+anchor" if patch and manifest.version in anchors else ""),
        "-" if manifest.step is None else str(manifest.step),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created / 1000)),
        percent(manifest.changed, manifest.units) if patch else "all",
        size(manifest.nbytes),
        factor(manifest.full_nbytes, manifest.nbytes) if patch or manifest.nbytes < manifest.full_nbytes else "-",
        f"{manifest.nbytes / manifest.changed:.3g}" if patch and manifest.changed else "-",
        whole + (" compressed" if anchor is not None and anchor.compressed else ""),
        manifest.state_digest[:12],
    )


@reported
def pull(
    source: StoreVersion,
    target: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new directory, or NAME.safetensors for the weights alone.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Write one version as a directory that any tool loads. Its digests are proven first."""
    from pulse import follow
    from pulse.cli.sources import store_version

    store, version = store_version(source)
    with progress("pulling", as_json=as_json) as report:
        manifest = follow.pull(store, version, target, report)
    result = {"target": str(target), "version": manifest.version, "step": manifest.step, "state_digest": manifest.state_digest}
    lines = [
        f"{target}: version {manifest.version}"
        + ("" if manifest.step is None else f" (step {manifest.step})")
        + f", {size(manifest.full_nbytes)}",
        f"  state digest {manifest.state_digest}, verified",
    ]
    emit(result, lines, as_json=as_json)


@reported
def verify(source: StoreVersion, as_json: Json = False) -> None:
    """Prove a version: its chain of manifests, every payload it needs, and the digest of the weights they give."""
    from pulse.cli.sources import store_version
    from pulse.versions import Versions

    store, version = store_version(source)
    versions = Versions(store)
    for number in range(version, -1, -1):  # each manifest that is read must be the one that the next names
        versions.manifest(number)
    with progress("verifying", as_json=as_json) as report:
        tensors, way = versions.restore_and_plan(version, report)
    start = way.start.version if way.start is not None else 0
    manifest = versions.manifest(version)
    result = {
        "store": store.url,
        "version": version,
        "verified": True,
        "anchor": start,
        "patches": len(way.patches),
        "bytes": way.nbytes,
        "tensors": len(tensors),
        "state_digest": manifest.state_digest,
    }
    lines = [
        f"verified: version {version} of {store.url}",
        f"  {version + 1} manifests in one chain; anchor {start} and {len(way.patches)} patches, {size(way.nbytes)}, of the right SHA-256",
        f"  {len(tensors)} tensors with state digest {manifest.state_digest}",
    ]
    emit(result, lines, as_json=as_json)


@reported
def follow(
    store: Store,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="DIR/current will lead to the newest version.", show_default=False)],
    once: Annotated[bool, typer.Option("--once", help="Stop when DIR holds the newest version there is now.")] = False,
    timeout: Annotated[float | None, typer.Option(min=0, help="Stop after this many seconds without a new version.")] = None,
    as_json: Json = False,
) -> None:
    """Keep a directory at the newest version, until interrupted. DIR/current always leads to a whole, verified version.

    DIR/versions keeps that version and the one before: open files through DIR/current. A store that does not answer, or whose newest
    objects are damaged, is asked again, with a warning; with --once or after --timeout that is an error, as is a store without a version.
    """
    from pulse.cli.sources import named_store
    from pulse.follow import DirectoryFollower
    from pulse.store import LocalStore

    target = named_store(store)
    if isinstance(target, LocalStore) and target.root == directory.absolute():
        raise FileError(f"{directory}: the store itself; follow into another directory")
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    patience = 0.0 if once else timeout
    with progress("fetching", as_json=as_json) as report, DirectoryFollower(target, directory, progress=report) as follower:
        for followed in _followed(follower, stopping, patience):
            _say(followed, follower.current, as_json=as_json)
        version = follower.version
    if patience is not None and version is None and not stopping.is_set():
        raise NoPath(f"{target.url}: nothing is published there, so {follower.current} does not exist")
    if patience is not None:
        emit(
            {"current": str(follower.current), "version": version}, [f"{follower.current}: version {version}"], as_json=as_json, stream=True
        )


def _followed(follower: DirectoryFollower, stopping: threading.Event, patience: float | None) -> Iterator[Followed]:
    """Each step of following, until told to stop or nothing has come for `patience` seconds; a store that fails is asked again."""
    quiet, pause = time.monotonic(), 0.5
    while not stopping.is_set():
        try:
            followed = follower.advance(0 if patience == 0 else 1, stopped=stopping.is_set)
            pause = 0.5
        except (StoreUnavailable, NotFound, DigestMismatch) as error:
            if patience is not None and time.monotonic() - quiet >= patience:
                raise
            warn(f"{error}; asking again in {pause:.1f} s")
            stopping.wait(pause)
            pause = min(2 * pause, 30.0)
            continue
        if followed is not None:
            quiet = time.monotonic()
            yield followed
        elif patience is not None and time.monotonic() - quiet >= patience:
            return


def _say(followed: Followed, current: Path, *, as_json: bool) -> None:
    manifest = followed.manifest
    how = "anchor" if followed.kind == "anchor" else f"{followed.patches} patch{'es' if followed.patches != 1 else ''}"
    line = (
        f"{current} -> version {manifest.version}" + ("" if manifest.step is None else f" (step {manifest.step})") + f": {how}, "
        f"{size(followed.nbytes)}, fetched in {followed.fetch_seconds:.2f} s, written in {followed.write_seconds:.2f} s, "
        f"state digest {manifest.state_digest[:12]} verified" + (f"; {followed.reason}" if followed.reason else "")
    )
    result = {
        "version": manifest.version,
        "step": manifest.step,
        "kind": followed.kind,
        "patches": followed.patches,
        "bytes": followed.nbytes,
        "fetch_seconds": followed.fetch_seconds,
        "write_seconds": followed.write_seconds,
        "state_digest": manifest.state_digest,
        "reason": followed.reason,
    }
    emit(result, [line], as_json=as_json, stream=True)
