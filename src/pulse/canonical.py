"""Canonical JSON, and a reader of JSON objects that trusts nothing."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

from pulse.errors import FormatError

T = TypeVar("T")
_HEX = set("0123456789abcdef")

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 200
shown = _brief.repr  # a value in a message: whatever it is, a short line


def to_json(value: Any) -> bytes:  # JSON
    """The one JSON text for `value`: sorted keys, no spaces, ASCII, finite numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def from_json(data: bytes | memoryview, what: str) -> dict[str, Any]:
    """The object in these bytes; `FormatError` unless they are canonical JSON for one."""
    try:
        value = json.loads(bytes(data))
        same = to_json(value) == data
        if b"\\ud" in bytes(data):
            json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair, which is no text
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not JSON: {error}") from error
    if not isinstance(value, dict) or not same:
        raise FormatError(f"{what}: not a canonical JSON object")
    return value


def natural(value: object) -> int:
    """`value`, if it is an integer from 0 to 2^63 - 1; `FormatError` otherwise, as for all that follow."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise FormatError(f"{shown(value)} is not a natural number")
    return value


def text(value: object) -> str:
    """`value`, if it is a string."""
    if not isinstance(value, str):
        raise FormatError(f"{shown(value)} is not a string")
    return value


def hexadecimal(digits: int) -> Callable[[object], str]:
    """A reader of strings of that many lower-case hexadecimal digits."""

    def read(value: object) -> str:
        if len(text(value)) != digits or set(text(value)) - _HEX:
            raise FormatError(f"{shown(value)} is not {digits} hexadecimal digits")
        return text(value)

    return read


sha256_digits = hexadecimal(64)
state_digits = hexadecimal(32)


def optional(read: Callable[[object], T]) -> Callable[[object], T | None]:
    """A reader that also takes null."""
    return lambda value: None if value is None else read(value)


def tuple_of(read: Callable[[object], T]) -> Callable[[object], tuple[T, ...]]:
    """A reader of lists."""

    def read_all(value: object) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise FormatError(f"{shown(value)} is not a list")
        return tuple(read(item) for item in value)

    return read_all


def fields(value: object, **readers: Callable[[object], Any]) -> dict[str, Any]:
    """The fields of a JSON object, each by its reader; exactly these must be there."""
    if not isinstance(value, dict):
        raise FormatError(f"{shown(value)} is not an object")
    if set(value) != set(readers):
        missing, unknown = sorted(set(readers) - set(value)), sorted(set(value) - set(readers))
        raise FormatError(f"missing fields {shown(missing)}, unknown fields {shown(unknown)}")
    found = {}
    for name, read in readers.items():
        try:
            found[name] = read(value[name])
        except FormatError as error:
            raise type(error)(f"{name}: {error}") from error  # it may be an UnsupportedFormat
    return found
