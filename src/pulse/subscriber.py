"""The worker's side: `fetch` while serving, `apply` in the pause, and never serve weights that are not exactly one version."""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from pulse import patch as patches
from pulse.binding import Binding, bind
from pulse.bits import Spec, TensorBits
from pulse.chain import Plan
from pulse.digest import Sum, check, flat_sum, state_digest, sum_at
from pulse.errors import BaseMismatch, DigestMismatch, StoreUnavailable, TornUpdate
from pulse.folding import fold_in_turn
from pulse.manifest import Manifest, TensorIndex
from pulse.patch import Patch, TensorPatch, changed_positions
from pulse.store import ObjectStore, open_store
from pulse.versions import Versions
from pulse.weights import Weights, must_be_weights


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
    made_for: _State = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """What the live weights are known to be. reason: why an anchor is needed where no version is held.

    Every write to the weights begins and ends with a new one: what was read or made while another one stood is known by that.
    """

    held: Manifest | None = None
    index: TensorIndex = field(default_factory=lambda: TensorIndex({}, {}, {}))
    binding: Binding = field(default_factory=dict)
    sums: Mapping[str, Sum] = field(default_factory=dict)
    reason: str = ""

    @property
    def version(self) -> int | None:
        """The version held, if any."""
        return None if self.held is None else self.held.version


_NOWHERE = np.empty(0, np.uint64)


class Subscriber:
    """Follows the versions in `store` and keeps `weights` at exactly one of them.

    `fetch` and `wait` download, decode and verify, and touch nothing that is served; they may run in another thread. `apply` writes,
    in place and only what changed, and reads back what it wrote. If it is interrupted, the weights are fenced: `version` is None until
    the same update has been applied again, or a fresh one (an anchor; `fetch` gets it) has.

    `held` says which version the weights already are, for one that was restarted: it is checked, and saves the anchor if it is true.
    The digest of all live weights is computed at the start and then every `verify_every` versions; where they are not what they
    should be, the next update repairs them from an anchor and says so in its `reason`. `verify` does it at once.
    """

    def __init__(
        self, store: ObjectStore | str | os.PathLike[str], weights: Weights, *, held: int | None = None, verify_every: int = 50
    ) -> None:
        must_be_weights(weights)
        if held is not None and held < 0:
            raise ValueError(f"versions count from 0; held={held} is none")
        self._versions = Versions(open_store(store))
        self._weights = weights
        self._verify_every = verify_every
        self._hint = held
        self._state = _State(reason="first version here")
        self._torn: Update | None = None
        self._unverified = 0
        self._lock = threading.Lock()  # held while the live weights are written

    @property
    def version(self) -> int | None:
        """The version that the live weights are, bit for bit; None before the first apply and while an apply is torn."""
        return self._state.version

    @property
    def state_digest(self) -> str | None:
        """The state digest of that version."""
        held = self._state.held
        return None if held is None else held.state_digest

    def fetch(self, version: int | None = None) -> Update | None:
        """The update to the newest version, or to the one asked for; None when the weights hold it already, or nothing is published.

        At the start, weights that turn out to be that version already get an empty update, which costs no download. If an
        apply comes in between, what was fetched is for weights that are no more, and it is fetched again.
        """
        if version is not None and (version := operator.index(version)) < 0:
            raise ValueError(f"versions count from 0; there is no version {version}")
        started = time.perf_counter()
        while True:
            with self._lock:  # an apply under way comes first
                state = self._state
            try:
                if state.held is not None and self._unverified >= self._verify_every and self._forget_if_rotten(state):
                    continue
                update = self._fetch(state, version)
            except (DigestMismatch, BaseMismatch):  # no fault of what was fetched, if the live weights are not what they should be
                if self._state is state and not self._forget_if_rotten(state):
                    raise
                continue
            if self._state is (state if update is None else update.made_for):
                return None if update is None else replace(update, seconds=time.perf_counter() - started)

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
        if not isinstance(update, Update):
            raise TypeError(f"an Update is wanted, not {type(update).__name__}: fetch() gives None when there is nothing newer")
        with self._lock:
            if self._torn is not update and update.made_for is not self._state:
                if self._torn is not None:
                    raise TornUpdate(f"the update to version {self._torn.version} is half applied: apply it again, or fetch a new one")
                raise BaseMismatch(
                    f"this update was not fetched for these weights as they are now (version {self.version}): "
                    "they have been written since, or another subscriber fetched it. Fetch again"
                )
            binding = bind(update.index, self._weights.specs(), self._weights.aliases)
            held = self._versions.manifest(update.version)
            self._torn = update
            self._state = _State(reason=f"the update to version {update.version} was interrupted")
            self._write(update, binding)
            self._read_back(update, binding)
            self._state = _State(held, update.index, binding, update.sums)
            self._unverified = 0 if update.kind == "anchor" else self._unverified + update.patches
            self._torn = None

    def verify(self) -> None:
        """Compute the digest of all live weights; `DigestMismatch`, naming the tensors, if they are not the version that is held.

        After a mismatch no version is held, and the next `fetch` repairs the weights from an anchor. An `apply` waits for it.
        """
        with self._lock:
            if self._torn is not None:
                raise TornUpdate(f"the update to version {self._torn.version} is half applied: apply it again, or fetch a new one")
            if self._state.held is None:
                raise BaseMismatch("these weights have not been any version yet: fetch and apply one first")
            version, rotten = self.version, self._rotten(self._state)
            self._judge(rotten)
        if rotten:
            changed = ", ".join(rotten[:5])
            raise DigestMismatch(f"the live weights are not version {version}: {changed} changed; fetch and apply to repair them")

    # --- what the weights hold ---

    def _rotten(self, state: _State) -> list[str]:
        """Live tensors whose bits are not those of the version held."""
        specs = self._weights.specs()
        places = [(name, place) for name, group in state.binding.items() for place in group]
        return [place for name, place in places if not self._is(place, specs.get(place), state.index.specs[name], state.sums[name])]

    def _is(self, place: str, spec: Spec | None, expected: Spec, total: Sum) -> bool:
        return spec == expected and flat_sum(self._weights.read(place).flat) == total

    def _forget_if_rotten(self, state: _State) -> bool:
        """Compare all live weights with what they should be. True if they differ, or were written meanwhile: look again, then."""
        rotten = self._rotten(state)
        with self._lock:
            if self._state is state:
                self._judge(rotten)
            return self._state is not state

    def _judge(self, rotten: Sequence[str]) -> None:
        """After a look at all weights: on a difference forget the version, so that an anchor repairs them."""
        self._unverified = 0
        if rotten:
            self._state = _State(reason=f"{len(rotten)} live tensors were not as version {self.version} left them ({rotten[0]} …)")

    def _recognised(self, state: _State, target: Manifest, index: TensorIndex, binding: Binding) -> _State:
        """At the start, weights that already are the wanted version, or the one they are said to be, need no anchor."""
        sums = {name: flat_sum(self._weights.read(places[0]).flat) for name, places in binding.items()}
        if any(flat_sum(self._weights.read(place).flat) != sums[name] for name, places in binding.items() for place in places[1:]):
            return state
        found = state_digest(index.specs, sums)
        hinted = self._versions.find(self._hint) if self._hint is not None else None
        for manifest in (target, hinted):
            if manifest is not None and manifest.state_digest == found:
                with self._lock:
                    if self._state is state:
                        self._state = _State(manifest, index, binding, sums)
                    return self._state
        if hinted is None:
            return state
        return self._disowned(state, f"these weights are not version {self._hint}, as was said")

    def _disowned(self, state: _State, reason: str) -> _State:
        """The same state with another reason why an anchor is needed."""
        with self._lock:
            if self._state is state:
                self._state = replace(state, reason=reason)
            return self._state

    # --- fetching ---

    def _fetch(self, state: _State, version: int | None) -> Update | None:
        """The update that leads from `state` to a version."""
        target = self._versions.newest(state.version) if version is None else version
        if target is None or target == state.version:
            return None
        manifest = self._versions.manifest(target)
        index = self._versions.index(manifest.tensors)
        binding = bind(index, self._weights.specs(), self._weights.aliases)
        for place in (place for group in binding.values() for place in group):
            self._weights.gather(place, _NOWHERE)  # weights that can be read but not written say so before anything is downloaded
        if state.held is None and self._torn is None:
            state = self._recognised(state, manifest, index, binding)
        way = Plan(None, ()) if state.version == target else self._versions.plan(target, state.version)
        if way.start is not None:
            return self._fetch_whole(state, manifest, index, binding)
        content = fold_in_turn(
            way.patches,
            lambda step, base: self._versions.patch(step, index.specs, base),
            index.specs,
            lambda name: self._weights.read(binding[name][0]),
            lambda name, positions: self._weights.gather(binding[name][0], positions),
        )
        sums = self._summed(state, content, binding)
        check(f"version {target}: the state it would give", manifest.state_digest, state_digest(index.specs, sums))
        return self._update(state, manifest, index, content, sums, way)

    def _fetch_whole(self, state: _State, manifest: Manifest, index: TensorIndex, binding: Binding) -> Update:
        """The whole version from an anchor, reduced to where the live weights differ from it."""
        tensors, way = self._versions.restore_and_plan(manifest.version)
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
        return self._update(state, manifest, index, content, sums, way)

    def _update(self, state: _State, manifest: Manifest, index: TensorIndex, content: Patch, sums: Mapping[str, Sum], way: Plan) -> Update:
        anchored = way.start is not None
        return Update(
            version=manifest.version,
            base=state.version,
            kind="anchor" if anchored else "patch",
            patches=len(way.patches),
            nbytes=way.nbytes,
            changed=content.changed,
            seconds=0.0,
            state_digest=manifest.state_digest,
            step=manifest.step,
            metadata=manifest.metadata,
            reason=(state.reason or "no patches lead there, or an anchor is smaller") if anchored else "",
            content=content,
            sums=sums,
            index=index,
            made_for=state,
        )

    def _summed(self, state: _State, content: Patch, binding: Binding) -> dict[str, Sum]:
        """The digest's sums after `content`, from those before it: O(changed)."""
        sums = dict(state.sums)
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
