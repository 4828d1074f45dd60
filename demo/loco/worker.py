"""An inference worker for several trainers: it follows the store, and draws rollouts for whichever trainer asks first.

``python -m demo.loco.worker SETTINGS NAME``; the run's token comes in the environment variable ``DEMO_TOKEN``. It shares nothing with the
trainers but the store and a socket to each, whose addresses it finds in the store.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import pulse
from demo.events import EventLog
from demo.loco.addresses import find
from demo.loco.settings import Settings
from demo.pinned import pin
from demo.processes import die_with_parent, peak_memory
from demo.sync import SyncError
from demo.ways import architecture, open_receiver
from demo.wire import Connection, WireError
from demo.worker import POLL_SECONDS, Worker, empty_policy

_DIAL_SECONDS = 0.5  # between two attempts to reach a trainer that is not there


class Unreachable(Exception):
    """A trainer has not been there for too long."""


class Trainers:
    """A worker's connections: one to each trainer that has not said that it is over. Those that break are made again."""

    def __init__(self, settings: Settings, name: str, token: str, log: EventLog) -> None:
        self._store = pulse.open_store(settings.store)
        self._hello = {"type": "hello", "worker": name, "token": token}
        self._patience = settings.stall_seconds
        self._log = log
        self._open: dict[int, Connection] = {}  # the one that has waited longest first
        self._away = dict.fromkeys(range(settings.trainers), time.monotonic())  # since when
        self._dial_at = 0.0

    def serve(self, worker: Worker) -> None:
        """Work until every trainer has said that it is over."""
        while self._open or self._away:
            self._reach()
            ready, _, _ = select.select(list(self._open.values()), [], [], POLL_SECONDS)
            if not ready:
                worker.while_idle()
            for rank in [rank for rank, connection in self._open.items() if connection in ready]:
                self._serve_one(worker, rank)

    def _serve_one(self, worker: Worker, rank: int) -> None:
        connection = self._open.pop(rank)
        try:
            if worker.answer(connection):
                connection.close()
            else:
                self._open[rank] = connection
        except WireError as error:
            connection.close()
            self._away[rank] = time.monotonic()
            self._log.write("cut", rank=rank, reason=str(error))

    def _reach(self) -> None:
        """Connect to trainers that are away."""
        if not self._away or time.monotonic() < self._dial_at:
            return
        for rank, since in list(self._away.items()):
            if time.monotonic() - since > self._patience:
                raise Unreachable(f"trainer {rank} was not there for {self._patience:g} s")
            if (connection := self._dial(rank)) is not None:
                self._open[rank] = connection
                del self._away[rank]
                self._log.write("connected", rank=rank)
        self._dial_at = time.monotonic() + _DIAL_SECONDS

    def _dial(self, rank: int) -> Connection | None:
        if (address := find(self._store, rank)) is None:
            return None
        try:
            connection = Connection.dial(address, timeout=10.0)
        except OSError:
            return None  # it is gone, and has not come back elsewhere yet
        try:
            connection.send(self._hello)
        except WireError:
            connection.close()
            return None
        return connection


def main(arguments: list[str]) -> int:
    """Run one worker until the trainers let it go."""
    die_with_parent()
    settings, name = Settings.load(Path(arguments[0])), arguments[1]
    log = EventLog(settings.folder / "events" / f"{name}.jsonl", name)
    log.write("started", pid=os.getpid())
    pin(threads=1)
    try:
        policy = empty_policy(architecture(settings))
        worker = Worker(name, policy, open_receiver(settings, policy), log)
        worker.follow()
        Trainers(settings, name, os.environ["DEMO_TOKEN"], log).serve(worker)
    except (SyncError, Unreachable, pulse.PulseError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    log.write("done", peak_memory=peak_memory())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
