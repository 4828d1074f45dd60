"""The two ways in which weights can travel, behind one interface, so that the rest of the demo cannot tell them apart."""

from __future__ import annotations

from pathlib import Path

import torch

from demo.checkpoints import CheckpointReceiver, CheckpointSender
from demo.patches import PatchReceiver, PatchSender, pull_config
from demo.settings import Settings
from demo.sync import Receiver, Sender


def open_sender(settings: Settings, model: torch.nn.Module) -> Sender:
    """The trainer's side of the way that the settings name."""
    if settings.sync == "checkpoint":
        return CheckpointSender(Path(settings.store), model)
    return PatchSender(settings, model)


def open_receiver(settings: Settings, model: torch.nn.Module) -> Receiver:
    """A worker's side of the way that the settings name."""
    if settings.sync == "checkpoint":
        return CheckpointReceiver(Path(settings.store), model)
    return PatchReceiver(settings, model)


def architecture(settings: Settings) -> Path:
    """A directory with the model's config, out of the store: all that a worker needs to build the model without weights."""
    if settings.sync == "checkpoint":
        return Path(settings.store)
    return pull_config(settings)
