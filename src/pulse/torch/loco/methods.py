"""Methods of training together: PULSELoCo, and those to compare it with. They differ in the gate and in the wire, and in nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pulse.codec import dense, payload
from pulse.codec.known import Anchor
from pulse.codec.payload import Entries
from pulse.torch.loco.gate import Everything, Gate, Largest, Visible
from pulse.torch.loco.layout import Layout


class Part(NamedTuple):
    """Entries of one parameter. positions: (n,) int64, ascending, or None for all of them in order; values: (n,) FP32."""

    positions: Tensor | None
    values: Tensor

    def add_to(self, total: Tensor) -> None:
        """Add the values where they belong. total: (elements,) FP32."""
        if self.positions is None:
            total.add_(self.values)
        else:
            total[self.positions] += self.values


class Wire(Protocol):
    """How parts travel."""

    @property
    def lossless(self) -> bool:
        """Whether what arrives is what was handed in."""

    def encode(self, parts: Sequence[Part], anchor: Sequence[Tensor], layout: Layout, facts: Mapping[str, Any]) -> tuple[bytes, list[Part]]:
        """The bytes, and the parts that they really carry."""

    def decode(self, blobs: Sequence[bytes], anchor: Sequence[Tensor], layout: Layout) -> list[list[Part]]:
        """The parts of each payload. `FormatError` or `BaseMismatch` for what is none of this round."""


@dataclass(frozen=True)
class Sparse:
    """`pulse.codec.payload`. gated: every entry is visible; others travel too, at greater length."""

    value_dtype: str = "float32"
    gated: bool = True

    @property
    def lossless(self) -> bool:
        """See `Wire`."""
        return self.value_dtype == "float32"

    def encode(self, parts: Sequence[Part], anchor: Sequence[Tensor], layout: Layout, facts: Mapping[str, Any]) -> tuple[bytes, list[Part]]:
        """See `Wire`."""
        (blob,), carried = self.encode_ranges(parts, anchor, layout, facts, [0, layout.elements])
        return blob, carried

    def encode_ranges(
        self, parts: Sequence[Part], anchor: Sequence[Tensor], layout: Layout, facts: Mapping[str, Any], borders: Sequence[int]
    ) -> tuple[tuple[bytes, ...], list[Part]]:
        """One payload for each range between two borders, and the parts that they really carry, whatever the borders."""
        known = anchor_bits(anchor, layout, gated=self.gated)
        cut = zip(pairwise(borders), _between(entries_of(parts, layout), borders), strict=True)
        found = [payload.encode(few, within(known, lo, hi), value_dtype=self.value_dtype, facts=facts) for (lo, hi), few in cut]
        sent = torch.from_numpy(np.concatenate([one.sent for one in found]))
        sizes = [part.values.numel() for part in parts]
        carried = [Part(part.positions, few.to(part.values.device)) for part, few in zip(parts, torch.split(sent, sizes), strict=True)]
        return tuple(one.blob for one in found), carried

    def decode(self, blobs: Sequence[bytes], anchor: Sequence[Tensor], layout: Layout) -> list[list[Part]]:
        """See `Wire`."""
        found = payload.decode(blobs, anchor_bits(anchor, layout, gated=self.gated))
        return [list(parts_of(entries, anchor, layout)) for entries in found]


@dataclass(frozen=True)
class Dense:
    """`pulse.codec.dense`, with 32, 8 or 4 bits per entry."""

    bits: int = 32

    @property
    def lossless(self) -> bool:
        """See `Wire`."""
        return self.bits == 32

    def encode(self, parts: Sequence[Part], anchor: Sequence[Tensor], layout: Layout, facts: Mapping[str, Any]) -> tuple[bytes, list[Part]]:  # noqa: ARG002
        """See `Wire`."""
        blob, carried = dense.encode(np.concatenate([_host(part.values) for part in parts]), self.bits, facts)
        return blob, self._parts(carried, parts[0].values.device, layout)

    def decode(self, blobs: Sequence[bytes], anchor: Sequence[Tensor], layout: Layout) -> list[list[Part]]:
        """See `Wire`."""
        return [self._parts(dense.decode(blob, layout.elements), anchor[0].device, layout) for blob in blobs]

    @staticmethod
    def _parts(values: Any, device: torch.device, layout: Layout) -> list[Part]:
        values = values if values.flags.writeable else values.copy()
        pieces = torch.split(torch.from_numpy(values), list(layout.sizes))
        return [Part(None, piece.to(device)) for piece in pieces]


def anchor_bits(anchor: Sequence[Tensor], layout: Layout, *, gated: bool) -> Anchor:
    """The anchor as the codec sees it: on the host, sharing its memory if it is there already."""
    return Anchor(tuple(_host(tensor).view(np.uint32) for tensor in anchor), layout.view_codes, gated)


def within(anchor: Anchor, lo: int, hi: int, *, gated: bool | None = None) -> Anchor:
    """A range of an anchor as an anchor."""
    pieces, views = [], []
    for piece, view, start in zip(anchor.pieces, anchor.views, anchor.starts, strict=False):
        first, stop = max(lo - start, 0), min(hi - start, piece.size)
        if first < stop:
            pieces.append(piece[first:stop])
            views.append(view)
    return Anchor(tuple(pieces), tuple(views), anchor.gated if gated is None else gated)


def entries_of(parts: Sequence[Part], layout: Layout) -> Entries:
    """Parts of every parameter as entries of all parameters laid end to end."""
    positions = []
    for part, start, size in zip(parts, layout.starts, layout.sizes, strict=False):
        inside = np.arange(size, dtype=np.uint64) if part.positions is None else _host(part.positions).astype(np.uint64)
        positions.append(inside + np.uint64(start))
    return Entries(np.concatenate(positions), np.concatenate([_host(part.values) for part in parts]))


def _between(entries: Entries, borders: Sequence[int]) -> list[Entries]:
    """The entries of each range, counted from its beginning."""
    cuts = np.searchsorted(entries.positions, np.array(borders, np.uint64))
    rows = zip(pairwise(cuts), borders, strict=False)
    return [Entries(entries.positions[first:stop] - np.uint64(lo), entries.values[first:stop]) for (first, stop), lo in rows]


def parts_of(entries: Entries, anchor: Sequence[Tensor], layout: Layout) -> Iterator[Part]:
    """The inverse of `entries_of`, on the anchor's device."""
    cuts = np.searchsorted(entries.positions, np.array(layout.starts, np.uint64))
    for i, tensor in enumerate(anchor):
        positions = (entries.positions[cuts[i] : cuts[i + 1]] - np.uint64(layout.starts[i])).astype(np.int64)
        values = torch.from_numpy(entries.values[cuts[i] : cuts[i + 1]])
        yield Part(torch.from_numpy(positions).to(tensor.device), values.to(tensor.device))


def _host(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy()


@dataclass(frozen=True)
class Method:
    """A gate, a wire, and what goes with them. decay: of the error feedback, each round; lr, momentum: of the outer step."""

    name: str
    gate: Gate
    wire: Wire
    decay: float = 1.0
    lr: float = 0.7
    momentum: float = 0.9

    @property
    def keeps(self) -> bool:
        """Whether anything can be left behind, so that error feedback is needed."""
        return not (isinstance(self.gate, Everything) and self.wire.lossless)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            Method("pulseloco", Visible(), Sparse()),
            Method("diloco", Everything(), Dense()),
            Method("diloco-int8", Everything(), Dense(8)),
            Method("diloco-int4", Everything(), Dense(4)),
            Method("sparseloco", Largest(), Sparse("float8", gated=False), decay=0.95, lr=1.0, momentum=0.0),
            Method("localsgd", Everything(), Dense(), lr=1.0, momentum=0.0),
        )
    }
)


def method_of(method: str | Method, value_dtype: str = "float32") -> Method:
    """A method by its name, or as it is; with another value dtype if it is PULSELoCo. `ValueError` for what there is none of."""
    if isinstance(method, Method):
        if value_dtype != "float32":
            raise ValueError(f"value_dtype={value_dtype!r} beside a method of your own: its wire says that")
        return method
    if method not in METHODS:
        raise ValueError(f"method={method!r}; known are {', '.join(METHODS)}")
    found = METHODS[method]
    if value_dtype == "float32":
        return found
    if method != "pulseloco" or value_dtype not in payload.DIGITS:
        raise ValueError(f"value_dtype={value_dtype!r} for {method}; only pulseloco has one: {', '.join(payload.DIGITS)}")
    return replace(found, wire=Sparse(value_dtype))
