"""What every exchange promises, as tests.

Derive a class and say how ranks are made to meet; pytest runs the rest:

    class TestMyExchange(ExchangeContract):
        @pytest.fixture
        def meet(self):
            return lambda size, scenario, timeout=60.0: in_threads(my_exchanges(size, timeout), scenario)

An exchange whose ranks can come back as other processes also derives from `RegroupContract`.
"""

# ruff: noqa: D102  a test's name is its sentence

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from pulse.errors import ExchangeError, PulseError, RankMissing, Regrouped
from pulse.exchange import Exchange, Traffic

Scenario = Callable[[Exchange], Any]  # what one rank does; of this module, or else it cannot be sent to another process
SHORT = 1.0  # seconds to wait for a rank that does not come
LENGTHS = (0, 1, 3_000_001, 12_000_000)  # bytes: uneven, and beyond what a socket takes at a time
MOST_FRAMING = 1000  # bytes that an exchange may add to a message


class Meet(Protocol):
    """Runs a scenario on every rank of a new group at once; what each returned, or the `PulseError` that it raised, in rank order."""

    def __call__(self, size: int, scenario: Scenario, timeout: float = 60.0) -> list[Any]: ...


def in_threads(exchanges: Sequence[Exchange], scenario: Scenario) -> list[Any]:
    """`Meet`, for exchanges that live in one process."""
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(functools.partial(outcome, scenario=scenario), exchanges))


def outcome(exchange: Exchange, scenario: Scenario) -> Any:
    """What the scenario returns on this rank, or its `PulseError`; the exchange is closed."""
    try:
        return scenario(exchange)
    except PulseError as error:
        return error
    finally:
        exchange.close()


class ExchangeContract:
    """What meeting promises."""

    @pytest.fixture
    def meet(self) -> Meet:
        raise NotImplementedError

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_messages_come_in_rank_order_whatever_the_order_of_arrival(self, meet: Meet, size: int) -> None:
        assert meet(size, _gather_out_of_order) == [[b"%d" % rank for rank in range(size)]] * size

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_messages_may_be_uneven_empty_and_large(self, meet: Meet, size: int) -> None:
        assert meet(size, _gather_uneven) == [True] * size
        assert meet(size, _route_uneven) == [True] * size

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_each_rank_gets_its_own_part_of_every_other_and_of_itself(self, meet: Meet, size: int) -> None:
        assert meet(size, _scatter) == [{source: b"%d to %d" % (source, rank) for source in range(size)} for rank in range(size)]

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_ranks_may_send_to_some_and_hear_from_some(self, meet: Meet, size: int) -> None:
        ring = [{(rank - 1) % size: b"from %d" % ((rank - 1) % size)} for rank in range(size)]
        assert meet(size, _ring) == ring
        assert meet(size, _to_the_last) == [*[{}] * (size - 1), dict.fromkeys(range(size - 1), b"up")]

    def test_no_message_of_a_call_is_taken_for_one_of_another_call(self, meet: Meet) -> None:
        assert meet(3, _many_calls) == [True] * 3

    def test_a_message_is_copied_so_that_its_buffer_can_be_used_again(self, meet: Meet) -> None:
        assert meet(3, _reuse_buffer) == [[b"first 0", b"first 1", b"first 2"]] * 3

    def test_one_rank_alone_touches_no_wire(self, meet: Meet) -> None:
        assert meet(1, _alone) == [([b"mine"], {0: b"me"}, Traffic())]

    def test_traffic_is_what_goes_to_others_and_comes_from_them(self, meet: Meet) -> None:
        size, ours, parts = 3, 1000, 100
        for sent, received in meet(size, functools.partial(_traffic, ours, parts)):
            least = (size - 1) * (ours + parts)
            assert least <= received <= least + 3 * (size - 1) * MOST_FRAMING
            assert ours + (size - 1) * parts <= sent <= least + 3 * (size - 1) * MOST_FRAMING

    @pytest.mark.parametrize("kind", ["all_gather", "route"])
    def test_other_tags_are_named_on_every_rank_and_nothing_is_garbled(self, meet: Meet, kind: str) -> None:
        errors = meet(3, functools.partial(_odd_tag, kind))
        for rank, error in enumerate(errors):
            assert type(error) is ExchangeError, error
            assert "'7/theirs'" in str(error)
            assert "'7/ours'" in str(error)
            assert "rank 1" in str(error)
            assert f"rank {rank}" in str(error)

    def test_other_calls_of_the_same_tag_are_named_too(self, meet: Meet) -> None:
        for error in meet(2, _odd_kind):
            assert type(error) is ExchangeError, error
            assert "all_gather '7'" in str(error)
            assert "route '7'" in str(error)

    @pytest.mark.parametrize(("kind", "size", "absent"), [("all_gather", 2, (1,)), ("route", 3, (0,)), ("all_gather", 4, (1, 3))])
    def test_ranks_that_do_not_come_are_named_on_all_others(self, meet: Meet, kind: str, size: int, absent: tuple[int, ...]) -> None:
        outcomes = meet(size, functools.partial(_absent, kind, absent), SHORT)
        for rank, error in enumerate(outcomes):
            if rank not in absent:
                assert isinstance(error, RankMissing), error
                assert error.missing == absent
                assert ", ".join(map(str, absent)) in str(error)
                assert "'9/vote'" in str(error)
                assert seconds_waited(str(error)) >= SHORT

    def test_after_a_failure_it_refuses_further_calls_and_says_why(self, meet: Meet) -> None:
        for first, second in meet(2, _go_on_after_failure):
            assert "'7/theirs'" in first
            assert "'8'" in second
            assert "7/" in second
            assert "another exchange" in second

    def test_a_closed_exchange_refuses_calls_and_may_be_closed_again(self, meet: Meet) -> None:
        assert all("closed" in message for message in meet(2, _closed))

    def test_calls_that_make_no_sense_are_refused_before_anything_is_sent(self, meet: Meet) -> None:
        assert meet(2, _nonsense) == [[b"0", b"1"]] * 2


class RegroupContract:
    """What an exchange promises whose ranks can come back as other processes."""

    @pytest.fixture
    def group(self) -> Callable[[int], list[Exchange]]:
        """A function that makes the exchanges of a new group of some size."""
        raise NotImplementedError

    @pytest.fixture
    def restarted(self) -> Callable[[Exchange], Exchange]:
        """A function that makes the same rank's exchange as a new process would."""
        raise NotImplementedError

    @pytest.mark.parametrize("back", [(1,), (0, 2)])
    def test_ranks_that_come_back_end_the_attempt_and_all_meet_again(
        self, group: Callable[[int], list[Exchange]], restarted: Callable[[Exchange], Exchange], back: tuple[int, ...]
    ) -> None:
        exchanges = group(3)
        assert in_step(exchanges, lambda exchange: exchange.all_gather("1/propose", b"%d" % exchange.rank)) == [[b"0", b"1", b"2"]] * 3
        tries: list[list[str]] = [[], [], []]

        def act(exchange: Exchange) -> list[bytes]:
            if exchange.rank in back:
                exchange = restarted(exchange)
            while True:
                try:
                    exchange.all_gather("2/propose", b"old")
                    return exchange.all_gather("2/vote", b"new %d" % exchange.rank)
                except Regrouped as error:
                    tries[exchange.rank].append(str(error))

        assert in_step(exchanges, act) == [[b"new 0", b"new 1", b"new 2"]] * 3
        for rank in {0, 1, 2} - set(back):
            assert tries[rank]
            assert all("begin the round again" in text for text in tries[rank])

    def test_a_vote_is_taken_by_all_ranks_or_by_none_whenever_one_comes_back(
        self, group: Callable[[int], list[Exchange]], restarted: Callable[[Exchange], Exchange]
    ) -> None:
        seen = set()
        for attempt in range(60):
            taken = [False] * 3

            def act(exchange: Exchange, attempt: int = attempt, taken: list[bool] = taken) -> None:
                if exchange.rank == 2:  # it comes back before, while or after the others vote, having voted or not
                    exchange.all_gather("1/propose", b"")
                    if attempt % 3:
                        time.sleep(0.0001 * (attempt % 7))
                        exchange.all_gather("1/vote", b"yes")
                        taken[2] = True
                    restarted(exchange)
                    return
                exchange.all_gather("1/propose", b"")
                try:
                    exchange.all_gather("1/vote", b"yes")
                except Regrouped:
                    return
                taken[exchange.rank] = True

            in_step(group(3), act)
            assert taken[0] == taken[1], attempt
            assert taken[0] >= taken[2], attempt
            seen.add(taken[0])
        assert seen == {True, False}

    def test_the_old_process_of_a_rank_that_came_back_is_stopped(
        self, group: Callable[[int], list[Exchange]], restarted: Callable[[Exchange], Exchange]
    ) -> None:
        exchanges = group(2)
        in_step(exchanges, lambda exchange: exchange.all_gather("1", b""))
        new = restarted(exchanges[1])
        with pytest.raises(ExchangeError, match="rank 1") as caught:
            exchanges[1].all_gather("2", b"old")
        assert type(caught.value) is ExchangeError

        def again(exchange: Exchange) -> list[bytes]:
            try:
                return exchange.all_gather("2", b"%d" % exchange.rank)
            except Regrouped:
                return exchange.all_gather("2", b"%d" % exchange.rank)

        assert in_step([exchanges[0], new], again) == [[b"0", b"1"]] * 2


def in_step(exchanges: Sequence[Exchange], act: Scenario) -> list[Any]:
    """What `act` returns for each exchange, in threads of their own. Errors are raised here, and nothing is closed."""
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(act, exchanges))


def seconds_waited(text: str) -> float:
    """The time that an error says it waited."""
    return float(text.partition(" waited ")[2].partition(" s")[0])


def _payload(source: int, length: int) -> bytes:
    return (b"%d," % source * (length // 2 + 1))[:length]


def _gather_out_of_order(exchange: Exchange) -> list[bytes]:
    time.sleep(0.05 * (exchange.size - exchange.rank))
    return exchange.all_gather("1", b"%d" % exchange.rank)


def _gather_uneven(exchange: Exchange) -> bool:
    for shift in range(len(LENGTHS)):
        length = [LENGTHS[(rank + shift) % len(LENGTHS)] for rank in range(exchange.size)]
        found = exchange.all_gather(f"{shift}/uneven", memoryview(_payload(exchange.rank, length[exchange.rank])))
        if found != [_payload(rank, length[rank]) for rank in range(exchange.size)]:
            return False
    return all(type(data) is bytes for data in found)


def _route_uneven(exchange: Exchange) -> bool:
    length = {(a, b): LENGTHS[(a + 3 * b) % len(LENGTHS)] for a in range(exchange.size) for b in range(exchange.size)}
    outgoing = {rank: _payload(exchange.rank, length[exchange.rank, rank]) for rank in range(exchange.size)}
    found = exchange.route("1/uneven", outgoing, range(exchange.size))
    return found == {rank: _payload(rank, length[rank, exchange.rank]) for rank in range(exchange.size)}


def _scatter(exchange: Exchange) -> dict[int, bytes]:
    everyone = range(exchange.size)
    return exchange.route("1/scatter", {rank: b"%d to %d" % (exchange.rank, rank) for rank in everyone}, everyone)


def _ring(exchange: Exchange) -> dict[int, bytes]:
    before, after = (exchange.rank - 1) % exchange.size, (exchange.rank + 1) % exchange.size
    return exchange.route("1/ring", {after: b"from %d" % exchange.rank}, [before])


def _to_the_last(exchange: Exchange) -> dict[int, bytes]:
    last = exchange.size - 1
    return exchange.route("1/up", {} if exchange.rank == last else {last: b"up"}, range(last) if exchange.rank == last else [])


def _many_calls(exchange: Exchange) -> bool:
    everyone = range(exchange.size)
    for number in range(40):
        if exchange.all_gather("same", b"%d %d" % (number, exchange.rank)) != [b"%d %d" % (number, rank) for rank in everyone]:
            return False
        mine = b"%d %d" % (number, exchange.rank)
        found = exchange.route("same", dict.fromkeys(everyone, mine), everyone)
        if found != {rank: b"%d %d" % (number, rank) for rank in everyone}:
            return False
    return True


def _reuse_buffer(exchange: Exchange) -> list[bytes]:
    buffer = bytearray(b"first %d" % exchange.rank)
    time.sleep(0.05 * exchange.rank)
    found = exchange.all_gather("1", memoryview(buffer))
    buffer[:] = b"later !"
    exchange.all_gather("2", memoryview(buffer))
    return found


def _alone(exchange: Exchange) -> tuple[list[bytes], dict[int, bytes], Traffic]:
    return exchange.all_gather("1", b"mine"), exchange.route("2", {0: b"me"}, [0]), exchange.traffic


def _traffic(ours: int, parts: int, exchange: Exchange) -> tuple[int, int]:
    exchange.all_gather("0", b"")
    before = exchange.traffic
    exchange.all_gather("1", bytes(ours))
    exchange.route("2", dict.fromkeys(range(exchange.size), bytes(parts)), range(exchange.size))
    after = exchange.traffic - before
    return after.sent, after.received


def _odd_tag(kind: str, exchange: Exchange) -> Any:
    tag = "7/theirs" if exchange.rank == 1 else "7/ours"
    exchange.all_gather("6", b"")
    everyone = range(exchange.size)
    return exchange.all_gather(tag, b"x") if kind == "all_gather" else exchange.route(tag, dict.fromkeys(everyone, b"x"), everyone)


def _odd_kind(exchange: Exchange) -> Any:
    return exchange.all_gather("7", b"x") if exchange.rank else exchange.route("7", {1: b"x"}, [1])


def _absent(kind: str, absent: tuple[int, ...], exchange: Exchange) -> Any:
    exchange.all_gather("8", b"")
    if exchange.rank in absent:
        time.sleep(1.5 * SHORT)  # there, but silent
        return None
    everyone = range(exchange.size)
    if kind == "all_gather":
        return exchange.all_gather("9/vote", b"x" * 100_000)
    return exchange.route("9/vote", dict.fromkeys(everyone, b"x" * 100_000), everyone)


def _go_on_after_failure(exchange: Exchange) -> tuple[str, str]:
    messages = []
    for tag in ("7/theirs" if exchange.rank else "7/ours", "8"):
        try:
            exchange.all_gather(tag, b"x")
        except ExchangeError as error:
            messages.append(str(error))
    return messages[0], messages[1]


def _closed(exchange: Exchange) -> str:
    exchange.all_gather("1", b"")
    exchange.close()
    exchange.close()
    try:
        exchange.all_gather("2", b"")
    except ExchangeError as error:
        return str(error)
    return ""


def _nonsense(exchange: Exchange) -> list[bytes]:
    for tag in ("", "a b", "ä", "x" * 97, "new\nline"):
        with pytest.raises(ValueError, match="not a tag"):
            exchange.all_gather(tag, b"x")
    nonsense: tuple[tuple[dict[int, bytes], list[int]], ...]
    nonsense = (({2: b""}, []), ({}, [-1]), ({exchange.rank: b""}, []), ({}, [exchange.rank]))
    for outgoing, sources in nonsense:
        with pytest.raises(ValueError, match="rank"):
            exchange.route("1", outgoing, sources)
    five: Any = 5  # as bytes, five zeros
    with pytest.raises(TypeError):
        exchange.all_gather("1", five)
    return exchange.all_gather("1", b"%d" % exchange.rank)
