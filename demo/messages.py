"""What trainer and workers say to each other, checked on arrival."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from demo.wire import Malformed, Message

MAX_PROMPT = 4096
MAX_SAMPLES = 256
MAX_TOKENS = 4096


@dataclass(frozen=True)
class Request:
    """Draw `samples` completions of one prompt with a version of at least `at_least`. Nothing in it says who computes it."""

    id: int
    prompt: list[int]
    samples: int
    seed: int
    max_tokens: int
    temperature: float
    end_tokens: list[int]
    at_least: int

    def message(self) -> Message:
        """As it travels."""
        return {"type": "generate", **asdict(self)}

    @staticmethod
    def parse(message: Message) -> Request:
        """Check a message and make it a request."""
        request = Request(
            id=_integer(message, "id", 0),
            prompt=_integers(message.get("prompt"), "prompt", MAX_PROMPT),
            samples=_integer(message, "samples", 1, MAX_SAMPLES),
            seed=_integer(message, "seed", 0),
            max_tokens=_integer(message, "max_tokens", 1, MAX_TOKENS),
            temperature=_number(message.get("temperature"), "temperature"),
            end_tokens=_integers(message.get("end_tokens"), "end_tokens", 64),
            at_least=_integer(message, "at_least", 0),
        )
        if request.temperature <= 0 or not request.prompt:
            raise Malformed("a request needs a prompt and a temperature above zero")
        return request


@dataclass(frozen=True)
class Reply:
    """The completions, with the weights that they came from."""

    id: int
    worker: str
    version: int
    digest: str
    tokens: list[list[int]]
    logprobs: list[list[float]]
    first_token_at: float

    def message(self) -> Message:
        """As it travels."""
        return {"type": "reply", **asdict(self)}

    @staticmethod
    def parse(message: Message, request: Request, worker: str) -> Reply:
        """Check that a message answers `request` in full."""
        if message.get("type") != "reply" or message.get("id") != request.id:
            raise Malformed(f"expected the reply to request {request.id}, got {message.get('type')!r} {message.get('id')!r}")
        reply = Reply(
            id=request.id,
            worker=worker,
            version=_integer(message, "version", request.at_least),
            digest=text(message, "digest"),
            tokens=[_integers(row, "tokens", request.max_tokens) for row in _rows(message, "tokens", request.samples)],
            logprobs=[_numbers(row, "logprobs", request.max_tokens) for row in _rows(message, "logprobs", request.samples)],
            first_token_at=_number(message.get("first_token_at"), "first_token_at"),
        )
        lengths = zip(reply.tokens, reply.logprobs, strict=True)
        if any(len(tokens) == 0 or len(tokens) != len(logprobs) for tokens, logprobs in lengths):
            raise Malformed("every completion needs at least one token and one log-probability per token")
        return reply


@dataclass(frozen=True)
class Finished:
    """The last word of a worker: the version it holds and what its weights hash to."""

    worker: str
    version: int
    digest: str
    sha256: str

    def message(self) -> Message:
        """As it travels."""
        return {"type": "finished", **asdict(self)}

    @staticmethod
    def parse(message: Message, worker: str) -> Finished:
        """Check a worker's last word."""
        if message.get("type") != "finished":
            raise Malformed(f"expected the last word of {worker}, got {message.get('type')!r}")
        return Finished(worker, _integer(message, "version", 0), text(message, "digest"), text(message, "sha256"))


def text(message: Message, key: str) -> str:
    """A string of at most 256 characters."""
    value = message.get(key)
    if not isinstance(value, str) or len(value) > 256:
        raise Malformed(f"{key} must be a string of at most 256 characters")
    return value


def _integer(message: Message, key: str, low: int, high: int = 2**62) -> int:
    value = message.get(key)
    if type(value) is not int or not low <= value <= high:
        raise Malformed(f"{key} must be an integer from {low} to {high}, got {value!r:.40}")
    return value


def _number(value: Any, key: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Malformed(f"{key} must be a finite number, got {value!r:.40}")
    return float(value)


def _rows(message: Message, key: str, count: int) -> list[Any]:
    value = message.get(key)
    if not isinstance(value, list) or len(value) != count:
        raise Malformed(f"{key} must be a list of {count} lists")
    return value


def _integers(value: Any, key: str, limit: int) -> list[int]:
    if not isinstance(value, list) or len(value) > limit or any(type(item) is not int or item < 0 for item in value):
        raise Malformed(f"{key} must be a list of at most {limit} token numbers")
    return value


def _numbers(value: Any, key: str, limit: int) -> list[float]:
    if not isinstance(value, list) or len(value) > limit:
        raise Malformed(f"{key} must be a list of at most {limit} numbers")
    return [_number(item, key) for item in value]
