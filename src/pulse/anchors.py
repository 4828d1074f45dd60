"""Making anchors: a set of weights as the files of a Hugging Face directory, each stored under its own digest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pulse import checkpoint
from pulse.bits import TensorBits
from pulse.codec.whole import encode_whole
from pulse.errors import FileError, FormatError
from pulse.files import read_file
from pulse.manifest import COMPRESSED, Anchor, File, Payload, file_name

Put = Callable[[bytes], Payload]


def weight_files(tensors: Mapping[str, TensorBits], limit: int) -> Iterator[tuple[str, bytes]]:
    """The weight files of a directory, one in memory at a time. limit: bytes per shard."""
    specs = {name: bits.spec for name, bits in tensors.items()}
    files = checkpoint.layout(specs, limit)
    for file, names in files.items():
        yield file, checkpoint.serialize({name: tensors[name] for name in names})
    if len(files) > 1:
        yield checkpoint.INDEX, checkpoint.index_json(files, specs)


def companions(paths: Iterable[str | os.PathLike[str]]) -> dict[str, Path]:
    """What is to lie beside the weights: these files, and these directories' files other than weights, by the names they get."""
    found: dict[str, Path] = {}
    for name, path in (pair for each in paths for pair in checkpoint.companions(each)):
        try:
            file_name(name)
        except FormatError as error:
            raise FileError(f"{path}: names beside an anchor have only A-Z a-z 0-9 . _ - and do not start with a dot: rename it") from error
        if name == checkpoint.INDEX or name.endswith((".safetensors", ".safetensors" + COMPRESSED)):
            raise FileError(f"{path}: would lie among the anchor's own weights: leave it out of files=")
        if found.setdefault(name, path) != path:
            raise FileError(f"{path} and {found[name]} would have one name beside an anchor: leave one out of files=")
    return found


def described(companions: Mapping[str, Path]) -> tuple[File, ...]:
    """The files beside an anchor, by name and content."""
    return tuple(File(name, Payload.of(read_file(path))) for name, path in sorted(companions.items()))


def compressed(weights: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """The same weight files with compressed ones in place of plain safetensors, one in memory at a time."""
    for name, data in weights:
        if name.endswith(".safetensors"):
            yield name + COMPRESSED, encode_whole(checkpoint.parse(memoryview(data), name))
        else:
            yield name, data


def put_anchor(
    put: Put,
    weights: Iterable[tuple[str, bytes]],
    companions: Mapping[str, Path],
    kept: Sequence[File] = (),
    *,
    compress: bool = False,
) -> Anchor:
    """Store the files of an anchor. kept: files of an earlier one, which lie in the store already, for use where none are given."""
    stored = tuple(File(name, put(data)) for name, data in (compressed(weights) if compress else weights))
    beside = tuple(File(name, put(read_file(path))) for name, path in sorted(companions.items()))
    return Anchor(stored, beside or tuple(kept))
