"""Would it pay to remember more than the base? Entropies of a run's patches, given what a receiver could also know.

``python -m bench.history STORE`` goes along a chain and, every few versions, works out what one change costs, in bits: its place given the
exponent class alone, and given also how long ago the weight changed last; its step given the class alone, and given also which way the
weight moved last. Empirical conditional entropies over all tensors, which charge nothing for their own tables: upper limits of the gain.
A receiver would need one byte of memory per weight: two bits of direction, six of time.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pulse.analysis.entropy import x_log_x
from pulse.analysis.sequences import Chain, chain_of
from pulse.bits import dtype_of, steps_between
from pulse.codec.classes import exponent
from pulse.codec.sections import zigzag
from pulse.store import open_store
from pulse.versions import Versions

_AGES = np.array([1, 2, 3, 5, 9, 17, 33])  # versions since the last change: where a group begins; before them: never changed
_GROUPS = _AGES.size + 1
_BF16 = dtype_of("BF16")
_CHUNK = 1 << 20
_NONE = np.zeros((256, _GROUPS), np.int64)


@dataclass(frozen=True, slots=True)
class Row:
    """One version. Bits per change: of the place, and of the step, without and with history; same_way: share that moved as last time."""

    version: int
    changed: int
    density: float
    place: float
    place_with_age: float
    step: float
    step_with_direction: float
    again: float
    same_way: float

    @property
    def gain(self) -> float:
        """Bytes per change that history would save at most."""
        return (self.place - self.place_with_age + self.step - self.step_with_direction) / 8

    @property
    def total(self) -> float:
        """Bytes per change without history."""
        return (self.place + self.step) / 8


def measure(chain: Chain, every: int) -> list[Row]:
    """A row for every `every`-th version of the chain, from the second on."""
    last = {name: np.zeros(spec.units, np.uint16) for name, spec in chain.specs.items()}  # the moment of the last change; 0: never
    up = {name: np.zeros(spec.units, np.bool_) for name, spec in chain.specs.items()}  # and its direction
    labels = [manifest.version for manifest in chain.kept]
    rows = []
    for moment, (patch, tensors) in enumerate(track(chain.patches(), "versions", len(labels) - 1, console=Console(stderr=True)), 1):
        counted = moment > 1 and moment % every == 0
        units = sum((_table(bits.flat, _ages(last[name], moment)) for name, bits in tensors.items()), _NONE) if counted else _NONE
        places, steps, same = _NONE.copy(), [], []
        for change in patch.changes:
            name, at = change.part.name, change.located
            old, before = tensors[name].flat[at], last[name][at]
            moved = steps_between(old, change.values, _BF16)
            rose = moved.view(np.int16) > 0
            if counted:
                places += _table(old, _ages(before, moment))
                known = np.where(before == 0, 0, 1 + up[name][at])  # of the direction, before the step is seen
                steps.append((exponent(old, _BF16) * 3 + known) << 16 | zigzag(moved).astype(np.int64))
                same.append((up[name][at] == rose)[before > 0])
            last[name][at], up[name][at] = moment, rose
        if counted:
            rows.append(_row(labels[moment], units, places, np.concatenate(steps), np.concatenate(same)))
    return rows


def _ages(last: NDArray[np.uint16], moment: int) -> NDArray[np.int64]:
    """The group of each weight, by how many versions ago it changed: 0 for never."""
    groups = np.zeros(moment + 1, np.int64)
    groups[1:] = np.searchsorted(_AGES, moment - np.arange(1, moment + 1), side="right")
    return groups[last]


def _table(units: NDArray[Any], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many units there are of each exponent and group, (256, groups)."""
    found = np.zeros(256 * _GROUPS, np.int64)
    for start in range(0, units.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        found += np.bincount(exponent(units[part], _BF16) * _GROUPS + groups[part], minlength=found.size)
    return found.reshape(256, _GROUPS)


def _row(version: int, units: NDArray[np.int64], places: NDArray[np.int64], steps: NDArray[np.int64], same: NDArray[np.bool_]) -> Row:
    changed, total = int(places.sum()), int(units.sum())
    plain = (steps >> 16) // 3 << 16 | steps & 0xFFFF  # without the direction
    return Row(
        version=version,
        changed=changed,
        density=changed / total,
        place=_places(units.sum(axis=1), places.sum(axis=1)) / changed,
        place_with_age=_places(units, places) / changed,
        step=_conditional(plain) / changed,
        step_with_direction=_conditional(steps) / changed,
        again=same.size / changed,
        same_way=float(same.mean()) if same.size else 0.0,
    )


def _places(n: NDArray[np.int64], k: NDArray[np.int64]) -> float:
    """Bits that say which k of n weights changed, over all groups."""
    return x_log_x(n) - x_log_x(k) - x_log_x(n - k)


def _conditional(pairs: NDArray[np.int64]) -> float:
    """Bits of the steps (the lower 16 bits) given what is known (the upper ones), over all pairs."""
    return x_log_x(np.unique(pairs >> 16, return_counts=True)[1]) - x_log_x(np.unique(pairs, return_counts=True)[1])


def main(arguments: list[str] | None = None) -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(prog="python -m bench.history", description=__doc__)
    parser.add_argument("store", help="a store whose chain holds BF16 weights")
    parser.add_argument("--to", type=int, help="the last version (default: the newest)")
    parser.add_argument("--every", type=int, default=10, help="versions between rows (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    rows = measure(chain_of(Versions(open_store(options.store)), None, options.to), options.every)
    if options.json:
        print(json.dumps([asdict(row) | {"gain": row.gain, "total": row.total} for row in rows], indent=1))
        return 0
    table = Table("version", "changed", "place, bits", "with age", "step, bits", "with direction", "changed before", "same way", "saved")
    for row in rows:
        figures = (row.place, row.place_with_age, row.step, row.step_with_direction)
        shares = (f"{row.again:.1%}", f"{row.same_way:.1%}", f"{row.gain / row.total:.1%}")
        table.add_row(str(row.version), f"{row.density:.3%}", *(f"{figure:.2f}" for figure in figures), *shares)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
