"""Starts one run's processes, watches their events, kills one worker on the way and starts it again."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from demo.events import Event
from demo.fleet import Fleet, RunError, Show
from demo.settings import Settings

_MARK = ".pulse-demo"  # in every folder that a run of this demo has filled, and nowhere else
_START_SECONDS = 120.0


def fresh_folder(path: Path) -> Path:
    """The run's folder, emptied if an earlier run of the demo filled it; anything else is left alone."""
    path = path.resolve()
    if path.is_dir() and any(path.iterdir()):
        if not (path / _MARK).is_file():
            raise RunError(f"{path} holds something that is no run of this demo: choose another with --run")
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / _MARK).touch()
    return path


class Run(Fleet):
    """One trainer and its workers. `kill_at` is the step at whose rollouts one worker is lost (None: none is)."""

    def __init__(self, settings: Settings, kill_at: int | None, show: Show) -> None:
        super().__init__(settings, show)
        self._settings = settings
        self._kill_at = kill_at
        self._address = ""
        self._killed: str | None = None
        self._killed_at_version = 0
        self._version = 0
        self._held: dict[str, int] = {}

    def run(self) -> None:
        """The trainer first; the workers when it listens."""
        started = time.monotonic()
        self.start("trainer", "demo.trainer", [], self._settings.trainer_threads)
        while "trainer" not in self.done:
            self.turn()
            if not self._address and time.monotonic() - started > _START_SECONDS:
                raise RunError(f"the trainer was not ready after {_START_SECONDS:g} s\n{self.processes['trainer'].last_words()}")

    def _start_worker(self, name: str) -> None:
        self.start(name, "demo.worker", [name, self._address], threads=1)

    def notice(self, event: Event) -> None:
        """See `Fleet.notice`."""
        kind = event["event"]
        if kind == "listening":
            self._address = event["address"]
            for index in range(self._settings.workers):
                self._start_worker(f"worker-{index}")
        elif kind == "published":
            self._version = event["version"]
        elif kind == "applied":
            self._held[event["who"]] = event["version"]
        elif kind == "asked" and event["split"] == "train" and event["step"] == self._kill_at and self._killed is None:
            self._kill(f"worker-{self._settings.workers - 1}")
        elif kind == "done":
            self.done.add(event["who"])
        self._restart_when_due()

    def _kill(self, name: str) -> None:
        """As when a machine is lost, while a request is being computed."""
        time.sleep(0.3)
        self.kill(name)
        self._killed, self._killed_at_version = name, self._version
        self.announce("killed", worker=name, version=self._held.get(name))

    def _restart_when_due(self) -> None:
        """The lost worker comes back one version later (at once if it was the only one), so that it has something to catch up."""
        if self._killed is None or f"{self._killed}-again" in self.processes:
            return
        if self._version > self._killed_at_version or self._settings.workers == 1:
            self._start_worker(f"{self._killed}-again")
            self.announce("restarted", worker=f"{self._killed}-again", lost=self._killed)


def read_records(folder: Path) -> list[dict[str, object]]:
    """Every rollout that the trainer recorded."""
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
