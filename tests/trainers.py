"""Ranks that train one model: played by one process with the arithmetic alone, or each in a thread with everything."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from pulse.exchange import Exchange, MemoryExchange
from pulse.torch import OuterOptimizer, Report
from pulse.torch.loco import rounds
from pulse.torch.loco.layout import collect
from pulse.torch.loco.methods import Method
from pulse.torch.loco.steps import Nesterov

# --- played by one process ---


class Played:
    """All ranks of a run, one after the other, over the real wire. `local[r][i]`: parameter i of rank r, (elements,)."""

    def __init__(
        self, start: Mapping[str, Tensor], ranks: int, method: Method, *, residual="feedback", lr=None, momentum=None, view=torch.bfloat16
    ):
        self.method = method
        self.layout, flat = collect([(name, torch.nn.Parameter(tensor)) for name, tensor in start.items()], view)
        self.local = [[tensor.clone() for tensor in flat] for _ in range(ranks)]
        rate = method.lr if lr is None else lr, method.momentum if momentum is None else momentum
        self.states = [rounds.new_state(local, method, Nesterov(*rate), residual) for local in self.local]

    def move(self, windows: Sequence[Sequence[Tensor]]) -> None:
        """Every rank's weights go down by its window."""
        for local, window in zip(self.local, windows, strict=True):
            for tensor, change in zip(local, window, strict=True):
                tensor.sub_(change.reshape(-1))

    def round(self, weights=None) -> list[rounds.Outcome]:
        ranks = range(len(self.local))
        self.outgoing = [rounds.encode(self.states[r], self.layout, self.local[r], self.method, {"rank": r}) for r in ranks]
        blobs = [outgoing.blob for outgoing in self.outgoing]
        arrived = [self.method.wire.decode(blobs, self.states[r].anchor, self.layout) for r in ranks]
        return [
            rounds.commit(self.states[r], self.layout, self.local[r], self.method, self.outgoing[r], arrived[r], weights) for r in ranks
        ]

    @property
    def anchor(self) -> Tensor:
        """Of rank 0, all parameters end to end; the same on every rank."""
        found = [torch.cat(state.anchor) for state in self.states]
        assert all(same_bits(found[0], other) for other in found)
        return found[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two FP32 tensors have the same bits: zeros have signs, and a NaN equals itself."""
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))


def weights_like_a_models(seed: int, elements: int) -> Tensor:
    """Normal, of deviation 0.02."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * 0.02


def window(seed: int, elements: int, size: float = 1e-5) -> Tensor:
    """What some inner steps change: small, and of both signs."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(1000 + seed)) * size


# --- each in a thread ---


class Net(torch.nn.Module):
    """A small model with everything that a model has: a tie, a frozen parameter, one that gets no gradient, a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Embedding(24, 16)
        self.up = torch.nn.Linear(16, 40)
        self.down = torch.nn.Linear(40, 16)
        self.head = torch.nn.Linear(16, 24, bias=False)
        self.spare = torch.nn.Linear(3, 3)  # an expert that no token reaches
        self.register_buffer("scale", torch.ones(1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=made) * 0.05)
        self.head.weight = self.embed.weight
        self.down.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(torch.nn.functional.gelu(self.up(x)))) * self.scale


class Trainer:
    """One rank with its model, inner optimizer and schedule; its data follow from its rank and step."""

    def __init__(self, exchange: Exchange | None, *, seed: int = 0, rate: float = 2e-4, **options: Any) -> None:
        self.rank = exchange.rank if exchange else 0
        self.model = Net(seed)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.inner, 1.0, 0.5, 40)
        self.outer = OuterOptimizer(self.model.named_parameters(), exchange=exchange, **{"inner_steps": 3, **options})
        self.steps = 0
        self.reports: list[Report] = []

    def inner_step(self) -> None:
        made = torch.Generator().manual_seed(10_000 * self.rank + self.steps)
        tokens = torch.randint(24, (8,), generator=made)
        self.inner.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):  # the forward pass sees the view
            logits = self.model(tokens)
        torch.nn.functional.cross_entropy(logits.float(), tokens.roll(1)).backward()
        self.inner.step()
        self.schedule.step()
        self.steps += 1

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.inner_step()
            self.note(self.outer.step())

    def finish(self) -> None:
        self.reports += self.outer.finish()

    def note(self, report: Report | None) -> None:
        if report is not None:
            self.reports.append(report)

    def saved(self) -> dict[str, Any]:
        """Everything that a checkpoint of this trainer holds."""
        parts = {"model": self.model, "inner": self.inner, "schedule": self.schedule, "outer": self.outer}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()}) | {"steps": self.steps}

    def load(self, saved: Mapping[str, Any]) -> None:
        for part in ("model", "inner", "schedule", "outer"):
            getattr(self, part).load_state_dict(saved[part])
        self.steps = saved["steps"]

    def bits(self) -> dict[str, Any]:
        """Everything that the future depends on, to be compared."""
        return {"steps": self.steps} | {
            name: tensor.detach().clone()
            for part in ("model", "inner", "outer")
            for name, tensor in tensors_in(getattr(self, part).state_dict(), part)
        }


def tensors_in(value: Any, name: str) -> list[tuple[str, Tensor]]:
    """All tensors within dictionaries and lists."""
    if isinstance(value, Tensor):
        return [(name, value)]
    rows = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, part in rows for found in tensors_in(part, f"{name}.{key}")]


def assert_same(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Two trainers' bits are the same."""
    assert a.keys() == b.keys()
    assert [name for name in a if not (a[name] == b[name] if isinstance(a[name], int) else torch.equal(a[name], b[name]))] == []


def in_threads(exchanges: Sequence[Exchange], act: Callable[[Exchange], Any]) -> list[Any]:
    """What each rank returns, in rank order; the lowest rank's exception, once all have ended."""
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return [future.result() for future in [pool.submit(act, exchange) for exchange in exchanges]]


def trained(ranks: int, windows: int = 2, act: Callable[[Trainer], Any] | None = None, **options: Any) -> list[Trainer]:
    """Trainers that have met in memory and trained for some windows of 3 steps."""

    def run(exchange: Exchange) -> Trainer:
        trainer = Trainer(exchange, **options)
        if act is not None:
            act(trainer)
        else:
            trainer.outer.start()
            trainer.train(3 * windows)
        return trainer

    return in_threads(MemoryExchange.group(ranks, timeout=60), run)


def digests(trainers: Sequence[Trainer]) -> list[list[str]]:
    """Of every rank, one for each round."""
    return [[report.digest for report in trainer.reports] for trainer in trainers]


# --- exchanges around exchanges ---


class Around:
    """An exchange that does as the one inside does."""

    def __init__(self, inside: Exchange) -> None:
        self.inside = inside

    @property
    def rank(self) -> int:
        return self.inside.rank

    @property
    def size(self) -> int:
        return self.inside.size

    @property
    def traffic(self):
        return self.inside.traffic

    def all_gather(self, tag: str, data: bytes) -> list[bytes]:
        return self.call(tag, lambda: self.inside.all_gather(tag, data))

    def route(self, tag: str, outgoing: Mapping[int, bytes], sources: Collection[int]) -> dict[int, bytes]:
        return self.call(tag, lambda: self.inside.route(tag, outgoing, sources))

    def close(self) -> None:
        self.inside.close()

    def call(self, tag: str, act: Callable[[], Any]) -> Any:
        return act()


class Late(Around):
    """Comes to every call after a time of its own, so that ranks arrive in any order."""

    def __init__(self, inside: Exchange, seed: int) -> None:
        super().__init__(inside)
        self.random = random.Random(100 * seed + inside.rank)

    def call(self, tag: str, act: Callable[[], Any]) -> Any:
        time.sleep(self.random.uniform(0, 0.004))
        return act()


class Counting(Around):
    """Counts what this rank sends to others and gets from them, by itself."""

    sent = received = 0

    def all_gather(self, tag: str, data: bytes) -> list[bytes]:
        found = super().all_gather(tag, data)
        self.sent += (self.size - 1) * len(data)
        self.received += sum(map(len, found)) - len(data)
        return found

    def route(self, tag: str, outgoing: Mapping[int, bytes], sources: Collection[int]) -> dict[int, bytes]:
        found = super().route(tag, outgoing, sources)
        self.sent += sum(len(data) for rank, data in outgoing.items() if rank != self.rank)
        self.received += sum(len(data) for rank, data in found.items() if rank != self.rank)
        return found


class Breaking(Around):
    """Raises `error` at one call, before or after it: the nth one whose tag ends with `what`."""

    def __init__(self, inside: Exchange, what: str, error: BaseException, *, nth: int = 0, after: bool = False) -> None:
        super().__init__(inside)
        self.what, self.error, self.left, self.after = what, error, nth, after

    def call(self, tag: str, act: Callable[[], Any]) -> Any:
        breaks = tag.endswith(f"/{self.what}") and self.left == 0
        self.left -= tag.endswith(f"/{self.what}")
        if breaks and not self.after:
            raise self.error
        found = act()
        if breaks:
            raise self.error
        return found


class Garbling(Around):
    """What this rank gets from others in one call is not what they sent: a byte of each message is flipped."""

    def __init__(self, inside: Exchange, what: str) -> None:
        super().__init__(inside)
        self.what: str | None = what

    def call(self, tag: str, act: Callable[[], Any]) -> Any:
        found = act()
        if self.what is None or not tag.endswith(f"/{self.what}"):
            return found
        self.what = None  # only once
        rows = found.items() if isinstance(found, dict) else enumerate(found)
        return type(found)({rank: garbled(data) if rank != self.rank else data for rank, data in rows}) if isinstance(found, dict) else [
            garbled(data) if rank != self.rank else data for rank, data in rows
        ]  # fmt: skip


class Stale(Around):
    """In its second call of one kind, this rank gets from others what they sent in the first."""

    def __init__(self, inside: Exchange, what: str) -> None:
        super().__init__(inside)
        self.what, self.found = what, []

    def call(self, tag: str, act: Callable[[], Any]) -> Any:
        found = act()
        if not tag.endswith(f"/{self.what}"):
            return found
        self.found.append(found)
        old = self.found[0] if len(self.found) == 2 else found
        return (
            {**old, self.rank: found[self.rank]}
            if isinstance(found, dict)
            else [*old[: self.rank], found[self.rank], *old[self.rank + 1 :]]
        )


def garbled(data: bytes) -> bytes:
    """The same, but for one bit in its middle."""
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]
