"""Ranks that meet through an object store: trainers that reach nothing but a bucket. It needs put, get and delete, and lists nothing.

    exchange/RUN/members/RANK            which process is this rank: a nonce, and how many ranks it counts
    exchange/RUN/EPOCH/CALL.FROM.all     what a rank says to all others in one call: one put, however many they are
    exchange/RUN/EPOCH/CALL.FROM.TO      … to one other

A process that becomes a rank overwrites that rank's member object with a new nonce. The **epoch** is a hash over the nonces of all
ranks. A rank takes it once all members are there, at its first call and after `Regrouped`. Calls are numbered from 0 within their
epoch. The tag stands in the message, so that a rank that is at another call is found under the same number, and named.

In a call, a rank makes sure that it still is the process in its member object, puts what it has to say, and reads until it has what
it awaits. After every few attempts it looks at the members too. If one has changed, it reads once more, since what a process said
before it was replaced counts, and then gives up with `Regrouped`. So once all ranks have put their message of a call, all can complete
it, whoever comes back meanwhile; and if one has not, and comes back, none can. Members of an earlier run are replaced in the same way.

The one gap: a put of a process that has died, which the store carries out after the process has been replaced, may let one rank
complete a call that another has given up.

A message carries whose it is, its call, its length and its SHA-256, and is refused if anything differs. A store that does not answer is
asked again until the time is up. What is left in the end: the last messages of each rank, and what processes that died had not yet deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from pulse.canonical import fields, from_json, hexadecimal, natural, sha256_digits, text, to_json
from pulse.errors import ExchangeError, FormatError, NotFound, Regrouped, StoreError, StoreUnavailable
from pulse.exchange.base import BaseExchange, Call
from pulse.store import ObjectStore, check_key, open_store
from pulse.threads import each

_LOOK = 5  # attempts between two looks at the members
_AT_ONCE = 8  # objects: they wait for the network, not for the processor
_MAX_HEADER = 1000  # bytes


class Member(NamedTuple):
    """Which process is a rank, and how many ranks it counts."""

    nonce: str
    size: int


class StoreExchange(BaseExchange):
    """One rank's place. To the other ranks, a new object for the same rank is a new process.

    store: a store, or its address. run: the name under which the ranks meet. timeout: seconds for a call. poll: seconds between two
    attempts to read; they grow to ten times that. Raises `StoreUnavailable` if the store does not answer for that long, as all calls do.
    """

    def __init__(
        self, store: ObjectStore | str | os.PathLike[str], rank: int, size: int, *, run: str, timeout: float = 600.0, poll: float = 0.1
    ) -> None:
        super().__init__(rank, size, timeout)
        if not poll > 0:
            raise ValueError(f"poll={poll}: a number of seconds is wanted")
        self._store = open_store(store)
        self._folder = check_key(f"exchange/{run}")
        self._poll = poll
        self._started = time.monotonic()  # of the call
        self._trouble: StoreUnavailable | None = None  # what came in place of an answer when the store was last read
        self._me = Member(uuid.uuid4().hex, size)
        self._members: Mapping[int, Member] = {}  # of the epoch; empty until it is taken
        self._posted: list[str] = []  # keys of this process's messages that are still there
        if size > 1:
            self._put({self._member_key(rank): to_json({"format": 0, **self._me._asdict()})})

    def _meet(self, call: Call) -> dict[int, bytes]:
        self._started = time.monotonic()
        if self._members:  # else a process that was replaced while it stood still could complete what the others have given up
            self._read_members([self.rank])
        else:
            self._join(call)
        messages = {"all": call.outgoing} if isinstance(call.outgoing, bytes) else {str(to): data for to, data in call.outgoing.items()}
        posts = {self._key(call, self.rank, to): _seal(self._facts(call, self.rank, to), call.name, data) for to, data in messages.items()}
        self._posted += posts
        self._put(posts)
        found = self._collect(call)
        if isinstance(call.outgoing, bytes):
            self._tidy(posts)
        return found

    def _join(self, call: Call) -> None:
        """Take the epoch, once all members are there. One that counts other ranks may be of an earlier run, and about to be replaced."""
        members = self._read_members(range(self.size))
        while odd := [rank for rank in range(self.size) if rank not in members or members[rank].size != self.size]:
            if self._left() <= 0:
                raise self._trouble or self._odd(call, members)
            self._sleep()
            members |= self._read_members(odd)
        self._members = members

    def _odd(self, call: Call, members: Mapping[int, Member]) -> ExchangeError:
        """Why there is no epoch."""
        for rank, member in members.items():
            if member.size != self.size:
                sizes = f"rank {rank} counts {member.size} ranks, rank {self.rank} {self.size}"
                return ExchangeError(f"{sizes}: start all with the same size, or if that is of an earlier run, rank {rank} has not come")
        return self._missing(call, set(range(self.size)) - set(members), self.timeout)

    def _collect(self, call: Call) -> dict[int, bytes]:
        """What the others say in this call."""
        found: dict[int, bytes] = {}
        regrouped = False
        for attempt in itertools.count(1):
            found |= self._read_messages(call, [rank for rank in call.sources if rank not in found])
            if len(found) == len(call.sources):
                return found
            missing = set(call.sources) - set(found)
            if regrouped:
                self._members = {}
                raise Regrouped(f"a rank came back as another process during {call.name} of rank {self.rank}: begin the round again")
            if self._left() <= 0:
                raise self._trouble or self._missing(call, missing, self.timeout)
            if attempt % _LOOK == 0:
                self._must_not_be_elsewhere(call, missing)
                regrouped = bool(self._read_members(range(self.size)).items() - self._members.items())
            if not regrouped:
                self._sleep()
        raise AssertionError

    def _read_messages(self, call: Call, ranks: Collection[int]) -> dict[int, bytes]:
        to = "all" if isinstance(call.outgoing, bytes) else str(self.rank)
        found = {}
        for rank, (key, blob) in zip(ranks, self._get(self._key(call, rank, to) for rank in ranks), strict=True):
            if blob is not None:
                name, found[rank] = _open(blob, self._facts(call, rank, to), f"{self._store.url}: {key}")
                self._must_be_same(call, rank, name)
        return found

    def _must_not_be_elsewhere(self, call: Call, ranks: Collection[int]) -> None:
        """Find the ranks that route where this one gathers, or the other way round."""
        other = str(self.rank) if isinstance(call.outgoing, bytes) else "all"
        for rank, (key, blob) in zip(ranks, self._get(self._key(call, rank, other) for rank in ranks), strict=True):
            if blob is not None:
                self._must_be_same(call, rank, _open(blob, self._facts(call, rank, other), f"{self._store.url}: {key}")[0])

    def _read_members(self, ranks: Collection[int]) -> dict[int, Member]:
        """The members that are there. Raises `ExchangeError` if another process has taken this one's place."""
        found = {}
        for rank, (key, blob) in zip(ranks, self._get(map(self._member_key, ranks)), strict=True):
            if blob is not None:
                found[rank] = _member(blob, f"{self._store.url}: {key}")
        if found.get(self.rank, self._me) != self._me:
            raise ExchangeError(f"another process has become rank {self.rank} of {self._folder}: stop this one")
        return found

    def _tidy(self, posts: Collection[str]) -> None:
        """Delete what this process put in earlier calls.

        Nobody reads it any more: an `all_gather` is complete, so each rank has put its message of it, which it does only when it is done
        with everything before. That holds for earlier epochs too: whoever puts in this one has left those for good, since a nonce that was
        replaced never returns. Messages of this call may still be read, and stay.
        """
        old = [key for key in self._posted if key not in posts]
        gone = each(self._deleted, old, _AT_ONCE)
        self._posted = [*posts, *(key for key, done in zip(old, gone, strict=True) if not done)]

    # The store

    def _member_key(self, rank: int) -> str:
        return f"{self._folder}/members/{rank}"

    def _key(self, call: Call, rank: int, to: str) -> str:
        return f"{self._folder}/{self._epoch}/{call.number:08d}.{rank}.{to}"

    @property
    def _epoch(self) -> str:
        return _sha256("\n".join(self._members[rank].nonce for rank in range(self.size)).encode())[:32]

    def _facts(self, call: Call, rank: int, to: str) -> dict[str, Any]:
        """What a message must say of itself."""
        return {"call": call.number, "epoch": self._epoch, "format": 0, "from": rank, "to": to}

    def _put(self, objects: Mapping[str, bytes]) -> None:
        def put(key: str) -> None:
            while True:  # the same key gets the same bytes, however often
                try:
                    self._store.put(key, objects[key])
                except StoreUnavailable:
                    if self._left() <= 0:
                        raise
                    self._sleep()
                else:
                    return

        for key, _ in zip(objects, each(put, objects, _AT_ONCE), strict=True):
            self._count(sent=len(objects[key]))

    def _get(self, keys: Iterable[str]) -> list[tuple[str, bytes | None]]:
        """These objects, None for those that are not there or cannot be had now."""

        def get(key: str) -> bytes | StoreUnavailable | None:
            try:
                return self._store.get(key)
            except NotFound:
                return None
            except StoreUnavailable as error:
                return error

        self._trouble = None
        found: list[tuple[str, bytes | None]] = []
        for key, answer in zip(keys := list(keys), each(get, keys, _AT_ONCE), strict=True):
            if isinstance(answer, StoreUnavailable):
                self._trouble = answer
            blob = answer if isinstance(answer, bytes) else None
            self._count(received=len(blob or b""))
            found.append((key, blob))
        return found

    def _deleted(self, key: str) -> bool:
        with contextlib.suppress(StoreError):  # the call is complete all the same; it is tried again after the next one
            self._store.delete(key)
            return True
        return False

    def _left(self) -> float:
        return self._started + self.timeout - time.monotonic()

    def _sleep(self) -> None:
        waited = self.timeout - self._left()
        time.sleep(max(0.0, min(max(self._poll, waited / 10), 10 * self._poll, self._left())))


def _seal(facts: Mapping[str, Any], name: str, message: bytes) -> bytes:
    """A message as it is stored: a line of canonical JSON, and the bytes."""
    header = to_json({**facts, "length": len(message), "name": name, "sha256": _sha256(message)})
    return b"%s\n%s" % (header, message)


def _open(blob: bytes, facts: Mapping[str, Any], what: str) -> tuple[str, bytes]:
    """Name of the call and message; `ExchangeError` unless they are whole and say what they must."""
    end = blob.find(b"\n", 0, _MAX_HEADER)
    message = blob[end + 1 :]
    try:
        said = fields(
            from_json(blob[: max(end, 0)], what),
            **dict.fromkeys(("call", "format", "from", "length"), natural),
            **dict.fromkeys(("epoch", "name", "to"), text),
            sha256=sha256_digits,
        )
    except FormatError as error:
        raise ExchangeError(f"{what} is not a message: {error}") from error
    expected = {**facts, "length": len(message), "name": said["name"], "sha256": _sha256(message)}
    if said != expected:
        wrong = next(key for key in sorted(said) if said[key] != expected[key])
        raise ExchangeError(f"{what} is torn or foreign: {wrong} is {expected[wrong]} where it says {said[wrong]}")
    return said["name"], message


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _member(blob: bytes, what: str) -> Member:
    try:
        found = fields(from_json(blob, what), format=natural, nonce=hexadecimal(32), size=natural)
    except FormatError as error:
        raise ExchangeError(f"{what} is not a member: {error}") from error
    if found["format"] != 0:
        raise ExchangeError(f"{what} is of format {found['format']}: all ranks need the same version of this software")
    return Member(found["nonce"], found["size"])
