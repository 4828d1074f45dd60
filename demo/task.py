"""The task: sums, checked exactly. One example in the prompt shows the form of the answer.

SmolLM2-135M-Instruct gets about half of them right at temperature 1, and learns under GRPO to be right more often within twenty
steps. Everything follows from the seed.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

_INSTRUCTION = "Add."
_EXAMPLE = ("13 + 6", "13 + 6 = 19")
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
    """`count` problems drawn from the seed. Held-out problems are never among the training problems."""
    held_out = {Problem(left, right) for left, right in _pairs() if (left * 7 + right * 3) % 5 == 0}
    pool = [pair for pair in map(lambda p: Problem(*p), _pairs()) if (pair in held_out) == (split == "held-out")]
    return random.Random(f"{split}-{seed}").choices(pool, k=count)


def _pairs() -> list[tuple[int, int]]:
    """One-digit numbers and tens on the left, one-digit numbers on the right."""
    return [(left, right) for left in [*range(1, 10), *range(10, 100, 10)] for right in range(1, 10)]


def reward(problem: Problem, completion: str) -> float:
    """1.0 if the last number in the completion is the answer, else 0.0."""
    numbers = _NUMBER.findall(completion.replace(",", ""))
    return float(bool(numbers) and len(numbers[-1]) < 10 and int(numbers[-1]) == problem.answer)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The question as the model's chat template asks it, or as plain text where there is none."""
    example, answer = _EXAMPLE
    if tokenizer.chat_template is None:
        return list(tokenizer(f"{_INSTRUCTION}\n{answer}\n{question} =")["input_ids"])
    messages = [
        {"role": "system", "content": _INSTRUCTION},
        {"role": "user", "content": example},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": question},
    ]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
