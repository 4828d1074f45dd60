"""The arithmetic of a round, without any communication: one process can play all ranks.

    s = E + (A - L)          what this rank has learnt since it was last heard, FP32
    sent                     the entries of s that the gate lets through, as the wire carries them
    E := s - sent            bit for bit: sent + E = s
    g = (w_1 sent_1 + w_2 sent_2 + ...) / (w_1 + w_2 + ...)      in rank order; what a rank did not send counts as 0
    A := outer step(A, g)
    L := A

With ``residual="masters"`` there is no E: what is not sent stays in the local weights, L := A - (s - sent). That saves 4 bytes per
parameter, and one rank alone then trains as if there were no gate, for any number of inner steps. What L cannot hold is rounded off.

Nothing changes before `commit`, which changes everything and cannot be refused any more: an attempt that is given up leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pulse.torch.loco.layout import Layout
from pulse.torch.loco.methods import Method, Part, Sparse
from pulse.torch.loco.steps import OuterStep
from pulse.torch.tensors import signed_view

Residual = Literal["feedback", "masters"]
LARGEST = 2.0**64  # magnitude of what may be sent: far beyond any weight, and no mean or outer step of it overflows
_CHUNK = 1 << 22  # elements that are looked at at once: some 100 MB of temporaries


@dataclass
class State:
    """What a rank keeps between rounds. anchor: FP32, (elements,) per parameter, equal on all ranks, as `outer` is; feedback: E, this
    rank's own, None where nothing waits or the local weights hold it; age: rounds that each entry of E has waited, uint8, or None."""  # noqa: D205, D209

    anchor: list[Tensor]
    outer: OuterStep
    feedback: list[Tensor] | None = None
    age: list[Tensor] | None = None
    round: int = 0


@dataclass(frozen=True)
class Outgoing:
    """What a rank sends. blobs: one payload, or one for each range; parts: per parameter, as they will arrive; bad: a parameter whose s is
    not finite, or beyond `LARGEST`, then nothing is sent."""  # noqa: D205, D209

    blobs: tuple[bytes, ...]
    parts: list[Part]
    bad: str | None = None

    @property
    def blob(self) -> bytes:
        """The payload, if there is but one."""
        (blob,) = self.blobs
        return blob

    @property
    def count(self) -> int:
        """Entries."""
        return sum(part.values.numel() for part in self.parts)


@dataclass(frozen=True)
class Outcome:
    """What a round did. Of this rank: sent, feedback_norm, age_mean, age_max (of the entries that wait); of all: union, view_changed."""

    sent: int
    union: int
    view_changed: int
    feedback_norm: float
    age_mean: float
    age_max: int


def new_state(local: Sequence[Tensor], method: Method, outer: OuterStep, residual: Residual, *, track_age: bool = True) -> State:
    """The state of a rank that begins with these weights: A = L, E = 0."""
    keeps = method.keeps and residual == "feedback"
    return State(
        [tensor.clone() for tensor in local],
        outer,
        [torch.zeros_like(tensor) for tensor in local] if keeps else None,
        [torch.zeros_like(tensor, dtype=torch.uint8) for tensor in local] if keeps and track_age else None,
    )


def pseudo_gradient(state: State, i: int, local: Tensor, decay: float, now: slice = slice(None)) -> Tensor:
    """A stretch of one parameter's s, a new tensor."""
    s = state.anchor[i][now] - local[now]
    if state.feedback is None:
        return s
    waiting = state.feedback[i][now]
    return s.add_(waiting if decay == 1.0 else waiting.mul(decay))


@torch.no_grad()
def encode(
    state: State,
    layout: Layout,
    local: Sequence[Tensor],
    method: Method,
    facts: Mapping[str, Any],
    borders: Sequence[int] | None = None,
) -> Outgoing:
    """This rank's payload, or with a sparse wire one payload for each range between two borders. Changes nothing."""
    parts = []
    for i, name in enumerate(layout.names):
        part = _select(state, i, local[i], method, layout.views[i])
        if part is None:
            return Outgoing((), [], name)
        parts.append(part)
    if borders is not None and isinstance(method.wire, Sparse):
        return Outgoing(*method.wire.encode_ranges(parts, state.anchor, layout, facts, borders))
    blob, carried = method.wire.encode(parts, state.anchor, layout, facts)
    return Outgoing((blob,), carried)


def _select(state: State, i: int, local: Tensor, method: Method, view: torch.dtype) -> Part | None:
    """What the gate lets through of one parameter; None if s is not finite, or too large."""
    positions, values = [], []
    for start in range(0, max(local.numel(), 1), _CHUNK):
        now = slice(start, start + _CHUNK)
        s = pseudo_gradient(state, i, local, method.decay, now)
        if not bool((s.abs() <= LARGEST).all()):  # a NaN is not
            return None
        opens = method.gate.opens(state.anchor[i][now], s, view)
        if opens is None:
            values.append(s)
            continue
        found = torch.nonzero(opens).view(-1)
        positions.append(found + start)
        values.append(s[found])
    return Part(torch.cat(positions) if positions else None, torch.cat(values))


@torch.no_grad()
def commit(
    state: State,
    layout: Layout,
    local: Sequence[Tensor],
    method: Method,
    outgoing: Outgoing,
    arrived: Sequence[Sequence[Part]],
    weights: Sequence[float] | None = None,
    total: float | None = None,
) -> Outcome:
    """Take what all ranks sent, in rank order, one list of parts each, and begin the next round.

    outgoing: what this rank has sent. weights: of the ranks in the mean, equal by default; total: what the sum is divided by, if that is
    not the weights' own sum, since `arrived` has been added up already.
    """
    masters = method.keeps and state.feedback is None
    waiting = [_Waiting() for _ in local]
    before = [tensor.to(view) for tensor, view in zip(state.anchor, layout.views, strict=True)]

    def gradients() -> Iterator[Tensor]:
        for i, tensor in enumerate(local):
            if method.keeps:
                s = _left(pseudo_gradient(state, i, tensor, method.decay), outgoing.parts[i])
                waiting[i] = _waiting(s, outgoing.parts[i].positions, state.age[i] if state.age else None)
                (state.feedback[i] if state.feedback is not None else tensor).copy_(s)
            yield mean([parts[i] for parts in arrived], tensor, weights, total)

    state.outer.step(state.anchor, gradients())
    for anchor, tensor in zip(state.anchor, local, strict=True):
        tensor.copy_(anchor - tensor if masters else anchor)
    state.round += 1
    after = zip(before, state.anchor, layout.views, strict=True)
    return Outcome(
        sent=outgoing.count,
        union=sum(_union([parts[i] for parts in arrived], tensor) for i, tensor in enumerate(local)),
        view_changed=sum(int(torch.count_nonzero(signed_view(old) != signed_view(new.to(view)))) for old, new, view in after),
        feedback_norm=math.sqrt(sum(one.squares for one in waiting)),
        age_mean=sum(one.ages for one in waiting) / max(sum(one.entries for one in waiting), 1),
        age_max=max(one.oldest for one in waiting),
    )


class _Waiting(NamedTuple):
    """What waits of one parameter: entries, the sum of their squares and of their ages, and the oldest age, in rounds."""

    entries: int = 0
    squares: float = 0.0
    ages: int = 0
    oldest: int = 0


def _waiting(s: Tensor, sent: Tensor | None, age: Tensor | None) -> _Waiting:
    """The figures of what waits, whose ages move on."""
    squares = float(torch.linalg.vector_norm(s, dtype=torch.float64)) ** 2
    waits = s != 0
    entries = int(torch.count_nonzero(waits))
    if age is None or not age.numel():
        return _Waiting(entries, squares)
    if sent is None:
        age.zero_()
    else:
        age[sent] = 0
    age.add_(age < 255).mul_(waits)
    return _Waiting(entries, squares, int(age.sum(dtype=torch.int64)), int(age.max()))


def _left(s: Tensor, sent: Part) -> Tensor:
    """What stays of s, in place."""
    if sent.positions is None:
        return s.sub_(sent.values)
    s[sent.positions] -= sent.values
    return s


def mean(parts: Sequence[Part], like: Tensor, weights: Sequence[float] | None = None, total: float | None = None) -> Tensor:
    """The weighted mean of one parameter's parts, (elements,) FP32: summed in the order given, each operation rounded by itself."""
    added = torch.zeros_like(like)
    for r, part in enumerate(parts):
        (part if weights is None else Part(part.positions, part.values * weights[r])).add_to(added)
    if total is None:
        total = float(len(parts)) if weights is None else sum(weights)
    # By a tensor of the device: CUDA divides by a number of the host as if it were multiplied by the inverse, which rounds otherwise.
    return added.div_(torch.full((), total, dtype=added.dtype, device=added.device))


def _union(parts: Sequence[Part], like: Tensor) -> int:
    """How many entries any rank sent."""
    sent = torch.zeros_like(like, dtype=torch.bool)
    for part in parts:
        sent[slice(None) if part.positions is None else part.positions] = True
    return int(torch.count_nonzero(sent))
