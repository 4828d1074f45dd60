"""One of several trainers: GRPO on the CPU, a round with the others every `inner_steps` steps, every rollout asked of the workers.

``python -m demo.loco.trainer SETTINGS RANK NAME``; the run's token comes in the environment variable ``DEMO_TOKEN``. Trainers meet in the
store and nowhere else. A trainer that finds a state of its own, saved after its last round, goes on from there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

import pulse
from demo.asking import Asker, Moment, scored
from demo.events import EventLog
from demo.grpo import SampledGRPOTrainer, grpo_config
from demo.hashing import view_sha256
from demo.loco import saved
from demo.loco.addresses import announce
from demo.loco.link import Shaped
from demo.loco.settings import Settings
from demo.patches import PatchSender
from demo.pinned import pin
from demo.processes import die_with_parent, peak_memory
from demo.rollouts import RolloutError
from demo.sync import SyncError
from demo.task import problems
from pulse.exchange import StoreExchange
from pulse.torch import OuterOptimizer, Report

_RUN = "loco"


class Run:
    """What a trainer does besides its inner steps: rounds with the others, each but the last saved; trainer 0 publishes too."""

    def __init__(self, settings: Settings, rank: int, model: torch.nn.Module, tokenizer: Any, log: EventLog) -> None:
        self._settings = settings
        self._rank = rank
        self._model = model
        self._log = log
        store = pulse.open_store(settings.store)
        self._store = store if settings.link is None else Shaped(store, settings.link)
        exchange = StoreExchange(self._store, rank, settings.trainers, run=_RUN, timeout=settings.stall_seconds, poll=settings.poll)
        self.outer = OuterOptimizer(model.named_parameters(), exchange=exchange, inner_steps=settings.inner_steps, method=settings.method)
        self._sender = PatchSender(settings, model, self._store) if rank == 0 else None
        self._found: dict[str, Any] | None = None  # a saved state, until all of it has been taken up
        self._step = 0  # since the last round
        self._round_at = time.time()
        self.asker = Asker(settings.of(rank), tokenizer, log)

    @property
    def over(self) -> bool:
        """Whether all rounds have been."""
        return self.outer.rounds >= self._settings.rounds

    def begin(self) -> None:
        """Take up what was saved, meet the others, and say where workers find this trainer."""
        self._found = found = saved.load(self._settings.state(self._rank))
        if found is not None:
            self.outer.load_state_dict(found.pop("outer"))
            self.outer.rollback()  # the local weights are the anchor, as they were when this was saved
        report = self.outer.start()
        self._log.write("met", round=self.outer.rounds, digest=self.outer.digest, resumed=found is not None)
        if report is not None:
            self._told(report)
        if self._sender is not None:
            self._publish()
        announce(self._store, self._rank, self.asker.server.address)
        self._log.write("listening", address=self.asker.server.address, pid=os.getpid())

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the first step: the inner optimizer's state, and that of the generator by which TRL shuffles."""
        if self._found is not None:
            optimizer.load_state_dict(self._found["inner"])
            torch.set_rng_state(self._found["random"])
            self._found = None

    def stepped(self, optimizer: torch.optim.Optimizer, losses: list[float], mismatch: float) -> None:
        """An inner step has been taken; after the last one of a window comes a round."""
        self._step += 1
        self._log.write("step", step=self._moment().step, losses=losses, mismatch=mismatch)
        report = self.outer.step()
        if report is not None:
            self._told(report)
            if self._sender is not None:
                self._publish()
            if not self.over:
                self._save(optimizer)

    def rollouts(self, prompts: list[str], _trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: drawn from the shared weights of the last round, however far the local ones have moved on."""
        return self.asker.rollouts(prompts, self._moment(), lambda: None)

    def finish(self) -> None:
        """Leave the others when all are done, and let the workers go."""
        for report in self.outer.finish():
            self._told(report)
        self.asker.finish(self.outer.rounds)
        if self._sender is not None:
            self._sender.close()
        self.outer.exchange.close()
        self._settings.state(self._rank).unlink(missing_ok=True)  # gigabytes that nobody needs any more

    def _save(self, optimizer: torch.optim.Optimizer) -> None:
        started = time.perf_counter()
        state = {"outer": self.outer.state_dict(), "inner": optimizer.state_dict(), "random": torch.get_rng_state()}
        saved.save(self._settings.state(self._rank), state)
        self._log.write("saved", round=self.outer.rounds, seconds=time.perf_counter() - started)

    def _moment(self) -> Moment:
        return Moment(self.outer.rounds * self._settings.inner_steps + self._step, self.outer.rounds, self._round_at)

    def _told(self, report: Report) -> None:
        self._step, self._round_at = 0, time.time()
        self._log.write("round", **vars(report))

    def _publish(self) -> None:
        """The view of the shared weights, which the local ones are right after a round."""
        assert self._sender is not None
        started = time.perf_counter()
        sent = self._sender.publish(self.outer.rounds)
        seconds = time.perf_counter() - started
        if sent.version != self.outer.rounds:
            raise SyncError(f"{self._settings.store} holds the versions of another run already: choose an empty store")
        self._log.write("published", step=self.outer.rounds, seconds=seconds, **vars(sent))
        self._log.write("hashed", version=sent.version, sha256=view_sha256(self._model))


class Rounds(TrainerCallback):  # type: ignore[misc]
    """Counts the inner steps, and ends the training after the last round."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.grpo: SampledGRPOTrainer | None = None

    def on_step_begin(self, *_: Any, optimizer: torch.optim.Optimizer, **__: Any) -> None:
        """Before every step; the loader, which draws from the generator too, is there by now."""
        self._run.restore(optimizer)

    def on_step_end(self, _args: Any, _state: Any, control: Any, *_: Any, optimizer: torch.optim.Optimizer, **__: Any) -> Any:
        """After every step; the gradients are gone."""
        assert self.grpo is not None
        self._run.stepped(optimizer, *self.grpo.take_losses())
        control.should_training_stop = self._run.over
        return control


def train(settings: Settings, rank: int, log: EventLog) -> None:
    """The whole run, as one trainer sees it."""
    own = settings.of(rank)
    own.folder.mkdir(parents=True, exist_ok=True)
    set_seed(own.seed)
    pin(settings.trainer_threads)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    run = Run(settings, rank, model, tokenizer, log)
    mine = problems(settings.seed, settings.prompts_per_step * settings.trainers, "train")[rank :: settings.trainers]
    run.asker.know(mine)
    callback = Rounds(run)
    callback.grpo = grpo = SampledGRPOTrainer(
        model=model,
        reward_funcs=[scored],
        args=grpo_config(own),
        train_dataset=Dataset.from_list([{"prompt": problem.question} for problem in mine] * settings.steps),
        processing_class=tokenizer,
        rollout_func=run.rollouts,
        callbacks=[callback],
    )
    run.begin()
    if not run.over:
        grpo.train()
    run.finish()
    log.write("done", peak_memory=peak_memory())


def main(arguments: list[str]) -> int:
    """Run the trainer that the settings describe."""
    die_with_parent()
    settings, rank, name = Settings.load(Path(arguments[0])), int(arguments[1]), arguments[2]
    log = EventLog(settings.folder / "events" / f"{name}.jsonl", name, rank=rank)
    try:
        train(settings, rank, log)
    except (RolloutError, SyncError, pulse.PulseError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
