"""Sampling with a key-value cache, reproducible to the last bit whoever runs it.

One call is one prompt and a fixed number of samples, so the shapes of the forward passes depend on the request alone. Every
sample draws from its own generator, seeded by the request, and the process computes with one thread.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens. The temperature also scales the log-probabilities, as the trainer's loss expects."""

    samples: int = 8
    max_tokens: int = 16
    temperature: float = 1.0


@dataclass
class Samples:
    """What came out: per sample its tokens (the end token included) and the log-probability of each."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    first_token_at: float = field(default=0.0)


def _uniform(generators: list[torch.Generator]) -> torch.Tensor:
    """One number in [0, 1) per sample, in double precision."""
    return torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators])


def _draw(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-transform sampling: the first token whose cumulative probability exceeds the uniform number."""
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    target = (uniform * cumulative[:, -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logprobs.shape[-1] - 1)


def _cache_argument(model: PreTrainedModel) -> str:
    """Transformers renames `past_key_values` to `cache`, model by model."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def sample(model: PreTrainedModel, prompt: list[int], seed: int, sampling: Sampling, end_tokens: frozenset[int]) -> Samples:
    """Draw `sampling.samples` completions of one prompt."""
    count = sampling.samples
    generators = [torch.Generator().manual_seed(seed * 1_000_003 + index) for index in range(count)]
    result = Samples([[] for _ in range(count)], [[] for _ in range(count)])
    cache = DynamicCache(config=model.config)
    cached = {_cache_argument(model): cache, "use_cache": True}
    output = model(torch.tensor([prompt]), **cached, logits_to_keep=1)
    cache.batch_repeat_interleave(count)
    logits = output.logits[:, -1].expand(count, -1)
    live = list(range(count))
    for position in range(sampling.max_tokens):
        logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
        tokens = _draw(logprobs, _uniform(generators))
        if position == 0:
            result.first_token_at = time.time()
        chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        for index in live:
            result.tokens[index].append(int(tokens[index]))
            result.logprobs[index].append(float(chosen[index]))
        live = [index for index in live if result.tokens[index][-1] not in end_tokens]
        if not live or position + 1 == sampling.max_tokens:
            return result
        logits = model(tokens.unsqueeze(-1), **cached).logits[:, -1]
    return result
