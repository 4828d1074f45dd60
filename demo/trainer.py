"""The trainer process: GRPO on the CPU, a version published after every optimizer step, every rollout asked of the workers.

``python -m demo.trainer SETTINGS``; the run's token comes in the environment variable ``DEMO_TOKEN``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from demo.asking import Asker, Moment, scored
from demo.events import EventLog
from demo.grpo import PublishEveryStep, SampledGRPOTrainer, grpo_config
from demo.hashing import masters_sha256, view_sha256
from demo.pinned import pin
from demo.processes import die_with_parent, peak_memory
from demo.rollouts import RolloutError
from demo.settings import Settings
from demo.sync import Sender, SyncError
from demo.task import problems
from demo.ways import open_sender


class Run:
    """What the trainer does besides training: publish, ask for rollouts, and hash what it published."""

    def __init__(self, settings: Settings, model: torch.nn.Module, tokenizer: Any, log: EventLog) -> None:
        self._settings = settings
        self._model = model
        self._log = log
        self._sender: Sender = open_sender(settings, model)
        self._now = Moment(0, 0, time.time())
        self._hashed = -1
        self.asker = Asker(settings, tokenizer, log)
        self.grpo: SampledGRPOTrainer | None = None

    def publish(self, step: int, stepped_at: float) -> None:
        """Make the weights of this step a version."""
        if self.grpo is not None and step > 0:
            losses, mismatch = self.grpo.take_losses()
            masters = masters_sha256(self._model) if self._settings.record_masters else None
            self._log.write("step", step=step, losses=losses, mismatch=mismatch, masters=masters, stepped_at=stepped_at)
        started = time.perf_counter()
        sent = self._sender.publish(step)
        seconds = time.perf_counter() - started
        self._now = Moment(step, sent.version, stepped_at)
        self._log.write("published", step=step, seconds=seconds, stepped_at=stepped_at, **vars(sent))

    def rollouts(self, prompts: list[str], _trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`."""
        return self.asker.rollouts(prompts, self._now, self._hash_once)

    def evaluate(self) -> None:
        """The share of right answers on held-out problems, with the newest version."""
        held_out = problems(self._settings.seed, self._settings.held_out, "held-out")
        self.asker.know(held_out)
        if held_out:
            self.asker.ask("held-out", [problem.question for problem in held_out], self._now, self._hash_once)

    def finish(self) -> None:
        """Hash the last version here and in every worker, and let the workers go."""
        self._hash_once()
        self.asker.finish(self._now.version)
        self._sender.close()

    def _hash_once(self) -> None:
        """The SHA-256 of the newest view, taken while the workers generate."""
        if self._hashed != self._now.version:
            self._hashed = self._now.version
            self._log.write("hashed", version=self._hashed, sha256=view_sha256(self._model))


def train(settings: Settings, log: EventLog) -> None:
    """The whole run."""
    set_seed(settings.seed)
    pin(settings.trainer_threads)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    run = Run(settings, model, tokenizer, log)
    training = problems(settings.seed, settings.prompts_per_step, "train")
    run.asker.know(training)
    grpo = SampledGRPOTrainer(
        model=model,
        reward_funcs=[scored],
        args=grpo_config(settings),
        train_dataset=Dataset.from_list([{"prompt": problem.question} for problem in training] * settings.steps),
        processing_class=tokenizer,
        rollout_func=run.rollouts,
        callbacks=[PublishEveryStep(run.publish)],
    )
    run.grpo = grpo
    run.publish(0, time.time())  # first: whoever comes finds this run in the store, and not one that was there before
    log.write("listening", address=run.asker.server.address, pid=os.getpid())
    run.evaluate()
    grpo.train()
    run.evaluate()
    run.finish()
    log.write("done", peak_memory=peak_memory())


def main(arguments: list[str]) -> int:
    """Run the trainer that the settings describe."""
    die_with_parent()
    settings = Settings.load(Path(arguments[0]))
    log = EventLog(settings.folder / "events" / "trainer.jsonl", "trainer")
    try:
        train(settings, log)
    except (RolloutError, SyncError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
