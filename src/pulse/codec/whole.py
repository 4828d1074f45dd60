"""Tensors and nothing else, compressed: a patch to nothing, which carries each of them whole. Compressed anchors are made of these."""

from __future__ import annotations

from collections.abc import Mapping

from pulse.bits import TensorBits
from pulse.codec.patches import decode, encode
from pulse.errors import FormatError
from pulse.patch import Patch


def encode_whole(tensors: Mapping[str, TensorBits]) -> bytes:
    """A patch that makes these tensors out of nothing."""
    return encode(Patch(whole=tensors), encoding="absolute")


def decode_whole(blob: bytes | memoryview, max_bytes: int, what: str) -> dict[str, TensorBits]:
    """The tensors that `encode_whole` was given; their units belong to the caller.

    Raises `FormatError`, naming `what`, for anything else, and for tensors of more than `max_bytes` before it makes room for them.
    """
    try:
        patch = decode(blob, max_bytes=max_bytes)
    except FormatError as error:
        raise type(error)(f"{what}: {error}") from error
    if patch.changes or patch.removed:
        raise FormatError(f"{what}: a patch that changes or removes tensors, where whole ones are expected")
    return dict(patch.whole)
