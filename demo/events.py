"""Events: one JSON object a line, written by a process into a file of its own and read by the one that started it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    """Appends events to a file, each with the writer's name, the time, and what is `always` the same."""

    def __init__(self, path: Path, who: str, **always: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._who = who
        self._always = always

    def write(self, event_kind: str, /, **fields: Any) -> None:
        """Append one event as one whole line."""
        event = {"event": event_kind, "who": self._who, "at": time.time(), **self._always, **fields}
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EventTail:
    """Reads the events that have appeared in a file since the last call; a line still being written waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        """Every whole new line, decoded."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


def read_events(folder: Path) -> Iterator[Event]:
    """All events of a run, in the order of their times."""
    events = [event for path in sorted(folder.glob("*.jsonl")) for event in EventTail(path).read()]
    yield from sorted(events, key=lambda event: float(event["at"]))
