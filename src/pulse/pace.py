"""What a publisher has seen of its link and of its own speed, and the encoding that follows from it: `encoding="auto"`."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from pulse.economics import SPEEDS, Choice, Speeds, bytes_per_change, fastest

CANDIDATES = ("contextual", "portable")  # absolute patches, for receivers that cannot read their base, would gain milliseconds at best
_SOME = 1 << 16  # bytes from which an upload says something about the link, and not only about its delay
_RECENT = 16


class Pace:
    """Remembers recent uploads and encodings. link: bit/s of the slowest link to a receiver, if the user knows it better."""

    def __init__(self, link: float | None = None) -> None:
        self._given = link
        self._rates: deque[float] = deque(maxlen=_RECENT)
        self._slower: deque[float] = deque(maxlen=_RECENT)  # than the documented speeds, by this factor
        self._sizes: dict[str, float] = {}  # bytes per change, as last seen

    @property
    def link(self) -> float | None:
        """Bit/s: the given one, or the best of the recent uploads (small ones are slowed down by delay); None if there were none."""
        return self._given or max(self._rates, default=None)

    def sent(self, nbytes: int, seconds: float) -> None:
        """An upload has taken so long."""
        if nbytes >= _SOME and seconds > 0:
            self._rates.append(8 * nbytes / seconds)

    def encoded(self, encoding: str, nbytes: int, units: int, changes: int, seconds: float) -> None:
        """A patch has been compared and encoded in so long."""
        if nbytes < _SOME or not changes:
            return
        self._sizes[encoding] = nbytes / changes
        speeds = SPEEDS[encoding]
        self._slower.append(seconds / (1e-9 * (speeds.encode_weight * units + speeds.encode_change * changes)))

    def choose(self, units: int, changes: int) -> Choice:
        """The encoding in which so many changes of so many weights arrive first."""
        if self.link is None:
            return Choice("portable", {}, "portable: the link has not been measured yet")
        if not changes:
            return Choice("portable", {}, "portable: nothing changed")
        density = changes / units
        sizes = {name: changes * self._sizes.get(name, bytes_per_change(name, density)) for name in CANDIDATES}
        return fastest(sizes, units, changes, self.link, {name: self._measured(SPEEDS[name]) for name in CANDIDATES})

    def _measured(self, speeds: Speeds) -> Speeds:
        """The documented speeds, as this machine has them."""
        slower = median(self._slower) if self._slower else 1.0
        return replace(
            speeds,
            encode_weight=speeds.encode_weight * slower,
            encode_change=speeds.encode_change * slower,
            decode_weight=speeds.decode_weight * slower,
            decode_change=speeds.decode_change * slower,
        )
