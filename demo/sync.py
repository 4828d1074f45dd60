"""What travels from the trainer to a worker, whichever way: as patches through PULSE, or, for comparison, as whole checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class SyncError(Exception):
    """A version did not come in time."""


@dataclass(frozen=True)
class Sent:
    """A version that the trainer has published."""

    version: int
    kind: str
    changed: int
    elements: int
    nbytes: int
    full_nbytes: int
    digest: str
    parts: dict[str, float]


@dataclass(frozen=True)
class Received:
    """A version that a worker has applied."""

    base: int | None
    version: int
    kind: str
    patches: int
    nbytes: int
    digest: str
    fetch_seconds: float
    apply_seconds: float


class Sender(Protocol):
    """The trainer's side."""

    def publish(self, step: int) -> Sent:
        """Make the weights of this step a version."""
        ...

    def close(self) -> None:
        """Wait for what runs in the background."""
        ...


class Receiver(Protocol):
    """A worker's side: what it holds, and how it goes on."""

    version: int | None
    digest: str

    def advance(self, timeout: float) -> Received | None:
        """Apply the newest version if there is one, waiting for it at most `timeout` seconds."""
        ...


def catch_up(receiver: Receiver, at_least: int, timeout: float) -> list[Received]:
    """Follow until `at_least` is held."""
    deadline = time.monotonic() + timeout
    received: list[Received] = []
    while receiver.version is None or receiver.version < at_least:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise SyncError(f"version {at_least} did not come in {timeout:g} s; still at {receiver.version}")
        if (update := receiver.advance(remaining)) is not None:
            received.append(update)
    return received
