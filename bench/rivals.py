"""How others lay out the same step, re-created from their descriptions: what each would put on the wire.

Every function takes the changed tensors and returns bytes that hold everything a receiver of that system needs, exactly (the inverses
are in tests/bench/inverses.py). Where a description is silent, the smaller choice was taken; digests, signatures, run and model names
that some of them send as well are left out. Descriptions: arXiv 2602.03839 and the code of its authors (v3.1, PULSEPT1); NeMo-RL pull
request 2444; slime pull request 1806, SkyRL pull request 1935, ModelExpress pull request 705; verl pull request 6974, vLLM 40096.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.steps import Bits, Change
from pulse.codec.sections import zigzag

_CHUNK = 1 << 20
PIECE = 1 << 19  # units that zstd patches at a time: larger ones gain nothing and take longer
ESCAPE = 255  # what does not fit a byte follows in a list of its own


def zstd_1(data: bytes) -> bytes:
    """One zstd frame of level 1."""
    return zstandard.ZstdCompressor(level=1).compress(data)


def with_header(entries: Sequence[Mapping[str, Any]], *pieces: bytes) -> bytes:
    """A length (u32), JSON of that length, and the pieces."""
    header = json.dumps({"tensors": entries}, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(header)), header, *pieces])


def narrow(numbers: NDArray[np.int64], *widths: str) -> NDArray[Any]:
    """The numbers in the first of these dtypes that holds them all."""
    return numbers.astype(next(width for width in widths if numbers.max() <= np.iinfo(width).max))


def paper(changes: Sequence[Change]) -> bytes:
    """v3.1: rows as differences, columns as differences inside a row (absolute in a new one), new bits; one zstd-1 frame for everything.

    A tensor is seen as (first dimension, the rest). The dtypes of rows (u8, u16, i32) and columns (u16, i32) are chosen per tensor.
    """
    entries, arrays, offset = [], [], 0
    for change in changes:
        width = int(np.prod(change.shape[1:]))
        rows, columns = np.divmod(change.positions, width)
        row_steps = np.diff(rows, prepend=0)
        column_steps = np.diff(columns, prepend=0)
        column_steps[row_steps > 0] = columns[row_steps > 0]
        found = [narrow(row_steps, "<u1", "<u2", "<i4"), narrow(column_steps, "<u2", "<i4"), change.new]
        entry = {"name": change.name, "shape": change.shape, "num_nonzero": rows.size, "value_dtype": "bfloat16"}
        entry |= {"row_dtype": found[0].dtype.str, "col_dtype": found[1].dtype.str, "offset": offset}
        entries.append(entry | {"sizes": [array.nbytes for array in found]})
        arrays += [array.tobytes() for array in found]
        offset += sum(array.nbytes for array in found)
    return zstd_1(with_header(entries, *arrays))


def flat(changes: Sequence[Change]) -> bytes:
    """The paper's layout at its kindest: distances between changes as bytes (255: it follows in a list of its own), new bits.

    All distances, all escapes, all bits: a zstd-1 frame each, so that none spoils another's statistics, as in v3.1 with small tensors.
    """
    gaps = np.concatenate([np.diff(change.positions, prepend=0) for change in changes])
    entries = [{"name": change.name, "shape": change.shape, "changed": change.positions.size} for change in changes]
    kinds = np.minimum(gaps, ESCAPE).astype("u1"), gaps[gaps >= ESCAPE].astype("<u4").view("u1").reshape(-1, 4).T
    frames = [zstd_1(with_header(entries)), *(zstd_1(kind.tobytes()) for kind in (*kinds, np.concatenate([c.new for c in changes])))]
    return b"".join([struct.pack("<4I", *map(len, frames)), *frames])


def nemo(changes: Sequence[Change]) -> bytes:
    """NeMo-RL: per tensor the distances between changes in the narrowest of u16, u32, u64, and old XOR new; one zstd-1 frame.

    Its own container is a serialized tuple of torch tensors, which is larger than the JSON here.
    """
    entries, arrays = [], []
    for change in changes:
        gaps = narrow(np.diff(change.positions, prepend=0), "<u2", "<u4", "<u8")
        entries.append({"name": change.name, "shape": change.shape, "changed": gaps.size, "gaps": gaps.dtype.str})
        arrays += [gaps.tobytes(), (change.old ^ change.new).tobytes()]
    return zstd_1(with_header(entries, *arrays))


def xor(changes: Sequence[Change]) -> bytes:
    """slime, miles, SkyRL, ModelExpress: every tensor that changed whole, as old XOR new, a zstd-1 frame each."""
    return framed(changes, [zstd_1((change.before ^ change.after).tobytes()) for change in changes])


def framed(changes: Sequence[Change], frames: Sequence[bytes]) -> bytes:
    """A frame for every tensor, and a header that says which."""
    pairs = zip(changes, frames, strict=True)
    return with_header([{"name": change.name, "shape": change.shape, "size": len(frame)} for change, frame in pairs], *frames)


def raw(changes: Sequence[Change]) -> bytes:
    """vLLM, verl: int32 positions and new bits, as they are."""
    entries = [{"name": change.name, "shape": change.shape, "changed": change.positions.size} for change in changes]
    return with_header(entries, *(narrow(c.positions, "<i4").tobytes() + c.new.tobytes() for c in changes))


def patch_from(changes: Sequence[Change]) -> bytes:
    """`zstd --patch-from`: the new bytes with the old ones as a raw dictionary, in pieces of 1 MiB, tuned.

    Level 3, a window over both, hash tables as large as the window. Untuned it needs several times as much: zstd keeps 16 MiB of a
    dictionary at most, and too few places of it.
    """
    return framed(changes, [b"".join(_patched(*pair) for pair in pieces(change.before, change.after)) for change in changes])


def pieces(*arrays: Bits) -> Iterator[list[Bits]]:
    """Arrays of one size, cut alike."""
    for start in range(0, arrays[0].size, PIECE):
        yield [array[start : start + PIECE] for array in arrays]


def _patched(before: Bits, after: Bits) -> bytes:
    window = max((2 * before.nbytes).bit_length(), zstandard.WINDOWLOG_MIN)
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=window, hash_log=window, chain_log=window)
    prefix = zstandard.ZstdCompressionDict(before.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    frame = zstandard.ZstdCompressor(dict_data=prefix, compression_params=parameters).compress(after.tobytes())
    return struct.pack("<I", len(frame)) + frame


def class_rice(changes: Sequence[Change]) -> bytes:
    """PULSEPT1 v3: gaps between ranks inside each exponent class of the base, Rice coded, and zig-zag differences of bits in bytes.

    Per tensor and class that changed: class, Rice parameter, number of changes. Differences of 255 and above follow as u16 in a list.
    Everything in one zstd-1 frame, one kind of data after the other.
    """
    entries, kinds = [], []
    for change in changes:
        classes, ranks = ranked(change.before, change.positions)
        order = np.argsort(classes, kind="stable")
        found, counts = np.unique(classes, return_counts=True)
        ranks, starts = ranks[order], np.cumsum(counts) - counts
        gaps = np.diff(ranks, prepend=-1) - 1
        gaps[starts] = ranks[starts]
        parameters = best_parameters(gaps, starts, counts)
        index = rice(gaps, np.repeat(parameters, counts))
        steps = zigzag(change.new - change.old)[order]
        entries.append({"name": change.name, "shape": change.shape, "classes": found.size, "index": index.size})
        table = np.column_stack([found, parameters]).astype("u1"), counts.astype("<u4")
        kinds.append((*table, index, np.minimum(steps, ESCAPE).astype("u1"), steps[steps >= ESCAPE]))
    joined = [np.concatenate([array.reshape(-1) for array in kind]) for kind in zip(*kinds, strict=True)]
    joined[1] = joined[1].view("u1").reshape(-1, 4).T  # the counts, lowest bytes first: most others are zero
    return zstd_1(with_header(entries, *(array.tobytes() for array in joined)))


def ranked(base: Bits, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The exponent class at each position, and how many units before it are of the same class. base: (units,); both (n,) int64."""
    seen = np.zeros(256, np.int64)
    classes = ((base[positions] >> 7) & 0xFF).astype(np.int64)
    ranks = np.empty_like(classes)
    for start in range(0, base.size, _CHUNK):
        block = ((base[start : start + _CHUNK] >> 7) & 0xFF).astype(np.uint8)
        lo, hi = np.searchsorted(positions, [start, start + block.size])
        counts = np.bincount(block, minlength=256)
        inside = np.empty(block.size, np.int64)
        inside[np.argsort(block, kind="stable")] = np.arange(block.size) - np.repeat(np.cumsum(counts) - counts, counts)
        ranks[lo:hi] = inside[positions[lo:hi] - start] + seen[classes[lo:hi]]
        seen += counts
    return classes, ranks


def best_parameters(gaps: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The Rice parameter of each class that makes its gaps shortest. starts, counts: where each class lies in `gaps`; all (classes,)."""
    lengths = [np.add.reduceat(gaps >> parameter, starts) + counts * (parameter + 1) for parameter in range(32)]
    parameters: NDArray[np.int64] = np.argmin(lengths, axis=0)
    return parameters


def rice(numbers: NDArray[np.int64], parameters: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Rice codes, packed: the number without its lowest `parameter` bits as so many zeros and a one, then those bits. Both (n,)."""
    quotients = numbers >> parameters
    ends = np.cumsum(quotients + 1 + parameters)
    bits = np.zeros(int(ends[-1]), np.uint8)
    bits[ends - parameters - 1] = 1
    for place in range(int(parameters.max())):
        has = parameters > place
        bits[ends[has] - 1 - place] = (numbers[has] >> place) & 1
    return np.packbits(bits)


PAPER = "paper v3.1"
RIVALS: Mapping[str, Callable[[Sequence[Change]], bytes]] = {
    "int32 + BF16 (vLLM, verl)": raw,
    PAPER: paper,
    "paper, kindest reading": flat,
    "dense XOR (slime, SkyRL)": xor,
    "zstd --patch-from, tuned": patch_from,
    "u16 gaps + XOR (NeMo-RL)": nemo,
    "Rice per class (PULSEPT1)": class_rice,
}
