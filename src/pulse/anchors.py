"""Making anchors: a set of weights as the files of a Hugging Face directory, each stored under its own digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from pulse import checkpoint
from pulse.bits import TensorBits
from pulse.digest import Sum
from pulse.manifest import Anchor, File, Payload, TensorIndex

Put = Callable[[bytes], Payload]


def weight_files(tensors: Mapping[str, TensorBits], limit: int) -> Iterator[tuple[str, bytes]]:
    """The weight files of a directory, one in memory at a time. limit: bytes per shard."""
    specs = {name: bits.spec for name, bits in tensors.items()}
    files = checkpoint.layout(specs, limit)
    for file, names in files.items():
        yield file, checkpoint.serialize({name: tensors[name] for name in names})
    if len(files) > 1:
        yield checkpoint.INDEX, checkpoint.index_json(files, specs)


def put_anchor(put: Put, weights: Iterable[tuple[str, bytes]], companions: Mapping[str, Path]) -> Anchor:
    """Store the files of an anchor."""
    stored = tuple(File(name, put(data)) for name, data in weights)
    beside = tuple(File(name, put(checkpoint.read_file(path))) for name, path in sorted(companions.items()))
    return Anchor(stored, beside)


def put_index(put: Put, tensors: Mapping[str, TensorBits], sums: Mapping[str, Sum], aliases: Mapping[str, str]) -> Payload:
    """Store the index that says what a receiver must match."""
    return put(TensorIndex({name: bits.spec for name, bits in tensors.items()}, sums, dict(aliases)).to_bytes())
