"""Containers around anything, with an honest trailer: what a hostile writer can make."""

import hashlib
import json
import struct

from pulse.codec import container, sections

PREFIX = struct.Struct("<8sHHII")


def sealed(body):
    """A container with an honest trailer, whatever is in it."""
    return bytes(body) + hashlib.sha256(body).digest()


def built(header, pieces=b"", *, raw=None, stored=None, version=0, flags=0, magic=container.MAGIC):
    """A container around a header: an object, or any bytes; sizes can be made to lie."""
    text = header if isinstance(header, bytes) else container.to_json(header)
    packed = sections.pack(text)
    prefix = PREFIX.pack(magic, version, flags, len(packed) if stored is None else stored, len(text) if raw is None else raw)
    return sealed(prefix + packed + pieces)


def loosely(header):
    """The header's text, even of what canonical JSON would refuse to write."""
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def opened(blob):
    """The header's object without its sizes, and the sections."""
    header, views = container.read(blob)
    return header, [bytes(view) for view in views]


def closed(header, pieces):
    """The container of a header, which lists the sizes of these sections."""
    return built(loosely({**header, "sections": [len(piece) for piece in pieces]}), b"".join(pieces))


def taken_apart(blob):
    """The header's object, sizes included, and the bytes of the sections."""
    header, pieces = opened(blob)
    return {**header, "sections": [len(piece) for piece in pieces]}, b"".join(pieces)
