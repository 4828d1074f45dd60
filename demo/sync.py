"""How weights travel from the trainer to a worker: as patches through PULSE, or, for comparison, as whole checkpoints.

Both ways share one small interface, so that the rest of the demo cannot tell them apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from demo.hashing import named_weights, view_sha256
from demo.settings import Settings


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


def open_sender(settings: Settings, model: torch.nn.Module) -> Sender:
    """The trainer's side of the way that the settings name."""
    if settings.sync == "checkpoint":
        return CheckpointSender(Path(settings.store), model)
    from demo.patches import PatchSender

    return PatchSender(settings, model)


def open_receiver(settings: Settings, model: torch.nn.Module) -> Receiver:
    """A worker's side of the way that the settings name."""
    if settings.sync == "checkpoint":
        return CheckpointReceiver(Path(settings.store), model)
    from demo.patches import PatchReceiver

    return PatchReceiver(settings, model)


def architecture(settings: Settings) -> Path:
    """A directory with the model's config, out of the store: all that a worker needs to build the model without weights."""
    if settings.sync == "checkpoint":
        return Path(settings.store)
    from demo.patches import pull_config

    return pull_config(settings)


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


class CheckpointSender:
    """Writes the whole BF16 view as a safetensors file for every version. The rename makes the version exist."""

    _KEPT = 3

    def __init__(self, folder: Path, model: torch.nn.Module) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(model, PreTrainedModel):
            model.config.save_pretrained(folder)
        self._folder = folder
        self._model = model
        self._version = max(_versions(folder), default=0)

    def publish(self, step: int) -> Sent:
        """Write one whole checkpoint."""
        started = time.perf_counter()
        view = {name: tensor.detach().to(torch.bfloat16) for name, tensor in named_weights(self._model)}
        version = self._version + 1
        partial = self._folder / f".{version}.partial"
        save_file(view, partial, metadata={"step": str(step)})
        partial.replace(_checkpoint(self._folder, version))
        self._version = version
        for old in _versions(self._folder)[: -self._KEPT]:
            _checkpoint(self._folder, old).unlink()
        elements = sum(tensor.numel() for tensor in view.values())
        nbytes = sum(tensor.nbytes for tensor in view.values())
        seconds = {"write": time.perf_counter() - started}
        return Sent(version, "checkpoint", elements, elements, nbytes, nbytes, view_sha256(self._model), seconds)

    def close(self) -> None:
        """Nothing runs in the background here."""


class CheckpointReceiver:
    """Copies the newest whole checkpoint into the live weights."""

    def __init__(self, folder: Path, model: torch.nn.Module) -> None:
        self._folder = folder
        self._model = model
        self.version: int | None = None
        self.digest = ""

    def advance(self, timeout: float) -> Received | None:
        """Load and copy the newest checkpoint."""
        deadline = time.monotonic() + timeout
        while (newest := max(_versions(self._folder), default=0)) <= (self.version or 0):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
        started = time.perf_counter()
        view = load_file(_checkpoint(self._folder, newest))
        fetched = time.perf_counter()
        with torch.inference_mode():
            for name, tensor in named_weights(self._model):
                tensor.copy_(view[name])
        applied = time.perf_counter()
        base, self.version, self.digest = self.version, newest, view_sha256(self._model)
        nbytes = sum(tensor.nbytes for tensor in view.values())
        return Received(base, newest, "checkpoint", 0, nbytes, self.digest, fetched - started, applied - fetched)


def _checkpoint(folder: Path, version: int) -> Path:
    return folder / f"version-{version:06d}.safetensors"


def _versions(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("version-")) for path in folder.glob("version-*.safetensors"))
