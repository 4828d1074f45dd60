"""The trainer's end of the socket: hands requests to the workers that are there, and each request of a lost worker to another."""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from demo.messages import Finished, Reply, Request, text
from demo.wire import Connection, Malformed, Message, WireError

_MAX_ATTEMPTS = 5
_HANDSHAKE_SECONDS = 10.0


class RolloutError(Exception):
    """The workers could not do what the trainer needs."""


@dataclass(frozen=True)
class Lost:
    """A worker that went away, and the request it left unanswered."""

    worker: str
    reason: str
    request: int | None


class RolloutServer:
    """Listens on the loopback interface; one thread per worker. `generate` returns replies in the order of the requests."""

    def __init__(self, token: str, reply_seconds: float, stall_seconds: float, on_lost: Callable[[Lost], None]) -> None:
        self._token = token
        self._reply_seconds = reply_seconds
        self._stall_seconds = stall_seconds
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._pending: deque[Request] = deque()
        self._attempts: dict[int, int] = {}
        self._replies: dict[int, Reply] = {}
        self._finish_at: int | None = None
        self._finished: dict[str, Finished] = {}
        self._failure: str | None = None
        self._closing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.2)
        self._threads = [threading.Thread(target=self._accept, name="rollouts-accept", daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        """Where workers connect."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def submit(self, requests: list[Request]) -> None:
        """Queue requests; workers start on them at once."""
        with self._changed:
            self._pending.extend(requests)
            self._changed.notify_all()

    def collect(self, requests: list[Request]) -> list[Reply]:
        """Wait for the replies to queued requests."""
        self._wait(lambda: sum(request.id in self._replies for request in requests), len(requests), "replies")
        with self._changed:
            return [self._replies.pop(request.id) for request in requests]

    def generate(self, requests: list[Request]) -> list[Reply]:
        """Queue requests and wait for their replies."""
        self.submit(requests)
        return self.collect(requests)

    def finish(self, workers: int, at_least: int) -> list[Finished]:
        """Have `workers` workers reach version `at_least`, hash their weights and leave; return what they found."""
        with self._changed:
            self._finish_at = at_least
            self._changed.notify_all()
        self._wait(lambda: len(self._finished), workers, "workers' last words")
        with self._changed:
            return [self._finished[name] for name in sorted(self._finished)]

    def close(self) -> None:
        """Stop listening and let every connection go."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._listener.close()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _wait(self, count: Callable[[], int], wanted: int, what: str) -> None:
        """Wait until `count` reaches `wanted`; no progress for `stall_seconds` is an error, never a hang."""
        with self._changed:
            seen, since = count(), time.monotonic()
            while seen < wanted:
                if self._failure is not None:
                    raise RolloutError(self._failure)
                if time.monotonic() - since > self._stall_seconds:
                    raise RolloutError(f"nothing came for {self._stall_seconds:g} s: {seen} of {wanted} {what}")
                self._changed.wait(timeout=0.5)
                if (now := count()) > seen:
                    seen, since = now, time.monotonic()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            thread = threading.Thread(target=self._serve, args=(Connection(sock),), name="rollouts-worker", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: Connection) -> None:
        """One worker, from its first word to its last."""
        worker, request = "unknown", None
        with connection:
            try:
                worker = self._handshake(connection)
                while (job := self._next(connection)) is not None:
                    if isinstance(job, int):
                        self._last_word(connection, worker, job)
                        return
                    request = job
                    connection.send(request.message())
                    reply = Reply.parse(connection.receive(self._reply_seconds), request, worker)
                    with self._changed:
                        self._replies[request.id] = reply
                        self._changed.notify_all()
                    request = None
            except WireError as error:
                self._give_back(request)
                self._on_lost(Lost(worker, str(error), None if request is None else request.id))

    def _handshake(self, connection: Connection) -> str:
        hello: Message = connection.receive(_HANDSHAKE_SECONDS)
        if hello.get("type") != "hello" or not hmac.compare_digest(text(hello, "token").encode(), self._token.encode()):
            raise Malformed("the first message is not the hello of a worker of this run")
        return text(hello, "worker")

    def _next(self, connection: Connection) -> Request | int | None:
        """The next request, or the version to finish at, or None when closing. Notices a worker that goes away idle."""
        while True:
            with self._changed:
                if self._closing:
                    return None
                if self._pending:
                    return self._pending.popleft()
                if self._finish_at is not None:
                    return self._finish_at
                self._changed.wait(timeout=0.2)
            if connection.poll(0.0):
                raise Malformed(f"a worker spoke unasked: {connection.receive(1.0)!r:.80}")

    def _give_back(self, request: Request | None) -> None:
        """Put a lost worker's request first in the queue, unless it has already cost too many workers."""
        if request is None:
            return
        with self._changed:
            self._attempts[request.id] = self._attempts.get(request.id, 0) + 1
            if self._attempts[request.id] >= _MAX_ATTEMPTS:
                self._failure = f"request {request.id} was lost with {_MAX_ATTEMPTS} workers in a row"
            self._pending.appendleft(request)
            self._changed.notify_all()

    def _last_word(self, connection: Connection, worker: str, at_least: int) -> None:
        connection.send({"type": "finish", "at_least": at_least})
        finished = Finished.parse(connection.receive(self._reply_seconds), worker)
        with self._changed:
            self._finished[worker] = finished
            self._changed.notify_all()
