"""Callbacks for `transformers.Trainer`, which TRL's trainers are: publish the policy behind the training; train it with others."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainerCallback

from pulse.codec import Encoding
from pulse.errors import FileError, StoreUnavailable
from pulse.exchange import Exchange
from pulse.publisher import Publisher, Receipt, check_options
from pulse.store import ObjectStore, open_store
from pulse.torch import ModuleWeights, OuterOptimizer, Report


class PublishCallback(TrainerCallback):  # type: ignore[misc]  # the base has no types
    """Publishes `model` into `store` when training begins, every `every` optimizer steps, and when it ends.

    >>> GRPOTrainer(..., callbacks=[PublishCallback("s3://bucket/run-7")])        # doctest: +SKIP

    `anchor_every`, `encoding`, `link` and `compress_anchors` are a `Publisher`'s. Beside the weights go the model's config and the
    tokenizer, unless `files` says otherwise, so that what `pulse pull` writes loads.
    The training loop pays only for comparing the weights with what was published last; encoding and upload go on in the background.
    What it paid since the last log entry is logged beside the loss: `pulse/step_seconds` (comparing) and `pulse/wait_seconds` (for a
    publish that was still under way); and of the newest committed version `pulse/version`, `pulse/bytes`, `pulse/density`. `receipts`
    has them all.

    A store that does not answer does not stop the training until `patience` publishes in a row have failed: each later version
    contains what the failed ones did. In a run of several processes only the first one publishes; sharded models (FSDP2, DeepSpeed
    ZeRO-3) are not supported yet.
    """

    def __init__(
        self,
        store: ObjectStore | str | os.PathLike[str],
        *,
        every: int = 1,
        view: torch.dtype | Mapping[str, torch.dtype] | None = torch.bfloat16,
        anchor_every: int = 50,
        files: Iterable[str | os.PathLike[str]] | str | os.PathLike[str] = (),
        encoding: Encoding | Literal["auto"] = "auto",
        link: float | None = None,
        compress_anchors: bool = False,
        patience: int = 3,
    ) -> None:
        for name, value in (("every", every), ("patience", patience)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: 1 or more is wanted")
        check_options(anchor_every, encoding, link)
        self._store = open_store(store) if isinstance(store, str | os.PathLike) else store
        self._every = every
        self._view = view
        beside = [files] if isinstance(files, str | os.PathLike) else list(files)
        self._options: dict[str, Any] = {"anchor_every": anchor_every, "files": beside}
        self._options |= {"encoding": encoding, "link": link, "compress_anchors": compress_anchors}
        self._patience = patience
        self._failures = 0
        self._publisher: Publisher | None = None
        self._pending: Future[Receipt] | None = None
        self._submitted: int | None = None
        self._metrics: dict[str, float] = {}
        self.receipts: list[Receipt] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Publish the weights that training starts from; after a resume, those that were restored."""
        if state.is_world_process_zero:
            if not self._options["files"]:
                self._options["files"] = [self._described(model, processing_class)]
            self._publisher = Publisher(self._store, ModuleWeights(model, view=self._view), **self._options)
            self._publish(state.global_step)
            self._settle()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Publish if it is time."""
        if self._publisher is not None and state.global_step % self._every == 0:
            self._publish(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Put what publishing cost into the log entry that is being written, and into the history."""
        if logs is not None and self._metrics:
            logs |= self._metrics
            if state.log_history:
                state.log_history[-1] |= self._metrics
            self._metrics |= {"pulse/wait_seconds": 0.0, "pulse/step_seconds": 0.0}

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Publish the last step if it has not been, and wait until everything is committed."""
        if self._publisher is None:
            return
        if self._submitted != state.global_step:
            self._publish(state.global_step)
        self._settle(final=True)
        self._publisher.close()
        self._publisher = None

    def _described(self, model: Any, processing_class: Any) -> str:
        """A directory with what a receiver needs beside the weights to load them: config, generation config, tokenizer."""
        folder = tempfile.mkdtemp(prefix="pulse-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        parts: list[Any] = [getattr(model, "config", None), getattr(model, "generation_config", None), processing_class]
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        return folder

    def _publish(self, step: int) -> None:
        started = time.perf_counter()
        self._settle()
        waited = time.perf_counter()
        if self._publisher is not None:
            self._pending = self._publisher.submit(step)
            self._submitted = step
        spent = {"pulse/wait_seconds": waited - started, "pulse/step_seconds": time.perf_counter() - waited}
        self._metrics |= {name: self._metrics.get(name, 0.0) + seconds for name, seconds in spent.items()}

    def _settle(self, *, final: bool = False) -> None:
        """Take the receipt of the publish under way; bear a store that is away for a while, but not at the end."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            receipt = pending.result()
        except StoreUnavailable:
            self._failures += 1
            if final or self._failures >= self._patience:
                raise
            return
        self._failures = 0
        self.receipts.append(receipt)
        self._metrics |= {"pulse/version": receipt.version, "pulse/bytes": receipt.nbytes, "pulse/density": receipt.density}


class OuterCallback(TrainerCallback):  # type: ignore[misc]  # the base has no types
    """Trains one model with several trainers: a round of PULSELoCo every `inner_steps` optimizer steps.

    >>> GRPOTrainer(..., callbacks=[OuterCallback(exchange, inner_steps=8)])        # doctest: +SKIP

    Each trainer is a job of its own, with an output directory of its own: started as one job, they would average gradients at every step.
    `exchange` is how they meet (`pulse.exchange`, `pulse.torch.exchange`); `options` are `OuterOptimizer`'s. Put it before a
    `PublishCallback(every=inner_steps)`, on one trainer, to publish the view of each new anchor.
    Logs what a round took beside the loss: `loco/round`, `loco/density`, `loco/payload_bytes`, `loco/view_changed`, `loco/seconds`.
    Each checkpoint gets this trainer's state, `outer.pt`, and a resumed trainer goes on from it. `reports` has every round.

    Raises `ValueError` when training begins if a round would fall between optimizer steps that use the same rollouts: their
    log-probabilities would belong to weights that are gone.
    """

    def __init__(self, exchange: Exchange, *, inner_steps: int = 8, **options: Any) -> None:
        self._exchange = exchange
        self._options = {"inner_steps": inner_steps, **options}
        self._metrics: dict[str, float] = {}
        self.outer: OuterOptimizer | None = None
        self.reports: list[Report] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Meet the other trainers; after a resume, with the state that was saved."""
        reuse = _steps_per_rollout(args)
        if self._options["inner_steps"] % reuse:
            raise ValueError(f"inner_steps={self._options['inner_steps']}: rollouts serve {reuse} optimizer steps, so a multiple of that")
        self.outer = OuterOptimizer(model.named_parameters(), exchange=self._exchange, **self._options)
        saved = Path(args.output_dir, f"checkpoint-{state.global_step}", _OUTER_FILE)
        if state.global_step:
            if not saved.is_file():
                raise FileError(f"{saved} is missing: training goes on from step {state.global_step}, without what the rounds left behind")
            self.outer.load_state_dict(torch.load(saved, weights_only=True))
        self._note(self.outer.start())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Count the step; at the end of a window, a round."""
        if self.outer is not None:
            self._note(self.outer.step())

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Put this trainer's state beside the checkpoint."""
        if self.outer is not None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            partial = folder / f"{_OUTER_FILE}.partial"
            torch.save(self.outer.state_dict(), partial)
            partial.replace(folder / _OUTER_FILE)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Put the newest round's figures into the log entry that is being written, and into the history."""
        if logs is not None and self._metrics:
            logs |= self._metrics
            if state.log_history:
                state.log_history[-1] |= self._metrics
            self._metrics = {}

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Take part until the others are done as well."""
        if self.outer is not None:
            for report in self.outer.finish():
                self._note(report)

    def _note(self, report: Report | None) -> None:
        if report is None or self.outer is None:
            return
        self.reports.append(report)
        self._metrics = {
            "loco/round": report.round,
            "loco/density": report.density,
            "loco/payload_bytes": report.payload_bytes[self._exchange.rank],
            "loco/view_changed": report.view_changed / report.elements,
            "loco/seconds": sum(report.seconds.values()),
        }


_OUTER_FILE = "outer.pt"


def _steps_per_rollout(args: Any) -> int:
    """How many optimizer steps use the same rollouts, as TRL's GRPO is set up; 1 for trainers that have none."""
    micro = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
    return max(int(micro * getattr(args, "num_iterations", 1)) // int(args.gradient_accumulation_steps), 1)
