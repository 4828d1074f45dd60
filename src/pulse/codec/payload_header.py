"""What a payload says of itself: the header, read and checked against itself before any section is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pulse.canonical import fields, natural, shown, text, tuple_of
from pulse.codec import container
from pulse.codec.cells import LEVELS
from pulse.codec.classes import Classes
from pulse.codec.header import classes_from_json
from pulse.codec.lanes import MAX_BLOCK
from pulse.codec.values import MOST_MIDDLE
from pulse.errors import FormatError, UnsupportedFormat

DIGITS: Mapping[str, int] = MappingProxyType({"float32": 32, "bfloat16": 8, "float8": 4})  # significant bits of a move that are kept


@dataclass(frozen=True, slots=True)
class Header:
    """What a payload says of itself.

    facts: what its sender adds, such as the round; units: weights of the anchor; gated: 1 if moves are counted from the border that they
    cross; blocks: of each `block` weights the number of entries, and the FP32 exponent of their typical move.
    """

    facts: Mapping[str, Any]
    units: int
    block: int
    gated: int
    value_dtype: str
    blocks: tuple[tuple[int, int], ...]
    classes: Classes

    @property
    def entries(self) -> int:
        """How many entries there are."""
        return sum(count for count, _ in self.blocks)

    @property
    def digits(self) -> int:
        """Significant bits of a move that are kept."""
        return DIGITS[self.value_dtype]

    def span(self, index: int) -> tuple[int, int]:
        """Where a block lies."""
        return index * self.block, min((index + 1) * self.block, self.units)


def write(header: Header, sections: Sequence[bytes]) -> bytes:
    """The payload: one container."""
    plain = {name: getattr(header, name) for name in ("facts", "units", "block", "gated", "value_dtype")}
    classes = [list(header.classes.exponents), list(header.classes.means)]
    return container.write({"kind": "payload", **plain, "blocks": list(map(list, header.blocks)), "classes": classes}, sections)


def read(blob: bytes | memoryview) -> tuple[Header, list[memoryview]]:
    """What a payload says of itself, and its sections, its trailer digest checked first. `FormatError` for what is none."""
    raw, sections = container.read(blob, "payload")
    kind = raw.pop("kind", None)
    if kind != "payload":
        found = "a patch between weights: see pulse.decode" if "encoding" in raw else f"of the kind {shown(kind)}"
        raise FormatError(f"this is no payload of a round against an anchor; it is {found}")
    try:
        header = Header(**fields(raw, **_READERS))
        _check(header, len(sections))
    except FormatError as error:
        raise type(error)(f"payload header: {error}") from error
    return header, sections


def _check(header: Header, sections: int) -> None:
    if header.value_dtype not in DIGITS:
        raise UnsupportedFormat(f"value dtype {header.value_dtype[:40]!r}; this reader knows {', '.join(DIGITS)}")
    if not 1 <= header.block <= MAX_BLOCK:
        raise FormatError(f"blocks of {header.block} weights; 1 to {MAX_BLOCK} are possible")
    if header.gated > 1:
        raise FormatError(f"gated is 0 or 1, not {header.gated}")
    header.classes.check(LEVELS)
    if len(header.blocks) != -(-header.units // header.block):
        raise FormatError(f"{len(header.blocks)} blocks do not fit {header.units} weights")
    for index, (count, middle) in enumerate(header.blocks):
        lo, hi = header.span(index)
        if count > hi - lo:
            raise FormatError(f"{count} entries in a block of {hi - lo} weights")
        if middle > (MOST_MIDDLE if count else 0):
            raise FormatError(f"a block with {count} entries has a typical move of 2^{middle}")
    if sections != 2 * sum(count > 0 for count, _ in header.blocks):
        raise FormatError(f"{sections} sections; every block with entries has two")


def _facts(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FormatError("facts are an object")
    return value


def _block(value: object) -> tuple[int, int]:
    count, middle = tuple_of(natural)(value) if isinstance(value, list) and len(value) == 2 else (None, None)
    if count is None or middle is None:
        raise FormatError("a block is listed as its entries and their typical move")
    return count, middle


_READERS: Mapping[str, Any] = {
    "facts": _facts,
    "units": natural,
    "block": natural,
    "gated": natural,
    "value_dtype": text,
    "blocks": tuple_of(_block),
    "classes": classes_from_json,
}
