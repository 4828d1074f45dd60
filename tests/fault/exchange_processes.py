"""Ranks that live and die: what the tests of restarts do in processes of their own, or in threads."""

from __future__ import annotations

import json
import os
import signal
import uuid
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pulse.errors import ExchangeError, RankMissing, Regrouped
from pulse.exchange import Exchange, StoreExchange

MEGABYTES_64 = 64_000_000
Round = list[str]  # what every rank proposed

warnings.simplefilter("error")


def live(exchange: Exchange, committed: list[Round], rounds: int, save: Callable[[list[Round]], None], *, fresh: bool) -> None:
    """Take part in rounds as a trainer does: say where one stands, propose, vote, commit; begin again whenever a rank has come back.

    fresh: this process has just begun with what another one left in `committed`, and may be behind the others. Nobody else may be: a vote
    is taken by all.
    """
    while True:
        try:
            stands = [json.loads(data) for data in exchange.all_gather("stand", json.dumps(committed).encode())]
            newest = max(stands, key=len)
            if len(newest) > len(committed):
                assert fresh, f"rank {exchange.rank} is behind at round {len(committed)}, though its process has seen all votes"
                assert newest[: len(committed)] == committed
                committed[:] = newest
                save(committed)
            fresh = False
            if all(len(stand) == rounds for stand in stands):
                return
            if len(newest) == rounds:
                continue
            proposals = exchange.all_gather("propose", f"{exchange.rank} {uuid.uuid4().hex}".encode())
            everyone = range(exchange.size)
            assert exchange.route("parts", dict.fromkeys(everyone, b"%d" % exchange.rank), everyone) == {r: b"%d" % r for r in everyone}
            exchange.all_gather("vote", b"yes")
        except Regrouped:
            continue
        committed.append([data.decode() for data in proposals])
        save(committed)


def trainer(folder: str, rank: int, size: int, rounds: int) -> None:
    """`live` in a process, over a folder; what is committed outlives it."""
    file = Path(folder) / f"committed-{rank}.json"

    def save(committed: list[Round]) -> None:
        file.with_suffix(".new").write_text(json.dumps(committed))
        file.with_suffix(".new").replace(file)

    committed = json.loads(file.read_text()) if file.exists() else []
    exchange = StoreExchange(Path(folder) / "store", rank, size, run="r", timeout=60, poll=0.01)
    live(exchange, committed, rounds, save, fresh=True)
    exchange.close()


class DyingGroup:
    """A group whose process is killed right after it has started so many operations, or right before the first."""

    def __init__(self, group: Any, operations: int) -> None:
        self._group = group
        self._left = operations
        self.rank, self.size, self.name = group.rank, group.size, group.name

    def send(self, *what: Any) -> Any:
        return self._start(self._group.send, *what)

    def recv(self, *what: Any) -> Any:
        return self._start(self._group.recv, *what)

    def _start(self, verb: Callable[..., Any], *what: Any) -> Any:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        work = verb(*what)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return work


def torch_rank(port: int, rank: int, size: int, victim: int, operations: int, told: Connection) -> None:
    """Gather 64 MB from every rank, again and again; the victim is killed after so many operations. Tells how it ended, and ends."""
    from pulse.torch.exchange import TorchExchange

    exchange = TorchExchange.connect(f"127.0.0.1:{port}", rank, size, timeout=100)
    if rank == victim:
        exchange._group = DyingGroup(exchange._group, operations)
    done = 0
    try:
        while True:
            sizes = [len(data) for data in exchange.all_gather(f"{done}", bytes(MEGABYTES_64))]
            assert sizes == [MEGABYTES_64] * size
            done += 1
    except RankMissing as error:
        again = ""
        try:
            exchange.all_gather("more", b"")
        except ExchangeError as refusal:
            again = str(refusal)
        told.send({"missing": error.missing, "message": str(error), "done": done, "again": again})
