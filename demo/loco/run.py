"""Starts a run's trainers and workers, watches their events, kills a worker and a trainer on the way and starts them again."""

from __future__ import annotations

import time
from dataclasses import dataclass

from demo.events import Event
from demo.fleet import Fleet, RunError, Show
from demo.loco.settings import Settings

_GRACE_SECONDS = 60.0  # beyond what the processes themselves wait for each other


@dataclass(frozen=True)
class Kills:
    """At whose asking for rollouts, in how many inner steps from the beginning, somebody is killed. None: nobody is."""

    worker: int | None = None
    trainer: int | None = None


def kills_for(settings: Settings) -> Kills:
    """A worker in the middle of a window, and a trainer in the middle of the next, about half way through."""
    middle = settings.inner_steps // 2
    window = settings.rounds // 2
    trainer = window * settings.inner_steps + middle if settings.trainers > 1 else None
    return Kills(max(window - 1, 0) * settings.inner_steps + middle, trainer)


class Run(Fleet):
    """The trainers of one run and its workers. Trainer 0, which publishes, is not killed."""

    def __init__(self, settings: Settings, kills: Kills, show: Show) -> None:
        super().__init__(settings, show)
        self._settings = settings
        self._kills = kills
        self._last = {"trainer": f"trainer-{settings.trainers - 1}", "worker": f"worker-{settings.workers - 1}"}
        self._version = -1
        self._held: dict[str, int] = {}
        self._asked: set[tuple[str, int]] = set()
        self._finished: set[int] = set()
        self._worker_back_at: int | None = None
        self._heard_at = time.monotonic()

    def run(self) -> None:
        """All trainers at once; the workers when there is something to follow."""
        for rank in range(self._settings.trainers):
            self._start_trainer(f"trainer-{rank}", rank)
        while len(self._finished) < self._settings.trainers:
            self.turn()
            silence = time.monotonic() - self._heard_at
            if silence > self._settings.stall_seconds + _GRACE_SECONDS:
                raise RunError(f"nothing has happened for {silence:.0f} s; see {self._settings.folder / 'logs'}")

    def notice(self, event: Event) -> None:
        """See `Fleet.notice`."""
        self._heard_at = time.monotonic()
        kind = event["event"]
        if kind == "published":
            if event["version"] == 0:
                for index in range(self._settings.workers):
                    self._start_worker(f"worker-{index}")
            self._version = event["version"]
        elif kind == "applied":
            self._held[event["who"]] = event["version"]
        elif kind == "asked":
            self._asked.add((event["who"], event["step"]))
        elif kind == "done":
            self.done.add(event["who"])
            if "rank" in event:
                self._finished.add(event["rank"])
        self._kill_if_due()
        self._restart_if_due()

    def _start_trainer(self, name: str, rank: int) -> None:
        self.start(name, "demo.loco.trainer", [str(rank), name], self._settings.trainer_threads)

    def _start_worker(self, name: str) -> None:
        self.start(name, "demo.loco.worker", [name], threads=1)

    def _kill_if_due(self) -> None:
        """As when a machine is lost: a worker while it computes a request, a trainer while it waits for one."""
        trainer, worker = self._last["trainer"], self._last["worker"]
        due = any(step == self._kills.worker for _, step in self._asked)
        if due and worker in self._held and worker not in self.killed:
            time.sleep(0.3)
            self.kill(worker)
            self._worker_back_at = min(self._version + (self._settings.workers > 1), self._settings.rounds)
            self.announce("killed", worker=worker, version=self._held[worker])
        if self._kills.trainer is not None and (trainer, self._kills.trainer) in self._asked and trainer not in self.killed:
            time.sleep(0.3)
            self.kill(trainer)
            window, step = divmod(self._kills.trainer, self._settings.inner_steps)
            self.announce("killed-trainer", trainer=trainer, window=window + 1, step=step)
            self._start_trainer(f"{trainer}-again", self._settings.trainers - 1)
            self.announce("restarted-trainer", trainer=f"{trainer}-again", lost=trainer)

    def _restart_if_due(self) -> None:
        """The lost worker comes back one version later (at once if it was the only one), so that it has something to catch up."""
        if self._worker_back_at is not None and self._version >= self._worker_back_at:
            self._worker_back_at = None
            again = f"{self._last['worker']}-again"
            self._start_worker(again)
            self.announce("restarted", worker=again, lost=self._last["worker"])
