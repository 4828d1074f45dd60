"""The bytes around a patch: magic, version, header, sections, trailer. Specified in docs/format.md.

    magic 8 | version u16 | flags u16 | stored header size u32 | raw header size u32 | header | sections ... | SHA-256 of all before

The header is canonical JSON (sorted keys, no spaces, ASCII), stored as a section; its key "sections" lists the stored sizes of the
sections that follow, back to back. The reader rejects whatever it does not know.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from pulse.canonical import from_json, to_json
from pulse.codec.sections import pack, unpack
from pulse.errors import DigestMismatch, FormatError, UnsupportedFormat

MAGIC = b"\x89PULSE\r\n"  # as in PNG: a byte that is not ASCII, and a line end that careless transfers would change
VERSION = 0
_PREFIX = struct.Struct("<8sHHII")
_TRAILER = 32
_MAX_HEADER = 1 << 28  # 256 MiB: two million tensors with long names
_FREE_HEADER = 1 << 20  # a header up to this size may be packed however well
_MAX_PACKING = 64  # a larger one at most so many times: parsed JSON takes up to 25 times its text in memory


def write(header: Mapping[str, Any], sections: Sequence[bytes]) -> bytes:
    """One container."""
    raw = to_json({**header, "sections": [len(section) for section in sections]})
    stored = pack(raw)
    if len(raw) > _header_limit(len(stored)):
        stored = raw
    pieces = [_PREFIX.pack(MAGIC, VERSION, 0, len(stored), len(raw)), stored, *sections]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return b"".join([*pieces, digest.digest()])


def _header_limit(stored: int) -> int:
    """How large a header may be that is stored in so many bytes."""
    return min(_MAX_HEADER, max(stored, _FREE_HEADER + _MAX_PACKING * stored))


def read_header(data: bytes | memoryview, what: str = "patch") -> tuple[dict[str, Any], int]:
    """The header and the offset of the first section. `data` need only reach that far. what: the word for it in errors."""
    if len(data) < _PREFIX.size:
        raise FormatError(f"not a {what}: {len(data)} bytes, a header needs {_PREFIX.size}")
    magic, version, flags, stored, raw = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise FormatError(f"not a {what}: it starts with {bytes(magic)!r}, not {MAGIC!r}")
    if version != VERSION or flags != 0:
        raise UnsupportedFormat(
            f"{what} format version {version}, flags {flags:#x}; this reader knows version {VERSION}, no flags: upgrade"
        )
    end = _PREFIX.size + stored
    if end > len(data):
        raise FormatError(f"the {what} header claims {stored} bytes, but only {len(data) - _PREFIX.size} follow: truncated or altered")
    if raw > _header_limit(stored):
        raise FormatError(f"the {what} header claims to unpack from {stored} to {raw} bytes; the limit is {_header_limit(stored)}")
    return from_json(unpack(memoryview(data)[_PREFIX.size : end], raw, f"{what} header"), f"{what} header"), end


def read(data: bytes | memoryview, what: str = "patch") -> tuple[dict[str, Any], list[memoryview]]:
    """The header and the stored sections of one whole container, its trailer digest checked first. what: the word for it in errors."""
    view = memoryview(data)
    if len(view) < _PREFIX.size + _TRAILER or bytes(view[:8]) != MAGIC:
        read_header(view, what)  # says what is wrong
        raise FormatError(f"a {what} of {len(view)} bytes is truncated")
    found = hashlib.sha256(view[:-_TRAILER]).hexdigest()
    expected = bytes(view[-_TRAILER:]).hex()
    header, start = read_header(view, what)
    if found != expected:
        raise DigestMismatch(f"{what}: its trailer says SHA-256 {expected}, its bytes have {found}: truncated or altered")
    sizes = header.pop("sections", None)
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise FormatError(f"{what} header: 'sections' is not a list of sizes")
    if start + sum(sizes) != len(view) - _TRAILER:
        raise FormatError(f"{what} header: sections of {sum(sizes)} bytes, but {len(view) - _TRAILER - start} are there")
    return header, [view[lo:hi] for lo, hi in pairwise(accumulate(sizes, initial=start))]
