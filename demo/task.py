"""The task: sums, checked exactly. One example in the prompt shows the form of the answer.

SmolLM2-135M-Instruct gets a third to a half of them right at temperature 1: it rambles, or adds wrongly. Under GRPO it learns within
twenty steps to come to the point and to be right more often. Everything follows from the seed.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

_INSTRUCTION = "Add."
_EXAMPLE, _EXAMPLE_ANSWER = "13 + 6", "13 + 6 = 19"
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


def problems(seed: int, count: int, split: str = "train") -> list[Problem]:
    """`count` problems drawn from the seed, easy and hard ones in turn. No held-out problem is a training problem."""
    draw = random.Random(f"{split}-{seed}")
    easy, hard = (_pool(lefts, split) for lefts in (range(1, 10), range(10, 100, 10)))
    return [draw.choice(hard if index % 2 else easy) for index in range(count)]


def _pool(lefts: range, split: str) -> list[Problem]:
    """All problems of one difficulty. One in five is held out."""
    found = [Problem(left, right) for left in lefts for right in range(1, 10)]
    return [problem for problem in found if ((problem.left * 7 // 10 + problem.right * 3) % 5 == 0) == (split == "held-out")]


def reward(problem: Problem, completion: str) -> float:
    """1.0 if the last number in the completion is the answer, else 0.0."""
    numbers = _NUMBER.findall(completion.replace(",", ""))
    return float(bool(numbers) and len(numbers[-1]) < 10 and int(numbers[-1]) == problem.answer)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The example and the question, as the model's chat template puts them, or as plain text where it has none."""
    if tokenizer.chat_template is None:
        return list(tokenizer(f"{_INSTRUCTION}\n{_EXAMPLE_ANSWER}\n{question} =")["input_ids"])
    messages = [
        {"role": "system", "content": _INSTRUCTION},
        {"role": "user", "content": _EXAMPLE},
        {"role": "assistant", "content": _EXAMPLE_ANSWER},
        {"role": "user", "content": question},
    ]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What ends an answer: the end of the turn or of the line."""
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    return sorted({tokenizer.eos_token_id, newline[-1]})
