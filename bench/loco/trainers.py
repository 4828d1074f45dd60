"""All trainers of a run, played in one process one after the other: the arithmetic is what `OuterOptimizer` does, bit for bit."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.loco import grpo
from bench.loco.grpo import Rollouts
from bench.loco.model import Decoder
from bench.loco.settings import Contestant, Setup
from pulse.exchange import MemoryExchange
from pulse.torch import METHODS
from pulse.torch.loco import rounds
from pulse.torch.loco.ddp import GradientMean
from pulse.torch.loco.layout import collect
from pulse.torch.loco.methods import Dense, Method, Part
from pulse.torch.loco.steps import Nesterov

_KEPT = ("anchor", "feedback", "age", "round")  # of a rank's outer state


@dataclass(frozen=True)
class Window:
    """What the ranks did in one window. All counts and bytes are per rank, on average.

    payload_bytes: what a rank hands to the exchange; wire_bytes: what it receives: of dense payloads 2 (R - 1) / R, in a ring, of sparse
    ones those of all others. moved: the L2 norm of A - L; waiting: of what is left behind; ages in rounds, of rank 0. seconds: of one core,
    by phase. carried: what each rank sent, for whoever wants to look at it.
    """

    payload_bytes: float
    wire_bytes: float
    digest: str
    seconds: dict[str, float]
    sent: float = 0.0
    moved: float = 0.0
    waiting: float = 0.0
    age_mean: float = 0.0
    age_max: int = 0
    carried: Sequence[Sequence[Part]] = ()


class Trainers:
    """The models of all ranks and their inner optimizers, which begin alike."""

    def __init__(self, setup: Setup, contestant: Contestant, start: Decoder) -> None:
        self.setup = setup
        self.models = [copy.deepcopy(start) for _ in range(setup.ranks)]
        found = [collect(model.named_parameters(), torch.bfloat16) for model in self.models]
        self.layout, self.local = found[0][0], [local for _, local in found]
        lr = setup.lr * contestant.faster
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), lr=lr, eps=setup.epsilon, weight_decay=0.0, fused=True) for model in self.models
        ]
        self._seconds: dict[str, float] = {}

    @property
    def shared(self) -> list[Tensor]:
        """The weights that all trainers have at a window's border, (elements,) FP32 each."""
        return self.local[0]

    @property
    def codes_entries(self) -> bool:
        """Whether what it sends is what PULSELoCo sends, as it is."""
        return False

    def window(self, rollouts: Sequence[Sequence[Rollouts]]) -> Window:
        """Train and exchange. rollouts: by rank and inner step."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Everything that the next window depends on."""
        return {"models": [m.state_dict() for m in self.models], "optimizers": [o.state_dict() for o in self.optimizers]}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for model, optimizer, weights, moments in zip(self.models, self.optimizers, state["models"], state["optimizers"], strict=True):
            model.load_state_dict(weights)
            optimizer.load_state_dict(moments)

    def _learn(self, rank: int, rollouts: Rollouts) -> None:
        grpo.loss(self.models[rank], self.setup.task, rollouts).backward()  # type: ignore[no-untyped-call]

    def _step(self, rank: int) -> None:
        self.optimizers[rank].step()
        self.optimizers[rank].zero_grad()

    def _proven(self, weights: Sequence[Sequence[Tensor]]) -> str:
        """The digest that all ranks have."""
        digests = {self.layout.digest(tensors) for tensors in weights}
        if len(digests) > 1:
            raise RuntimeError(f"the ranks differ: {sorted(digests)}")
        return digests.pop()

    def _taken(self) -> dict[str, float]:
        """The seconds since the last window, which begin anew."""
        taken, self._seconds = self._seconds, {}
        return taken

    @contextmanager
    def timed(self, phase: str, times: float = 1.0) -> Iterator[None]:
        """Count processor time, which others that use the machine do not change; `times` as much for one rank."""
        started = time.process_time()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + (time.process_time() - started) * times


class Ddp(Trainers):
    """Gradients are averaged before every inner step."""

    def __init__(self, setup: Setup, contestant: Contestant, start: Decoder) -> None:
        super().__init__(setup, contestant, start)
        self._exchanges = MemoryExchange.group(setup.ranks)
        for model, optimizer, exchange in zip(self.models, self.optimizers, self._exchanges, strict=True):
            GradientMean(model.parameters(), exchange).attach(optimizer)

    def window(self, rollouts: Sequence[Sequence[Rollouts]]) -> Window:
        """See `Trainers`."""
        ranks = range(self.setup.ranks)
        before = self._exchanges[0].traffic.received
        with ThreadPoolExecutor(len(ranks)) as threads, self.timed("train", 1 / len(ranks)):
            for now in zip(*rollouts, strict=True):
                for rank in ranks:
                    self._learn(rank, now[rank])
                list(threads.map(self._step, ranks))
        gradients = 4.0 * self.layout.elements * self.setup.inner_steps
        return Window(gradients, self._exchanges[0].traffic.received - before, self._proven(self.local), self._taken())


class Islands(Trainers):
    """Each rank trains alone for a window, then all exchange what the method says."""

    def __init__(self, setup: Setup, contestant: Contestant, start: Decoder, method: Method) -> None:
        super().__init__(setup, contestant, start)
        self._method, self._forgets = method, contestant.forgets
        self._states = [
            rounds.new_state(local, method, Nesterov(method.lr, method.momentum), contestant.residual, track_age=rank == 0)
            for rank, local in enumerate(self.local)
        ]

    @property
    def shared(self) -> list[Tensor]:
        """See `Trainers`. The local weights may hold more than that."""
        return self._states[0].anchor

    @property
    def codes_entries(self) -> bool:
        """See `Trainers`."""
        return self._method == METHODS["pulseloco"] and not self._forgets

    def window(self, rollouts: Sequence[Sequence[Rollouts]]) -> Window:
        """See `Trainers`."""
        ranks = self.setup.ranks
        with self.timed("train", 1 / ranks):
            for rank, mine in enumerate(rollouts):
                for now in mine:
                    self._learn(rank, now)
                    self._step(rank)
        moved = sum(_distance(local, self.shared) for local in self.local) / ranks
        outgoing, outcomes = self._round()
        for state in self._states if self._forgets else ():
            for waiting in state.feedback or ():
                waiting.zero_()
        payload = sum(len(one.blob) for one in outgoing) / ranks
        return Window(
            payload_bytes=payload,
            wire_bytes=payload * (2 * (ranks - 1) / ranks if isinstance(self._method.wire, Dense) else ranks - 1),
            digest=self._proven([state.anchor for state in self._states]),
            seconds=self._taken(),
            sent=sum(one.count for one in outgoing) / ranks,
            moved=moved,
            waiting=sum(one.feedback_norm for one in outcomes) / ranks,
            age_mean=outcomes[0].age_mean,
            age_max=outcomes[0].age_max,
            carried=[one.parts for one in outgoing],
        )

    def _round(self) -> tuple[list[rounds.Outgoing], list[rounds.Outcome]]:
        ranks, method = range(self.setup.ranks), self._method
        with self.timed("encode", 1 / len(ranks)):
            outgoing = [
                rounds.encode(self._states[r], self.layout, self.local[r], method, {"round": self._states[r].round + 1, "rank": r})
                for r in ranks
            ]
        if bad := [one.bad for one in outgoing if one.bad]:
            raise RuntimeError(f"a pseudo-gradient is not finite: {bad[0]}")
        with self.timed("decode"):
            arrived = method.wire.decode([one.blob for one in outgoing], self.shared, self.layout)
        with self.timed("commit", 1 / len(ranks)):
            outcomes = [rounds.commit(self._states[r], self.layout, self.local[r], method, outgoing[r], arrived) for r in ranks]
        return outgoing, outcomes

    def state(self) -> dict[str, Any]:
        """See `Trainers`."""
        outer = [{name: getattr(state, name) for name in _KEPT} | {"outer": state.outer.state_dict()} for state in self._states]
        return super().state() | {"outer": outer}

    def load(self, state: dict[str, Any]) -> None:
        """See `Trainers`."""
        super().load(state)
        for mine, theirs in zip(self._states, state["outer"], strict=True):
            mine.outer.load_state_dict(theirs["outer"])
            for name in _KEPT:
                setattr(mine, name, theirs[name])


def trainers_of(setup: Setup, contestant: Contestant, start: Decoder) -> Trainers:
    """All ranks of one contestant."""
    if contestant.method is None:
        return Ddp(setup, contestant, start)
    return Islands(setup, contestant, start, contestant.method)


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return float(torch.stack([(a - b).norm() for a, b in zip(one, other, strict=True)]).norm())
