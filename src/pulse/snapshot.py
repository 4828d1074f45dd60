"""What a publisher takes from the weights while they stand still: what changed since the baseline, or everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pulse.bits import Spec, TensorBits
from pulse.digest import flat_sum, state_digest, sum_at, tensor_sums
from pulse.manifest import TensorIndex
from pulse.patch import Patch, TensorPatch, apply_bits
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
    changes, whole = [], {}
    sums = dict(index.sums)
    for name in sorted(index.specs):
        base = baseline[name]
        found = weights.diff(name, base)
        if isinstance(found, TensorPatch):
            changes.append(found)
            sums[name] += sum_at(found.located, found.values) - sum_at(found.located, base.flat[found.located])
        elif found is not None:
            whole[name] = found
            sums[name] = flat_sum(found.flat)
    digest = state_digest(index.specs, sums)
    patch = Patch(tuple(changes), whole, base=state_digest(index.specs, index.sums), result=digest)
    return Snapshot(patch, "patch", "", replace(index, sums=sums), digest)


def as_anchor(snapshot: Snapshot, baseline: Mapping[str, TensorBits] | None, reason: str) -> Snapshot:
    """The snapshot as all bits, which no longer depends on the baseline."""
    if snapshot.kind == "anchor":
        return replace(snapshot, reason=reason)
    whole = apply_bits(snapshot.patch, baseline or {})
    return replace(snapshot, kind="anchor", reason=reason, patch=Patch(whole={name: bits.copy() for name, bits in whole.items()}))
