"""What a patch says of itself: the header, read and checked against itself before any section is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pulse.bits import Spec, dtype_of
from pulse.canonical import fields, natural, optional, shown, state_digits, text, tuple_of
from pulse.codec import container
from pulse.codec.classes import Classes, exponents_of
from pulse.codec.lanes import MAX_BLOCK, Lane, lanes_of
from pulse.errors import FormatError, UnsupportedFormat, WeightsMismatch
from pulse.patch import Part, TensorPatch

Encoding = Literal["contextual", "portable", "absolute"]
ENCODINGS: tuple[Encoding, ...] = ("contextual", "portable", "absolute")


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
    classes: tuple[Classes, ...] = ()  # per lane; the contextual encoding alone has them

    @property
    def lanes(self) -> list[Lane]:
        """How the parts lie in the sections."""
        return lanes_of([part for part, _ in self.parts])

    def sections_of(self, entry: tuple[int, int, int]) -> int:
        """How many sections a block has: its planes; in the contextual encoding gaps and steps are followed by a check."""
        _, first, values = entry
        return first + values + (self.encoding == "contextual" and values > 0)

    @property
    def changed(self) -> int:
        """Units written."""
        return sum(count for _, count in self.parts) + sum(spec.units for _, spec in self.whole)

    @property
    def decoded_bytes(self) -> int:
        """Memory that decoding takes for positions and values."""
        sparse = sum(count * (8 + dtype_of(part.spec.dtype).width) for part, count in self.parts)
        return sparse + sum(spec.nbytes for _, spec in self.whole)


def inspect(blob: bytes | memoryview) -> Header:
    """What a whole patch says of itself, its trailer digest checked, without decoding it."""
    raw, sections = container.read(blob)
    header = parse_header(raw)
    check_sections(header, len(sections))
    return header


def read_header(blob: bytes | memoryview) -> Header:
    """What the patch says of itself, without decoding it."""
    raw, _ = container.read_header(blob)
    raw.pop("sections", None)
    return parse_header(raw)


def check_specs(header: Header, specs: Mapping[str, Spec]) -> None:
    """Raise `WeightsMismatch` unless every part of the patch is a piece of one of these tensors."""
    for part, _ in header.parts:
        if specs.get(part.name) != part.spec:
            raise WeightsMismatch(f"{part.name}: the patch changes {part.spec}, here it is {specs.get(part.name, 'missing')}")


def parse_header(raw: dict[str, Any]) -> Header:
    """A header from its JSON object; `FormatError` for anything that does not add up."""
    encoding = raw.get("encoding")
    if encoding is None and "kind" in raw:
        raise FormatError(f"this is no patch: it is a {shown(raw['kind'])} that trainers exchange in a round")
    if encoding not in ENCODINGS:
        raise UnsupportedFormat(f"encoding {shown(encoding)}; this reader knows {', '.join(ENCODINGS)}")
    try:
        readers = dict(_READERS) | ({"classes": tuple_of(classes_from_json)} if encoding == "contextual" else {})
        header = Header(**fields(raw, **readers))
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
    _check_classes(header)
    sizes = [stop - start for lane in header.lanes for start, stop in _few_blocks(lane, header)]
    if len(sizes) != len(header.blocks) or any(entry[0] > size for entry, size in zip(header.blocks, sizes, strict=True)):
        raise FormatError("patch header: the blocks do not fit the parts")
    if sum(entry[0] for entry in header.blocks) != sum(count for _, count in header.parts):
        raise FormatError("patch header: the blocks hold more or fewer changes than the parts")
    chunks = sum(-(-spec.units // header.block) for _, spec in header.whole)
    if chunks != len(header.chunks):
        raise FormatError("patch header: the chunks do not fit the whole tensors")


def _check_classes(header: Header) -> None:
    if header.encoding != "contextual":
        return
    if len(header.classes) != len(header.lanes):
        raise FormatError("patch header: the classes do not fit the lanes")
    for lane, classes in zip(header.lanes, header.classes, strict=True):
        try:
            classes.check(exponents_of(lane.dtype))
        except FormatError as error:
            raise FormatError(f"patch header: {error}") from error
    if any(sections > 1 and not values for _, sections, values in header.blocks):
        raise FormatError("patch header: a block of ranks is one section, one of gaps has steps as well")


def _few_blocks(lane: Lane, header: Header) -> Iterator[tuple[int, int]]:
    """The lane's blocks, unless a lying header claims more of them than it has entries for."""
    if lane.borders[-1] > len(header.blocks) * header.block:
        raise FormatError("patch header: more units than blocks for them")
    yield from lane.blocks(header.block)


def check_sections(header: Header, found: int) -> None:
    """Raise `FormatError` unless the container holds as many sections as the header describes."""
    wanted = sum(map(header.sections_of, header.blocks)) + sum(header.chunks)
    if wanted != found:
        raise FormatError(f"patch header: {wanted} sections described, {found} there")


def part_to_json(change: TensorPatch) -> list[Any]:
    """How a header lists the changes of one part."""
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


def classes_from_json(entry: object) -> Classes:
    """Classes as a header lists them."""
    exponents, means = _list(entry, 2)
    return Classes(tuple_of(natural)(exponents), tuple_of(natural)(means))


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
