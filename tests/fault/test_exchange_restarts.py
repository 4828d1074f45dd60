"""Ranks that are killed, come back, or never come; stores that do not answer: the others go on, or learn who is missing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pulse.errors import ExchangeError, RankMissing, Regrouped, StoreUnavailable
from pulse.exchange import StoreExchange
from pulse.store import MemoryStore, ObjectStore
from pulse.testing.exchange import in_step
from pulse.testing.faults import Call, Died, FaultyStore
from pulse.torch.exchange import TorchExchange
from tests.fault.exchange_processes import Round, live, torch_rank, trainer

ROUNDS = 3
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["pulse.torch.exchange"])


def exchange_on(store: ObjectStore, rank: int, size: int = 3, *, run: str = "r", timeout: float = 60.0) -> StoreExchange:
    return StoreExchange(store, rank, size, run=run, timeout=timeout, poll=0.002)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_dies_at_any_call_to_the_store_and_comes_back_leaves_all_ranks_with_the_same_rounds(when: Any) -> None:
    deaths = 0
    for number in range(70):
        inner = MemoryStore()
        dying = FaultyStore(inner, lambda call, number=number: call.number == number, when=when, error=Died)  # type: ignore[misc]
        histories: list[list[Round]] = [[], [], []]

        def act(rank: int, inner: MemoryStore = inner, dying: FaultyStore = dying, histories: list[list[Round]] = histories) -> bool:
            try:
                live(exchange_on(dying if rank == 1 else inner, rank), histories[rank], ROUNDS, lambda _: None, fresh=False)
            except Died:
                live(exchange_on(inner, rank), histories[rank], ROUNDS, lambda _: None, fresh=True)
                return True
            return False

        with ThreadPoolExecutor(3) as pool:
            deaths += any(pool.map(act, range(3)))
        assert len(histories[0]) == ROUNDS
        assert histories[0] == histories[1] == histories[2]
    assert deaths > 30


def test_what_all_ranks_have_put_is_complete_for_a_slow_one_though_another_has_come_back_and_the_rest_have_regrouped() -> None:
    inner, let_go = MemoryStore(), threading.Event()

    class Slow(FaultyStore):
        def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes:
            if "/00000001." in key:
                let_go.wait()
            return super().get(key, start=start, stop=stop)

    exchanges = [exchange_on(Slow(inner) if rank == 1 else inner, rank) for rank in range(3)]
    votes: list[list[bytes]] = [[], [], []]
    begun: list[list[bytes]] = []
    with ThreadPoolExecutor(3) as pool:

        def begin(rank: int, exchange: StoreExchange) -> None:
            exchange.all_gather("propose", b"")
            votes[rank] = exchange.all_gather("vote", b"yes %d" % rank)
            if rank == 2:
                exchange = exchange_on(inner, 2)
                let_go.set()
            begun.append(again(exchange, "begin"))

        list(pool.map(begin, range(3), exchanges))
    assert votes == [[b"yes 0", b"yes 1", b"yes 2"]] * 3
    assert begun == [[b"0", b"1", b"2"]] * 3


def again(exchange: StoreExchange, tag: str) -> list[bytes]:
    """Gather, beginning again whenever a rank has come back."""
    while True:
        try:
            return exchange.all_gather(tag, b"%d" % exchange.rank)
        except Regrouped:
            continue


def test_all_ranks_may_come_back_at_once_and_what_an_earlier_run_of_another_size_left_is_replaced() -> None:
    store = MemoryStore()
    for size in (3, 3, 2, 4):
        exchanges: list[StoreExchange] = []

        def act(rank: int, size: int = size, exchanges: list[StoreExchange] = exchanges) -> list[bytes]:
            time.sleep(0.02 * rank)
            exchanges.append(exchange_on(store, rank, size))
            return again(exchanges[-1], "begin")

        with ThreadPoolExecutor(size) as pool:
            assert list(pool.map(act, range(size))) == [[b"%d" % rank for rank in range(size)]] * size


def test_ranks_that_count_differently_learn_it() -> None:
    store = MemoryStore()
    exchanges = [exchange_on(store, 0, 2, timeout=0.3), exchange_on(store, 1, 3, timeout=0.3)]
    for error in in_step(exchanges, failure):
        assert type(error) is ExchangeError
        assert "start all with the same size" in str(error)
        assert str(error).startswith(("rank 0 counts 2 ranks, rank 1 3", "rank 1 counts 3 ranks, rank 0 2"))


def failure(exchange: StoreExchange) -> Exception | None:
    """How a gather ends."""
    try:
        exchange.all_gather("propose", b"12345678")
    except (ExchangeError, StoreUnavailable) as error:
        return error
    return None


def test_a_rank_that_has_never_come_is_named() -> None:
    store = MemoryStore()
    for error in in_step([exchange_on(store, rank, timeout=0.3) for rank in (0, 2)], failure):
        assert isinstance(error, RankMissing)
        assert error.missing == (1,)


@pytest.mark.parametrize("when", ["before", "after", "late"])
def test_a_store_that_fails_now_and_then_delays_ranks_and_nothing_else(when: Any) -> None:
    inner = MemoryStore()
    stores = [FaultyStore(inner, lambda call: call.number % 3 == 0, when=when) for _ in range(3)]
    histories: list[list[Round]] = [[], [], []]

    def act(rank: int) -> None:
        live(exchange_on(stores[rank], rank), histories[rank], ROUNDS, lambda _: None, fresh=True)
        stores[rank].arrive()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(act, range(3)))
    assert len(histories[0]) == ROUNDS
    assert histories[0] == histories[1] == histories[2]


@pytest.mark.parametrize("verb", ["put", "get"])
def test_a_store_that_is_away_for_good_is_named_where_it_is_and_the_rank_that_lacks_it_by_the_others(verb: str) -> None:
    inner = MemoryStore()

    def away(call: Call) -> bool:
        return call.verb == verb and "members" not in call.key

    exchanges = [exchange_on(FaultyStore(inner, away) if rank == 1 else inner, rank, timeout=0.5) for rank in range(3)]
    errors = in_step(exchanges, failure)
    assert isinstance(errors[1], StoreUnavailable)
    for error in (errors[0], errors[2]):
        if verb == "put":
            assert isinstance(error, RankMissing)
            assert error.missing == (1,)
        else:
            assert error is None


def test_a_delete_that_fails_loses_nothing_and_is_tried_again() -> None:
    inner, broken = MemoryStore(), [True]
    stores = [FaultyStore(inner, lambda call: call.verb == "delete" and broken[0]) for _ in range(2)]
    exchanges = [exchange_on(store, rank, 2) for rank, store in enumerate(stores)]
    for _ in range(4):
        in_step(exchanges, lambda exchange: exchange.all_gather("1", b""))
    assert len(inner.list()) == 2 + 2 * 4
    broken[0] = False
    in_step(exchanges, lambda exchange: exchange.all_gather("1", b""))
    assert len(inner.list()) == 2 + 2


def test_a_torn_message_is_refused() -> None:
    inner = MemoryStore()
    torn = FaultyStore(inner, lambda call: "/00000000." in call.key, when="torn")
    errors = in_step([exchange_on(torn if rank == 1 else inner, rank, timeout=2) for rank in range(3)], failure)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert type(error) is ExchangeError
        assert "00000000.1.all" in str(error)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the message": lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]),
    "a byte too many": lambda blob: blob + b"!",
    "a byte too few": lambda blob: blob[:-1],
    "nothing": lambda blob: b"",
    "something else": lambda blob: b"\x89PNG\r\n" * 300,
    "no header": lambda blob: blob.partition(b"\n")[2],
    "of another rank": lambda blob: blob.replace(b'"from":1', b'"from":0'),
    "of another call": lambda blob: blob.replace(b'"call":0', b'"call":1'),
    "of another epoch": lambda blob: blob.replace(b'"epoch":"', b'"epoch":"0'),
    "for another rank": lambda blob: blob.replace(b'"to":"all"', b'"to":"0"'),
    "of a later format": lambda blob: blob.replace(b'"format":0', b'"format":1'),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_foreign_message_is_refused(change: Callable[[bytes], bytes]) -> None:
    class Changing(FaultyStore):
        def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
            changed = change(bytes(data)) if "/00000000." in key else data
            assert ("members" in key) == (changed == data)
            super().put(key, changed, if_absent=if_absent)

    inner = MemoryStore()
    errors = in_step([exchange_on(Changing(inner) if rank else inner, rank, 2, timeout=2) for rank in range(2)], failure)
    assert errors[1] is None
    assert type(errors[0]) is ExchangeError
    assert "00000000.1.all" in str(errors[0])


@pytest.mark.parametrize(
    "blob", [b"", b"{}", b"\xff", b'{"format":1,"nonce":"%s","size":2}' % (b"0" * 32), b'{"format":0,"nonce":"x","size":2}']
)
def test_a_foreign_member_is_refused(blob: bytes) -> None:
    store = MemoryStore()
    exchange = exchange_on(store, 0, 2, timeout=2)
    store.put("exchange/r/members/1", blob)
    error = failure(exchange)
    assert type(error) is ExchangeError
    assert "members/1" in str(error)


def test_real_processes_that_are_killed_and_come_back_end_with_the_same_rounds(tmp_path: Path) -> None:
    rounds, size = 40, 3
    ranks = {rank: processes.Process(target=trainer, args=(str(tmp_path), rank, size, rounds)) for rank in range(size)}
    for process in ranks.values():
        process.start()
    killed = 0
    for victim, at in ((1, 3), (0, 8), (2, 9), (1, 20)):
        while committed(tmp_path, victim) < at:
            time.sleep(0.001)
        os.kill(ranks[victim].pid, signal.SIGKILL)
        ranks[victim].join()
        killed += ranks[victim].exitcode == -signal.SIGKILL
        ranks[victim] = processes.Process(target=trainer, args=(str(tmp_path), victim, size, rounds))
        ranks[victim].start()
    for process in ranks.values():
        process.join()
        assert process.exitcode == 0
    assert killed == 4
    histories = [json.loads((tmp_path / f"committed-{rank}.json").read_text()) for rank in range(size)]
    assert len(histories[0]) == rounds
    assert histories[0] == histories[1] == histories[2]


def committed(folder: Path, rank: int) -> int:
    file = folder / f"committed-{rank}.json"
    return len(json.loads(file.read_text())) if file.exists() else 0


# A call among three ranks starts 4 operations for headers, 8 for messages, 4 for receipts; of these the first half sends. Among two ranks
# it starts 2, 4 and 2; among four 6, 12 and 6.


@pytest.mark.parametrize(
    ("size", "victim", "operations", "done"),
    [
        pytest.param(3, 2, 0, 0, id="before"),
        pytest.param(3, 0, 0, 0, id="before, being the one that listens"),
        pytest.param(3, 2, 2, 0, id="having sent its headers"),
        pytest.param(3, 2, 5, 0, id="while the first part of its message leaves"),
        pytest.param(3, 2, 8, 0, id="while its messages leave"),
        pytest.param(3, 0, 8, 0, id="while its messages leave, being the one that listens"),
        pytest.param(2, 1, 4, 0, id="while its message leaves, of two"),
        pytest.param(3, 2, 10, 0, id="while messages come and leave"),
        pytest.param(4, 1, 12, 0, id="while its messages leave, of four"),
        pytest.param(3, 2, 17, 1, id="after"),
        pytest.param(3, 0, 17, 1, id="after, being the one that listens"),
    ],
)
def test_a_rank_that_is_killed_is_named_by_all_others(size: int, victim: int, operations: int, done: int) -> None:
    for said in torch_ranks(size, victim, operations).values():
        assert said["missing"] == (victim,)
        assert f"rank {victim} left during all_gather '{done}'" in said["message"]
        assert said["done"] == done
        assert f"all_gather '{done}' had failed" in said["again"]


@pytest.mark.parametrize("operations", [1, 3, 13, 15])
def test_a_rank_that_is_killed_between_two_others_is_named_perhaps_beside_one_that_left_because_of_it(operations: int) -> None:
    for said in torch_ranks(3, 2, operations).values():
        assert 2 in said["missing"]
        assert "left during" in said["message"]


def torch_ranks(size: int, victim: int, operations: int) -> dict[int, dict[str, Any]]:
    """What the survivors tell, having ended as soon as they had an error."""
    port, ranks, ends = free_port(), {}, {}
    for rank in range(size):
        ends[rank], other = processes.Pipe(duplex=False)
        ranks[rank] = processes.Process(target=torch_rank, args=(port, rank, size, victim, operations, other))
        ranks[rank].start()
        other.close()
    told = {rank: end.recv() for rank, end in ends.items() if rank != victim}
    for process in ranks.values():
        process.join()
    assert ranks[victim].exitcode == -signal.SIGKILL
    return told


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def connect_all(*what: tuple[int, int], timeout: float = 1.0) -> list[Any]:
    """What comes of connecting these ranks of groups of these sizes at one address: an exchange, or an error."""
    port = free_port()

    def connect(rank_and_size: tuple[int, int]) -> Any:
        try:
            return TorchExchange.connect(f"localhost:{port}", *rank_and_size, timeout=timeout)
        except ExchangeError as error:
            return error

    with ThreadPoolExecutor(len(what)) as pool:
        return list(pool.map(connect, what))


def test_ranks_that_do_not_connect_are_named() -> None:
    for error in connect_all((0, 4), (2, 4)):
        assert isinstance(error, RankMissing)
        assert {1, 3} >= set(error.missing) - {0}
    (error,) = connect_all((1, 2))
    assert isinstance(error, RankMissing)
    assert error.missing == (0,)


def test_ranks_that_connect_with_other_sizes_learn_it() -> None:
    for error in connect_all((0, 2), (1, 3), timeout=60):
        assert type(error) is ExchangeError
        assert "same size" in str(error)


def test_two_processes_cannot_connect_as_one_rank() -> None:
    outcomes = connect_all((0, 3), (1, 3), (1, 3))
    assert sum("already" in str(error) for error in outcomes) == 1


def test_an_address_that_is_taken_or_none_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ExchangeError, match="rank 0 cannot listen"):
        TorchExchange.connect(f"127.0.0.1:{server.getsockname()[1]}", 0, 2, timeout=1)
    for address in ("localhost", "localhost:", ":80", "localhost:http"):
        with pytest.raises(ValueError, match="host:port"):
            TorchExchange.connect(address, 0, 2)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        TorchExchange.connect("localhost:80", 2, 2)


def test_without_a_default_group_torch_says_what_to_do() -> None:
    with pytest.raises(ExchangeError, match=r"init_process_group.*connect"):
        TorchExchange()
