"""The processes of one run: started, watched by the events that they write, killed where that is the point, and all ended."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from demo.events import Event, EventLog
from demo.processes import Process, start
from demo.settings import Settings

_END_SECONDS = 60.0

Show = Callable[[Event], None]


class RunError(Exception):
    """The run failed; the message says which process and what it said."""


class Fleet(ABC):
    """What every run of the demo does with its processes. `killed` are those that are meant to be gone, `done` those that said so."""

    def __init__(self, settings: Settings, show: Show) -> None:
        self.show = show
        self.processes: dict[str, Process] = {}
        self.killed: set[str] = set()
        self.done: set[str] = set()
        self._folder = settings.folder
        self._path = settings.save()
        self._token = secrets.token_hex(16)
        self._log = EventLog(settings.folder / "events" / "demo.jsonl", "demo")

    def execute(self) -> None:
        """Run to the end. Whatever happens, every process that was started is ended."""
        try:
            self.run()
            self._await_end()
        finally:
            for process in self.processes.values():
                process.end()
            self._log.close()

    @abstractmethod
    def run(self) -> None:
        """Start processes and take turns until everything has been done."""

    @abstractmethod
    def notice(self, event: Event) -> None:
        """Act on an event."""

    def start(self, name: str, module: str, arguments: list[str], threads: int) -> None:
        """Start ``python -m module SETTINGS arguments…``."""
        extra = {"DEMO_TOKEN": self._token}
        self.processes[name] = start(name, [module, str(self._path), *arguments], threads, self._folder, extra)

    def turn(self) -> None:
        """Look at every process once."""
        for process in list(self.processes.values()):
            exit_code = process.exit_code
            for event in process.events.read():
                self.notice(event)
                self.show(event)
            if exit_code is not None and process.name not in self.killed and not (exit_code == 0 and process.name in self.done):
                self._fail(process, exit_code)
        time.sleep(0.05)

    def kill(self, name: str) -> None:
        """As when a machine is lost."""
        self.processes[name].kill()
        self.killed.add(name)

    def announce(self, kind: str, **fields: object) -> None:
        """Say what the demo itself has done."""
        self._log.write(kind, **fields)
        self.show({"event": kind, "who": "demo", "at": time.time(), **fields})

    def _fail(self, process: Process, exit_code: int) -> None:
        """Say what went wrong first: workers that lose their trainer fail because it did."""
        for trainer in self.processes.values():
            if trainer.name.startswith("trainer") and trainer.name not in self.killed | {process.name}:
                if trainer.wait_a_little() in (None, 0):
                    continue
                process, exit_code = trainer, trainer.exit_code or 0
                break
        raise RunError(f"{process.name} ended with status {exit_code}; the end of {process.log}:\n{process.last_words()}")

    def _await_end(self) -> None:
        """Everything has been done: the processes leave by themselves."""
        deadline = time.monotonic() + _END_SECONDS
        for process in self.processes.values():
            while process.exit_code is None:
                if time.monotonic() > deadline:
                    raise RunError(f"{process.name} did not end; the end of {process.log}:\n{process.last_words()}")
                time.sleep(0.05)
            if process.exit_code != 0 and process.name not in self.killed:
                self._fail(process, process.exit_code)
            for event in process.events.read():
                self.show(event)
