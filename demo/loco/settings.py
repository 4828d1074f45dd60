"""What a run with several trainers is told: what `demo.settings` has, and how the trainers meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from demo import settings
from demo.task import MOST_TRAINED

SMALL = "small"  # the name of the model that is made on the spot
MOST_TRAINERS = MOST_TRAINED // 2  # each has two sums of its own at least


@dataclass(frozen=True)
class Settings(settings.Settings):
    """One run. `link` is what each trainer is behind, in bit/s, or None for what there is; `steps` is more than any trainer will need."""

    method: str = "pulseloco"
    trainers: int = 2
    inner_steps: int = 8
    rounds: int = 5
    link: float | None = None
    prompts_per_step: int = 4
    samples_per_prompt: int = 8
    micro_batch: int = 16
    trainer_threads: int = 1
    stall_seconds: float = 600.0
    poll: float = 0.05

    def of(self, rank: int) -> Self:
        """One trainer's settings: a seed and a folder of its own."""
        return replace(self, run=str(self.folder / f"trainer-{rank}"), seed=(self.seed * MOST_TRAINERS + rank) % (1 << 32))

    def state(self, rank: int) -> Path:
        """Where a trainer saves its state."""
        return self.of(rank).folder / "state.pt"
