"""The model that every cell starts from: taught by a teacher that gives the right sum only some of the time."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.loco import grpo
from bench.loco.model import Decoder
from bench.loco.settings import Setup
from bench.loco.task import VOCABULARY
from pulse.files import write_file

_LR, _WARM, _COOL = 1e-3, 50, 0.3  # the last share of the steps cools down


def decoder(setup: Setup) -> Decoder:
    """A model with weights of no meaning yet."""
    length = setup.task.prompt_length + setup.task.answer_length - 1
    return Decoder(len(VOCABULARY), length, setup.width, setup.layers, setup.heads)


def starting_model(setup: Setup, folder: Path, say: Callable[[str], None]) -> Decoder:
    """The starting model, made if `folder` does not have it."""
    path = folder / "start.pt"
    if not path.is_file():
        made = taught(setup, say)
        write_file(path, saved(made.state_dict()))
    model = decoder(setup)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


def saved(state: dict[str, Any]) -> bytes:
    """What `torch.save` writes."""
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def taught(setup: Setup, say: Callable[[str], None]) -> Decoder:
    """Cross entropy on answers of which `setup.right` are right; in the others 9 - d stands for every digit d."""
    torch.manual_seed(0)
    model = decoder(setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.0, fused=True)
    sums, _ = setup.task.split()
    numbers = torch.Generator().manual_seed(0)
    for step in range(setup.taught_steps):
        for group in optimizer.param_groups:
            group["lr"] = _LR * _pace(step, setup.taught_steps)
        batch = sums[torch.randint(len(sums), (setup.taught_batch,), generator=numbers)]
        loss = -grpo.answer_logprobs(model, setup.task, lesson(setup, batch, numbers)).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 20 == 0:
            say(f"the starting model: step {step} of {setup.taught_steps}, loss {loss.item():.3f}")
    return model


def lesson(setup: Setup, sums: Tensor, numbers: torch.Generator) -> Tensor:
    """What the teacher shows: (n, length) int64."""
    tokens = setup.task.sequences(sums)
    answers = tokens[:, setup.task.prompt_length :]
    wrong = torch.rand(len(sums), 1, generator=numbers) >= setup.right
    answers.copy_(torch.where(wrong, 9 - answers, answers))
    return tokens


def _pace(step: int, steps: int) -> float:
    """A warm-up, and a cooling down to a fiftieth."""
    left = (steps - step) / (steps * _COOL)
    return min(1.0, (step + 1) / _WARM) * min(1.0, max(left, 0.02))
