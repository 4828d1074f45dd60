"""What one run is told, handed to its processes as one JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

SyncMode = Literal["patch", "checkpoint"]


@dataclass(frozen=True)
class Settings:
    """One run. `sync` says how weights travel: as patches through PULSE, or as whole checkpoints."""

    run: str
    model: str
    store: str
    sync: SyncMode = "patch"
    steps: int = 20
    workers: int = 2
    seed: int = 0
    learning_rate: float = 3e-6
    prompts_per_step: int = 6
    samples_per_prompt: int = 16
    micro_batch: int = 48
    max_tokens: int = 8
    temperature: float = 1.0
    held_out: int = 10
    anchor_every: int = 10
    record_masters: bool = False
    trainer_threads: int = 2
    stall_seconds: float = 240.0

    @property
    def folder(self) -> Path:
        """The folder of the run's records."""
        return Path(self.run)

    def save(self) -> Path:
        """Write the settings into the run's folder and say where."""
        path = self.folder / "settings.json"
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text()))
