"""Sampling: the same from the same seed, and log-probabilities that are the model's own."""

import pytest
import torch
from transformers import LlamaForCausalLM

from demo.sampling import Sampling, sample

PROMPT = [5, 9, 11, 40]


def test_the_same_request_gives_the_same_bits(tiny: LlamaForCausalLM) -> None:
    first = sample(tiny, PROMPT, 7, Sampling(4, 10), frozenset({2}))
    sample(tiny, [1, 2, 3], 8, Sampling(2, 5), frozenset({2}))
    again = sample(tiny, PROMPT, 7, Sampling(4, 10), frozenset({2}))
    assert (first.tokens, first.logprobs) == (again.tokens, again.logprobs)
    assert sample(tiny, PROMPT, 8, Sampling(4, 10), frozenset({2})).tokens != first.tokens


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_one_forward_pass(tiny: LlamaForCausalLM, temperature: float) -> None:
    drawn = sample(tiny, PROMPT, 3, Sampling(4, 10, temperature), frozenset())
    for tokens, logprobs in zip(drawn.tokens, drawn.logprobs, strict=True):
        with torch.inference_mode():
            logits = tiny(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1] / temperature
        expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=1e-4)


def test_tokens_are_drawn_as_often_as_they_are_probable(tiny: LlamaForCausalLM) -> None:
    with torch.inference_mode():
        probable = torch.softmax(tiny(torch.tensor([PROMPT])).logits[0, -1] * 20, -1)
    drawn = sample(tiny, PROMPT, 0, Sampling(4000, 1, 0.05), frozenset())
    counted = torch.bincount(torch.tensor([tokens[0] for tokens in drawn.tokens]), minlength=128) / 4000
    assert float((counted - probable).abs().max()) < 0.03


def test_a_completion_ends_with_its_end_token(tiny: LlamaForCausalLM) -> None:
    ends = frozenset(range(0, 128, 5))
    drawn = sample(tiny, PROMPT, 1, Sampling(16, 12), ends)
    for tokens, logprobs in zip(drawn.tokens, drawn.logprobs, strict=True):
        assert len(tokens) == len(logprobs) <= 12
        assert not ends & set(tokens[:-1])
        assert tokens[-1] in ends or len(tokens) == 12
