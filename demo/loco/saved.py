"""A trainer's state on disk: whole, whatever kills the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state beside the one before, then put it in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load(path: Path) -> dict[str, Any] | None:
    """The state that was saved last, if there is one."""
    if not path.exists():
        return None
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found
