"""The worker's side: `fetch` while serving, `apply` in the pause, and never serve weights that are not exactly one version."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from pulse import patch as patches
from pulse.binding import Binding, bind
from pulse.bits import TensorBits, advance, dtype_of
from pulse.chain import Plan
from pulse.digest import Sum, check, flat_sum, state_digest, sum_at
from pulse.errors import BaseMismatch, DigestMismatch, StoreUnavailable, TornUpdate
from pulse.manifest import Manifest, TensorIndex
from pulse.patch import Patch, TensorPatch, changed_positions, compose
from pulse.store import ObjectStore
from pulse.versions import Versions
from pulse.weights import Weights


@dataclass(frozen=True, slots=True)
class Update:
    """A change that has been fetched and verified and is ready to be applied, as absolute bits.

    base: the version it is for; None: whatever the weights hold (a cold start, or a repair). kind: "patch" if only patches were
    fetched, `patches` of them; "anchor" if a whole version was. nbytes: downloaded. reason: why an anchor was needed.
    """

    version: int
    base: int | None
    kind: Literal["patch", "anchor"]
    patches: int
    nbytes: int
    changed: int
    seconds: float
    state_digest: str
    step: int | None
    metadata: Mapping[str, Any]
    reason: str
    content: Patch = field(repr=False)
    sums: Mapping[str, Sum] = field(repr=False)
    index: TensorIndex = field(repr=False)
    ticket: int = field(repr=False)


class Subscriber:
    """Follows the versions in `store` and keeps `weights` at exactly one of them.

    `fetch` and `wait` download, decode and verify, and touch nothing that is served; they may run in another thread. `apply` writes,
    in place and only what changed, and reads back what it wrote. If it is interrupted, the weights are fenced: `version` is None until
    the same update has been applied again, or a fresh one (an anchor; `fetch` gets it) has.

    `held` says which version the weights already are, for one that was restarted: it is checked, and saves the anchor if it is true.
    The digest of all live weights is computed at the start and then every `verify_every` versions; where they are not what they
    should be, the next update repairs them from an anchor and says so in its `reason`. `verify` does it at once.
    """

    def __init__(self, store: ObjectStore, weights: Weights, *, held: int | None = None, verify_every: int = 50) -> None:
        self._store = store
        self._versions = Versions(store)
        self._weights = weights
        self._verify_every = verify_every
        self._hint = held
        self._binding: Binding = {}
        self._index: TensorIndex | None = None
        self._held: Manifest | None = None
        self._sums: Mapping[str, Sum] = {}
        self._reason = "first version here"
        self._torn: Update | None = None
        self._ticket = 0  # changes whenever the live weights do: an update made before is then refused
        self._unverified = 0
        self._lock = threading.Lock()

    @property
    def version(self) -> int | None:
        """The version that the live weights are, bit for bit; None before the first apply and while an apply is torn."""
        return self._held.version if self._held is not None and self._torn is None else None

    @property
    def state_digest(self) -> str | None:
        """The state digest of that version."""
        return self._held.state_digest if self._held is not None and self._torn is None else None

    def fetch(self, version: int | None = None) -> Update | None:
        """The update to the newest version, or to the one asked for; None when the weights hold it already, or nothing is published."""
        started = time.perf_counter()
        if self.version is not None and self._unverified >= self._verify_every:
            self._recheck()
        held = self.version
        target = self._versions.newest(held) if version is None else self._versions.manifest(version).version
        if target is None or target == held:
            return None
        manifest = self._versions.manifest(target)
        index = self._versions.index(manifest.tensors)
        binding = bind(index, self._weights.specs(), self._weights.aliases)
        if held is None and self._torn is None:
            self._recognise(manifest, index, binding)
        update = self._fetch_or_repair(manifest, index, binding)
        return replace(update, seconds=time.perf_counter() - started)

    def wait(self, timeout: float, *, poll: float = 0.2) -> Update | None:
        """`fetch`, asking again every `poll` seconds (sooner at first) until there is something newer; None after `timeout` seconds.

        A store that does not answer is asked again too; if it still does not at the end, `StoreUnavailable` is raised.
        """
        deadline = time.monotonic() + timeout
        pause = min(0.01, poll)
        while True:
            failure: StoreUnavailable | None = None
            try:
                if (update := self.fetch()) is not None:
                    return update
            except StoreUnavailable as error:
                failure = error
            left = deadline - time.monotonic()
            if left <= 0:
                if failure is not None:
                    raise failure
                return None
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, poll)

    def apply(self, update: Update) -> None:
        """Make the live weights the update's version. Call it while nothing computes with them.

        Raises `BaseMismatch` if the weights have changed since the fetch, `TornUpdate` if another update is half applied or the
        weights did not keep what was written.
        """
        with self._lock:
            if self._torn is not update and update.ticket != self._ticket:
                if self._torn is not None:
                    raise TornUpdate(f"the update to version {self._torn.version} is half applied: apply it again, or fetch a new one")
                raise BaseMismatch(f"this update was fetched for version {update.base}, the weights are now at {self.version}: fetch again")
            binding = bind(update.index, self._weights.specs(), self._weights.aliases)
            self._torn = update
            self._ticket += 1
            self._write(update, binding)
            self._read_back(update, binding)
            self._held = self._versions.manifest(update.version)
            self._sums, self._index, self._binding = update.sums, update.index, binding
            self._unverified = 0 if update.kind == "anchor" else self._unverified + update.patches
            self._reason = ""
            self._torn = None

    def verify(self) -> None:
        """Compute the digest of all live weights; `DigestMismatch`, naming the tensors, if they are not the version that is held.

        After a mismatch no version is held, and the next `fetch` repairs the weights from an anchor.
        """
        if self._torn is not None:
            raise TornUpdate(f"the update to version {self._torn.version} is half applied: apply it again, or fetch a new one")
        if self._held is None:
            raise BaseMismatch("these weights have not been any version yet: fetch and apply one first")
        expected = self._held
        if rotten := self._rotten():
            self._recheck()
            raise DigestMismatch(f"the live weights are not version {expected.version}: {', '.join(rotten[:5])} changed; fetch and apply to repair them")

    # --- what the weights hold ---

    def _rotten(self) -> list[str]:
        """Live tensors whose bits are not those of the version held."""
        places = [(name, place) for name, group in self._binding.items() for place in group]
        return [place for name, place in places if flat_sum(self._weights.read(place).flat) != self._sums[name]]

    def _recheck(self) -> bool:
        """Compare all live weights with what they should be; on a difference forget the version, so that an anchor repairs them."""
        self._unverified = 0
        if not (rotten := self._rotten()):
            return False
        self._reason = f"{len(rotten)} live tensors were not as version {self.version} left them ({rotten[0]} …)"
        self._held = None
        self._ticket += 1
        return True

    def _recognise(self, target: Manifest, index: TensorIndex, binding: Binding) -> None:
        """At the start, weights that already are the wanted version, or the one they are said to be, need no anchor."""
        sums = {name: flat_sum(self._weights.read(places[0]).flat) for name, places in binding.items()}
        if any(flat_sum(self._weights.read(place).flat) != sums[name] for name, places in binding.items() for place in places[1:]):
            return
        found = state_digest(index.specs, sums)
        hinted = self._versions.find(self._hint) if self._hint is not None else None
        for manifest in (target, hinted):
            if manifest is not None and manifest.state_digest == found:
                self._held, self._sums, self._index, self._binding = manifest, sums, index, binding
                return

    # --- fetching ---

    def _fetch_or_repair(self, manifest: Manifest, index: TensorIndex, binding: Binding) -> Update:
        """A patch that does not give what it should is not to blame if the live weights had changed: then an anchor repairs them."""
        try:
            return self._fetch(manifest, index, binding)
        except DigestMismatch:
            if self.version is None or not self._recheck():
                raise
            return self._fetch(manifest, index, binding)

    def _fetch(self, manifest: Manifest, index: TensorIndex, binding: Binding) -> Update:
        held = self.version
        way = Plan(None, ()) if held == manifest.version else self._versions.plan(manifest.version, held)
        if way.start is not None or held is None:
            return self._fetch_whole(manifest, index, binding, way)
        specs = dict(index.specs)
        loaded = [self._versions.patch(step, specs) for step in way.patches]
        content = self._resolved(loaded, binding)
        sums = self._summed(content, binding)
        check(f"version {manifest.version}: the state it would give", manifest.state_digest, state_digest(index.specs, sums))
        return self._update(manifest, index, content, sums, way)

    def _fetch_whole(self, manifest: Manifest, index: TensorIndex, binding: Binding, way: Plan) -> Update:
        """The whole version from an anchor, reduced to where the live weights differ from it."""
        tensors = self._versions.restore_by(way)
        changes: list[TensorPatch] = []
        whole: dict[str, TensorBits] = {}
        for name, bits in tensors.items():
            found = _difference(name, [self._weights.read(place) for place in binding[name]], bits)
            if isinstance(found, TensorPatch):
                changes.append(found)
            elif found is not None:
                whole[name] = found
        sums = {name: flat_sum(bits.flat) for name, bits in tensors.items()}
        content = Patch(tuple(changes), whole, result=manifest.state_digest)
        return self._update(manifest, index, content, sums, way)

    def _update(self, manifest: Manifest, index: TensorIndex, content: Patch, sums: Mapping[str, Sum], way: Plan) -> Update:
        kind: Literal["patch", "anchor"] = "patch" if way.start is None else "anchor"
        return Update(
            version=manifest.version,
            base=self.version,
            kind=kind,
            patches=len(way.patches),
            nbytes=way.nbytes,
            changed=content.changed,
            seconds=0.0,
            state_digest=manifest.state_digest,
            step=manifest.step,
            metadata=manifest.metadata,
            reason=self._reason if kind == "anchor" else "",
            content=content,
            sums=sums,
            index=index,
            ticket=self._ticket,
        )

    def _resolved(self, loaded: Sequence[Patch], binding: Binding) -> Patch:
        """Patches in order as one absolute patch to the live weights, reading those only where something is written."""
        total = Patch()
        for group in _runs(loaded):
            folded = _fold(group)
            if folded.values == "steps":
                folded = replace(folded, changes=tuple(self._with_bits(change, total, binding) for change in folded.changes), values="bits")
            total = compose(replace(total, base=None, result=None), replace(folded, base=None, result=None))
        return total

    def _with_bits(self, change: TensorPatch, earlier: Patch, binding: Binding) -> TensorPatch:
        """One change's steps as bits: over what `earlier` will have written, or else over the live bits."""
        name, positions = change.part.name, change.located
        if name in earlier.whole:
            before = earlier.whole[name].flat[positions]
        else:
            before = self._weights.gather(binding[name][0], positions)
            for other in (other for other in earlier.changes if other.part.name == name):
                at = other.located
                where = np.minimum(np.searchsorted(at, positions), max(at.size - 1, 0))
                hit = at[where] == positions if at.size else np.zeros(positions.size, bool)
                before[hit] = other.values[where[hit]]
        return replace(change, values=advance(before, change.values, dtype_of(change.part.spec.dtype)))

    def _summed(self, content: Patch, binding: Binding) -> dict[str, Sum]:
        """The digest's sums after `content`, from those before it: O(changed)."""
        sums = dict(self._sums)
        for change in content.changes:
            name, positions = change.part.name, change.located
            before = self._weights.gather(binding[name][0], positions)
            sums[name] += sum_at(positions, change.values) - sum_at(positions, before)
        return sums | {name: flat_sum(bits.flat) for name, bits in content.whole.items()}

    # --- applying ---

    def _write(self, update: Update, binding: Binding) -> None:
        for change in update.content.changes:
            for place in binding[change.part.name]:
                self._weights.scatter(place, change.located, change.values)
        for name, bits in update.content.whole.items():
            for place in binding[name]:
                self._weights.assign(place, bits)

    def _read_back(self, update: Update, binding: Binding) -> None:
        """What was written must be there now."""
        for change in update.content.changes:
            for place in binding[change.part.name]:
                if not np.array_equal(self._weights.gather(place, change.located), change.values):
                    raise TornUpdate(f"{place}: the weights do not hold what was written to them; does something else write there?")
        for name, bits in update.content.whole.items():
            for place in binding[name]:
                if self._weights.read(place) != bits:
                    raise TornUpdate(f"{place}: the weights do not hold what was written to them; does something else write there?")


def _difference(name: str, live: Sequence[TensorBits], bits: TensorBits) -> TensorPatch | TensorBits | None:
    """What to write so that every live copy becomes `bits`: as a patch where one describes all copies, else whole."""
    found = patches.diff_tensor(name, live[0], bits)
    if all(changed_positions(live[0].flat, other.flat).size == 0 for other in live[1:]):
        return found
    return bits


def _runs(loaded: Sequence[Patch]) -> list[list[Patch]]:
    """The patches in runs of one kind of values, since only those compose without the weights."""
    runs: list[list[Patch]] = []
    for patch in loaded:
        if runs and runs[-1][-1].values == patch.values:
            runs[-1].append(patch)
        else:
            runs.append([patch])
    return runs


def _fold(group: Sequence[Patch]) -> Patch:
    """One patch for several in a row, pair by pair, so that n patches cost log n passes."""
    while len(group) > 1:
        pairs = [compose(group[i], group[i + 1]) for i in range(0, len(group) - 1, 2)]
        group = pairs + list(group[len(pairs) * 2 :])
    return group[0]


