"""What is measured: real and synthetic steps, each two BF16 checkpoints and the words that a figure needs beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pulse
from pulse import checkpoint
from pulse.bits import TensorBits
from pulse.errors import WeightsMismatch
from pulse.patch import changed_positions
from pulse.versions import Versions

Bits = NDArray[np.uint16]
_CHUNK = 1 << 20  # weights at a time where temporaries are wider than they are
_MEDIAN, _NORMAL_MEDIAN = 0.019, 0.6745  # of |w|: in the paper's models, and of a normal distribution of width 1
_ADAM = 0.25  # width of an Adam step over the learning rate


@dataclass(frozen=True, eq=False)
class Change:
    """One tensor that changed. positions: (n,) int64, ascending, n > 0; before, after: all its bits, (units,) uint16."""

    name: str
    shape: tuple[int, ...]
    positions: NDArray[np.int64]
    before: Bits
    after: Bits

    @property
    def old(self) -> Bits:
        """The bits that were there. (n,)."""
        return self.before[self.positions]

    @property
    def new(self) -> Bits:
        """The bits that come instead. (n,)."""
        return self.after[self.positions]


@dataclass(frozen=True, eq=False)
class Step:
    """Two checkpoints of the same BF16 tensors. lr and regime: under which learning rate and precision one became the other."""

    name: str
    lr: str
    regime: str
    old: Mapping[str, TensorBits]
    new: Mapping[str, TensorBits]

    def __post_init__(self) -> None:
        if {name: bits.spec for name, bits in self.old.items()} != {name: bits.spec for name, bits in self.new.items()}:
            raise WeightsMismatch(f"{self.name}: the two checkpoints differ in names, shapes or dtypes")
        if other := sorted(name for name, bits in self.old.items() if bits.dtype != "BF16"):
            raise WeightsMismatch(f"{self.name}: the layouts compared here are for BF16; {other[0]} is {self.old[other[0]].dtype}")

    @property
    def nbytes(self) -> int:
        """Size of one checkpoint in bytes."""
        return sum(bits.flat.nbytes for bits in self.old.values())

    @property
    def units(self) -> int:
        """How many weights there are."""
        return self.nbytes // 2

    @property
    def changed(self) -> int:
        """How many of them differ in bits."""
        return sum(change.positions.size for change in self.changes)

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The tensors that changed, by name."""
        found = []
        for name in sorted(self.old):
            before, after = self.old[name], self.new[name]
            positions = changed_positions(before.flat, after.flat).astype(np.int64)
            if positions.size:
                found.append(Change(name, before.shape, positions, before.flat, after.flat))
        return tuple(found)

    @property
    def median(self) -> float:
        """The (lower) median of |w| in the old checkpoint."""
        counts = np.zeros(1 << 15, np.int64)  # of each pattern without its sign, which orders like the numbers
        for bits in self.old.values():
            for start in range(0, bits.flat.size, _CHUNK):
                counts += np.bincount(bits.flat[start : start + _CHUNK] & 0x7FFF, minlength=1 << 15)
        middle = np.searchsorted(np.cumsum(counts), (self.units + 1) // 2)
        return float(np.array([middle << 16], np.uint32).view(np.float32)[0])


def trace(name: str, folder: Path, lr: str, regime: str) -> Iterator[Step]:
    """The steps between consecutive `.safetensors` files of a folder, in order of names."""
    for old, new in pairwise(sorted(folder.glob("*.safetensors"))):
        yield Step(f"{name}, {old.stem} to {new.stem}", lr, regime, checkpoint.read(old), checkpoint.read(new))


def stored(url: str, versions: list[tuple[int, int]], lr: str, regime: str) -> Iterator[Step]:
    """Steps between versions of a store: whole models."""
    chain = Versions(pulse.open_store(url))
    for old, new in versions:
        yield Step(f"whole model, version {old} to {new}", lr, regime, chain.restore(old), chain.restore(new))


def synthetic(params: float, lr: float, seed: int = 0) -> Step:
    """A made-up step of a transformer of about so many weights, tensor by tensor, always the same for a seed.

    Masters are normal, with a width per tensor that puts the median of |w| at about that of the paper's models; each moves by a normal
    step of 0.25 times `lr`, and both are rounded to BF16. So a weight changes with probability min(1, |step| / ulp), as in training.
    """
    old, new = {}, {}
    for index, (name, shape) in enumerate(transformer(params).items()):
        random = np.random.default_rng([seed, index])
        old[name], new[name] = (TensorBits("BF16", shape, flat) for flat in _moved(int(np.prod(shape)), name, lr, random))
    regime = "made up: normal weights, FP32 masters spread in their cells, independent steps of width lr / 4"
    return Step(f"synthetic, {sum(bits.flat.size for bits in old.values()) / 1e6:,.0f} M weights", f"{lr:g}", regime, old, new)


def transformer(params: float) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a transformer of about so many weights: depth and vocabulary grow with the width."""
    hidden = 128 * min(range(1, 65), key=lambda n: abs(14.5 * n * (128 * n) ** 2 + 16 * (128 * n) ** 2 - params))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (16 * hidden, hidden), "model.norm.weight": (hidden,)}
    outputs = {"self_attn.q_proj": hidden, "self_attn.k_proj": hidden // 4, "self_attn.v_proj": hidden // 4, "self_attn.o_proj": hidden}
    outputs |= {"mlp.gate_proj": 4 * hidden, "mlp.up_proj": 4 * hidden}
    for layer in range(hidden // 128):
        place = f"model.layers.{layer}"
        shapes |= {f"{place}.{name}.weight": (size, hidden) for name, size in outputs.items()}
        shapes[f"{place}.mlp.down_proj.weight"] = (hidden, 4 * hidden)
        shapes |= {f"{place}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    return shapes


def _moved(units: int, name: str, lr: float, random: np.random.Generator) -> tuple[Bits, Bits]:
    """The BF16 bits of one tensor before and after a step. (units,) each."""
    norm = name.endswith("norm.weight")
    center, width = (1.0, 0.1) if norm else (0.0, _MEDIAN / _NORMAL_MEDIAN * float(np.exp(0.3 * random.standard_normal())))
    old, new = np.empty(units, "<u2"), np.empty(units, "<u2")
    for start in range(0, units, _CHUNK):
        size = min(_CHUNK, units - start)
        master = center + np.float32(width) * random.standard_normal(size, np.float32)
        step = np.float32(_ADAM * lr) * random.standard_normal(size, np.float32)
        old[start : start + size] = to_bf16(master)
        new[start : start + size] = to_bf16(master + step)
    return old, new


def to_bf16(values: NDArray[Any]) -> Bits:
    """Finite float32 numbers rounded to BF16 bits, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: Bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded
