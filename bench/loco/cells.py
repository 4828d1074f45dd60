"""A cell: one contestant and one seed. A run that was killed goes on where it was; finished cells stay as JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pulse
from bench.loco import coded, grpo
from bench.loco.model import Decoder
from bench.loco.settings import Contestant, Setup
from bench.loco.start import saved
from bench.loco.trainers import Trainers, Window, trainers_of
from pulse.files import write_file
from pulse.torch.loco.gate import visible
from pulse.torch.loco.methods import Part

Row = dict[str, Any]
Say = Callable[[str], None]
_SAVED_EVERY = 5  # rounds
_CODED_EVERY = 5


@dataclass(frozen=True)
class Cell:
    """One contestant with one seed: prompts and sampling follow from the seed, and are the same for all contestants."""

    contestant: Contestant
    seed: int

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.contestant.name.replace(',', '').replace(' ', '-')}-{self.seed}"


def play(cell: Cell, setup: Setup, start: Decoder, folder: Path, say: Say) -> Row:
    """The cell's rows, one for each round, and the scores of the starting model; played if `folder` does not have them."""
    place = folder / f"{cell.name}.json"
    if place.is_file():
        found: Row = json.loads(place.read_text())
        return found
    trainers = trainers_of(setup, cell.contestant, start)
    rows = _resumed(folder / f"{cell.name}.pt", trainers)
    for number in range(len(rows) + 1, setup.rounds + 1):
        rows.append(one_round(trainers, setup, start, cell.seed, number))
        say(f"{cell.name}: round {number} of {setup.rounds}, reward {rows[-1]['reward']:.3f}")
        if number % _SAVED_EVERY == 0:
            write_file(folder / f"{cell.name}.pt", saved({"rows": json.dumps(rows), "trainers": trainers.state()}))
    done = {"contestant": cell.contestant.name, "seed": cell.seed, "elements": trainers.layout.elements, "rows": rows}
    done |= {"before": scores(start, setup)}
    write_file(place, json.dumps(done).encode())
    (folder / f"{cell.name}.pt").unlink(missing_ok=True)
    return done


def _resumed(path: Path, trainers: Trainers) -> list[Row]:
    if not path.is_file():
        return []
    kept = torch.load(path, weights_only=True)
    trainers.load(kept["trainers"])
    rows: list[Row] = json.loads(kept["rows"])
    return rows


def one_round(trainers: Trainers, setup: Setup, start: Decoder, seed: int, number: int) -> Row:
    """Sample with the view of the shared weights, train all ranks on that for a window, exchange, and look at what came of it."""
    old = [tensor.clone() for tensor in trainers.shared]
    policy = policy_of(start, old)
    numbers = torch.Generator().manual_seed(seed * 1_000_003 + number)
    sums, _ = setup.task.split()
    asked = sums[torch.randint(len(sums), (setup.ranks * setup.inner_steps * setup.prompts,), generator=numbers)]
    with trainers.timed("sample", 1 / setup.ranks):
        rollouts = grpo.sample(policy, setup.task, asked, setup.group, numbers)
    by_rank = [part.split(setup.inner_steps) for part in rollouts.split(setup.ranks)]
    window = trainers.window(by_rank)
    row = {name: value for name, value in vars(window).items() if name != "carried"}
    row |= {"round": number, "tokens": number * setup.tokens_per_round, "reward": float(rollouts.rewards.mean())}
    row |= seen(old, trainers, window) | scores(policy_of(start, trainers.shared), setup)
    if trainers.codes_entries and number % _CODED_EVERY == 0:
        row["coded"] = coded.costs(window.carried[0], old, trainers.layout)
    return row


def policy_of(start: Decoder, weights: list[Tensor]) -> Decoder:
    """A model whose weights are the BF16 view of these."""
    policy = copy.deepcopy(start)
    with torch.no_grad():
        for parameter, values in zip(policy.parameters(), weights, strict=True):
            parameter.copy_(values.view(parameter.shape).bfloat16())
    return policy


def scores(policy: Decoder, setup: Setup) -> Row:
    """How good a policy is at sums that are trained on, and at held-out ones."""
    trained, held_out = (grpo.score(policy, setup.task, sums[: setup.scored]) for sums in setup.task.split())
    return {"score": trained.expected, "held_out": held_out.expected, "greedy": held_out.greedy}


def seen(old: list[Tensor], trainers: Trainers, window: Window) -> Row:
    """What the step did to the view, what a patch of it weighs, and how that goes with what was sent.

    view_changed: weights whose view is another; union: entries that any rank sent; both: that are either; stepped: the step's L2 norm.
    """
    names, new = trainers.layout.names, trainers.shared
    changed = [visible(before, after, torch.bfloat16) for before, after in zip(old, new, strict=True)]
    row: Row = {
        "view_changed": sum(int(where.sum()) for where in changed),
        "stepped": float(torch.stack([(after - before).norm() for before, after in zip(old, new, strict=True)]).norm()),
        "patch_bytes": _patch_bytes(*(dict(zip(names, _views(tensors), strict=True)) for tensors in (old, new))),
    }
    if window.carried and window.carried[0][0].positions is not None:
        fired = [_any([parts[i] for parts in window.carried], where) for i, where in enumerate(changed)]
        row["union"] = sum(int(where.sum()) for where in fired)
        row["both"] = sum(int((one & other).sum()) for one, other in zip(fired, changed, strict=True))
    return row


def _views(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.bfloat16() for tensor in tensors]


def _patch_bytes(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> int:
    """What PULSESync sends of the step, contextual, everything included."""
    return len(pulse.encode(pulse.diff(old, new), old, encoding="contextual"))


def _any(parts: list[Part], like: Tensor) -> Tensor:
    found = torch.zeros_like(like)
    for part in parts:
        if part.positions is not None:
            found[part.positions] = True
    return found
