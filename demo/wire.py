"""Messages over a socket: four bytes of length, then that many bytes of JSON. Bounded in size and in time."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from types import TracebackType
from typing import Any, Self

Message = dict[str, Any]

MAX_MESSAGE = 8 * 2**20
_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """The connection cannot be used any more."""


class Closed(WireError):
    """The peer is gone."""


class Malformed(WireError):
    """The peer sent what is no message."""


class TimedOut(WireError):
    """The peer did not send or take a whole message in time."""


class Connection:
    """One end of a conversation. After any `WireError` only `close` is left to do."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock

    @staticmethod
    def dial(address: str, timeout: float) -> Connection:
        """Connect to `host:port`."""
        host, _, port = address.rpartition(":")
        return Connection(socket.create_connection((host, int(port)), timeout=timeout))

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def poll(self, timeout: float) -> bool:
        """Wait for something to read: a message, or the end of the connection."""
        return bool(select.select([self._socket], [], [], timeout)[0])

    def send(self, message: Message, timeout: float = 30.0) -> None:
        """Send one whole message."""
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(body)} bytes is above the limit of {MAX_MESSAGE}")
        self._socket.settimeout(timeout)
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except TimeoutError as error:
            raise TimedOut(f"could not send {len(body)} bytes in {timeout:g} s") from error
        except OSError as error:
            raise Closed(f"the peer went away while being sent to: {error}") from error

    def receive(self, timeout: float) -> Message:
        """Receive one whole message, all of it within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > MAX_MESSAGE:
            raise Malformed(f"a message claims {length} bytes; the limit is {MAX_MESSAGE}")
        return _decode(self._exactly(length, deadline))

    def _exactly(self, count: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while count:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimedOut(f"{count} bytes of a message are still missing")
            self._socket.settimeout(remaining)
            try:
                part = self._socket.recv(min(count, 2**16))
            except TimeoutError as error:
                raise TimedOut(f"{count} bytes of a message are still missing") from error
            except OSError as error:
                raise Closed(f"the peer went away: {error}") from error
            if not part:
                raise Closed(f"the peer closed the connection with {count} bytes of a message missing")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the socket; safe to repeat."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _decode(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"a message of {len(body)} bytes is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise Malformed(f"a message is a {type(message).__name__}, expected an object")
    return message
