"""Sums whose answers can be checked: `37+48=` is followed by `085`. Every answer has as many tokens as any other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

VOCABULARY = "0123456789+="
_PLUS, _EQUALS = VOCABULARY.index("+"), VOCABULARY.index("=")
_HELD_OUT_EVERY = 5  # of five sums one is held out


@dataclass(frozen=True)
class Task:
    """Sums of two numbers of `digits` digits each."""

    digits: int

    @property
    def prompt_length(self) -> int:
        """Tokens up to and including `=`."""
        return 2 * self.digits + 2

    @property
    def answer_length(self) -> int:
        """Tokens of every answer: one digit more than a number has."""
        return self.digits + 1

    def sequences(self, sums: Tensor) -> Tensor:
        """Prompts with their right answers. sums: (n, 2) int64, the numbers; returns (n, prompt_length + answer_length) int64."""
        first, second = (_digits(sums[:, i], self.digits) for i in (0, 1))
        plus, equals = (torch.full((sums.shape[0], 1), sign) for sign in (_PLUS, _EQUALS))
        return torch.cat([first, plus, second, equals, _digits(sums.sum(1), self.answer_length)], dim=1)

    def split(self) -> tuple[Tensor, Tensor]:
        """All sums, those to train on and those held out: (n, 2) int64 each. Always the same."""
        return _split(10**self.digits)


@cache
def _split(span: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(span * span, generator=torch.Generator().manual_seed(0))
    sums = torch.stack([order // span, order % span], dim=1)
    cut = len(sums) // _HELD_OUT_EVERY
    return sums[cut:], sums[:cut]


def _digits(numbers: Tensor, count: int) -> Tensor:
    """(n,) int64 as (n, count) digits, the highest first."""
    powers = 10 ** torch.arange(count - 1, -1, -1)
    return numbers[:, None] // powers % 10
