"""The loss really uses the log-probabilities that came with the rollouts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaForCausalLM

from demo.grpo import SampledGRPOTrainer, grpo_config
from demo.sampling import Sampling, sample
from demo.settings import Settings
from demo.trainer import scored
from tests.demo.conftest import tiny_config


def losses(folder: Path, tokenizer: Any, shift: float) -> tuple[list[float], float]:
    """One step of a tiny model on its own rollouts, whose log-probabilities are off by `shift` where the answer was right."""
    settings = Settings(run=str(folder), model="", store="", steps=1, prompts_per_step=2, samples_per_prompt=4, micro_batch=8, max_tokens=6)
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(len(tokenizer)))

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        drawn = [(tokenizer(prompt)["input_ids"], prompt) for prompt in prompts[::4]]
        groups = [(ids, sample(model, ids, 1, Sampling(4, 6), frozenset({2}))) for ids, _ in drawn]
        return {
            "prompt_ids": [ids for ids, _ in groups for _ in range(4)],
            "completion_ids": [tokens for _, group in groups for tokens in group.tokens],
            "logprobs": [
                [value + shift * (index == 1) for value in row] for _, group in groups for index, row in enumerate(group.logprobs)
            ],
            "scored": [0.0, 1.0, 0.0, 0.0] * 2,
        }

    dataset = Dataset.from_list([{"prompt": "1 + 2"}, {"prompt": "3 + 4"}])
    trainer = SampledGRPOTrainer(
        model=model,
        reward_funcs=[scored],
        args=grpo_config(settings),
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    trainer.train()
    return trainer.take_losses()


@pytest.mark.filterwarnings("ignore")
def test_other_log_probabilities_give_another_loss(real_model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    honest, mismatch = losses(tmp_path, tokenizer, 0.0)
    shifted, shifted_mismatch = losses(tmp_path, tokenizer, -0.15)
    assert mismatch < 0.05
    assert shifted_mismatch == pytest.approx(0.15 / 4, abs=0.01)
    assert abs(honest[0]) < 0.005
    advantage = (1 - 0.25) / (0.5 + 1e-4)
    assert shifted[0] - honest[0] == pytest.approx(-advantage * (math.exp(0.15) - 1) / 4, rel=0.1)
