"""`Rank`: what one rank of a run holds, and what it does by itself. How ranks meet is `pulse.torch.loco.attempt`'s affair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pulse.canonical import to_json
from pulse.digest import digest_of, sha256
from pulse.errors import TornUpdate, WeightsMismatch
from pulse.torch.loco import rounds, saved
from pulse.torch.loco.islands import Island
from pulse.torch.loco.layout import View, collect, local_of
from pulse.torch.loco.meeting import Stand, Word
from pulse.torch.loco.methods import Method, Part
from pulse.torch.loco.rounds import Outcome, Outgoing, Residual
from pulse.torch.loco.steps import OuterStep
from pulse.torch.tensors import tensor_bits

Share = Literal["gather", "scatter"]


@dataclass(frozen=True)
class Options:
    """What a user has chosen: see `OuterOptimizer`."""

    method: Method
    inner_steps: int
    view: View
    residual: Residual
    share: Share
    drop: bool
    on_resync: Callable[[], None] | None
    buffers: tuple[tuple[str, Tensor], ...]

    def settings(self, outer: OuterStep) -> str:
        """What must be the same on all ranks, as JSON."""
        method = self.method
        own = {"method": method.name, "wire": str(method.wire), "gate": str(method.gate), "decay": method.decay}
        return to_json(own | {"inner_steps": self.inner_steps, "residual": self.residual, "share": self.share} | outer.settings).decode()


class Rank:
    """One rank.

    digest: of the anchor, as it was committed; steps: inner steps since then; weight: in the mean; dropped: whether the window that is
    under way is one that was given up; resynced: ranks that have taken over a state since the last round.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], options: Options, outer: OuterStep, *, track_age: bool) -> None:
        self.options = options
        self.layout, self.local = collect(named, options.view)
        self.state = rounds.new_state(self.local, options.method, outer, options.residual, track_age=track_age)
        self.island = Island.of(parameter for _, parameter in named)
        self.digest = self.layout.digest(self.state.anchor)
        self.steps = 0
        self.weight = 1.0
        self.dropped = False
        self.resynced: tuple[int, ...] = ()
        self._named = named
        self._torn = False

    def look(self) -> None:
        """Find the parameters where they are now: a module may have given them other memory."""
        layout, self.local = collect(self._named, self.options.view)
        if layout != self.layout:
            raise WeightsMismatch("the parameters have changed since this optimizer was made (shapes, dtypes, which train): make a new one")

    def is_whole(self) -> bool:
        """Whether the anchor is what the last round made it."""
        return not self._torn and self.layout.digest(self.state.anchor) == self.digest

    @torch.no_grad()
    def rollback(self) -> None:
        """The local weights are the anchor again; the window begins anew."""
        for tensor, anchor in zip(self.local, self.state.anchor, strict=True):
            tensor.copy_(anchor)
        self.steps = 0

    def outgoing(self, rank: int, borders: Sequence[int] | None) -> Outgoing:
        """What this rank would send in the next round; nothing, on all shards, if it is not finite on one."""
        outgoing = self._encoded(rank, borders)
        (bad,) = self.island.any(outgoing.bad is not None)
        if bad and self.options.drop:
            self.rollback()
            self.dropped = True
            outgoing = self._encoded(rank, borders)
            (bad,) = self.island.any(outgoing.bad is not None)
        return Outgoing((), [], outgoing.bad or "another shard") if bad else outgoing

    def _encoded(self, rank: int, borders: Sequence[int] | None) -> Outgoing:
        facts = {"round": self.state.round + 1, "rank": rank, "anchor": self.digest}
        return rounds.encode(self.state, self.layout, self.local, self.options.method, facts, borders)

    def word(self, stand: Stand, outgoing: Outgoing | None, *, whole: bool) -> Word:
        """What this rank says at a meeting."""
        buffers = {name: tensor_bits(local_of(tensor)) for name, tensor in self.options.buffers}
        return Word(
            layout=self.layout.fingerprint,
            settings=self.options.settings(self.state.outer),
            round=self.state.round,
            digest=self.digest,
            whole=whole,
            stand=stand,
            steps=self.steps,
            weight=self.weight,
            bad=outgoing.bad if outgoing is not None else None,
            dropped=self.dropped,
            payloads=tuple(map(sha256, outgoing.blobs)) if outgoing is not None else (),
            buffers=digest_of(buffers) if buffers else "",
        )

    def commit(
        self, outgoing: Outgoing, arrived: Sequence[Sequence[Part]], weights: Sequence[float] | None, total: float | None
    ) -> Outcome:
        """See `pulse.torch.loco.rounds.commit`. If it is interrupted, the anchor is not whole."""
        self._torn = True
        outcome = rounds.commit(self.state, self.layout, self.local, self.options.method, outgoing, arrived, weights, total)
        self.steps, self.digest, self.dropped = 0, self.layout.digest(self.state.anchor), False
        self._torn = False
        return outcome

    def pack(self) -> bytes:
        """What another rank takes over."""
        return saved.pack(self.state)

    def take_over(self, data: bytes, digest: str) -> None:
        """Take over another rank's anchor, outer state and round number. This rank's own window and error feedback are given up."""
        saved.take_over(self.state, self.layout, data, digest)
        self.digest, self._torn = digest, False

    def to_dict(self) -> dict[str, Any]:
        """See `OuterOptimizer.state_dict`."""
        if not self.is_whole():
            raise TornUpdate("the anchor is not what the last round made it: load a saved state, or meet ranks that have it, then go on")
        return saved.to_dict(self.state, self.layout, self._made_by(), self.digest, self.steps)

    def load(self, state: dict[str, Any]) -> None:
        """See `OuterOptimizer.load_state_dict`."""
        self.steps = saved.load(self.state, self.layout, self._made_by(), state)
        self.digest, self.dropped, self._torn = str(state["digest"]), False, False

    def _made_by(self) -> dict[str, str]:
        return {
            "method": self.options.method.name,
            "residual": self.options.residual,
            "outer optimizer": self.state.outer.settings["outer"],
        }
