"""A payload: some entries of an FP32 pseudo-gradient, against an anchor that both sides hold bit for bit.

Positions are written as patches write them (`pulse.codec.contextual`), but classes go by how far each weight of the anchor is from changing
its view: those near a border of their cell are sent most often. Values are written as what they are, moves over that border, counted in
representable FP32 numbers (`pulse.value_coder`); the few that are not exactly such moves travel as their 32 bits. Lossless, unless fewer
significant bits are asked for; then a value is shortened towards the border, never beyond what it was, so that it cannot overshoot.
Specified in docs/format.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse.codec import payload_header, ranks, values
from pulse.codec.cells import LEVELS, plain_levels
from pulse.codec.classes import Classes, choose
from pulse.codec.contextual import check_of
from pulse.codec.known import Anchor
from pulse.codec.lanes import BLOCK, MAX_BLOCK
from pulse.codec.payload_header import DIGITS, Header, read
from pulse.errors import BaseMismatch, FormatError
from pulse.threads import each

__all__ = ["DIGITS", "Anchor", "Encoded", "Entries", "Header", "decode", "encode", "read"]

_MASK = np.uint16(0xFFFF)
_SAMPLE = 1 << 20  # weights from which the classes are decided


class Entries(NamedTuple):
    """Entries of a pseudo-gradient. positions: (n,) uint64, ascending, in all weights laid end to end; values: (n,) float32, finite."""

    positions: NDArray[np.uint64]
    values: NDArray[np.float32]


NOTHING = Entries(np.empty(0, np.uint64), np.empty(0, np.float32))


class Encoded(NamedTuple):
    """A payload's bytes, and the values that it really carries, (n,) float32: what is sent."""

    blob: bytes
    sent: NDArray[np.float32]


def encode(
    entries: Entries,
    anchor: Anchor,
    *,
    value_dtype: str = "float32",
    facts: Mapping[str, Any] | None = None,
    block: int = BLOCK,
    threads: int | None = None,
) -> Encoded:
    """The payload of some entries. The bytes do not depend on `threads`.

    value_dtype: float32 is lossless; bfloat16 and float8 keep 8 and 4 significant bits of a move (`pulse.codec.moves.moves_of` says what
    stays behind). Raises `ValueError` for entries that are not what they should be, such as values that are not finite.
    """
    if value_dtype not in DIGITS:
        raise ValueError(f"value_dtype={value_dtype!r}; known are {', '.join(DIGITS)}")
    if not 1 <= block <= MAX_BLOCK:
        raise ValueError(f"blocks of {block} weights; 1 to {MAX_BLOCK} are possible")
    _check(entries, anchor)
    spans = [(start, min(start + block, anchor.units)) for start in range(0, anchor.units, block)]
    cuts = np.searchsorted(entries.positions, np.array([0, *(hi for _, hi in spans)], np.uint64))
    parts = [Entries(entries.positions[lo:hi], entries.values[lo:hi]) for lo, hi in pairwise(cuts)]
    classes = _classes(anchor, parts, threads)

    def packed(index: int) -> tuple[tuple[int, int], list[bytes], NDArray[np.float32]]:
        return _encode_block(parts[index], spans[index], anchor, classes, DIGITS[value_dtype])

    found = list(each(packed, range(len(spans)), threads))
    header = Header(dict(facts or {}), anchor.units, block, int(anchor.gated), value_dtype, tuple(entry for entry, _, _ in found), classes)
    blob = payload_header.write(header, [section for _, sections, _ in found for section in sections])
    return Encoded(blob, np.concatenate([NOTHING.values, *(sent for _, _, sent in found)]))


def decode(blobs: Sequence[bytes | memoryview], anchor: Anchor, threads: int | None = None) -> list[Entries]:
    """The entries of several payloads, in one pass over the anchor.

    Takes memory in proportion to the anchor and the number of payloads, whatever they claim. Raises `FormatError` for bytes that are no
    payload, and `BaseMismatch` for one that was made against another anchor.
    """
    opened = [read(blob) for blob in blobs]
    for header, _ in opened:
        _check_base(header, anchor)
    sizes = {header.block for header, _ in opened}
    if len(sizes) > 1:
        raise FormatError(f"payloads of one round have blocks of one size, not {sorted(sizes)[:5]}")
    if not opened:
        return []
    by_block = [_by_block(*one) for one in opened]
    spans = [opened[0][0].span(index) for index in range(len(opened[0][0].blocks))]

    def unpacked(index: int) -> list[Entries]:
        wanted = [sections.get(index) for sections in by_block]
        levels = anchor.levels(*spans[index]) if any(wanted) else None
        return [
            NOTHING if pair is None or levels is None else _decode_block(header, index, pair, levels, anchor)
            for (header, _), pair in zip(opened, wanted, strict=True)
        ]

    blocks = list(each(unpacked, range(len(spans)), threads))
    return [_joined([block[i] for block in blocks]) for i in range(len(opened))]


def _check(entries: Entries, anchor: Anchor) -> None:
    positions, found = entries
    if positions.dtype != np.uint64 or found.dtype != np.float32 or positions.shape != found.shape or positions.ndim != 1:
        raise ValueError(f"entries of {positions.dtype}{list(positions.shape)} and {found.dtype}{list(found.shape)}: see Entries")
    if positions.size and (positions[-1] >= anchor.units or (positions[1:] <= positions[:-1]).any()):
        raise ValueError(f"positions ascend, and lie within the {anchor.units} weights of the anchor")
    if not np.isfinite(found).all():
        raise ValueError("a pseudo-gradient that is not finite cannot be sent")


def _check_base(header: Header, anchor: Anchor) -> None:
    if header.units != anchor.units:
        raise BaseMismatch(f"the payload is for {header.units} weights, here are {anchor.units}")
    if header.gated != anchor.gated:
        raise BaseMismatch(f"the payload has gated={bool(header.gated)}, the anchor here gated={anchor.gated}")


def _by_block(header: Header, sections: Sequence[memoryview]) -> dict[int, tuple[memoryview, memoryview]]:
    """The two sections of every block that has entries."""
    filled = [index for index, (count, _) in enumerate(header.blocks) if count]
    return {index: (sections[2 * i], sections[2 * i + 1]) for i, index in enumerate(filled)}


def _joined(parts: Sequence[Entries]) -> Entries:
    return Entries(*(np.concatenate(columns) for columns in zip(NOTHING, *parts, strict=True)))


def _classes(anchor: Anchor, parts: Sequence[Entries], threads: int | None) -> Classes:
    """The classes, by how many weights of each level there are and how many of them are sent."""
    pace = max(1, anchor.units // _SAMPLE) | 1  # odd, so that it does not keep step with the rows of a matrix
    seen = np.zeros(LEVELS)
    for flat, cells, _ in anchor.within(0, anchor.units):
        sample = plain_levels(flat[::pace], cells)
        seen += np.bincount(sample, minlength=LEVELS) * (flat.size / sample.size)
    counts = each(lambda part: np.bincount(anchor.at(part.positions).level, minlength=LEVELS), parts, threads)
    return choose(seen, sum(counts, np.zeros(LEVELS, np.int64)), len(parts))


def _encode_block(
    entries: Entries, span: tuple[int, int], anchor: Anchor, classes: Classes, digits: int
) -> tuple[tuple[int, int], list[bytes], NDArray[np.float32]]:
    """The header's entry and the sections of one block, and the values that they carry."""
    if not entries.positions.size:
        return (0, 0), [], NOTHING.values
    known = anchor.at(entries.positions)
    seen = np.zeros(len(classes.means), np.int64)
    class_of, ranked = ranks.rank(anchor.levels(*span), entries.positions - np.uint64(span[0]), _cuts(classes), _MASK, seen)
    order = np.argsort(class_of, kind="stable")
    starts = np.insert(np.cumsum(np.bincount(class_of, minlength=seen.size)), 0, 0)
    check = check_of(seen, entries.positions, known.patterns)
    where = ranks.encode(ranked[order], np.empty(0, np.uint64), starts, classes.means, check)
    middle, what, sent = values.encode(entries.values, known, digits)
    return (entries.positions.size, middle), [where, what], sent


def _decode_block(
    header: Header, index: int, sections: tuple[memoryview, memoryview], levels: NDArray[np.uint16], anchor: Anchor
) -> Entries:
    (count, middle), (lo, hi), classes = header.blocks[index], header.span(index), header.classes
    ranked, _, starts, check = ranks.decode(sections[0], classes.means, count, hi - lo, 0)
    seen, nexts = np.zeros(len(classes.means), np.int64), starts[:-1].copy()
    found, _ = ranks.select(levels, _cuts(classes), _MASK, seen, ranked, nexts, starts[1:])
    positions = found + np.uint64(lo)
    known = anchor.at(positions)
    if positions.size != count or check_of(seen, positions, known.patterns) != check:
        raise BaseMismatch("the payload was made against another anchor")
    return Entries(positions, values.decode(sections[1], middle, known, header.digits))


def _cuts(classes: Classes) -> NDArray[np.uint16]:
    return np.array(classes.exponents, np.uint16)
