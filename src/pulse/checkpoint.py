"""Checkpoints as people have them: a `.safetensors` file, or a directory in the Hugging Face layout (one file, or shards and an index).

The reader maps files instead of reading them, and rejects instead of guessing. The safetensors library has no numpy form for BF16,
FP8 and packed types and copies what it reads, so the thirty lines of header are read here; the tests compare with the library.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pulse.bits import DTYPES, Spec, TensorBits, dtype_of
from pulse.canonical import shown, text
from pulse.errors import FileError, FormatError, WeightsMismatch
from pulse.files import write_file, write_files, writing

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 << 30
_MAX_HEADER = 100_000_000  # the safetensors library's own limit
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack)$|model\.safetensors\.index\.json$")
_SHARD = re.compile(r"[^/\0]+\.safetensors")
_OURS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json")


def parse(data: memoryview, what: str) -> dict[str, TensorBits]:
    """The tensors of one safetensors file; they share `data`'s memory. `FormatError` for anything that is not exactly one."""
    if len(data) < 8:  # the size of the size
        raise FormatError(f"{what}: not a safetensors file: {len(data)} bytes")
    (size,) = struct.unpack_from("<Q", data)
    if size > min(_MAX_HEADER, len(data) - 8):
        raise FormatError(f"{what}: not a safetensors file, or truncated: its header claims {size} of {len(data)} bytes")
    try:
        header = json.loads(str(data[8 : 8 + size], "utf-8"), object_pairs_hook=_once)
        "".join(header).encode()  # fails for half a surrogate pair, which is no text
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{what}: its header is not an object")
    header.pop("__metadata__", None)
    entries = {name: _entry(value, f"{what}: {name}") for name, value in header.items()}
    body = data[8 + size :]
    spans = sorted(span for _, span in entries.values())
    edges = [(0, 0), *spans, (len(body), len(body))]
    if any(left[1] != right[0] for left, right in pairwise(edges)):
        raise FormatError(f"{what}: its tensors do not fill its {len(body)} bytes of data exactly: truncated, extended or overlapping")
    return {name: _tensor(spec, body[lo:hi]) for name, (spec, (lo, hi)) in entries.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is listed twice")
    return found


def _entry(value: object, what: str) -> tuple[Spec, tuple[int, int]]:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
        raise FormatError(f"{what}: no dtype, shape and data_offsets")
    shape, offsets = value["shape"], value["data_offsets"]
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if any(type(number) is not int or number < 0 for number in numbers) or len(offsets) != 2:
        raise FormatError(f"{what}: shape {shown(shape)}, offsets {shown(offsets)}")
    try:
        spec = Spec(dtype_of(text(value["dtype"])).name, tuple(shape))
        nbytes = spec.nbytes
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from error
    if nbytes != offsets[1] - offsets[0]:
        raise FormatError(f"{what}: {spec} takes {nbytes} bytes, its offsets give {offsets[1] - offsets[0]}")
    return spec, (offsets[0], offsets[1])


def _tensor(spec: Spec, data: memoryview) -> TensorBits:
    flat = np.frombuffer(data, dtype_of(spec.dtype).unsigned)
    return TensorBits(spec.dtype, spec.shape, flat if flat.flags.aligned else flat.copy())


def serialize(tensors: Mapping[str, TensorBits]) -> bytes:
    """One safetensors file. Equal tensors give equal bytes: widest dtypes first, then names."""
    if "__metadata__" in tensors:
        raise WeightsMismatch("safetensors keeps the name __metadata__ for itself; no tensor may have it")
    order = sorted(tensors, key=lambda name: (-DTYPES[tensors[name].dtype].bits, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        bits = tensors[name]
        start, end = end, end + bits.spec.nbytes
        header[name] = {"dtype": bits.dtype, "shape": list(bits.shape), "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    bodies = (tensors[name].flat.data.cast("B") for name in order if tensors[name].flat.size)
    return b"".join([struct.pack("<Q", len(head)), head, *bodies])


def layout(tensors: Mapping[str, Spec], limit: int = SHARD_BYTES) -> dict[str, list[str]]:
    """Which tensors go into which file: one file up to `limit` bytes, else shards in order of names."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in sorted(tensors):
        if shards[-1] and filled + tensors[name].nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensors[name].nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def index_json(files: Mapping[str, Sequence[str]], tensors: Mapping[str, Spec]) -> bytes:
    """The `model.safetensors.index.json` that goes with several shards."""
    total = sum(spec.nbytes for spec in tensors.values())
    where = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2).encode()


def read(path: str | os.PathLike[str]) -> dict[str, TensorBits]:
    """The tensors of a `.safetensors` file or Hugging Face directory, mapped into memory."""
    path = Path(path)
    if path.is_dir():
        return _read_directory(path)
    return parse(_mapped(path), str(path))


def _read_directory(path: Path) -> dict[str, TensorBits]:
    if not (path / INDEX).exists():
        if not (path / SINGLE).exists():
            raise FileError(f"{path}: neither {SINGLE} nor {INDEX} is in this directory")
        return read(path / SINGLE)
    try:
        where = json.loads(bytes(_mapped(path / INDEX)))["weight_map"]
        files = sorted(set(where.values()))
        "".join(files).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{path / INDEX}: not an index of shards: {error!r}") from error
    if any(not _SHARD.fullmatch(name) for name in files):
        raise FormatError(f"{path / INDEX}: a shard that is not a file beside it: {shown(files)}")
    tensors: dict[str, TensorBits] = {}
    for name in files:
        found = parse(_mapped(path / name), str(path / name))
        if set(found) != {tensor for tensor, file in where.items() if file == name}:
            raise FormatError(f"{path / name}: its tensors are not those that {INDEX} says")
        tensors |= found
    return tensors


def _mapped(path: Path) -> memoryview:
    try:
        if path.stat().st_size == 0:
            raise FormatError(f"{path}: an empty file")
        return np.memmap(path, np.uint8, "r").data
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error


def companions(path: str | os.PathLike[str]) -> Iterator[tuple[str, Path]]:
    """What belongs beside the weights: `path` itself if it is a file, else the directory's own files that are not weights."""
    path = Path(path)
    if path.is_file():
        yield path.name, path
    elif path.is_dir():
        for file in sorted(path.iterdir()):
            if file.is_file() and not file.name.startswith(".") and not _WEIGHTS.match(file.name):
                yield file.name, file
    else:
        raise FileError(f"{path}: no such file or directory")


def write(path: str | os.PathLike[str], tensors: Mapping[str, TensorBits], *, limit: int = SHARD_BYTES) -> list[Path]:
    """Write tensors as one `.safetensors` file, or into a directory in the Hugging Face layout. Returns the files written.

    Weights that were in the directory under this layout's names are replaced; other files stay.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        write_file(path, serialize(tensors))
        return [path]
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    specs = {name: bits.spec for name, bits in tensors.items()}
    files = layout(specs, limit)
    shards = ((path / file, serialize({name: tensors[name] for name in names})) for file, names in files.items())
    index = [(path / INDEX, index_json(files, specs))] if len(files) > 1 else []
    write_files(chain(shards, index))
    written = [*(place for place, _ in index), *(path / file for file in files)]
    with writing(path):
        for stale in set(path.iterdir()) - set(written):
            if _OURS.fullmatch(stale.name):
                stale.unlink()
    return written
