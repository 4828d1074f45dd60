"""Finding the newest version and planning the way to one, against brute force."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse import chain
from pulse.errors import NoPath
from pulse.manifest import Anchor, File, LateAnchor, Manifest, Payload, anchor_key
from pulse.store import MemoryStore
from pulse.testing.faults import FaultyStore
from pulse.versions import Versions
from tests.chains import published

HINTS = st.integers(0, 60) | st.integers(0, 2**63 - 1)


@given(st.integers(0, 50), HINTS)
def test_the_newest_version_is_found_from_any_hint(count: int, hint: int) -> None:
    asked = []

    def exists(version: int) -> bool:
        asked.append(version)
        return version < count

    assert chain.newest(exists, hint) == (count - 1 if count else None)
    assert len(asked) <= 2 * max(hint, count).bit_length() + 2


@given(st.integers(0, 50))
def test_a_right_hint_costs_two_looks(newest: int) -> None:
    asked = []
    chain.newest(lambda version: asked.append(version) or version <= newest, newest)  # type: ignore[func-returns-value]
    assert asked == [newest, newest + 1]


def payload(size: int) -> Payload:
    return Payload(size, f"{size:064x}")


def stored(size: int) -> Anchor:
    return Anchor((File("model.safetensors", payload(size)),), ())


def manifest(version: int, size: int, *, anchor: bool) -> Manifest:
    return Manifest(
        run="run", version=version, base=None if anchor else version - 1, epoch=0, nonce="", step=None, created=0, previous=None,
        state_digest=f"{version:032x}", patch=None if anchor else payload(size), anchor=stored(size) if anchor else None,
        tensors=payload(0), newest_anchor=0, view=None, changed=0, units=0, full_nbytes=0,
    )  # fmt: skip


chains = st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1, max_size=10).map(
    lambda sizes: [manifest(version, size, anchor=anchor) for version, (size, anchor) in enumerate(sizes)]
)


def ways(held: int | None, versions: Sequence[Manifest], late: dict[int, int]) -> list[tuple[int | None, int]]:
    """Every way to the end: where it starts (None: from what is held), and its bytes."""
    target = versions[-1].version
    starts = {found.version: found.anchor.nbytes for found in versions if found.anchor is not None} | late
    found = []
    for start, size in [*starts.items(), *([] if held is None else [(held, 0)])]:
        steps = [each for each in versions if start < each.version]
        reaches = len(steps) == target - start and all(step.patch is not None for step in steps)
        if reaches:
            found.append((start, size + sum(step.nbytes for step in steps)))
    return found


@given(chains, st.none() | st.integers(0, 12), st.dictionaries(st.integers(0, 9), st.integers(0, 100), max_size=3), st.data())
def test_a_plan_leads_to_the_last_version_and_none_that_was_promised_is_shorter(
    versions: list[Manifest], held: int | None, sizes: dict[int, int], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(versions) - 1))
    target = versions[-1].version
    shown = versions[first:]
    sizes = {version: size for version, size in sizes.items() if first <= version <= target and versions[version].patch is not None}
    late = [LateAnchor("run", version, versions[version].state_digest, stored(size), payload(0)) for version, size in sizes.items()]
    possible = ways(held, shown, sizes)
    if not possible:
        with pytest.raises(NoPath, match=f"version {target}"):
            chain.plan(held, shown, late)
        return
    way = chain.plan(held, shown, late)
    at = held if way.start is None else way.start.version
    assert at is not None
    for step in way.patches:
        assert step.patch is not None
        assert step.version == at + 1
        at = step.version
    assert at == target
    newest_start = max((version for version, _ in possible if version != held), default=None)
    assert way.nbytes <= min(size for version, size in possible if version in (held, newest_start))


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.none() | st.integers(0, 7), st.integers(0, 7))
def test_a_plan_from_a_store_is_as_cheap_as_one_that_looked_at_everything(due: list[bool], held: int | None, target: int) -> None:
    store = MemoryStore()
    trainer, publisher, _ = published(store, 1)
    for late in due:
        trainer.step(0.3)
        publisher._anchor_every = 1 if late else 10**9
        publisher.publish()
        if publisher._anchoring is not None:
            publisher._anchoring.result()
    publisher.close()
    target = min(target, len(due))
    held = None if held is None else min(held, len(due))
    if held == target:
        return
    reader = Versions(store)
    everything = [reader.manifest(version) for version in range(target + 1)]
    known = {*range(everything[-1].newest_anchor + 1), target}
    anchors = [found for version in sorted(known) if (found := reader.late_anchor(version))]
    assert Versions(store).plan(target, held).nbytes == chain.plan(held, everything, anchors).nbytes


def test_small_patches_are_planned_without_a_look_at_anchors() -> None:
    store = FaultyStore(MemoryStore())
    trainer, publisher, _ = published(store, 1, anchor_every=2)
    for _ in range(5):
        trainer.step(0.01)
        publisher.publish()
    publisher.close()
    reader = Versions(store)
    store.calls.clear()
    assert reader.plan(5, 4).start is None
    assert [call.key for call in store.calls] == ["manifests/000000000005.json"]


def test_a_late_anchor_that_is_lost_is_replaced_by_the_one_before() -> None:
    store = MemoryStore()
    trainer, publisher, history = published(store, 1, anchor_every=2)
    for _ in range(5):
        trainer.step()
        publisher.publish()
        history.append(trainer.bits())
        if publisher._anchoring is not None:
            publisher._anchoring.result()
    publisher.close()
    starts = []
    for lost in (None, 4, 2):
        if lost is not None:
            store.delete(anchor_key(lost))
        way = Versions(store).plan(5)
        assert way.start is not None
        starts.append(way.start.version)
        assert Versions(store).restore(5) == history[5]
    assert starts == [4, 2, 0]
