"""GRPO, as small as it can be: groups of samples, a reward that is right or wrong, advantages, a clipped loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.loco.task import Task

_CLIP = 0.2
_EPSILON = 1e-4  # added to a group's standard deviation


@dataclass(frozen=True)
class Rollouts:
    """Groups of samples. tokens: (n, length) int64, prompt and answer; logprobs: (n, answer length) FP32, of the policy that sampled, for
    its tokens; rewards: (n,) 0 or 1; advantages: (n,)."""  # noqa: D205, D209

    tokens: Tensor
    logprobs: Tensor
    rewards: Tensor
    advantages: Tensor

    def split(self, parts: int) -> list[Rollouts]:
        """Equal parts, in order."""
        return [Rollouts(*pieces) for pieces in zip(*(values.chunk(parts) for values in vars(self).values()), strict=True)]


class Scores(NamedTuple):
    """How good a policy is at some sums: the mean probability of a right answer when it samples, and the share right when it does not."""

    expected: float
    greedy: float


@torch.no_grad()
def sample(policy: nn.Module, task: Task, sums: Tensor, group: int, noise: torch.Generator) -> Rollouts:
    """`group` answers to every sum, at temperature 1. The same noise gives the same answers for as long as the policy's odds agree."""
    right = task.sequences(sums).repeat_interleave(group, dim=0)
    tokens, found = right[:, : task.prompt_length], []
    for place in range(task.answer_length):
        seen = tokens[::group] if place == 0 else tokens
        odds = policy(seen)[:, -1].log_softmax(-1)
        odds = odds.repeat_interleave(group, dim=0) if place == 0 else odds
        gumbel = -torch.empty_like(odds).exponential_(generator=noise).log_()
        chosen = (odds + gumbel).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, chosen], dim=1)
        found.append(odds.gather(-1, chosen))
    rewards = (tokens == right).all(1).float()
    return Rollouts(tokens, torch.cat(found, dim=1), rewards, advantages(rewards, group))


def advantages(rewards: Tensor, group: int) -> Tensor:
    """Each reward less its group's mean, divided by its group's deviation. (n,)."""
    groups = rewards.view(-1, group)
    spread = groups.std(1, keepdim=True) + _EPSILON
    return ((groups - groups.mean(1, keepdim=True)) / spread).view(-1)


def loss(policy: nn.Module, task: Task, rollouts: Rollouts) -> Tensor:
    """The clipped loss, against the log-probabilities of the policy that sampled."""
    ratio = (answer_logprobs(policy, task, rollouts.tokens) - rollouts.logprobs).exp()
    gains = rollouts.advantages[:, None]
    return -torch.minimum(ratio * gains, ratio.clamp(1 - _CLIP, 1 + _CLIP) * gains).mean()


def answer_logprobs(policy: nn.Module, task: Task, tokens: Tensor) -> Tensor:
    """The log-probability of every token of the answers, (n, answer length)."""
    odds = policy(tokens[:, :-1])[:, task.prompt_length - 1 :].log_softmax(-1)
    found: Tensor = odds.gather(-1, tokens[:, task.prompt_length :, None]).squeeze(-1)
    return found


@torch.no_grad()
def score(policy: nn.Module, task: Task, sums: Tensor) -> Scores:
    """Both scores, exactly: nothing is sampled."""
    tokens = task.sequences(sums)
    odds = policy(tokens[:, :-1])[:, task.prompt_length - 1 :].log_softmax(-1)
    answers = tokens[:, task.prompt_length :]
    right = odds.gather(-1, answers[..., None]).squeeze(-1).sum(1).exp()
    greedy = (odds.argmax(-1) == answers).all(1)
    return Scores(float(right.mean()), float(greedy.float().mean()))
