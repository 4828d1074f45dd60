"""Weights as patches: the demo's only use of PULSE. Three lines on the trainer's side, two on a worker's."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import pulse
from demo.settings import Settings
from demo.sync import Received, Sent, SyncError
from pulse.follow import pull_files
from pulse.torch import ModuleWeights


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """PULSE's errors as the demo's."""
    try:
        yield
    except pulse.PulseError as error:
        raise SyncError(f"{type(error).__name__}: {error}") from error


class PatchSender:
    """Publishes the BF16 view of the trainer's FP32 masters after every step."""

    def __init__(self, settings: Settings, model: torch.nn.Module, store: pulse.ObjectStore | None = None) -> None:
        with _explained():
            self._publisher = pulse.Publisher(
                store or pulse.open_store(settings.store),
                ModuleWeights(model, view=torch.bfloat16),
                anchor_every=settings.anchor_every,
                files=[settings.model],
                encoding="contextual",  # the one for slow links; left to itself a publisher finds that this folder is a fast one
            )

    def publish(self, step: int) -> Sent:
        """Publish what changed since the last version."""
        with _explained():
            receipt = self._publisher.publish(step=step)
        return Sent(
            version=receipt.version,
            kind=receipt.kind,
            changed=receipt.changed,
            elements=receipt.units,
            nbytes=receipt.nbytes,
            full_nbytes=receipt.full_nbytes,
            digest=receipt.state_digest,
            parts=dict(receipt.seconds),
        )

    def close(self) -> None:
        """Wait for what runs in the background."""
        with _explained():
            self._publisher.close()


def pull_config(settings: Settings) -> Path:
    """The files beside the newest version's weights, in a directory of this process's own."""
    folder = Path(tempfile.mkdtemp(prefix="pulse-worker-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with _explained():
        pull_files(pulse.open_store(settings.store), folder)
    return folder


class PatchReceiver:
    """Follows the store: fetches and verifies beside the live weights, then applies in place."""

    def __init__(self, settings: Settings, model: torch.nn.Module) -> None:
        with _explained():
            self._subscriber = pulse.Subscriber(pulse.open_store(settings.store), ModuleWeights(model))
        self.version: int | None = None
        self.digest = ""

    def advance(self, timeout: float) -> Received | None:
        """Fetch the newest version and apply it."""
        with _explained():
            update = self._subscriber.fetch() if timeout <= 0 else self._subscriber.wait(timeout, poll=0.05)
            if update is None:
                return None
            started = time.perf_counter()
            self._subscriber.apply(update)
        applied = time.perf_counter() - started
        base, self.version, self.digest = self.version, update.version, update.state_digest
        return Received(base, update.version, update.kind, update.patches, update.nbytes, self.digest, update.seconds, applied)
