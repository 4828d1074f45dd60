"""A model made on the spot: a Llama of a million parameters that has half learnt to add, so that a run takes a minute.

``python -m demo.loco.small`` prints its directory. It shows that the machinery works; its rewards and sizes mean little.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.loco.settings import SMALL
from demo.model import CACHE
from demo.task import MOST_HELD_OUT, MOST_TRAINED, problems, prompt_tokens

_CHARACTERS = "0123456789+-= \n"
_END, _OTHER = "<end>", "<other>"
_RIGHT = 0.35  # the mean probability of a right answer at which it has learnt enough: GRPO needs both right and wrong ones
_MOST_STEPS = 2000


def prepare() -> Path:
    """The model's directory, made if it is not there."""
    target = CACHE / SMALL
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=CACHE, prefix=".partial-"))
    try:
        tokenizer = character_tokenizer()
        half_learnt(tokenizer).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        if not target.is_dir():
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of a sum."""
    vocabulary = {token: number for number, token in enumerate([_END, _OTHER, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_OTHER))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"eos_token": _END, "pad_token": _END, "unk_token": _OTHER}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def half_learnt(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random weights, trained on the task's sums until answers are right in `_RIGHT` of all cases."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(_config(len(tokenizer)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, answers = _sums(tokenizer)
    for _ in range(_MOST_STEPS):
        logprobs = torch.log_softmax(model(tokens).logits[:, :-1].float(), dim=-1)
        each = logprobs.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1) * answers[:, 1:]
        if float(each.detach().sum(dim=1).exp().mean()) > _RIGHT:
            return model
        (-each.sum() / answers.sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    raise RuntimeError(f"the small model did not learn to add in {_MOST_STEPS} steps")


def _config(vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def _sums(tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Every sum of the task with its answer, padded at the end, and a mask of the answers; (sums, tokens) each."""
    asked = problems(0, MOST_TRAINED, "train") + problems(0, MOST_HELD_OUT, "held-out")
    prompts = [prompt_tokens(tokenizer, problem.question) for problem in asked]
    rows = [tokenizer(f" {problem.answer}\n")["input_ids"] for problem in asked]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, rows, strict=True))
    tokens, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest)
    for i, (prompt, answer) in enumerate(zip(prompts, rows, strict=True)):
        tokens[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask[i, len(prompt) : len(prompt) + len(answer)] = 1
    return tokens, mask


def main() -> int:
    """Print the directory."""
    print(prepare())
    return 0


if __name__ == "__main__":
    sys.exit(main())
