"""What a round was, as figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """One round, as this rank saw it.

    round: its number, from 1; elements: parameters in all; sent: entries that this rank sent; union: entries that any rank sent;
    view_changed: weights whose view the outer step changed: what the next published patch holds.
    payload_bytes: of each rank, in rank order; wire_sent, wire_received: what this rank put on and took off the wire for the round,
    everything included. inner_steps: this rank's, in its window.
    feedback_norm, age_mean, age_max: of what this rank still keeps: its L2 norm, and for how many rounds its entries have waited.
    seconds: by phase, from encode to proof; meet is mostly waiting for the slowest rank. digest: of the anchor, equal on all ranks but
    those in `differing`; resynced: ranks that took over another's state since the round before; dropped: ranks whose window was dropped
    since it was not finite.
    """

    round: int
    elements: int
    sent: int
    union: int
    view_changed: int
    payload_bytes: tuple[int, ...]
    wire_sent: int
    wire_received: int
    inner_steps: int
    feedback_norm: float
    age_mean: float
    age_max: int
    seconds: Mapping[str, float]
    digest: str
    differing: tuple[int, ...] = ()
    resynced: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()

    @property
    def density(self) -> float:
        """The share of the entries that this rank sent."""
        return self.sent / max(self.elements, 1)  # a rank's shards may have none

    @property
    def dense_bytes(self) -> int:
        """What dense DiLoCo sends per rank and round: four bytes per parameter."""
        return 4 * self.elements

    @property
    def reduction(self) -> float:
        """How many times smaller a payload is than dense DiLoCo's, on average over the ranks."""
        return self.dense_bytes * len(self.payload_bytes) / max(sum(self.payload_bytes), 1)

    def __str__(self) -> str:
        mean = sum(self.payload_bytes) / len(self.payload_bytes)
        return (
            f"round {self.round}: {self.density:.2%} sent, {mean / 1e6:.3g} MB per rank ({self.reduction:.3g}x under dense), "
            f"view changed {self.view_changed / max(self.elements, 1):.2%}, anchor {self.digest[:8]}{self._events()}"
        )

    def _events(self) -> str:
        """What was out of the ordinary, ranks named."""
        named = (("other anchors on rank", self.differing), ("taken over by rank", self.resynced), ("window dropped by rank", self.dropped))
        return "".join(f"; {what} {', '.join(map(str, ranks))}" for what, ranks in named if ranks)
