"""Starts one run's processes, watches their events, kills one worker on the way and starts it again."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from demo.events import Event, EventLog
from demo.processes import Process, start
from demo.settings import Settings

_MARK = ".pulse-demo"  # in every folder that a run of this demo has filled, and nowhere else
_START_SECONDS = 120.0
_END_SECONDS = 60.0

Show = Callable[[Event], None]


class RunError(Exception):
    """The run failed; the message says which process and what it said."""


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


class Run:
    """One trainer and its workers. `kill_at` is the step at whose rollouts one worker is lost (None: none is)."""

    def __init__(self, settings: Settings, kill_at: int | None, show: Show) -> None:
        self._settings = settings
        self._kill_at = kill_at
        self._show = show
        self._path = settings.save()
        self._token = secrets.token_hex(16)
        self._processes: dict[str, Process] = {}
        self._log = EventLog(settings.folder / "events" / "demo.jsonl", "demo")
        self._address = ""
        self._killed: str | None = None
        self._killed_at_version = 0
        self._version = 0
        self._held: dict[str, int] = {}
        self._done: set[str] = set()

    def execute(self) -> None:
        """Run to the end. Whatever happens, every process that was started is ended."""
        started = time.monotonic()
        try:
            self._start("trainer", "demo.trainer", [], self._settings.trainer_threads)
            while "trainer" not in self._done:
                self._turn()
                if not self._address and time.monotonic() - started > _START_SECONDS:
                    raise RunError(f"the trainer was not ready after {_START_SECONDS:g} s\n{self._processes['trainer'].last_words()}")
            self._await_end()
        finally:
            for process in self._processes.values():
                process.end()
            self._log.close()

    def _start(self, name: str, module: str, arguments: list[str], threads: int) -> None:
        extra = {"DEMO_TOKEN": self._token}
        process = start(name, [module, str(self._path), *arguments], threads, self._settings.folder, extra)
        self._processes[name] = process

    def _start_worker(self, name: str) -> None:
        self._start(name, "demo.worker", [name, self._address], threads=1)

    def _turn(self) -> None:
        """Look at every process once."""
        for process in list(self._processes.values()):
            exit_code = process.exit_code
            for event in process.events.read():
                self._notice(event)
                self._show(event)
            if exit_code is not None and process.name != self._killed and not (exit_code == 0 and process.name in self._done):
                self._fail(process, exit_code)
        time.sleep(0.05)

    def _fail(self, process: Process, exit_code: int) -> None:
        """Say what went wrong first: workers that lose their trainer fail because it did."""
        trainer = self._processes["trainer"]
        if process is not trainer and trainer.wait_a_little() not in (None, 0):
            process, exit_code = trainer, trainer.exit_code or 0
        raise RunError(f"{process.name} ended with status {exit_code}; the end of {process.log}:\n{process.last_words()}")

    def _notice(self, event: Event) -> None:
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
            self._done.add(event["who"])
        self._restart_when_due()

    def _kill(self, name: str) -> None:
        """As when a machine is lost, while a request is being computed."""
        time.sleep(0.3)
        self._processes[name].kill()
        self._killed, self._killed_at_version = name, self._version
        self._announce("killed", worker=name, version=self._held.get(name))

    def _restart_when_due(self) -> None:
        """The lost worker comes back one version later (at once if it was the only one), so that it has something to catch up."""
        if self._killed is None or f"{self._killed}-again" in self._processes:
            return
        if self._version > self._killed_at_version or self._settings.workers == 1:
            self._start_worker(f"{self._killed}-again")
            self._announce("restarted", worker=f"{self._killed}-again", lost=self._killed)

    def _announce(self, kind: str, **fields: object) -> None:
        self._log.write(kind, **fields)
        self._show({"event": kind, "who": "demo", "at": time.time(), **fields})

    def _await_end(self) -> None:
        """Everything has been done: the processes leave by themselves."""
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes.values():
            while process.exit_code is None:
                if time.monotonic() > deadline:
                    raise RunError(f"{process.name} did not end; the end of {process.log}:\n{process.last_words()}")
                time.sleep(0.05)
            if process.exit_code != 0 and process.name != self._killed:
                self._fail(process, process.exit_code)
            for event in process.events.read():
                self._show(event)


def read_records(folder: Path) -> list[dict[str, object]]:
    """Every rollout that the trainer recorded."""
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
