"""Which published tensor goes where: ties on either side, and everything that does not fit, by name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse import MemoryWeights, Publisher, Subscriber
from pulse.binding import bind
from pulse.bits import Spec
from pulse.digest import ZERO
from pulse.errors import WeightsMismatch
from pulse.manifest import TensorIndex
from pulse.store import MemoryStore
from tests.chains import advance, copied

EMBED, HEAD, NORM = "model.embed.weight", "lm_head.weight", "model.norm.weight"
SPEC = Spec("BF16", (4, 2))


def index(names: list[str], aliases: Mapping[str, str] | None = None, spec: Spec = SPEC) -> TensorIndex:
    return TensorIndex(dict.fromkeys(names, spec), dict.fromkeys(names, ZERO), dict(aliases or {}))


def test_equal_sets_are_bound_name_to_name() -> None:
    assert bind(index(["a", "b"]), {"b": SPEC, "a": SPEC}, {}) == {"a": ("a",), "b": ("b",)}


TIED, UNTIED, NO_HEAD = "tied", "untied", "without a head"
PUBLISHERS = {TIED: ([EMBED], {HEAD: EMBED}), UNTIED: ([EMBED, HEAD], {}), NO_HEAD: ([EMBED], {})}
RECEIVERS = {
    TIED: ([EMBED], {HEAD: EMBED}),
    "tied by the head's name": ([HEAD], {EMBED: HEAD}),
    UNTIED: ([EMBED, HEAD], {}),
    NO_HEAD: ([EMBED], {}),
}
EXPECTED: dict[tuple[str, str], object] = {
    (TIED, TIED): {EMBED: (EMBED,)},
    (TIED, "tied by the head's name"): {EMBED: (HEAD,)},
    (TIED, UNTIED): {EMBED: (EMBED, HEAD)},
    (TIED, NO_HEAD): {EMBED: (EMBED,)},
    (UNTIED, TIED): "published apart, but tied to model.embed.weight here: untie them, or tie them there",
    (UNTIED, "tied by the head's name"): "published apart, but tied to lm_head.weight here",
    (UNTIED, UNTIED): {EMBED: (EMBED,), HEAD: (HEAD,)},
    (UNTIED, NO_HEAD): "published, but missing here: lm_head.weight",
    (NO_HEAD, TIED): {EMBED: (EMBED,)},
    (NO_HEAD, "tied by the head's name"): {EMBED: (HEAD,)},
    (NO_HEAD, UNTIED): "here, but not published: lm_head.weight",
    (NO_HEAD, NO_HEAD): {EMBED: (EMBED,)},
}


@pytest.mark.parametrize(("publisher", "receiver"), EXPECTED)
def test_every_combination_of_ties_is_bound_or_refused_by_name(publisher: str, receiver: str) -> None:
    names, aliases = RECEIVERS[receiver]
    expected = EXPECTED[publisher, receiver]
    if isinstance(expected, dict):
        assert bind(index(*PUBLISHERS[publisher]), dict.fromkeys(names, SPEC), aliases) == expected
    else:
        with pytest.raises(WeightsMismatch, match=str(expected)):
            bind(index(*PUBLISHERS[publisher]), dict.fromkeys(names, SPEC), aliases)


@pytest.mark.parametrize(("publisher", "receiver"), [pair for pair, expected in EXPECTED.items() if isinstance(expected, dict)])
def test_the_head_follows_the_embedding_through_anchors_and_patches(publisher: str, receiver: str) -> None:
    rng = np.random.default_rng(0)

    def weights(names: list[str], aliases: dict[str, str]) -> MemoryWeights:
        return MemoryWeights({name: rng.standard_normal((4, 2)).astype(np.float32) for name in [*names, NORM]}, aliases=aliases)

    source = weights(*PUBLISHERS[publisher])
    target = weights(*RECEIVERS[receiver])
    store = MemoryStore()
    trainer, subscriber = Publisher(store, source), Subscriber(store, target)
    for step in range(4):
        trainer.publish()
        advance(subscriber)
        assert subscriber.state_digest == trainer.publish().state_digest
        for name, bits in copied(target).items():
            published = {**source.tensors, **{alias: source.tensors[canonical] for alias, canonical in source.aliases.items()}}
            assert bits == published.get(name, published[EMBED])
        for bits in source.tensors.values():
            bits.flat[step % bits.flat.size] ^= 1 << step
    target.tensors[RECEIVERS[receiver][0][-1]].flat[0] ^= 1  # a copy that is off is found, whichever it is
    advance(subscriber)
    with pytest.raises(Exception, match=RECEIVERS[receiver][0][-1]):
        subscriber.verify()


def test_one_of_two_copies_that_is_off_at_the_start_is_not_taken_for_the_version() -> None:
    store = MemoryStore()
    source = MemoryWeights({EMBED: np.arange(8, dtype=np.float32)}, aliases={HEAD: EMBED})
    Publisher(store, source).publish()
    target = MemoryWeights({EMBED: np.arange(8, dtype=np.float32), HEAD: np.ones(8, np.float32)})
    subscriber = Subscriber(store, target)
    update = subscriber.fetch()
    assert update is not None
    assert update.kind == "anchor"
    subscriber.apply(update)
    assert target.tensors[EMBED] == target.tensors[HEAD] == source.tensors[EMBED]


def test_a_tie_that_is_made_or_broken_between_versions_comes_as_an_anchor() -> None:
    store = MemoryStore()
    source = MemoryWeights({EMBED: np.arange(8, dtype=np.float32)})
    publisher = Publisher(store, source)
    publisher.publish()
    source.aliases = {HEAD: EMBED}
    receipt = publisher.publish()
    assert (receipt.kind, receipt.reason) == ("anchor", "names, shapes, dtypes or ties changed")
    target = MemoryWeights({EMBED: np.ones(8, np.float32), HEAD: np.ones(8, np.float32)})
    advance(Subscriber(store, target))
    assert target.tensors[HEAD] == source.tensors[EMBED]
    source.aliases = {}
    assert publisher.publish().kind == "patch"  # who knows two names for one tensor loses nothing


def test_a_checkpoint_without_the_other_names_continues_a_tied_run_with_patches() -> None:
    store = MemoryStore()
    Publisher(store, MemoryWeights({EMBED: np.arange(8, dtype=np.float32)}, aliases={HEAD: EMBED})).publish()
    again = Publisher(store, MemoryWeights({EMBED: np.arange(8, dtype=np.float32)}))
    assert again.publish().kind == "patch"
    untied = MemoryWeights({EMBED: np.ones(8, np.float32), HEAD: np.ones(8, np.float32)})
    advance(Subscriber(store, untied))
    assert untied.tensors[EMBED] == untied.tensors[HEAD]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Spec("F32", (4, 2)), r"a: published as BF16\[4, 2\], here it is F32\[4, 2\]; publish with a view"),
        (Spec("BF16", (2, 4)), r"a: published as BF16\[4, 2\], here it is BF16\[2, 4\]; the two sides have different models"),
    ],
)
def test_another_dtype_or_shape_is_refused_with_advice(spec: Spec, text: str) -> None:
    with pytest.raises(WeightsMismatch, match=text):
        bind(index(["a"]), {"a": spec}, {})


def test_many_missing_names_are_counted() -> None:
    with pytest.raises(WeightsMismatch, match="missing here: t0, t1, t2, t3, t4 and 5 more"):
        bind(index([f"t{i}" for i in range(10)]), {}, {})


@given(st.lists(st.sampled_from("abcde"), unique=True, min_size=1), st.dictionaries(st.sampled_from("vwxyz"), st.integers(0, 4)), st.data())
def test_a_binding_writes_every_local_tensor_once_and_from_its_own_name(
    names: list[str], ties: dict[str, int], data: st.DataObject
) -> None:
    aliases = {alias: names[at % len(names)] for alias, at in ties.items()}
    groups: dict[str, list[str]] = {name: [name] for name in names}
    for alias, canonical in aliases.items():
        groups[canonical].append(alias)
    specs, local = {}, {}
    for group in groups.values():  # the receiver ties some of each group, under whichever name comes first there
        order = data.draw(st.permutations(group))
        places = data.draw(st.lists(st.integers(0, 1), min_size=len(order), max_size=len(order)))
        for kind in (0, 1):
            tied = [name for name, place in zip(order, places, strict=True) if place == kind]
            specs |= dict.fromkeys(tied[:1], SPEC)
            local |= dict.fromkeys(tied[1:], tied[0] if tied else "")
    binding = bind(index(names, aliases), specs, local)
    written = [place for places in binding.values() for place in places]
    assert sorted(written) == sorted(specs)
    assert all(place in groups[name] for name, places in binding.items() for place in places)
