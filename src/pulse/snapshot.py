"""What a publisher takes from the weights while they stand still: what changed since the baseline, or everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pulse.bits import Spec, TensorBits
from pulse.digest import state_digest, tensor_sums
from pulse.manifest import TensorIndex
from pulse.patch import Patch, TensorPatch, apply_bits, sums_after
from pulse.threads import each
from pulse.weights import Weights


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is to be published, taken while the weights stood still: what changed since the baseline, or for an anchor everything."""

    patch: Patch
    kind: Literal["anchor", "patch"]
    reason: str
    index: TensorIndex
    state_digest: str
    seconds: float = 0.0


def fits(index: TensorIndex, specs: Mapping[str, Spec], aliases: Mapping[str, str]) -> bool:
    """Whether an index speaks for tensors and ties like these."""
    return specs == index.specs and aliases.items() <= index.aliases.items()


def everything(weights: Weights, reason: str) -> Snapshot:
    """All bits, copied. reason: why an anchor is needed."""
    specs = weights.specs()
    whole = {name: weights.read(name).copy() for name in specs}
    sums = tensor_sums(whole)
    return Snapshot(Patch(whole=whole), "anchor", reason, TensorIndex(specs, sums, dict(weights.aliases)), state_digest(specs, sums))


def changes_since(weights: Weights, baseline: Mapping[str, TensorBits], index: TensorIndex) -> Snapshot:
    """What changed since the baseline, whose index is `index`; the digest's sums follow in O(changed)."""
    names = sorted(index.specs)
    found = dict(zip(names, each(lambda name: weights.diff(name, baseline[name]), names), strict=True))
    changes = tuple(change for change in found.values() if isinstance(change, TensorPatch))
    whole = {name: bits for name, bits in found.items() if isinstance(bits, TensorBits)}
    sums = sums_after(Patch(changes, whole), baseline, index.sums)
    digest = state_digest(index.specs, sums)
    patch = Patch(changes, whole, base=state_digest(index.specs, index.sums), result=digest)
    return Snapshot(patch, "patch", "", replace(index, sums=sums), digest)


def as_anchor(snapshot: Snapshot, baseline: Mapping[str, TensorBits] | None, reason: str) -> Snapshot:
    """The snapshot as all bits, which no longer depends on the baseline."""
    if snapshot.kind == "anchor":
        return replace(snapshot, reason=reason)
    whole = apply_bits(snapshot.patch, baseline or {})
    return replace(snapshot, kind="anchor", reason=reason, patch=Patch(whole={name: bits.copy() for name, bits in whole.items()}))
