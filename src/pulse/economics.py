"""What sending a step costs, and which encoding arrives first: arithmetic on sizes and speeds, without weights.

A step arrives after the work of both sides and the time on the link. Sizes follow from how many weights changed, the work from how
many weights are looked at and how many changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Speeds:
    """The work for one encoding on one core, in ns per weight and per change: comparing and encoding, decoding and applying."""

    encode_weight: float
    encode_change: float
    decode_weight: float
    decode_change: float

    def seconds(self, units: float, changes: float) -> float:
        """The work of both sides for a step."""
        return 1e-9 * ((self.encode_weight + self.decode_weight) * units + (self.encode_change + self.decode_change) * changes)

    def on(self, cores: float) -> Speeds:
        """The same work shared by several cores, as far as it goes."""
        return Speeds(*(each / cores for each in (self.encode_weight, self.encode_change, self.decode_weight, self.decode_change)))


WHOLE = "whole"
SPEEDS: Mapping[str, Speeds] = MappingProxyType({
    "absolute": Speeds(0.6, 65, 0.0, 77),
    "portable": Speeds(0.6, 74, 0.0, 90),
    "contextual": Speeds(1.5, 118, 1.0, 124),
    WHOLE: Speeds(0.2, 0, 0.2, 0),  # a copy on either side, and nothing checked
})  # fmt: skip
# Bytes per change of BF16 weights, as steps of many densities gave them (docs/analysis.md): what the value takes, and how many bytes of
# position there are per byte of its entropy. The contextual encoding's are fewer, since classes tell it where changes are likely.
VALUE_BYTES: Mapping[str, float] = MappingProxyType({"absolute": 1.48, "portable": 0.31, "contextual": 0.25})
POSITION_SHARE: Mapping[str, float] = MappingProxyType({"absolute": 1.09, "portable": 1.09, "contextual": 0.66})


def index_bits(density: float) -> float:
    """The entropy of one position, in bits per change, if changes are independent: H(d) / d. Infinite for none, 0 for all."""
    if not 0 < density < 1:
        return 0.0 if density >= 1 else math.inf
    return -math.log2(density) - (1 - density) / density * math.log1p(-density) / math.log(2)


def bytes_per_change(encoding: str, density: float) -> float:
    """The size of one change where nothing was measured: positions are dearer where they are rarer."""
    return VALUE_BYTES[encoding] + POSITION_SHARE[encoding] * index_bits(density) / 8


def expected_sizes(encodings: Iterable[str], units: int, changes: float, width: int = 2) -> dict[str, float]:
    """Bytes per step for the encodings that something is known about, and for the whole. width: bytes per weight."""
    density = changes / units if units else 0.0
    sizes = {name: changes * bytes_per_change(name, density) if changes else 0.0 for name in encodings if name in VALUE_BYTES}
    whole = float(units * width)
    return {name: min(size, whole) for name, size in sizes.items()} | {WHOLE: whole}


@dataclass(frozen=True, slots=True)
class Choice:
    """The encoding that arrives first, the seconds that each takes, and a sentence that says why."""

    encoding: str
    seconds: Mapping[str, float]
    reason: str


def arrival(size: float, units: float, changes: float, link: float, speeds: Speeds) -> float:
    """Seconds until a step is there. size: bytes on the link; link: bit/s."""
    return speeds.seconds(units, changes) + 8 * size / link


def fastest(sizes: Mapping[str, float], units: float, changes: float, link: float, speeds: Mapping[str, Speeds] = SPEEDS) -> Choice:
    """Of some encodings, the one that arrives first. sizes: encoding -> bytes on the link, never empty; link: bit/s."""
    seconds = {name: arrival(size, units, changes, link, speeds[name]) for name, size in sizes.items()}
    first, *others = sorted(seconds, key=lambda name: (seconds[name], name))
    rest = ", ".join(f"{name} {seconds[name]:.3g} s" for name in others)
    return Choice(first, seconds, f"{first} {seconds[first]:.3g} s" + (f" against {rest}" if rest else "") + f" at {rate(link)}")


def break_even(a: str, b: str, sizes: Mapping[str, float], units: float, changes: float, speeds: Mapping[str, Speeds] = SPEEDS) -> float:
    """The link, in bit/s, below which `a` arrives before `b`: infinite if it always does, 0 if it never does.

    `a` must be the smaller one, or it is never first on slow links.
    """
    saved, dearer = sizes[b] - sizes[a], speeds[a].seconds(units, changes) - speeds[b].seconds(units, changes)
    if saved <= 0:
        return 0.0
    return math.inf if dearer <= 0 else 8 * saved / dearer


def rate(link: float) -> str:
    """A link for people, in bit/s."""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if link >= size:
            return f"{link / size:.3g} {unit}"
    return f"{link:.3g} bit/s"
