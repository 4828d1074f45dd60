"""Every exchange that is shipped keeps the contract. An exchange of one's own needs the same few lines."""

from __future__ import annotations

import itertools
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from pulse.exchange import Exchange, MemoryExchange, StoreExchange
from pulse.store import MemoryStore
from pulse.testing.exchange import ExchangeContract, Meet, RegroupContract, Scenario, in_step, in_threads
from pulse.testing.faults import FaultyStore
from tests.contract import exchange_processes

MEMBER, SEALED = 68, 200  # bytes, about: what a store's exchange adds, once per rank and once per message


class TestMemoryExchange(ExchangeContract, RegroupContract):
    @pytest.fixture
    def meet(self) -> Meet:
        return lambda size, scenario, timeout=60.0: in_threads(MemoryExchange.group(size, timeout), scenario)

    @pytest.fixture
    def group(self) -> Callable[[int], list[Exchange]]:
        return lambda size: [*MemoryExchange.group(size)]

    @pytest.fixture
    def restarted(self) -> Callable[[Exchange], Exchange]:
        return lambda exchange: exchange.restarted()


class TestStoreExchange(ExchangeContract, RegroupContract):
    @pytest.fixture
    def group(self) -> Callable[..., list[Exchange]]:
        runs, store = itertools.count(), MemoryStore()

        def group(size: int, timeout: float = 60.0) -> list[Exchange]:
            run = f"run-{next(runs)}"
            return [StoreExchange(store, rank, size, run=run, timeout=timeout, poll=0.01) for rank in range(size)]

        return group

    @pytest.fixture
    def meet(self, group: Callable[..., list[Exchange]]) -> Meet:
        return lambda size, scenario, timeout=60.0: in_threads(group(size, timeout), scenario)

    @pytest.fixture
    def restarted(self) -> Callable[[Exchange], Exchange]:
        return lambda old: StoreExchange(old._store, old.rank, old.size, run=old._folder.removeprefix("exchange/"), poll=0.01)


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.contract.exchange_processes"])
    with ProcessPoolExecutor(4, context) as pool:
        yield pool


def in_processes(processes: ProcessPoolExecutor, act: Callable[..., Any], size: int, *what: Any) -> list[Any]:
    """What `act` returns on each rank. All wait for each other, so that no process gets two ranks."""
    port = free_port()
    return [running.result() for running in [processes.submit(act, port, rank, size, *what) for rank in range(size)]]


def meet_by(processes: ProcessPoolExecutor, act: Callable[..., Any]) -> Meet:
    def meet(size: int, scenario: Scenario, timeout: float = 60.0) -> list[Any]:
        return in_processes(processes, act, size, scenario, timeout)

    return meet


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class TestTorchExchangeOverAPrivateGroup(ExchangeContract):
    @pytest.fixture
    def meet(self, processes: ProcessPoolExecutor) -> Meet:
        return meet_by(processes, exchange_processes.connected)


class TestTorchExchangeOverTheDefaultGroup(ExchangeContract):
    @pytest.fixture
    def meet(self, processes: ProcessPoolExecutor) -> Meet:
        return meet_by(processes, exchange_processes.in_default_group)


class TestTorchExchangeInBatchesAsNcclNeedsThem(ExchangeContract):
    @pytest.fixture
    def meet(self, processes: ProcessPoolExecutor) -> Meet:
        return meet_by(processes, exchange_processes.in_batches)


def test_memory_counts_each_message_once_for_each_rank_that_gets_it() -> None:
    exchanges = MemoryExchange.group(3)
    in_step(exchanges, lambda exchange: exchange.all_gather("1", bytes(10 * exchange.rank)))
    in_step(exchanges, lambda exchange: exchange.route("2", dict.fromkeys(range(3), b"x"), range(3)))
    assert [(exchange.traffic.sent, exchange.traffic.received) for exchange in exchanges] == [(2, 32), (22, 22), (42, 12)]


class CountingStore(FaultyStore):
    """A store that adds up what goes in and comes out."""

    sent = received = 0

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        super().put(key, data, if_absent=if_absent)
        self.sent += len(data)

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes:
        data = super().get(key, start=start, stop=stop)
        self.received += len(data)
        return data


def test_through_a_store_traffic_is_every_byte_put_and_got_and_a_gather_is_one_put() -> None:
    inner = MemoryStore()
    stores = [CountingStore(inner) for _ in range(3)]
    exchanges = [StoreExchange(store, rank, 3, run="r", poll=0.01) for rank, store in enumerate(stores)]
    in_step(exchanges, lambda exchange: exchange.all_gather("1", bytes(1000 * exchange.rank)))
    in_step(exchanges, lambda exchange: exchange.route("2", dict.fromkeys(range(3), b"x" * 100), range(3)))
    for rank, (exchange, store) in enumerate(zip(exchanges, stores, strict=True)):
        assert (exchange.traffic.sent, exchange.traffic.received) == (store.sent, store.received)
        assert 1000 * rank + 200 < store.sent < 1000 * rank + 200 + MEMBER + 3 * 2 * SEALED
        assert [call.key.rpartition("/")[2] for call in store.calls if call.verb == "put"] == [
            str(rank),
            f"00000000.{rank}.all",
            *(f"00000001.{rank}.{other}" for other in range(3) if other != rank),
        ]
        assert {call.verb for call in store.calls} == {"put", "get"}


def test_through_a_store_only_the_last_messages_stay() -> None:
    store = MemoryStore()
    exchanges = [StoreExchange(store, rank, 3, run="r", poll=0.01) for rank in range(3)]
    for number in range(5):
        in_step(exchanges, lambda exchange: exchange.route("1", dict.fromkeys(range(3), b"x"), range(3)))
        in_step(exchanges, lambda exchange, number=number: exchange.all_gather("2", b"%d" % number))
    (epoch,) = {key.split("/")[2] for key in store.list("exchange/r")} - {"members"}
    assert store.list(f"exchange/r/{epoch}") == [f"exchange/r/{epoch}/00000009.{rank}.all" for rank in range(3)]
    assert store.list("exchange/r/members") == [f"exchange/r/members/{rank}" for rank in range(3)]


def test_over_torch_traffic_is_what_its_operations_carry(processes: ProcessPoolExecutor) -> None:
    for said, counted in in_processes(processes, exchange_processes.counted, 3):
        assert said == counted


def test_accelerate_and_torch_see_nothing_of_a_private_group(processes: ProcessPoolExecutor) -> None:
    seen = {"initialized": False, "processes": 1, "distributed": "NO", "met": [b"0", b"1"]}
    assert in_processes(processes, exchange_processes.beside_accelerate, 2) == [seen] * 2
