"""Messages over a socket: what a hostile or dying peer can send, and what comes of it."""

import json
import socket
import struct
from collections.abc import Iterator

import pytest

from demo.messages import Finished, Reply, Request
from demo.wire import MAX_MESSAGE, Closed, Connection, Malformed, Message, TimedOut

REQUEST = Request(id=7, prompt=[1, 2, 3], samples=2, seed=5, max_tokens=4, temperature=1.0, end_tokens=[0], at_least=3)


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection and its raw peer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with Connection(accepted) as connection, raw:
        yield connection, raw


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def reply(**changes: object) -> Message:
    good = Reply(7, "w", 3, "d", [[1], [2, 3]], [[-0.5], [-1.0, -2.0]], 1.0).message()
    return good | changes


def test_a_message_arrives_as_it_was_sent(pair: tuple[Connection, socket.socket]) -> None:
    connection, raw = pair
    with Connection(raw.dup()) as peer:
        peer.send({"logprobs": [-0.1, -1e-17, -12.345678901234567]})
    assert connection.receive(1.0) == {"logprobs": [-0.1, -1e-17, -12.345678901234567]}


@pytest.mark.parametrize("body", [b"", b"nonsense", b"\xff\xfe", b"[1, 2]", b"3", b"[" * 100_000])
def test_garbage_is_malformed(pair: tuple[Connection, socket.socket], body: bytes) -> None:
    connection, raw = pair
    raw.sendall(framed(body))
    with pytest.raises(Malformed):
        connection.receive(1.0)


def test_a_length_that_lies_allocates_nothing(pair: tuple[Connection, socket.socket]) -> None:
    connection, raw = pair
    raw.sendall(struct.pack(">I", MAX_MESSAGE + 1))
    with pytest.raises(Malformed, match="limit"):
        connection.receive(1.0)


@pytest.mark.parametrize("sent", [b"", b"\x00\x00", framed(b'{"a": 1}')[:-1]])
def test_a_peer_that_dies_in_a_message_is_closed(pair: tuple[Connection, socket.socket], sent: bytes) -> None:
    connection, raw = pair
    raw.sendall(sent)
    raw.close()
    with pytest.raises(Closed):
        connection.receive(1.0)


@pytest.mark.timeout(30)
def test_a_peer_that_stalls_times_out(pair: tuple[Connection, socket.socket]) -> None:
    connection, raw = pair
    raw.sendall(framed(b'{"a": 1}')[:-1])
    with pytest.raises(TimedOut):
        connection.receive(0.2)


def test_a_peer_that_drips_times_out_too(pair: tuple[Connection, socket.socket]) -> None:
    connection, raw = pair
    raw.sendall(b"\x00")
    raw.sendall(b"\x00")
    with pytest.raises(TimedOut):
        connection.receive(0.2)


def test_what_is_too_large_is_not_sent(pair: tuple[Connection, socket.socket]) -> None:
    with pytest.raises(ValueError, match="limit"):
        pair[0].send({"x": "y" * MAX_MESSAGE})


def test_requests_and_replies_survive_the_way() -> None:
    assert Request.parse(json.loads(json.dumps(REQUEST.message()))) == REQUEST
    assert Reply.parse(json.loads(json.dumps(reply())), REQUEST, "w").tokens == [[1], [2, 3]]


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "hello"},
        {"id": 8},
        {"version": 2},
        {"version": True},
        {"version": "3"},
        {"digest": None},
        {"digest": "x" * 1000},
        {"tokens": [[1]]},
        {"tokens": [[1], [2, -3]]},
        {"tokens": [[1], [2, "3"]]},
        {"tokens": [[], [2, 3]]},
        {"tokens": [[1], [2, 3, 4, 5, 6]]},
        {"logprobs": [[-0.5], [-1.0]]},
        {"logprobs": [[-0.5], [-1.0, float("nan")]]},
        {"logprobs": [[-0.5], [-1.0, None]]},
        {"first_token_at": float("inf")},
    ],
)
def test_a_reply_that_does_not_answer_is_malformed(changes: Message) -> None:
    with pytest.raises(Malformed):
        Reply.parse(reply(**changes), REQUEST, "w")


@pytest.mark.parametrize(
    "changes",
    [{"prompt": []}, {"prompt": None}, {"samples": 0}, {"samples": 10**6}, {"temperature": 0.0}, {"max_tokens": 10**9}, {"id": -1}],
)
def test_a_request_that_cannot_be_is_malformed(changes: Message) -> None:
    with pytest.raises(Malformed):
        Request.parse(REQUEST.message() | changes)


def test_a_last_word_must_be_one() -> None:
    with pytest.raises(Malformed):
        Finished.parse(reply(), "w")
