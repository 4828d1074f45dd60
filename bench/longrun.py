"""A longer real run: GRPO on the demo's model, every step published, so that `pulse analyze` can look at it afterwards.

``python -m bench.longrun`` runs four cells one after the other: learning rates 3e-6 and 1e-6, each with FP32 masters and in pure BF16.
A cell is resumed from its last checkpoint if it was interrupted. One process, the policy samples for itself; what is measured is what an
optimizer step changes in the weights, not how they travel.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig

from demo.grpo import SampledGRPOTrainer
from demo.model import DEFAULT_MODEL, prepare
from demo.sampling import Sampling, sample
from demo.task import Problem, end_tokens, problems, prompt_tokens, reward
from pulse.integrations.transformers import PublishCallback

Regime = Literal["masters", "bf16"]
NOISE = 0.03  # of each tensor's standard deviation: the weights come from a 4-bit file, and lie on a coarse grid without it
_PROMPTS, _SAMPLES, _TOKENS = 6, 8, 8


@dataclass(frozen=True)
class Cell:
    """One run: a learning rate and a precision regime."""

    learning_rate: float
    regime: Regime

    @property
    def name(self) -> str:
        """What its folder is called."""
        return f"{self.regime}-{self.learning_rate:.0e}".replace("e-0", "e-")


_REGIMES: tuple[Regime, ...] = ("masters", "bf16")
CELLS = tuple(Cell(rate, regime) for regime in _REGIMES for rate in (3e-6, 1e-6))


def natural(model: torch.nn.Module, seed: int) -> None:
    """Noise on every weight, then BF16: values, and exponents, spread as in a model that was trained and never quantised."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * NOISE
            weight.copy_((weight + noise).bfloat16())


class Rollouts:
    """TRL's `rollout_func`: a copy of the policy's BF16 view samples, as a worker would."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, problem_list: list[Problem], folder: Path) -> None:
        self._model = model
        self._policy = copy.deepcopy(model).to(torch.bfloat16).eval()
        self._tokenizer = tokenizer
        self._problems = {problem.question: problem for problem in problem_list}
        self._ends = frozenset(end_tokens(tokenizer))
        self._log = folder / "rewards.jsonl"

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """One request per group of equal prompts."""
        step = trainer.state.global_step
        columns: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "scored": []}
        with torch.no_grad():
            for copied, weight in zip(self._policy.parameters(), self._model.parameters(), strict=True):
                copied.copy_(weight)
        for index, question in enumerate(prompts[::_SAMPLES]):
            prompt = prompt_tokens(self._tokenizer, question)
            found = sample(self._policy, prompt, step * 1000 + index, Sampling(_SAMPLES, _TOKENS), self._ends)
            texts = self._tokenizer.batch_decode(found.tokens, skip_special_tokens=True)
            columns["prompt_ids"] += [prompt] * _SAMPLES
            columns["completion_ids"] += found.tokens
            columns["logprobs"] += found.logprobs
            columns["scored"] += [reward(self._problems[question], text) for text in texts]
        mean = sum(columns["scored"]) / len(columns["scored"])
        with self._log.open("a") as log:
            log.write(json.dumps({"step": step, "reward": mean}) + "\n")
        return columns


class Say(TrainerCallback):  # type: ignore[misc]
    """One line per step, for whoever watches the log."""

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """What the step did."""
        logs = logs or {}
        figures = {"loss": logs.get("loss"), "density": logs.get("pulse/density"), "bytes": logs.get("pulse/bytes")}
        print(f"step {state.global_step}: {json.dumps(figures)}", flush=True)


def scored(**columns: Any) -> list[float]:
    """TRL's reward function: the rewards that were worked out with the rollouts."""
    rewards: list[float] = columns["scored"]
    return rewards


def run(cell: Cell, folder: Path, steps: int, seed: int) -> None:
    """Train one cell to its end, from its last checkpoint if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    set_seed(seed)
    source = prepare(DEFAULT_MODEL)
    dtype = torch.float32 if cell.regime == "masters" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    natural(model, seed)
    tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    training = problems(seed, _PROMPTS, "train")
    trainer = SampledGRPOTrainer(
        model=model,
        reward_funcs=[scored],
        args=_config(cell, folder, steps, seed),
        train_dataset=Dataset.from_list([{"prompt": problem.question} for problem in training] * steps),
        processing_class=tokenizer,
        rollout_func=Rollouts(model, tokenizer, training, folder),
        callbacks=[PublishCallback(folder / "store", anchor_every=1_000_000), Say()],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder / "trl")) if (folder / "trl").is_dir() else None)
    (folder / "done").write_text(f"{steps}\n")


def _config(cell: Cell, folder: Path, steps: int, seed: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=cell.regime == "masters",
        max_steps=steps,
        per_device_train_batch_size=_PROMPTS * _SAMPLES,
        num_generations=_SAMPLES,
        max_completion_length=_TOKENS,
        temperature=1.0,
        learning_rate=cell.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=seed,
        data_seed=seed,
        save_steps=25,
        save_total_limit=1,
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run every cell that is not done."""
    parser = argparse.ArgumentParser(prog="python -m bench.longrun", description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/longrun"), help="folder for stores and checkpoints (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps per cell (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="everything follows from it (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of PyTorch (default: all)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for cell in CELLS:
        folder = options.run / cell.name
        if not (folder / "done").is_file():
            print(f"{cell.name}: {options.steps} steps", flush=True)
            run(cell, folder, options.steps, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
