"""`encode` a patch as bytes and `decode` it, in one of three encodings.

contextual: ranks in the classes of the base, and steps; the smallest, and needs the whole base on both sides. portable: gaps and steps;
needs old bits only where it writes. absolute: gaps and new bits, for receivers whose base cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.arrays import as_bits
from pulse.bits import TensorBits, dtype_of
from pulse.codec import container, contextual, gaps
from pulse.codec.classes import Classes
from pulse.codec.header import ENCODINGS, Encoding, Header, check_sections, parse_header, part_to_json
from pulse.codec.lanes import BLOCK, MAX_BLOCK, Lane, join, lanes_of, split
from pulse.codec.literals import pack_whole
from pulse.codec.sections import unpack_planes
from pulse.errors import BaseMismatch, FormatError, WeightsMismatch
from pulse.patch import Patch, TensorPatch, relate, resolve
from pulse.threads import each

_KEPT = 4  # tensors of the base: as many as the blocks under way lie in, where tensors are large
_Block = tuple[gaps.Entry, list[bytes]]


def encode(
    patch: Patch,
    base: Mapping[str, Any] | None = None,
    *,
    encoding: Encoding = "portable",
    block: int = BLOCK,
    threads: int | None = None,
) -> bytes:
    """The bytes of `patch`. `base` (name -> tensor): the weights that it applies to.

    The contextual encoding always needs the base, the others only where the values must be converted: bits to steps or back. That it is the
    right base is not checked here, which would cost a pass over all bits: whoever reads the patch finds out. threads: how
    many to use; the bytes do not depend on it.
    """
    if not isinstance(patch, Patch):
        raise TypeError(f"a Patch is wanted, not {type(patch).__name__}")
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {encoding!r}; known are {', '.join(ENCODINGS)}")
    if not 1 <= block <= MAX_BLOCK:
        raise ValueError(f"blocks of {block} units; 1 to {MAX_BLOCK} are possible")
    patch = _in_values_of(encoding, patch, base)
    changes = {change.part: change for change in patch.changes}
    if len(changes) != len(patch.changes):
        raise ValueError("the patch lists a part twice; compose its changes first")
    header: dict[str, Any] = {"encoding": encoding, "block": block, "base": patch.base, "result": patch.result}
    header |= {"removed": list(patch.removed), "parts": [part_to_json(change) for change in patch.changes]}
    lanes = [(lane, *join(lane, changes)) for lane in lanes_of(list(changes))]
    if encoding == "contextual":
        found = [_contextual(*row, _reader(base), block, threads) for row in lanes]
        header["classes"] = [[list(classes.exponents), list(classes.means)] for classes, _ in found]
        blocks = [packed for _, row in found for packed in row]
    else:
        blocks = [packed for row in lanes for packed in _with_gaps(*row, block, threads, fold=encoding == "portable")]
    whole = _whole(patch.whole, block, threads)
    header["blocks"] = [list(entry) for entry, _ in blocks]
    header["whole"] = [[name, patch.whole[name].dtype, list(patch.whole[name].shape)] for name in sorted(patch.whole)]
    header["chunks"] = [len(planes) for planes in whole]
    return container.write(
        header, [section for _, sections in blocks for section in sections] + [plane for planes in whole for plane in planes]
    )


def _in_values_of(encoding: Encoding, patch: Patch, base: Mapping[str, Any] | None) -> Patch:
    """The patch with the values that an encoding writes: bits for absolute, steps for the others."""
    wanted = "bits" if encoding == "absolute" else "steps"
    if not patch.changes or (patch.values == wanted and encoding != "contextual"):
        return patch
    if base is None:
        raise ValueError(f"the {encoding} encoding of a patch of {patch.values} needs base=, the weights that it applies to")
    if patch.values == wanted:
        return patch
    old = {change.part.name: as_bits(base[change.part.name]) for change in patch.changes if change.part.name in base}
    return relate(patch, old) if wanted == "steps" else resolve(patch, old)


def _reader(base: Mapping[str, Any] | None) -> contextual.Base:
    """Reads the base by name. The last few tensors are kept: blocks in a row lie in one, and it may be a copy made for the reading."""

    @lru_cache(maxsize=_KEPT)
    def read(name: str) -> TensorBits:
        if base is None or name not in base:
            raise WeightsMismatch(f"the patch changes {name}, which these weights do not have")
        return as_bits(base[name])

    return read


def _contextual(
    lane: Lane, positions: NDArray[np.uint64], steps: NDArray[Any], base: contextual.Base, size: int, threads: int | None
) -> tuple[Classes, list[_Block]]:
    """The classes and the blocks of a lane."""
    spans = list(lane.blocks(size))
    classes = contextual.classes_of(lane, positions, base, len(spans))

    def packed(span: tuple[int, int]) -> _Block:
        lo, hi = np.searchsorted(positions, np.array(span, np.uint64))
        return contextual.encode_block(lane, span, positions[lo:hi], steps[lo:hi], classes, base)

    return classes, list(each(packed, spans, threads))


def _with_gaps(
    lane: Lane, positions: NDArray[np.uint64], values: NDArray[Any], size: int, threads: int | None, *, fold: bool
) -> Iterator[_Block]:
    def packed(span: tuple[int, int]) -> _Block:
        lo, hi = np.searchsorted(positions, np.array(span, np.uint64))
        return gaps.pack(positions[lo:hi], values[lo:hi], span[0], fold=fold)

    return each(packed, lane.blocks(size), threads)


def _whole(tensors: Mapping[str, TensorBits], size: int, threads: int | None) -> list[list[bytes]]:
    """The planes of every chunk of every tensor."""
    chunks = [
        (bits.flat[start : start + size], dtype_of(bits.dtype))
        for _, bits in sorted(tensors.items())
        for start in range(0, bits.flat.size, size)
    ]
    return list(each(lambda chunk: pack_whole(*chunk), chunks, threads))


def decode(
    blob: bytes | memoryview, base: Mapping[str, Any] | None = None, *, max_bytes: int | None = None, threads: int | None = None
) -> Patch:
    """The patch in these bytes. With `base` (name -> tensor), its values are bits, read against it; a contextual one needs it.

    Raises `FormatError` for bytes that are not a patch, `BaseMismatch` if a contextual patch turns out to be for other weights, and
    `FormatError` for one that would take more than `max_bytes` to decode (default: 64 MiB plus 4096 times its size, far above what honest
    patches need, unless they carry large tensors of one constant). Nothing is executed, whatever the bytes are.
    """
    raw, sections = container.read(blob)
    header = parse_header(raw)
    limit = (1 << 26) + 4096 * len(blob) if max_bytes is None else max_bytes
    if header.decoded_bytes > limit:
        raise FormatError(f"the patch claims {header.decoded_bytes} bytes from {len(blob)}; the limit is {limit} (max_bytes=)")
    check_sections(header, len(sections))
    if header.encoding == "contextual" and header.parts and base is None:
        raise ValueError("a contextual patch is read beside the weights that it applies to: decode(blob, base)")
    queue = iter(sections)
    blocks = [[next(queue) for _ in range(header.sections_of(entry))] for entry in header.blocks]
    try:
        changes = {change.part: change for change in _decode_changes(header, blocks, _reader(base), threads)}
    except BaseMismatch as error:
        which = "weights" if header.base is None else f"weights with state digest {header.base}"
        raise BaseMismatch(f"the patch applies to {which}; these are others: find its base, or an anchor") from error
    for part, count in header.parts:
        if changes[part].positions.size != count:
            raise FormatError(f"{part.name}: the header says {count} changes, the blocks hold {changes[part].positions.size}")
    whole = _decode_whole(header, queue)
    ordered = tuple(changes[part] for part, _ in header.parts)
    _check_disjoint(ordered)
    patch = Patch(ordered, whole, header.removed, "steps" if header.encoding == "portable" else "bits", header.base, header.result)
    if base is None or patch.values == "bits":
        return patch
    return resolve(patch, {part.name: as_bits(base[part.name]) for part, _ in header.parts if part.name in base})


def _decode_changes(
    header: Header, blocks: Sequence[Sequence[memoryview]], base: contextual.Base, threads: int | None
) -> Iterator[TensorPatch]:
    done = 0
    for index, lane in enumerate(header.lanes):
        spans = list(lane.blocks(header.block))

        def unpacked(
            job: tuple[tuple[int, int], gaps.Entry, Sequence[memoryview]], lane: Lane = lane, index: int = index
        ) -> tuple[NDArray[np.uint64], NDArray[Any]]:
            span, entry, sections = job
            if header.encoding != "contextual":
                return gaps.unpack(entry, sections, span, lane.dtype.unsigned, fold=header.encoding == "portable")
            return contextual.decode_block(lane, span, entry, sections, header.classes[index], base)

        jobs = zip(spans, header.blocks[done:], blocks[done:], strict=False)
        done += len(spans)
        found = list(each(unpacked, jobs, threads))
        positions = [pair[0] for pair in found] or [np.empty(0, np.uint64)]
        values = [pair[1] for pair in found] or [np.empty(0, lane.dtype.unsigned)]
        yield from split(lane, np.concatenate(positions), np.concatenate(values))


def _check_disjoint(changes: tuple[TensorPatch, ...]) -> None:
    """Parts of one tensor may not write one unit twice: the result would depend on their order, and steps would be lost."""
    by_name: dict[str, list[TensorPatch]] = {}
    for change in changes:
        by_name.setdefault(change.part.name, []).append(change)
    for name, group in by_name.items():
        if len(group) > 1:
            located = np.concatenate([change.located for change in group])
            if np.unique(located).size != located.size:
                raise FormatError(f"{name}: its parts overlap: a unit is written twice")


def _decode_whole(header: Header, queue: Iterator[memoryview]) -> dict[str, TensorBits]:
    counts = iter(header.chunks)
    whole = {}
    for name, spec in header.whole:
        unsigned = dtype_of(spec.dtype).unsigned
        flat = np.empty(spec.units, unsigned)
        for start in range(0, spec.units, header.block):
            chunk = flat[start : start + header.block]
            chunk[:] = unpack_planes([next(queue) for _ in range(next(counts))], chunk.size, unsigned, name)
        whole[name] = TensorBits(spec.dtype, spec.shape, flat)
    return whole
