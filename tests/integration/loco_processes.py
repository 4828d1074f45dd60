"""What ranks do that are processes of their own and meet over gloo: with whole parameters, and with sharded ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pulse.errors import ExchangeError, PulseError
from pulse.torch import OuterOptimizer
from pulse.torch.exchange import TorchExchange
from tests.fault.loco_processes import Killing
from tests.trainers import Trainer

STEPS = 9


def whole(folder: str, port: int, rank: int, size: int, kill: tuple[str, int, bool] | None) -> None:
    """Train, and save at the end or when a rank is missing: what it saved, its rounds, and what it was told."""
    torch.set_num_threads(1)
    exchange: Any = TorchExchange.connect(f"127.0.0.1:{port}", rank, size, timeout=60)
    trainer = Trainer(Killing(exchange, kill[0], kill[1], after=kill[2]) if kill else exchange)
    saved = Path(folder) / f"{rank}.pt"
    error = ""
    try:
        if saved.exists():
            trainer.load(torch.load(saved, weights_only=True)["trainer"])
            if trainer.outer.rounds < trainer.steps // 3:
                trainer.note(trainer.outer.round())  # the one that failed
        else:
            trainer.outer.start()
            torch.save({"trainer": trainer.saved()}, saved)
        trainer.train(STEPS - trainer.steps)
        trainer.finish()
    except ExchangeError as failure:
        error = str(failure)
    digests = [report.digest for report in trainer.reports]
    torch.save({"trainer": trainer.saved(), "digests": digests, "error": error}, saved)
    exchange.close()


SIZES = {"first": (8, 6), "second": (5, 8), "third": (3, 5)}  # rows that two shards share unevenly


class Layers(torch.nn.Module):
    """Three layers without biases, and one vector that two shards share."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(3)
        for name, shape in SIZES.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=made) * 0.1))
        self.scale = torch.nn.Parameter(torch.ones(1))  # the second shard has none of it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first.T @ self.second.T @ self.third.T) * self.scale


def sharded(folder: str, port: int, rank: int, options: dict[str, Any], spoilt: str = "") -> None:
    """Two islands of two shards: ranks 0 and 1, 2 and 3. Keeps what the whole weights were before and after each round, and what was refused.

    spoilt: what is wrong with one shard, in the second window: `local` weights, the `anchor`, or `settings`, from the beginning.
    """
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "4"}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    model = fully_shard(Layers(), mesh=mesh["shard"])
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exchange = TorchExchange(mesh.get_group("island"), timeout=60)
    odd = {"lr": 0.5} if spoilt == "settings" and rank == 3 else {}
    outer = OuterOptimizer(model.named_parameters(), exchange=exchange, inner_steps=2, **odd, **options)
    island, seen, refused = rank // 2, [], []
    try:
        outer.start()
    except PulseError as error:
        refused.append(f"{type(error).__name__}: {error}")
    for step in range(0 if refused else 6):
        made = torch.Generator().manual_seed(100 * island + step)
        inner.zero_grad()
        model(torch.randn(16, 6, generator=made)).square().mean().backward()
        inner.step()
        if spoilt == "local" and rank == 3 and step == 3:
            with torch.no_grad():
                model.second.to_local()[0, 0] = float("nan")
        if spoilt == "anchor" and rank == 3 and step == 3:
            outer.anchor["second"][0, 0] += 1
        before = full(model)
        try:
            report = outer.step()
        except PulseError as error:
            refused.append(f"{type(error).__name__}: {error}")
            if island == 1:  # every shard of it
                outer.rollback()
            before, report = full(model), outer.round()
        if report is not None:
            figures = {name: getattr(report, name) for name in ("digest", "sent", "elements", "inner_steps", "resynced", "differing")}
            seen.append({"before": before, "after": full(model), **figures})
    local = {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}
    torch.save({"seen": seen, "refused": refused, "local": local, "feedback": outer.state_dict()["feedback"]}, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def full(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}
