"""Everything that is counted along a history of weights, and the one pass that counts it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pulse.analysis.entropy import Pairs, total_bits
from pulse.analysis.numbers import PATTERNS, class_count, class_of_pattern
from pulse.analysis.past import WINDOWS
from pulse.analysis.sequences import History, Progress
from pulse.analysis.tally import SIZES, Move, Sums, count_patterns, tally
from pulse.analysis.views import VIEWS, visible
from pulse.bits import DTYPES, DType


class DTypeCounts:
    """Counts of the tensors of one dtype. Rows are steps of the history, 0 to `steps - 1`.

    patterns: (65536,) of the weights at the start; left, arrived: (steps, classes) changes by exponent class before and after.
    """

    def __init__(self, dtype: DType, steps: int) -> None:
        self.dtype = dtype
        self.patterns = np.zeros(PATTERNS, np.int64)
        self.left = np.zeros((steps, class_count(dtype)), np.int64)
        self.arrived = np.zeros_like(self.left)
        self.pairs = [Pairs() for _ in range(steps)]
        self.visible = {view: np.zeros(steps, np.int64) for view in VIEWS.get(dtype.name, ())}

    def units(self) -> NDArray[np.int64]:
        """How many weights of each class there are before each step. (steps, classes)."""
        start = np.bincount(class_of_pattern(self.dtype.name), self.patterns, self.left.shape[1]).astype(np.int64)
        found: NDArray[np.int64] = start + np.cumsum(self.arrived - self.left, axis=0) - (self.arrived - self.left)
        return found


@dataclass(frozen=True, eq=False)
class Counts:
    """What was counted. Rows are steps; `changed` is by tensor.

    sizes: (steps, 64) by |step|; up, again, same: (steps,) changes upwards, of units that had changed before, and those in the same
    direction as then; since: (steps + 1, 2) by steps since, and whether in the same direction; windows: k -> (steps,), units that differ
    from k steps before, for steps k - 1 and later.
    """

    history: History
    by_dtype: dict[str, DTypeCounts]
    changed: dict[str, NDArray[np.int64]]
    sizes: NDArray[np.int64]
    up: NDArray[np.int64]
    again: NDArray[np.int64]
    same: NDArray[np.int64]
    since: NDArray[np.int64]
    windows: dict[int, NDArray[np.int64]]
    views: bool
    _last: dict[tuple[str, int], NDArray[np.signedinteger]] = field(default_factory=dict)
    _spare: list[NDArray[np.signedinteger]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many steps the history has."""
        return len(self.up)

    def reference_bits(self) -> list[float | None]:
        """The reference entropy of each step, in bits; None where it is not known."""
        units = {name: counts.units() for name, counts in self.by_dtype.items()}
        return [
            total_bits({name: (units[name][step], counts.left[step], counts.pairs[step]) for name, counts in self.by_dtype.items()})
            for step in range(self.steps)
        ]

    def add(self, move: Move) -> None:
        """Count one move."""
        if move.dtype.name not in self.by_dtype:
            self.by_dtype[move.dtype.name] = DTypeCounts(move.dtype, self.steps)
        counts = self.by_dtype[move.dtype.name]
        if move.moment == 0:
            count_patterns(move.current, counts.patterns)
            return
        step = move.moment - 1
        for k, differ in move.windows.items():
            self.windows[k][step] += differ
        if move.positions.size:
            self._add_changes(move, step, counts)
        if move.moment == self.steps and move.piece in self._last:
            self._spare[:] = [self._last.pop(move.piece)]

    def _add_changes(self, move: Move, step: int, counts: DTypeCounts) -> None:
        if move.piece not in self._last:
            self._last[move.piece] = self._zeros(move.current.size)
        sums = Sums(self.sizes[step], counts.left[step], counts.arrived[step], self.since)
        up, again, same, pairs = tally(move, self._last[move.piece], sums)
        self.changed[move.piece[0]][step] += move.positions.size
        self.up[step] += up
        self.again[step] += again
        self.same[step] += same
        if move.dtype.name != "F64":  # whose classes and steps together fit no 64 bits
            counts.pairs[step].add(pairs)
        for view in counts.visible if self.views else ():
            counts.visible[view][step] += visible(move.old, move.new, move.dtype.name, view)

    def _zeros(self, size: int) -> NDArray[np.signedinteger]:
        """Zeros for so many units or more, in the memory of the last piece if that is large enough."""
        if self._spare and self._spare[0].size >= size:
            spare = self._spare.pop()
            spare[:size] = 0
            return spare
        return np.zeros(size, np.int16 if self.steps < 1 << 15 else np.int32)


def count(history: History, *, views: bool = False, report: Progress = lambda _done, _total: None) -> Counts:
    """Count along a history. views: also what changes in views of lower precision, which costs a pass more."""
    steps = len(history.labels) - 1

    def rows() -> NDArray[np.int64]:
        return np.zeros(steps, np.int64)

    found = Counts(
        history,
        {name: DTypeCounts(DTYPES[name], steps) for name in sorted({spec.dtype for spec in history.specs.values()})},
        {name: rows() for name in history.specs},
        np.zeros((steps, SIZES), np.int64),
        rows(),
        rows(),
        rows(),
        np.zeros((steps + 1, 2), np.int64),
        {k: rows() for k in WINDOWS if k <= steps},
        views,
    )
    moves: Iterable[Move] = history.moves(report)
    for move in moves:
        found.add(move)
    return found
