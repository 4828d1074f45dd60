"""Time and memory of one PULSELoCo round on one rank, in copies of the FP32 weights: gate and encode, decode, commit.

Made-up weights and windows, so that about as many entries are visible as the paper reports. Two ranks meet in memory: what is measured is
one rank's work, two payloads to decode and apply. A copy is timed right before and after each job, as for the other speeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from bench.speeds import seconds
from pulse.torch.loco import rounds
from pulse.torch.loco.layout import Layout, collect
from pulse.torch.loco.methods import Method, method_of
from pulse.torch.loco.steps import Nesterov

PARAMS = 1e8
_MATRIX = 1 << 21
_STEP = 2e-6  # how far a weight moves in a window: so that 4 to 5 % of them do so visibly
METHODS = (("pulseloco", "float32"), ("pulseloco", "bfloat16"), ("pulseloco", "float8"), ("diloco", "float32"), ("diloco-int8", "float32"))


@dataclass(frozen=True, slots=True)
class RoundSpeed:
    """One method. Times in copies, the least and the median of all rounds measured; state: bytes per parameter kept between rounds."""

    method: str
    density: float
    payload_bytes: int
    per_entry: float
    encode: tuple[float, float]
    decode: tuple[float, float]
    commit: tuple[float, float]
    state: float


@dataclass(frozen=True, slots=True)
class RoundSpeeds:
    """All methods. copy_seconds: the least; threads: of PyTorch and of the codec."""

    params: int
    threads: int
    rounds: int
    copy_seconds: float
    rows: tuple[RoundSpeed, ...]


def made(params: float, seed: int) -> tuple[Layout, list[torch.Tensor], list[list[torch.Tensor]]]:
    """A layout, an anchor, and the local weights of two ranks after a window."""
    generator = torch.Generator().manual_seed(seed)
    count = max(int(params) // _MATRIX, 1)
    anchor = [torch.randn(_MATRIX, generator=generator) * 0.02 for _ in range(count)]
    layout, _ = collect([(f"layers.{i}.weight", torch.nn.Parameter(tensor)) for i, tensor in enumerate(anchor)], torch.bfloat16)
    windows = [[tensor - torch.randn(_MATRIX, generator=generator) * _STEP for tensor in anchor] for _ in range(2)]
    return layout, anchor, windows


def measure(params: float, repeats: int, say: Callable[[str], None]) -> RoundSpeeds:
    """Every method, one after the other."""
    layout, anchor, windows = made(params, 0)
    spare = [torch.empty_like(tensor) for tensor in anchor]

    def copy() -> None:
        for target, source in zip(spare, anchor, strict=True):
            target.copy_(source)

    copy()
    copies: list[float] = []
    rows = []
    for name, value_dtype in METHODS:
        say(f"round: {name}, {value_dtype}")
        rows.append(_row(method_of(name, value_dtype), value_dtype, layout, anchor, windows, repeats, copy, copies))
    return RoundSpeeds(layout.elements, torch.get_num_threads(), repeats, min(copies), tuple(rows))


def _row(
    method: Method,
    value_dtype: str,
    layout: Layout,
    anchor: list[torch.Tensor],
    windows: list[list[torch.Tensor]],
    repeats: int,
    copy: Callable[[], None],
    copies: list[float],
) -> RoundSpeed:
    state = rounds.new_state(anchor, method, Nesterov(method.lr, method.momentum), "feedback")
    local = [tensor.clone() for tensor in windows[0]]
    theirs = rounds.encode(state, layout, windows[1], method, {})
    found: dict[str, list[float]] = {"encode": [], "decode": [], "commit": []}
    held: dict[str, object] = {}

    def encode() -> None:
        held["out"] = rounds.encode(state, layout, local, method, {})

    def decode() -> None:
        mine = held["out"]
        assert isinstance(mine, rounds.Outgoing)
        held["in"] = method.wire.decode([mine.blob, theirs.blob], state.anchor, layout)

    def commit() -> None:
        mine, arrived = held["out"], held["in"]
        assert isinstance(mine, rounds.Outgoing)
        assert isinstance(arrived, list)
        rounds.commit(state, layout, local, method, mine, arrived)

    for number in range(repeats + 1):
        for name, job in (("encode", encode), ("decode", decode), ("commit", commit)):
            before, took, after = seconds(copy), seconds(job), seconds(copy)
            if number:  # the first one compiles kernels
                found[name].append(2 * took / (before + after))
                copies += [before, after]
        _begin_again(state, anchor, local, windows[0])
    mine = rounds.encode(state, layout, local, method, {})
    least = {name: (min(times), median(times)) for name, times in found.items()}
    label = method.name if value_dtype == "float32" else f"{method.name}, {value_dtype} values"
    return RoundSpeed(
        label,
        mine.count / layout.elements,
        len(mine.blob),
        len(mine.blob) / max(mine.count, 1),
        least["encode"],
        least["decode"],
        least["commit"],
        state_bytes(state) / layout.elements,
    )


def _begin_again(state: rounds.State, anchor: list[torch.Tensor], local: list[torch.Tensor], window: list[torch.Tensor]) -> None:
    """The same window once more, against the same anchor; momentum stays, as it would."""
    for i, tensor in enumerate(anchor):
        state.anchor[i].copy_(tensor)
        local[i].copy_(window[i])
        for own in (state.feedback, state.age):
            if own is not None:
                own[i].zero_()


def state_bytes(state: rounds.State) -> int:
    """What a rank keeps between rounds, in bytes."""
    momentum = [tensor for tensor in state.outer.state_dict().get("momentum", []) if isinstance(tensor, torch.Tensor)]
    kept = [*state.anchor, *(state.feedback or []), *(state.age or []), *momentum]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)
