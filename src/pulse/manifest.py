"""What a version is: the small object whose existence makes the version exist, and the names of everything in a store.

    STORE/
      head.json                       a hint where to start looking; never decides anything
      manifests/000000000412.json     put if absent: the commit
      anchors/000000000450.json       put if absent: version 450, already published as a patch, is also there whole
      payloads/SHA-256                content addressed: patches, weight files, tensor indexes, config and tokenizer files

A manifest is canonical JSON. Its hash is named by the next one, so the newest manifest vouches for the whole chain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pulse.bits import Spec, dtype_of
from pulse.canonical import (
    fields,
    from_json,
    natural,
    optional,
    sha256_digits,
    shown,
    state_digits,
    text,
    to_json,
    tuple_of,
)
from pulse.digest import Sum, sha256
from pulse.errors import FormatError, UnsupportedFormat

FORMAT = 0
FORMAT_COMPRESSED = 1  # of what names a compressed anchor, so that readers from before there were any say "upgrade"
COMPRESSED = ".pulse"  # ends the names of weights stored compressed: model.safetensors.pulse
MAX_MANIFEST = 1 << 20  # bytes; a manifest of the protocol takes about 1.5 KB
HEAD = "head.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


def manifest_key(version: int) -> str:
    """Where the manifest of a version is."""
    return f"manifests/{version:012d}.json"


def anchor_key(version: int) -> str:
    """Where the anchor made later for an already published version is."""
    return f"anchors/{version:012d}.json"


@dataclass(frozen=True, slots=True)
class Payload:
    """One immutable object, named by its content."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes | memoryview) -> Payload:
        """The payload that these bytes are."""
        return cls(len(data), sha256(data))

    @property
    def key(self) -> str:
        """Where it is in a store."""
        return f"payloads/{self.sha256}"

    @classmethod
    def from_json(cls, value: object) -> Payload:
        """Read and check."""
        return cls(**fields(value, size=natural, sha256=sha256_digits))


@dataclass(frozen=True, slots=True)
class File:
    """A file of an anchor's directory: its name there, and its bytes."""

    name: str
    payload: Payload

    @classmethod
    def from_json(cls, value: object) -> File:
        """Read and check."""
        return cls(**fields(value, name=file_name, payload=Payload.from_json))


def file_name(value: object) -> str:
    """`value`, if it names a file inside a directory: plain relative segments, none starting with a dot."""
    if not _FILE_NAME.fullmatch(text(value)):
        raise FormatError(f"{value!r} is not a plain relative file name")
    return text(value)


@dataclass(frozen=True, slots=True)
class Anchor:
    """A version stored whole: safetensors files in the Hugging Face layout, plain or compressed, and the files the publisher was given."""

    weights: tuple[File, ...]
    files: tuple[File, ...]

    @property
    def nbytes(self) -> int:
        """Size of the weights' files in bytes, as they are stored."""
        return sum(file.payload.size for file in self.weights)

    @property
    def compressed(self) -> bool:
        """Whether a file of weights is stored compressed."""
        return any(file.name.endswith(COMPRESSED) for file in self.weights)

    @classmethod
    def from_json(cls, value: object) -> Anchor:
        """Read and check."""
        anchor = cls(**fields(value, weights=tuple_of(File.from_json), files=tuple_of(File.from_json)))
        names = [file.name for file in (*anchor.weights, *anchor.files)]
        if len(set(names)) != len(names):
            raise FormatError(f"two files of one name: {sorted(names)}")
        return anchor


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version.

    base: the version that `patch` applies to; None for an anchor. tensors: the index of names, dtypes, shapes and ties that a
    receiver must match. view: what masters are cast to before they are compared, as the publisher was told; None: as they are.
    previous: SHA-256 of the manifest before. newest_anchor: the newest one known when this was committed.
    """

    run: str
    version: int
    base: int | None
    epoch: int
    nonce: str
    step: int | None
    created: int
    previous: str | None
    state_digest: str
    patch: Payload | None
    anchor: Anchor | None
    tensors: Payload
    newest_anchor: int
    view: str | Mapping[str, str] | None
    changed: int
    units: int
    full_nbytes: int
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Literal["anchor", "patch"]:
        """How the version is stored at its commit."""
        return "patch" if self.patch is not None else "anchor"

    @property
    def nbytes(self) -> int:
        """What a follower downloads for this version: the patch, or the anchor's weights."""
        return self.patch.size if self.patch is not None else self.anchor.nbytes if self.anchor is not None else 0

    def to_bytes(self) -> bytes:
        """Canonical JSON. Links over several versions and the signature have their places, empty so far."""
        return to_json({"format": _format(self.anchor), "links": [], "signature": None, **_plain(self)})

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "manifest") -> Manifest:
        """Read and check everything; `FormatError` or `UnsupportedFormat` otherwise."""
        value = _content(data, what, newest=FORMAT_COMPRESSED)
        if value.pop("links", None) != [] or value.pop("signature", 0) is not None:
            raise UnsupportedFormat(f"{what}: links or a signature, which this reader does not know")
        manifest = cls(**_read(value, what, _READERS))
        _check_same(manifest.to_bytes(), data, what)
        if (manifest.patch is None) == (manifest.anchor is None) or (manifest.patch is None) != (manifest.base is None):
            raise FormatError(f"{what}: neither an anchor nor a patch with a base")
        if manifest.base not in (None, manifest.version - 1):
            raise FormatError(f"{what}: version {manifest.version} on base {manifest.base}")
        if (manifest.version == 0) != (manifest.previous is None):
            raise FormatError(f"{what}: version {manifest.version} after the manifest {manifest.previous}")
        if manifest.newest_anchor > manifest.version or (manifest.newest_anchor == manifest.version) != (manifest.anchor is not None):
            raise FormatError(
                f"{what}: version {manifest.version}, stored as {manifest.kind}, names {manifest.newest_anchor} as the newest anchor"
            )
        return manifest


def _content(data: bytes, what: str, newest: int = FORMAT) -> dict[str, Any]:
    """The JSON object in these bytes, without its format, which is known here."""
    value = from_json(data, what)
    found = value.pop("format", None)
    if type(found) is not int or not FORMAT <= found <= newest:
        raise UnsupportedFormat(f"{what}: format {shown(found)}; this reader knows {FORMAT} to {newest}: upgrade")
    return value


def _format(anchor: Anchor | None) -> int:
    """The format of what names this anchor."""
    return FORMAT_COMPRESSED if anchor is not None and anchor.compressed else FORMAT


def _check_same(written: bytes, read: bytes, what: str) -> None:
    """What is read is canonical, so only a format that does not go with the anchor could be written otherwise."""
    if written != read:
        raise UnsupportedFormat(f"{what}: its format does not go with its anchor")


def _read(value: object, what: str, readers: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an object; errors say what it is."""
    try:
        return fields(value, **readers)
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from error


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, all the way down."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _metadata(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{value!r} is not an object")
    return value


def _view(value: object) -> str | dict[str, str]:
    if isinstance(value, dict):
        return {text(name): dtype_of(text(dtype)).name for name, dtype in value.items()}
    return dtype_of(text(value)).name


_READERS: Mapping[str, Any] = {
    "run": text,
    "version": natural,
    "base": optional(natural),
    "epoch": natural,
    "nonce": text,
    "step": optional(natural),
    "created": natural,
    "previous": optional(sha256_digits),
    "state_digest": state_digits,
    "patch": optional(Payload.from_json),
    "anchor": optional(Anchor.from_json),
    "tensors": Payload.from_json,
    "newest_anchor": natural,
    "view": optional(_view),
    "changed": natural,
    "units": natural,
    "full_nbytes": natural,
    "metadata": _metadata,
}


@dataclass(frozen=True, slots=True)
class LateAnchor:
    """An anchor made for a version that had already been published as a patch."""

    run: str
    version: int
    state_digest: str
    anchor: Anchor
    tensors: Payload

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return to_json({"format": _format(self.anchor), **_plain(self)})

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "anchor") -> LateAnchor:
        """Read and check everything."""
        readers = {"run": text, "version": natural, "state_digest": state_digits, "anchor": Anchor.from_json, "tensors": Payload.from_json}
        late = cls(**_read(_content(data, what, newest=FORMAT_COMPRESSED), what, readers))
        _check_same(late.to_bytes(), data, what)
        return late


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """The names, dtypes, shapes and ties of a set of weights, with the digest's sums at the time it was written."""

    specs: Mapping[str, Spec]
    sums: Mapping[str, Sum]
    aliases: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        tensors = {name: [spec.dtype, list(spec.shape), self.sums[name].hex] for name, spec in self.specs.items()}
        return to_json({"format": FORMAT, "tensors": tensors, "aliases": dict(self.aliases)})

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "tensor index") -> TensorIndex:
        """Read and check everything."""
        found = _read(_content(data, what), what, {"tensors": _metadata, "aliases": _metadata})
        specs, sums = {}, {}
        for name, entry in found["tensors"].items():
            if not isinstance(entry, list) or len(entry) != 3:
                raise FormatError(f"{what}: {name}: {entry!r} is not dtype, shape, sum")
            specs[name] = Spec(dtype_of(text(entry[0])).name, tuple_of(natural)(entry[1]))
            specs[name].nbytes  # noqa: B018  raises where a packed dtype does not fill its bytes
            sums[name] = Sum.from_hex(state_digits(entry[2]))
        aliases = {name: text(canonical) for name, canonical in found["aliases"].items()}
        if set(aliases) & set(specs) or set(aliases.values()) - set(specs):
            raise FormatError(f"{what}: aliases that are tensors, or that point to none")
        return cls(specs, sums, aliases)


def head_bytes(version: int) -> bytes:
    """The hint that `head.json` holds: the newest version, and the oldest whose payloads are still there."""
    return to_json({"format": FORMAT, "version": version, "horizon": 0})


def parse_head(data: bytes) -> int:
    """The newest version that `head.json` knew of."""
    return int(_read(_content(data, HEAD), HEAD, {"version": natural, "horizon": natural})["version"])
