"""Starting and ending the demo's processes: each by its own id, none left behind."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from demo.events import EventTail

_PR_SET_PDEATHSIG = 1
_REUSE_MEMORY = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"  # page faults took a fifth of a step


@dataclass
class Process:
    """A running process, the file it logs to and the events it writes."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    events: EventTail

    @property
    def exit_code(self) -> int | None:
        """The exit status, or None while it runs."""
        return self.popen.poll()

    def wait_a_little(self, seconds: float = 2.0) -> int | None:
        """The exit status if it ends within `seconds`."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """SIGKILL, as when a machine is lost."""
        self.popen.kill()
        self.popen.wait()

    def end(self, patience: float = 5.0) -> None:
        """End it: kindly first, then for certain."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(patience)
            except subprocess.TimeoutExpired:
                self.kill()

    def last_words(self, lines: int = 12) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def start(name: str, arguments: list[str], threads: int, folder: Path, extra: dict[str, str]) -> Process:
    """Start ``python -m …`` with a fixed number of threads; what it prints goes to a log file."""
    log = folder / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        popen = subprocess.Popen(  # noqa: S603  our own modules
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **_environment(threads), **extra},
            cwd=Path(__file__).resolve().parent.parent,
        )
    return Process(name, popen, log, EventTail(folder / "events" / f"{name}.jsonl"))


def _environment(threads: int) -> dict[str, str]:
    """Threads pinned, since their number changes sums; nothing phones home."""
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))
    fixed = {
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        "OMP_WAIT_POLICY": "PASSIVE",
        "MKL_CBWR": "AVX2",
        "TOKENIZERS_PARALLELISM": "false",
    }
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**counts, **fixed, **quiet, **offline, "GLIBC_TUNABLES": _REUSE_MEMORY}


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone (Linux; elsewhere timeouts end it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def peak_memory() -> int:
    """The most memory that this process has held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
