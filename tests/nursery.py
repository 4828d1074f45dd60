"""Processes that start in milliseconds: forked from one that has loaded PyTorch and the kernels, and does nothing itself."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

Life = Sequence[tuple[Any, ...]]  # what a process is called with, and after its end the next one in its place


class Nursery:
    """One such process. modules: what it loads."""

    def __init__(self, *modules: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._told, there = spawn.Pipe()
        self._process = spawn.Process(target=_nurse, args=(there, modules))
        self._process.start()
        there.close()

    def lived(self, target: Callable[..., None], *lives: Life, seconds: float = 90) -> list[list[int | None]]:
        """The exit codes of processes that run side by side, each life by itself; all are gone afterwards."""
        self._told.send((target, lives, seconds))
        return self._told.recv()

    def close(self) -> None:
        self._told.close()
        self._process.join()


def _nurse(told: Connection, modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    while True:
        try:
            target, lives, seconds = told.recv()
        except EOFError:
            return
        told.send(_lived(target, [list(life) for life in lives], seconds))


def _lived(target: Callable[..., None], lives: list[list[Any]], seconds: float) -> list[list[int | None]]:
    fork = multiprocessing.get_context("fork")

    def begun(arguments: tuple[Any, ...]) -> Any:
        child = fork.Process(target=target, args=arguments)
        child.start()
        return child

    children = [begun(life.pop(0)) for life in lives]
    codes: list[list[int | None]] = [[] for _ in lives]
    deadline = time.monotonic() + seconds
    try:
        while any(child is not None for child in children) and time.monotonic() < deadline:
            for i, child in enumerate(children):
                if child is not None and child.exitcode is not None:
                    codes[i].append(child.exitcode)
                    children[i] = begun(lives[i].pop(0)) if lives[i] else None
            time.sleep(0.005)
        return codes
    finally:
        for child in children:
            if child is not None:
                child.kill()
                child.join()
