"""Weights as whole checkpoints, for comparison: the plainest way that there is."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from demo.hashing import named_weights, view_sha256
from demo.sync import Received, Sent


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
