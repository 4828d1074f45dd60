"""The task: sums, checked exactly. The prompt is one solved sum and the next one, to be completed up to the end of the line.

SmolLM2-135M-Instruct gets about four in ten of them right at temperature 1. Under GRPO it learns within twenty steps to be right more
often. Every step asks the same sums, so that the rewards of two steps compare; other sums, never trained on, tell what came of it.
Everything follows from the seed.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

Split = Literal["train", "held-out"]

_EXAMPLE = "13 + 6 = 19\n"
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Problem:
    """Two numbers to add."""

    left: int
    right: int

    @property
    def question(self) -> str:
        """The problem as it is asked."""
        return f"{self.left} + {self.right}"

    @property
    def answer(self) -> int:
        """The one right answer."""
        return self.left + self.right


def problems(seed: int, count: int, split: Split) -> list[Problem]:
    """`count` different problems drawn from the seed, easy and hard ones in turn. No held-out problem is a training problem."""
    draw = random.Random(f"{split}-{seed}")
    easy, hard = (_pool(lefts, split) for lefts in (range(1, 10), range(10, 100, 10)))
    easy, hard = (draw.sample(pool, len(pool)) for pool in (easy, hard))
    mixed = [problem for pair in zip(easy, hard, strict=False) for problem in pair]
    if count > len(mixed):
        raise ValueError(f"there are {len(mixed)} {split} problems, not {count}")
    return mixed[:count]


def _pool(lefts: range, split: Split) -> list[Problem]:
    """All problems of one difficulty. Two in five are held out."""
    found = [Problem(left, right) for left in lefts for right in range(1, 10)]
    return [problem for problem in found if (split == "held-out") == ((sum(divmod(problem.left, 10)) + 3 * problem.right) % 5 < 2)]


def reward(problem: Problem, completion: str) -> float:
    """1.0 if the last number in the completion is the answer, else 0.0."""
    numbers = _NUMBER.findall(completion.replace(",", ""))
    return float(bool(numbers) and len(numbers[-1]) < 10 and int(numbers[-1]) == problem.answer)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The example and the question. Plain text, since a chat template would triple the tokens to train on."""
    return list(tokenizer(f"{_EXAMPLE}{question} =")["input_ids"])


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What ends an answer: the end of the text or of the line."""
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    return sorted({tokenizer.eos_token_id, newline[-1]})
