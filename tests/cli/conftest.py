"""The `pulse` command as a process, and checkpoints to feed it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pulse import checkpoint
from tests.cli.samples import PULSE, weights


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def pulse(tmp_path: Path) -> Callable[..., Finished]:
    """Run `pulse` in a folder of its own; a traceback is never an answer."""

    def run(*arguments: object) -> Finished:
        command = [str(PULSE), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    """Three consecutive checkpoints as files `0.safetensors` … `2.safetensors`."""
    tensors = weights(0)
    paths = []
    for i in range(3):
        paths.append(tmp_path / f"{i}.safetensors")
        checkpoint.write(paths[-1], tensors)
        tensors = weights(i + 1, 0.02, tensors)
    return paths
