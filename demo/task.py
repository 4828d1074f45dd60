"""The task: sums, checked exactly. The prompt is one solved sum and the next one, to be completed up to the end of the line.

The sums are those that SmolLM2-135M-Instruct gets right 15 to 50 times in a hundred (24 samples each at temperature 1): what is
always wrong or always right teaches GRPO nothing. A run trains on a few of them, the same at every step, so that the rewards of two
steps compare; the others are held out and tell what came of it. Everything follows from the seed.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

Split = Literal["train", "held-out"]

_EXAMPLE = "13 + 6 = 19\n"
_PARTLY_SOLVED = (
    (1, 7), (1, 9), (2, 6), (3, 6), (4, 7), (4, 8), (5, 7), (5, 8), (6, 2), (6, 7), (6, 8),
    (6, 9), (7, 3), (7, 7), (7, 8), (7, 9), (8, 3), (8, 4), (8, 8), (9, 2), (9, 3), (9, 4),
)  # fmt: skip
MOST_TRAINED = 12
MOST_HELD_OUT = len(_PARTLY_SOLVED) - MOST_TRAINED
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
    """`count` different problems; which are for training follows from the seed, and no held-out problem is among them."""
    mixed = random.Random(seed).sample(_PARTLY_SOLVED, len(_PARTLY_SOLVED))
    pool = mixed[:MOST_TRAINED] if split == "train" else mixed[MOST_TRAINED:]
    if count > len(pool):
        raise ValueError(f"there are {len(pool)} {split} problems, not {count}")
    return [Problem(left, right) for left, right in pool[:count]]


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
