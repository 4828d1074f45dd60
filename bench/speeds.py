"""Time and memory of one step, in copies of the checkpoint: what a publisher and a worker do, per encoding and number of threads.

A copy (`np.copyto` of all tensors into memory that has been touched) is timed right before and right after each job, in one thread, and
the job's time is divided by their mean. What else the machine does thus slows both. Jobs take turns, round after round.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from bench.steps import Step
from pulse.bits import TensorBits
from pulse.codec import ENCODINGS, Encoding, decode, encode
from pulse.digest import Sum, check, flat_sum, state_digest, sum_at, tensor_sums
from pulse.patch import Patch, TensorPatch, diff_tensor
from pulse.threads import each

THREADS = 1, 2
LIMITS: Mapping[str, float] = {"contextual": 8.0, "portable": 4.0}  # copies, in one thread: to encode, and to decode and apply
MEMORY_LIMIT, TWO_THREADS_LIMIT = 0.3, 1.5  # of the checkpoint; times as fast as one thread
Bits = Mapping[str, TensorBits]


@dataclass(frozen=True, slots=True)
class Speed:
    """One job. copies and seconds: the least and the median; extra_memory: the peak above what was held before, over the checkpoint."""

    job: str
    encoding: str | None
    threads: int
    copies: float
    copies_median: float
    seconds: float
    seconds_median: float
    times_one_thread: float
    limit: float | None
    extra_memory: float | None


@dataclass(frozen=True, slots=True)
class Speeds:
    """All jobs on one step. copy_seconds: the least and the median; first_use: seconds of a first small step in a fresh process."""

    step: str
    nbytes: int
    density: float
    rounds: int
    copy_seconds: float
    copy_median: float
    first_use: Mapping[str, float]
    rows: tuple[Speed, ...]


def publish(step: Step, sums: Mapping[str, Sum], encoding: Encoding, threads: int) -> bytes:
    """What a publisher does: compare with the baseline, whose sums are known; digest what changed; encode."""

    def look(name: str) -> tuple[TensorPatch | TensorBits | None, Sum]:
        before = step.old[name]
        found = diff_tensor(name, before, step.new[name])
        if found is None:
            return None, sums[name]
        if isinstance(found, TensorBits):
            return found, flat_sum(found.flat)
        was, now = sum_at(found.positions, before.flat[found.positions]), sum_at(found.positions, found.values)
        return found, sums[name] + now - was

    names = sorted(step.old)
    looked = dict(zip(names, each(look, names, threads), strict=True))
    changes = tuple(found for found, _ in looked.values() if isinstance(found, TensorPatch))
    whole = {name: found for name, (found, _) in looked.items() if isinstance(found, TensorBits)}
    specs = {name: bits.spec for name, bits in step.old.items()}
    result = state_digest(specs, {name: after for name, (_, after) in looked.items()})
    patch = Patch(changes, whole, base=state_digest(specs, sums), result=result)
    return encode(patch, base=step.old, encoding=encoding, threads=threads)


def receive(blob: bytes, live: Bits, sums: Mapping[str, Sum], threads: int) -> None:
    """What a worker does: decode against its weights, write what changed, and prove the result by digest, from bits that are read back."""
    patch = decode(blob, base=live, threads=threads)

    def write(change: TensorPatch) -> Sum:
        flat = live[change.part.name].flat
        was = sum_at(change.positions, flat[change.positions])
        flat[change.positions] = change.values
        return sum_at(change.positions, flat[change.positions]) - was

    moved = zip(patch.changes, each(write, patch.changes, threads), strict=True)
    after = dict(sums) | {change.part.name: sums[change.part.name] + more for change, more in moved}
    for name, bits in patch.whole.items():
        np.copyto(live[name].flat, bits.flat)
        after[name] = flat_sum(live[name].flat)
    check("the result", patch.result or "none", state_digest({name: bits.spec for name, bits in live.items()}, after))


def digest(weights: Bits, threads: int) -> None:
    """The state digest of everything, as at a start or an anchor."""
    sums = each(lambda bits: flat_sum(bits.flat), weights.values(), threads)
    state_digest({name: bits.spec for name, bits in weights.items()}, dict(zip(weights, sums, strict=True)))


def measure(step: Step, rounds: int, say: Callable[[str], None]) -> Speeds:
    """All jobs, `rounds` times in turns, after one round that warms up and measures memory."""
    live = {name: bits.copy() for name, bits in step.old.items()}

    def copy() -> None:
        for name, bits in step.old.items():
            np.copyto(live[name].flat, bits.flat)

    jobs = _jobs(step, live)
    memory = {}
    for key, job in jobs.items():
        say(f"memory: {_words(key)}")
        copy()
        job()
        copy()
        memory[key] = extra_memory(job)
    times: dict[_Key, list[tuple[float, float]]] = {key: [] for key in jobs}
    copies = []
    for number in range(rounds):
        for key, job in jobs.items():
            say(f"speed, round {number + 1} of {rounds}: {_words(key)}")
            before, took, after = seconds(copy), seconds(job), seconds(copy)
            times[key].append((took, 2 * took / (before + after)))
            copies += [before, after]
    rows = tuple(_speed(key, times, memory[key], step.nbytes) for key in jobs)
    say("first use")
    return Speeds(step.name, step.nbytes, step.changed / step.units, rounds, min(copies), median(copies), first_use(), rows)


_Key = tuple[str, str | None, int]  # job, encoding, threads


def _words(key: _Key) -> str:
    return f"{key[0]}, {key[1] or 'everything'}, {key[2]} threads"


def _jobs(step: Step, live: Bits) -> dict[_Key, Callable[[], object]]:
    sums = tensor_sums(step.old)
    jobs: dict[_Key, Callable[[], object]] = {}
    for threads in THREADS:
        for encoding in ENCODINGS:
            blob = publish(step, sums, encoding, 1)
            jobs["encode", encoding, threads] = partial(publish, step, sums, encoding, threads)
            jobs["apply", encoding, threads] = partial(receive, blob, live, sums, threads)
        jobs["digest of everything", None, threads] = partial(digest, live, threads)
    return jobs


def _speed(key: _Key, times: Mapping[_Key, list[tuple[float, float]]], memory: int | None, nbytes: int) -> Speed:
    job, encoding, threads = key
    took, copies = zip(*times[key], strict=True)
    one = median(copies for _, copies in times[job, encoding, 1])
    limit = LIMITS.get(encoding or "") if threads == 1 else None
    extra = None if memory is None else memory / nbytes
    return Speed(job, encoding, threads, min(copies), median(copies), min(took), median(took), one / median(copies), limit, extra)


def seconds(job: Callable[[], object]) -> float:
    """How long it takes, once."""
    start = perf_counter()
    job()
    return perf_counter() - start


def extra_memory(job: Callable[[], object]) -> int | None:
    """The most memory that the process held during `job`, above what it held before, in bytes; None where Linux does not say."""
    gc.collect()
    if hasattr(trim := ctypes.CDLL(None), "malloc_trim"):
        trim.malloc_trim(0)  # what earlier jobs freed must not serve this one unseen
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is held now
    except OSError:
        return None
    before = _held("VmRSS")
    kept = job()
    peak = _held("VmHWM")
    del kept
    return max(peak - before, 0)


def _held(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) << 10


def first_use() -> dict[str, float]:
    """Seconds of the first small step in a fresh process, kernels to be compiled or from the cache, and of the second one there."""
    with tempfile.TemporaryDirectory() as cache:
        runs = [_fresh(cache) for _ in range(2)]
    return {"compiled": runs[0][0], "cached": runs[1][0], "second": runs[1][1]}


def _fresh(cache: str) -> list[float]:
    """The first and the second step of a process that keeps compiled kernels in `cache`."""
    command, root = [sys.executable, "-m", "bench.first_use"], Path(__file__).parents[1]
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
    done = subprocess.run(command, cwd=root, env=environment, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    found: list[float] = json.loads(done.stdout)
    return found
