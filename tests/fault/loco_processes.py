"""A trainer that lives and dies: in a thread of the tests of restarts, or in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo

from pulse import kernels
from pulse.exchange import Exchange, StoreExchange
from tests.trainers import Around, Trainer

kernels.sum_flat(np.zeros(1, np.uint32))  # numba is loaded once, where processes are forked from, and not in each of them


class Killing(Around):
    """Kills its process at one call: the nth whose tag ends with `what`, before or after it."""

    def __init__(self, inside: Exchange, what: str, nth: int, *, after: bool) -> None:
        super().__init__(inside)
        self.what, self.left, self.after = what, nth, after

    def call(self, tag: str, act: Callable[[], Any]) -> Any:
        ours = tag.endswith(f"/{self.what}")
        if ours and self.left == 0 and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = act()
        if ours and self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= ours
        return found


def live(trainer: Trainer, steps: int, save: Callable[[Trainer], None], killed_at: int | None = None) -> None:
    """Train to a number of steps and save after every round, as a training loop does."""
    trainer.note(trainer.outer.start())
    while trainer.steps < steps:
        before = len(trainer.reports)
        trainer.train(1)
        if len(trainer.reports) > before:
            save(trainer)
        if trainer.steps == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
    trainer.finish()


def process(folder: str, rank: int, size: int, steps: int, kill: tuple[str, int, bool] | int | None) -> None:
    """`live` over a folder. kill: a call as `Killing` takes it, or a number of inner steps."""
    torch.set_num_threads(1)
    exchange: Exchange = StoreExchange(Path(folder) / "store", rank, size, run="r", timeout=60, poll=0.01)
    if isinstance(kill, tuple):
        exchange = Killing(exchange, kill[0], kill[1], after=kill[2])
    trainer = Trainer(exchange)
    saved = Path(folder) / f"{rank}.pt"

    def save(trainer: Trainer) -> None:
        torch.save(trainer.saved(), saved.with_suffix(".new"))
        saved.with_suffix(".new").replace(saved)

    if saved.exists():
        trainer.load(torch.load(saved, weights_only=True))
    live(trainer, steps, save, kill if isinstance(kill, int) else None)
    text = "\n".join(f"{report.round} {report.digest} {report.resynced}" for report in trainer.reports)
    (Path(folder) / f"{rank}.txt").write_text(f"{text}\nend {trainer.outer.digest}")
