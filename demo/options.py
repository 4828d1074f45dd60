"""What the demo's commands do with what they are told."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console

from demo.fleet import RunError


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Treat a request to end as ^C, so that everything started is ended."""
    raise KeyboardInterrupt


def seed(text: str) -> int:
    """What random generators take."""
    if not 0 <= (value := int(text)) < 1 << 32:
        raise argparse.ArgumentTypeError("must be from 0 to 4294967295")
    return value


def positive(text: str) -> int:
    """A number from 1 up."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def store_of(given: str | None, folder: Path) -> str:
    """The address of the store: what was given, or a folder in the run's folder."""
    store = given or str(folder / "store")
    if store.startswith("memory:"):
        raise RunError("a store in memory is seen by one process only: give a folder or a URL with --store")
    return store if "://" in store else str(Path(store).resolve())


def prepared(model: str, console: Console, module: str = "demo.model") -> str:
    """The model's directory, made ready by a process of its own: ``python -m module model``."""
    with console.status(f"preparing {model} …"):
        command = [sys.executable, "-m", module, model]
        done = subprocess.run(  # noqa: S603  our own modules
            command, capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent, check=False
        )
    if done.returncode != 0:
        raise RunError(done.stderr.strip().splitlines()[-1].removeprefix("error: ") if done.stderr.strip() else "no model")
    return done.stdout.strip().splitlines()[-1]
