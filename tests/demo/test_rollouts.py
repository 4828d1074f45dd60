"""The trainer's end of the socket, against workers that answer, die, lie and stall."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from demo.messages import Finished, Reply, Request
from demo.rollouts import Lost, RolloutError, RolloutServer
from demo.wire import Connection, WireError

TOKEN = "secret"


def request(number: int) -> Request:
    return Request(id=number, prompt=[number], samples=2, seed=number, max_tokens=4, temperature=1.0, end_tokens=[0], at_least=1)


def answer(asked: Request, worker: str) -> Reply:
    """The same whoever computes it, as the demo's workers' answers are."""
    return Reply(asked.id, worker, 1, "d", [[asked.seed], [asked.seed + 1]], [[-1.0], [-2.0]], 1.0)


@dataclass
class Harness:
    """A server, and threads that play workers."""

    server: RolloutServer
    lost: list[Lost]
    threads: list[threading.Thread] = field(default_factory=list)

    def join(self, name: str, behave: Callable[[Connection, Request, int], bool], token: str = TOKEN) -> None:
        """Start a worker that treats its n-th request as `behave` says, and goes when that returns False."""

        def live() -> None:
            with Connection.dial(self.server.address, 5.0) as connection:
                connection.send({"type": "hello", "worker": name, "token": token})
                count = 0
                try:
                    while (message := connection.receive(20.0))["type"] == "generate":
                        count += 1
                        if not behave(connection, Request.parse(message), count):
                            return
                    connection.send(Finished(name, int(message["at_least"]), "d", "s").message())
                except WireError:
                    return

        thread = threading.Thread(target=live, daemon=True)
        thread.start()
        self.threads.append(thread)

    def good(self, name: str) -> None:
        """A worker that answers everything."""

        def behave(connection: Connection, asked: Request, count: int) -> bool:
            connection.send(answer(asked, name).message())
            return True

        self.join(name, behave)


@pytest.fixture
def harness() -> Iterator[Harness]:
    lost: list[Lost] = []
    server = RolloutServer(TOKEN, reply_seconds=1.0, stall_seconds=8.0, on_lost=lost.append)
    harness = Harness(server, lost)
    yield harness
    server.close()
    for thread in harness.threads:
        thread.join(5.0)


def tokens(replies: list[Reply]) -> list[list[list[int]]]:
    return [reply.tokens for reply in replies]


def test_replies_come_in_the_order_of_the_requests(harness: Harness) -> None:
    harness.good("a")
    harness.good("b")
    asked = [request(number) for number in range(40)]
    assert tokens(harness.server.generate(asked)) == [answer(one, "x").tokens for one in asked]
    assert harness.lost == []


def dies(connection: Connection, asked: Request, count: int) -> bool:
    return False


def dies_within_a_reply(connection: Connection, asked: Request, count: int) -> bool:
    connection._socket.sendall(struct.pack(">I", 1000) + b'{"type": "rep')
    return False


def lies(connection: Connection, asked: Request, count: int) -> bool:
    connection.send(answer(asked, "liar").message() | {"version": 0})
    return True


def claims_much(connection: Connection, asked: Request, count: int) -> bool:
    connection._socket.sendall(struct.pack(">I", 2**32 - 1))
    return True


def babbles(connection: Connection, asked: Request, count: int) -> bool:
    connection._socket.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    return True


def stalls(connection: Connection, asked: Request, count: int) -> bool:
    time.sleep(1.5)
    return True


@pytest.mark.parametrize("behaviour", [dies, dies_within_a_reply, lies, claims_much, babbles, stalls])
def test_the_request_of_a_bad_worker_is_computed_by_another(
    harness: Harness, behaviour: Callable[[Connection, Request, int], bool]
) -> None:
    harness.join("bad", behaviour)
    asked = [request(number) for number in range(6)]
    harness.server.submit(asked)
    deadline = time.monotonic() + 5.0
    while not harness.lost and time.monotonic() < deadline:
        time.sleep(0.01)
    harness.good("good")
    assert tokens(harness.server.collect(asked)) == [answer(one, "x").tokens for one in asked]
    assert [lost.worker for lost in harness.lost] == ["bad"]
    assert harness.lost[0].request == 0


def test_a_stranger_gets_nothing(harness: Harness) -> None:
    harness.join("stranger", dies, token="guess")
    harness.good("good")
    assert len(harness.server.generate([request(1)])) == 1
    with socket.create_connection(tuple(harness.server.address.rsplit(":", 1)), timeout=5.0) as raw:  # type: ignore[arg-type]
        raw.sendall(b"\x00\x00\x00\x02{}")
        assert raw.recv(10) == b""


def test_without_workers_the_wait_ends() -> None:
    server = RolloutServer(TOKEN, reply_seconds=1.0, stall_seconds=0.5, on_lost=lambda lost: None)
    with pytest.raises(RolloutError, match="0 of 1 replies"):
        server.generate([request(1)])
    server.close()


def test_a_request_that_kills_every_worker_is_given_up(harness: Harness) -> None:
    for index in range(5):
        harness.join(f"victim-{index}", dies)
    with pytest.raises(RolloutError, match="5 workers"):
        harness.server.generate([request(1)])


def test_every_worker_says_its_last_word(harness: Harness) -> None:
    harness.good("a")
    harness.good("b")
    assert [(word.worker, word.version) for word in harness.server.finish(2, at_least=9)] == [("a", 9), ("b", 9)]
