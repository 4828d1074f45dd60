"""`encoding="auto"`: the encoding that arrives first, by what the publisher has seen; and the receipt says why."""

import numpy as np
import pytest

from pulse import MemoryWeights, Publisher, Subscriber
from pulse.pace import Pace
from pulse.store import MemoryStore

UNITS, CHANGES = 100_000_000, 1_000_000


def test_a_slow_link_gets_the_smallest_patch_and_a_fast_one_the_quickest() -> None:
    assert Pace(link=1e7).choose(UNITS, CHANGES).encoding == "contextual"
    assert Pace(link=1e12).choose(UNITS, CHANGES).encoding == "portable"


def test_the_link_is_the_best_of_the_recent_uploads() -> None:
    pace = Pace()
    assert pace.link is None
    pace.sent(100, 1e-9)  # far too small to tell
    assert pace.link is None
    pace.sent(1_000_000, 1.0)
    pace.sent(1_000_000, 0.1)
    pace.sent(70_000, 1.0)
    assert pace.link == pytest.approx(8e7)
    for _ in range(16):
        pace.sent(1_000_000, 2.0)
    assert pace.link == pytest.approx(4e6)


def test_a_slow_machine_prefers_the_encoding_that_costs_less_work() -> None:
    quick, slow = Pace(link=3e9), Pace(link=3e9)
    link = next(rate for rate in np.geomspace(1e7, 1e12, 500) if Pace(rate).choose(UNITS, CHANGES).encoding == "portable")
    quick, slow = Pace(link / 1.1), Pace(link / 1.1)
    slow.encoded("portable", int(1.48 * CHANGES), UNITS, CHANGES, 60.0)
    assert quick.choose(UNITS, CHANGES).encoding == "contextual"
    assert slow.choose(UNITS, CHANGES).encoding == "portable"


def test_sizes_that_were_seen_count_more_than_those_expected() -> None:
    link = next(rate for rate in np.geomspace(1e7, 1e12, 500) if Pace(rate).choose(UNITS, CHANGES).encoding == "portable")
    pace = Pace(link * 1.1)
    expected = Pace(link * 1.1).choose(UNITS, CHANGES)
    assert expected.encoding == "portable"
    pace._sizes["contextual"] = 0.3
    assert pace.choose(UNITS, CHANGES).encoding == "contextual"


def test_nothing_to_send_needs_no_thought() -> None:
    assert Pace(link=1e3).choose(UNITS, 0).encoding == "portable"


def trained(encoding: str, link: float | None) -> tuple[Publisher, MemoryWeights, MemoryStore]:
    rng = np.random.default_rng(0)
    weights = MemoryWeights({"w": rng.normal(size=300_000).astype(np.float32)})
    store = MemoryStore()
    publisher = Publisher(store, weights, encoding=encoding, link=link)  # type: ignore[arg-type]
    publisher.publish()
    weights.tensors["w"].flat[::101] += 1
    return publisher, weights, store


@pytest.mark.parametrize(("link", "expected"), [(1e5, "contextual"), (1e13, "portable")])
def test_the_receipt_says_which_encoding_was_chosen_and_why(link: float, expected: str) -> None:
    publisher, weights, store = trained("auto", link)
    receipt = publisher.publish()
    assert receipt.encoding == expected
    assert receipt.encoding_reason.startswith(f"{expected} ")
    assert "against" in receipt.encoding_reason
    follower = MemoryWeights({"w": np.zeros(300_000, np.float32)})
    subscriber = Subscriber(store, follower)
    update = subscriber.fetch()
    assert update is not None
    subscriber.apply(update)
    assert follower.tensors == weights.tensors


def test_an_encoding_that_was_asked_for_needs_no_reason() -> None:
    publisher, _, _ = trained("absolute", None)
    receipt = publisher.publish()
    assert (receipt.encoding, receipt.encoding_reason) == ("absolute", "")
    assert receipt.kind == "patch"


@pytest.mark.parametrize("link", [0, -1.0, float("nan")])
def test_a_link_that_carries_nothing_is_refused(link: float) -> None:
    with pytest.raises(ValueError, match="bits per second"):
        Publisher(MemoryStore(), MemoryWeights({}), link=link)


@pytest.mark.parametrize("link", ["1Gbit", True, float("inf")])
def test_a_link_that_is_no_number_of_bits_is_refused(link: object) -> None:
    with pytest.raises(ValueError, match="bits per second"):
        Publisher(MemoryStore(), MemoryWeights({}), link=link)  # type: ignore[arg-type]
