"""What ranks do that are processes of their own: imported there, so it loads no more than it needs."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.distributed as dist

from pulse.testing.exchange import Scenario, outcome
from pulse.torch.exchange import TorchExchange

warnings.simplefilter("error")


def connected(port: int, rank: int, size: int, scenario: Scenario, timeout: float) -> Any:
    exchange = TorchExchange.connect(f"127.0.0.1:{port}", rank, size)
    exchange.timeout = timeout
    return outcome(exchange, scenario)


def in_default_group(port: int, rank: int, size: int, scenario: Scenario, timeout: float, *, batched: bool = False) -> Any:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}  # as torchrun does
    dist.init_process_group("gloo")
    try:
        exchange = TorchExchange(timeout=timeout)
        exchange._batched = batched
        return outcome(exchange, scenario)
    finally:
        dist.destroy_process_group()
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
            del os.environ[name]


def in_batches(*what: Any) -> Any:
    return in_default_group(*what, batched=True)


class CountingGroup:
    """A group that adds up what its operations carry."""

    def __init__(self, group: Any) -> None:
        self.sent = self.received = 0
        self._group = group
        self.rank, self.size, self.name = group.rank, group.size, group.name

    def send(self, tensors: list[Any], rank: int, tag: int) -> Any:
        self.sent += sum(tensor.nbytes for tensor in tensors)
        return self._group.send(tensors, rank, tag)

    def recv(self, tensors: list[Any], rank: int, tag: int) -> Any:
        self.received += sum(tensor.nbytes for tensor in tensors)
        return self._group.recv(tensors, rank, tag)


def counted(port: int, rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Traffic as the exchange says, and as a counting group does."""
    exchange = TorchExchange.connect(f"127.0.0.1:{port}", rank, size)
    group = exchange._group = CountingGroup(exchange._group)
    exchange.all_gather("1", bytes(1000 * rank))
    exchange.route(
        "2", {other: bytes(100 + other) for other in range(size) if other != rank}, [other for other in range(size) if other != rank]
    )
    traffic = exchange.traffic
    exchange.close()
    return (traffic.sent, traffic.received), (group.sent, group.received)


def beside_accelerate(port: int, rank: int, size: int) -> dict[str, Any]:
    """What Accelerate and torch.distributed see of a private group."""
    import accelerate

    exchange = TorchExchange.connect(f"127.0.0.1:{port}", rank, size)
    state = accelerate.PartialState()
    try:
        return {
            "initialized": dist.is_initialized(),
            "processes": state.num_processes,
            "distributed": state.distributed_type.value,
            "met": exchange.all_gather("1", b"%d" % rank),
        }
    finally:
        exchange.close()
