"""`encode` a patch as bytes and `decode` it. Two encodings today: portable (gaps and steps) and absolute (gaps and new bits)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pulse.arrays import as_bits
from pulse.bits import Spec, TensorBits, dtype_of
from pulse.canonical import fields, natural, optional, shown, state_digits, text, tuple_of
from pulse.codec import container
from pulse.codec.lanes import BLOCK, MAX_BLOCK, Lane, from_gaps, join, lanes_of, split, to_gaps
from pulse.codec.sections import pack_planes, unpack_planes, unzigzag, zigzag
from pulse.errors import FormatError, UnsupportedFormat, WeightsMismatch
from pulse.patch import Part, Patch, TensorPatch, relate, resolve

Encoding = Literal["portable", "absolute"]
ENCODINGS: tuple[Encoding, ...] = ("portable", "absolute")
_VALUES: Mapping[str, Literal["steps", "bits"]] = {"portable": "steps", "absolute": "bits"}


def encode(patch: Patch, base: Mapping[str, Any] | None = None, *, encoding: Encoding = "portable", block: int = BLOCK) -> bytes:
    """The bytes of `patch`. `base` (name -> tensor) is needed only where the values must be converted: bits to steps or back."""
    if not isinstance(patch, Patch):
        raise TypeError(f"a Patch is wanted, not {type(patch).__name__}")
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {encoding!r}; known are {', '.join(ENCODINGS)}")
    if not 1 <= block <= MAX_BLOCK:
        raise ValueError(f"blocks of {block} units; 1 to {MAX_BLOCK} are possible")
    if patch.values != _VALUES[encoding] and patch.changes:
        if base is None:
            raise ValueError(f"the {encoding} encoding of a patch of {patch.values} needs base=, the weights that it applies to")
        old = {change.part.name: as_bits(base[change.part.name]) for change in patch.changes if change.part.name in base}
        patch = relate(patch, old) if encoding == "portable" else resolve(patch, old)
    changes = {change.part: change for change in patch.changes}
    if len(changes) != len(patch.changes):
        raise ValueError("the patch lists a part twice; compose its changes first")
    sections: list[bytes] = []
    blocks = [_pack_block(*found, sections, fold=encoding == "portable") for found in _blocks(changes, block)]
    chunks = []
    for name in sorted(patch.whole):
        flat = patch.whole[name].flat
        for start in range(0, flat.size, block):
            planes = pack_planes(flat[start : start + block])
            sections += planes
            chunks.append(len(planes))
    header = {
        "encoding": encoding,
        "block": block,
        "base": patch.base,
        "result": patch.result,
        "removed": list(patch.removed),
        "parts": [_part_to_json(change) for change in patch.changes],
        "blocks": blocks,
        "whole": [[name, patch.whole[name].dtype, list(patch.whole[name].shape)] for name in sorted(patch.whole)],
        "chunks": chunks,
    }
    return container.write(header, sections)


def _blocks(changes: dict[Part, TensorPatch], size: int) -> Iterator[tuple[NDArray[np.uint32], NDArray[Any]]]:
    """Gaps and values of every block of every lane."""
    for lane in lanes_of(list(changes)):
        positions, values = join(lane, changes)
        for start, stop in lane.blocks(size):
            lo, hi = np.searchsorted(positions, np.array([start, stop], np.uint64))
            yield to_gaps(positions[lo:hi], start), values[lo:hi]


def _pack_block(gaps: NDArray[np.uint32], values: NDArray[Any], sections: list[bytes], *, fold: bool) -> list[int]:
    """Append the sections of one block; returns its header entry: changes, planes of gaps, planes of values."""
    gap_planes = pack_planes(gaps)
    value_planes = pack_planes(zigzag(values) if fold else values)
    sections += gap_planes + value_planes
    return [gaps.size, len(gap_planes), len(value_planes)]


@dataclass(frozen=True, slots=True)
class Header:
    """What a patch says of itself, checked against itself; reading it touches no section."""

    encoding: Encoding
    block: int
    base: str | None
    result: str | None
    removed: tuple[str, ...]
    parts: tuple[tuple[Part, int], ...]
    blocks: tuple[tuple[int, int, int], ...]
    whole: tuple[tuple[str, Spec], ...]
    chunks: tuple[int, ...]

    @property
    def lanes(self) -> list[Lane]:
        """How the parts lie in the sections."""
        return lanes_of([part for part, _ in self.parts])

    @property
    def changed(self) -> int:
        """Units written."""
        return sum(count for _, count in self.parts) + sum(spec.units for _, spec in self.whole)

    @property
    def decoded_bytes(self) -> int:
        """Memory that decoding takes for positions and values."""
        sparse = sum(count * (8 + dtype_of(part.spec.dtype).width) for part, count in self.parts)
        return sparse + sum(spec.nbytes for _, spec in self.whole)


def decode(blob: bytes | memoryview, base: Mapping[str, Any] | None = None, *, max_bytes: int | None = None) -> Patch:
    """The patch in these bytes; with `base`, its values are bits, read against it.

    Raises `FormatError` for bytes that are not a patch, and for one that would take more than `max_bytes` to decode (default: 64 MiB
    plus 4096 times its size, far above what honest patches need, unless they carry large tensors of one constant). Nothing is
    executed, whatever the bytes are.
    """
    raw, sections = container.read(blob)
    header = parse_header(raw)
    limit = (1 << 26) + 4096 * len(blob) if max_bytes is None else max_bytes
    if header.decoded_bytes > limit:
        raise FormatError(f"the patch claims {header.decoded_bytes} bytes from {len(blob)}; the limit is {limit} (max_bytes=)")
    _check_sections(header, len(sections))
    queue = iter(sections)
    changes = {change.part: change for change in _decode_changes(header, queue)}
    for part, count in header.parts:
        if changes[part].positions.size != count:
            raise FormatError(f"{part.name}: the header says {count} changes, the blocks hold {changes[part].positions.size}")
    whole = _decode_whole(header, queue)
    ordered = tuple(changes[part] for part, _ in header.parts)
    _check_disjoint(ordered)
    patch = Patch(ordered, whole, header.removed, _VALUES[header.encoding], header.base, header.result)
    if base is None:
        return patch
    return resolve(patch, {part.name: as_bits(base[part.name]) for part, _ in header.parts if part.name in base})


def _decode_changes(header: Header, queue: Iterator[memoryview]) -> Iterator[TensorPatch]:
    entries = iter(header.blocks)
    for lane in header.lanes:
        found = [_unpack_block(next(entries), lane, span, queue, header) for span in lane.blocks(header.block)]
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


def _unpack_block(
    entry: tuple[int, int, int], lane: Lane, span: tuple[int, int], queue: Iterator[memoryview], header: Header
) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    count, gap_planes, value_planes = entry
    gaps = unpack_planes([next(queue) for _ in range(gap_planes)], count, np.dtype("<u4"), "gaps")
    values = unpack_planes([next(queue) for _ in range(value_planes)], count, lane.dtype.unsigned, "values")
    if header.encoding == "portable":
        values = unzigzag(values)
        if not values.all():
            raise FormatError("a step of zero: an unchanged unit is listed as changed")
    return from_gaps(gaps, *span), values


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


def check_specs(header: Header, specs: Mapping[str, Spec]) -> None:
    """Raise `WeightsMismatch` unless every part of the patch is a piece of one of these tensors."""
    for part, _ in header.parts:
        if specs.get(part.name) != part.spec:
            raise WeightsMismatch(f"{part.name}: the patch changes {part.spec}, here it is {specs.get(part.name, 'missing')}")


def inspect(blob: bytes | memoryview) -> Header:
    """What a whole patch says of itself, its trailer digest checked, without decoding it."""
    raw, sections = container.read(blob)
    header = parse_header(raw)
    _check_sections(header, len(sections))
    return header


def read_header(blob: bytes | memoryview) -> Header:
    """What the patch says of itself, without decoding it."""
    raw, _ = container.read_header(blob)
    raw.pop("sections", None)
    return parse_header(raw)


def parse_header(raw: dict[str, Any]) -> Header:
    """A header from its JSON object; `FormatError` for anything that does not add up."""
    encoding = raw.get("encoding")
    if encoding not in ENCODINGS:
        raise UnsupportedFormat(f"encoding {shown(encoding)}; this reader knows {', '.join(ENCODINGS)}")
    try:
        header = Header(**fields(raw, **_READERS))
    except FormatError as error:
        raise type(error)(f"patch header: {error}") from error
    _check_header(header)
    return header


def _check_header(header: Header) -> None:
    if not 1 <= header.block <= MAX_BLOCK:
        raise FormatError(f"patch header: blocks of {header.block} units; 1 to {MAX_BLOCK} are possible")
    for part, count in header.parts:
        part.check()
        if count > part.units:
            raise FormatError(f"{part.name}: {count} changes in {part.units} units")
    if len({part for part, _ in header.parts}) != len(header.parts):
        raise FormatError("patch header: a part is listed twice")
    patched = {part.name for part, _ in header.parts}
    if len({(part.name, part.spec) for part, _ in header.parts}) != len(patched):
        raise FormatError("patch header: a tensor is listed with two dtypes or shapes")
    names = [*patched, *(name for name, _ in header.whole), *header.removed]
    if len(set(names)) != len(names):
        raise FormatError("patch header: a tensor is listed twice")
    sizes = [stop - start for lane in header.lanes for start, stop in _few_blocks(lane, header)]
    if len(sizes) != len(header.blocks) or any(entry[0] > size for entry, size in zip(header.blocks, sizes, strict=True)):
        raise FormatError("patch header: the blocks do not fit the parts")
    if sum(entry[0] for entry in header.blocks) != sum(count for _, count in header.parts):
        raise FormatError("patch header: the blocks hold more or fewer changes than the parts")
    chunks = sum(-(-spec.units // header.block) for _, spec in header.whole)
    if chunks != len(header.chunks):
        raise FormatError("patch header: the chunks do not fit the whole tensors")


def _few_blocks(lane: Lane, header: Header) -> Iterator[tuple[int, int]]:
    """The lane's blocks, unless a lying header claims more of them than it has entries for."""
    if lane.borders[-1] > len(header.blocks) * header.block:
        raise FormatError("patch header: more units than blocks for them")
    yield from lane.blocks(header.block)


def _check_sections(header: Header, found: int) -> None:
    wanted = sum(gaps + values for _, gaps, values in header.blocks) + sum(header.chunks)
    if wanted != found:
        raise FormatError(f"patch header: {wanted} sections described, {found} there")


def _part_to_json(change: TensorPatch) -> list[Any]:
    part = change.part
    place = ["span", *part.span] if part.span is not None else ["box", *map(list, part.box)] if part.box is not None else None
    return [part.name, part.spec.dtype, list(part.spec.shape), place, change.positions.size]


def _part_from_json(entry: object) -> tuple[Part, int]:
    name, dtype, shape, place, count = _list(entry, 5)
    part = Part(text(name), _spec(dtype, shape))
    if place is None:
        return part, natural(count)
    kind, *numbers = _list(place) or [None]
    if kind == "span":
        start, stop = map(natural, _list(numbers, 2))
        return replace(part, span=(start, stop)), natural(count)
    if kind == "box":
        pairs = [_list(pair, 2) for pair in numbers]
        return replace(part, box=tuple((natural(lo), natural(hi)) for lo, hi in pairs)), natural(count)
    raise UnsupportedFormat(f"{shown(name)}: unknown kind of part {shown(kind)}")


def _whole_from_json(entry: object) -> tuple[str, Spec]:
    name, dtype, shape = _list(entry, 3)
    return text(name), _spec(dtype, shape)


def _block_from_json(entry: object) -> tuple[int, int, int]:
    count, gap_planes, value_planes = map(natural, _list(entry, 3))
    return count, gap_planes, value_planes


def _spec(dtype: object, shape: object) -> Spec:
    spec = Spec(dtype_of(text(dtype)).name, tuple_of(natural)(shape))
    spec.nbytes  # noqa: B018  raises where a packed dtype does not fill its bytes
    return spec


def _list(value: object, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise FormatError(f"{shown(value)} is not a list of {length or 'some'} values")
    return value


_READERS: Mapping[str, Any] = {
    "encoding": text,
    "block": natural,
    "base": optional(state_digits),
    "result": optional(state_digits),
    "removed": tuple_of(text),
    "parts": tuple_of(_part_from_json),
    "blocks": tuple_of(_block_from_json),
    "whole": tuple_of(_whole_from_json),
    "chunks": tuple_of(natural),
}
