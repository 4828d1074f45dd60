"""TRL's GRPO trainer, with every rollout drawn by the workers and their log-probabilities in the loss."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from demo.settings import Settings


def grpo_config(settings: Settings) -> GRPOConfig:
    """One optimizer step per batch of rollouts, FP32 masters, BF16 autocast, no checkpoints."""
    batch = settings.prompts_per_step * settings.samples_per_prompt
    return GRPOConfig(
        output_dir=str(settings.folder / "trl"),
        use_cpu=True,
        bf16=True,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=batch // settings.micro_batch,
        num_generations=settings.samples_per_prompt,
        max_completion_length=settings.max_tokens,
        temperature=settings.temperature,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=settings.seed,
        data_seed=settings.seed,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class SampledGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """The probability ratio of the loss is taken against the log-probabilities that the workers recorded while sampling.

    TRL 1.16 passes the `logprobs` of a `rollout_func` on as `sampling_per_token_logps`, but its loss reads them only with vLLM
    (or for the off-policy mask). Without, the ratio's denominator is the trainer's own forward pass, and whatever the workers
    did would count as on-policy. Here they become `old_per_token_logps`: the loss clips exp(trainer - worker) token by token,
    as PPO and GRPO define it, so a stale or wrong policy in a worker shows up in the loss.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.losses: list[float] = []
        self.mismatch: list[float] = []
        self._latest_logps: torch.Tensor | None = None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> tuple[Any, Any, Any]:
        result: tuple[Any, Any, Any] = super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        self._latest_logps = result[0].detach()
        return result

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        assert self._latest_logps is not None
        mask = inputs["completion_mask"].bool()
        self.mismatch.append(float((self._latest_logps - inputs["old_per_token_logps"])[mask].abs().mean()))
        self.losses.append(float(loss.detach()))
        return loss

    def take_losses(self) -> tuple[list[float], float]:
        """The losses of the micro-batches since the last call, and how far worker and trainer disagreed per token."""
        losses, mismatch = self.losses, sum(self.mismatch) / max(len(self.mismatch), 1)
        self.losses, self.mismatch = [], []
        return losses, mismatch


class PublishEveryStep(TrainerCallback):  # type: ignore[misc]
    """Stamps the time of every optimizer step, then has its weights published."""

    def __init__(self, publish: Any) -> None:
        self._publish = publish
        self._stepped_at = 0.0

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The weights have just changed."""
        self._stepped_at = time.time()

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Publish them."""
        self._publish(state.global_step, self._stepped_at)
