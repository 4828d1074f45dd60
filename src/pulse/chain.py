"""Decisions about versions, as pure functions: where the newest one is, and which objects lead to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pulse.errors import NoPath
from pulse.manifest import Anchor, LateAnchor, Manifest, Payload


@dataclass(frozen=True, slots=True)
class Start:
    """A version stored whole, from which patches can go on."""

    version: int
    anchor: Anchor
    tensors: Payload


@dataclass(frozen=True, slots=True)
class Plan:
    """How to reach a version: from `start`, or if that is None from what is held, through `patches` in order."""

    start: Start | None
    patches: tuple[Manifest, ...]

    @property
    def nbytes(self) -> int:
        """What it takes to download."""
        return sum(manifest.nbytes for manifest in self.patches) + (self.start.anchor.nbytes if self.start is not None else 0)


def newest(exists: Callable[[int], bool], hint: int = 0) -> int | None:
    """The newest version, given that versions 0 … newest exist: from the hint upwards in doubling steps, then by halving.

    A hint that is wrong costs some look-ups, never the answer. None if there is no version at all.
    """
    low, step = -1, 1
    probe = hint
    while exists(probe):
        low, probe, step = probe, probe + step, step * 2
    high = probe
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    return None if low < 0 else low


def plan(held: int | None, chain: Sequence[Manifest], late: Sequence[LateAnchor] = ()) -> Plan:
    """The cheaper way to the last version of `chain`: patches from `held`, or the newest anchor and the patches after it.

    chain: consecutive manifests up to the target, from `held` + 1 or from an anchor on, or from earlier. late: anchors made later.
    Raises `NoPath` when neither leads there.
    """
    target = chain[-1].version
    starts: list[tuple[int, Start | None]] = [] if held is None else [(held, None)]
    if (newest_start := _newest_start(chain, late)) is not None:
        starts.append((newest_start.version, newest_start))
    ways = []
    for version, start in starts:
        patches = tuple(manifest for manifest in chain if manifest.version > version)
        if len(patches) == target - version and all(manifest.patch is not None for manifest in patches):
            ways.append(Plan(start, patches))
    if not ways:
        raise NoPath(f"no anchor leads to version {target}" + (f", nor do patches from version {held}" if held is not None else ""))
    return min(ways, key=lambda way: way.nbytes)


def _newest_start(chain: Sequence[Manifest], late: Sequence[LateAnchor]) -> Start | None:
    """The newest version in `chain` that is stored whole."""
    starts = [Start(manifest.version, manifest.anchor, manifest.tensors) for manifest in chain if manifest.anchor is not None]
    starts += [Start(found.version, found.anchor, found.tensors) for found in late]
    return max((start for start in starts if start.version <= chain[-1].version), key=lambda start: start.version, default=None)
