"""PULSE: RL policy weights from trainers to inference workers as lossless sparse patches.

Importing this package loads no torch and, until a name is used, nothing else either.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulse.bits import TensorBits
    from pulse.codec import decode, encode
    from pulse.digest import digest_of
    from pulse.errors import PulseError
    from pulse.patch import Patch, apply, compose, diff
    from pulse.publisher import Publisher, Receipt
    from pulse.store import ObjectStore, open_store
    from pulse.subscriber import Subscriber, Update
    from pulse.weights import MemoryWeights, Weights

__version__ = "0.1.0"

_HOMES = {
    "MemoryWeights": "pulse.weights",
    "ObjectStore": "pulse.store",
    "Patch": "pulse.patch",
    "Publisher": "pulse.publisher",
    "PulseError": "pulse.errors",
    "Receipt": "pulse.publisher",
    "Subscriber": "pulse.subscriber",
    "TensorBits": "pulse.bits",
    "Update": "pulse.subscriber",
    "Weights": "pulse.weights",
    "apply": "pulse.patch",
    "compose": "pulse.patch",
    "decode": "pulse.codec",
    "diff": "pulse.patch",
    "digest_of": "pulse.digest",
    "encode": "pulse.codec",
    "open_store": "pulse.store",
}

__all__ = [
    "MemoryWeights",
    "ObjectStore",
    "Patch",
    "Publisher",
    "PulseError",
    "Receipt",
    "Subscriber",
    "TensorBits",
    "Update",
    "Weights",
    "apply",
    "compose",
    "decode",
    "diff",
    "digest_of",
    "encode",
    "open_store",
]


def __getattr__(name: str) -> Any:
    """Load a public name where it is first used: `pulse --help` then starts without numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pulse' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
