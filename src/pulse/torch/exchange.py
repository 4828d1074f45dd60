"""Ranks that meet through torch.distributed.

One call, between any two ranks, in point-to-point operations on bytes. All of one stage are in flight at once, so that no order of
ranks locks up:

1. Each rank sends each other rank a header: number and name of its call, the length of its message for that rank (-1: none), and
   whether it awaits one. So ranks that disagree learn it before any message travels, and a receiver makes room for what comes.
2. Messages travel, each as long as it is.
3. Who has received a message sends back one byte.

Stage 3, and the last byte of each message, which travels by itself, are there because of gloo: when a peer dies, it tells at once only
those operations that have not begun; one that stands half done would wait until its time is up.

A rank names those that it has lost only after it has met all others as far as that goes, so survivors name the rank that died and not each
other. After a failure there are no more calls: a gloo group does not survive one. The job is started again (`torchrun --max-restarts`)
and resumes from what it saved. A rank may then have ended a round that another has not: compare rounds first.

A time-out is for a whole call: allow for the slowest link. Traffic counts what the stages send; what gloo, NCCL and TCP add lies below.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from pulse.errors import ExchangeError, RankMissing
from pulse.exchange.base import BaseExchange, Call

_c10d: Any = dist  # its type stubs lack the stores, and most of what gloo's group can do

_HEADER = struct.Struct("<8sQq?112s")  # magic, number of the call, length, whether a message is awaited, name
_MAGIC = b"PULSEX\0\0"
_P2P_TAG = 80  # of gloo's operations, so that those of others in the same group are not mixed in

Group = Any  # a ProcessGroup, or a backend by itself
Parts = Iterable[tuple[int, torch.Tensor]]  # (rank, what goes there or comes from there): (bytes,) uint8


class TorchExchange(BaseExchange):
    """An exchange over a process group: the default one, as torchrun starts it, or `group`, or a private one (`connect`).

    timeout: seconds for a call. device: where messages pass through, by default the current CUDA device for NCCL, else the CPU. The way
    over NCCL was tried with gloo in NCCL's place, never on GPUs: there a rank that is gone is found out as late as NCCL's own watchdog
    allows, and all ranks of the call are named.
    """

    def __init__(self, group: Group | None = None, *, timeout: float = 600.0, device: torch.device | str | None = None) -> None:
        found = group or dist.group.WORLD
        if found is None:
            raise ExchangeError("torch.distributed has no default group: call init_process_group under torchrun, or TorchExchange.connect")
        super().__init__(found.rank(), found.size(), timeout)
        self._group: Group = found
        self._batched = found.name() == "nccl"
        self._device = torch.device(device or (f"cuda:{torch.cuda.current_device()}" if self._batched else "cpu"))

    @classmethod
    def connect(cls, address: str, rank: int, size: int, *, timeout: float = 600.0) -> Self:
        """A private gloo group, which needs no default group, and of which Accelerate and torchrun see nothing.

        address: "host:port" of rank 0, the same on all ranks; rank 0 listens there. Then all ranks connect to each other, each at the
        address from which it reaches rank 0 (`GLOO_SOCKET_IFNAME` chooses another interface). Raises `RankMissing` after `timeout` seconds.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}; ranks count from 0")
        return cls(_private_group(address, rank, size, timeout), timeout=timeout)

    def close(self) -> None:
        """See `Exchange.close`. A private group is gone; another is left as it is."""
        super().close()
        self._group = None

    def _meet(self, call: Call) -> dict[int, bytes]:
        try:
            return self._talk(call)
        except ExchangeError as error:
            # A private group closes with its last holder, so that who still waits for this rank learns that it is gone. The frames in
            # the error's traceback would hold it.
            self._group = None
            raise error.with_traceback(None) from error.__cause__

    def _talk(self, call: Call) -> dict[int, bytes]:
        talk = _Talk(self._group, self._device, self.timeout, self._count, batched=self._batched)
        lengths = self._greet(call, talk)
        outgoing = {rank: talk.tensor(data) for rank in self.others if (data := call.to(rank))}
        incoming = {rank: talk.room(length) for rank, length in lengths.items()}
        leaving, arriving = talk.start(_in_two(outgoing), _in_two(incoming))
        talk.finish(reversed(arriving))
        receipts = [(rank, talk.tensor(b"\1")) for rank, data in incoming.items() if len(data)]
        talk.exchange(receipts, [(rank, talk.room(1)) for rank in outgoing])
        talk.finish(leaving)
        self._must_have_met(call, talk)
        return {rank: data.cpu().numpy().tobytes() for rank, data in incoming.items()}

    def _greet(self, call: Call, talk: _Talk) -> dict[int, int]:
        """How long the messages are that come, by rank."""
        headers = {rank: talk.room(_HEADER.size) for rank in self.others}
        talk.exchange([(rank, talk.tensor(self._header(call, rank))) for rank in self.others], headers.items())
        self._must_have_met(call, talk)
        lengths = {rank: self._length(call, rank, data.cpu().numpy().tobytes()) for rank, data in headers.items()}
        return {rank: length for rank, length in lengths.items() if length >= 0}

    def _header(self, call: Call, rank: int) -> bytes:
        message = call.to(rank)
        return _HEADER.pack(_MAGIC, call.number, -1 if message is None else len(message), rank in call.sources, call.name.encode())

    def _length(self, call: Call, rank: int, header: bytes) -> int:
        """What another rank's header says of the length of its message, if its call is this rank's."""
        magic, number, length, awaits, name = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise ExchangeError(f"rank {rank} sent rank {self.rank} something else than a header: is someone else using the group?")
        self._must_be_same(call, rank, name.rstrip(b"\0").decode(), number)
        if (length >= 0) != (rank in call.sources) or awaits != (call.to(rank) is not None):
            raise ExchangeError(f"ranks {rank} and {self.rank} do not agree in {call.name} on who of them sends to the other")
        return int(length)

    def _must_have_met(self, call: Call, talk: _Talk) -> None:
        if talk.lost:
            verb = "did not come to" if talk.left() <= 0 else "left during"
            raise self._missing(call, talk.lost, self.timeout - talk.left(), verb) from next(iter(talk.lost.values()))


class _Operation(NamedTuple):
    """One that has been started."""

    sends: bool
    rank: int
    part: torch.Tensor
    work: dist.Work


class _Talk:
    """The operations of one call. A rank with which one of them fails is lost to it; it goes on with the others."""

    def __init__(self, group: Group, device: torch.device, seconds: float, count: Callable[..., None], *, batched: bool) -> None:
        self.lost: dict[int, RuntimeError] = {}
        self._group = group
        self._device = device
        self._count = count
        self._batched = batched
        self._deadline = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return self._deadline - time.monotonic()

    def tensor(self, data: bytes) -> torch.Tensor:
        """A copy of these bytes, of which there are some."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)

    def room(self, length: int) -> torch.Tensor:
        """Where so many bytes will be."""
        return torch.empty(length, dtype=torch.uint8, device=self._device)

    def exchange(self, sends: Parts, receives: Parts) -> None:
        """Start all of these and wait for them."""
        leaving, arriving = self.start(sends, receives)
        self.finish(arriving)
        self.finish(leaving)

    def start(self, sends: Parts, receives: Parts) -> tuple[list[_Operation], list[_Operation]]:
        """Start all of these; those that send and those that receive."""
        wanted = [(sending, *part) for sending, parts in ((True, sends), (False, receives)) for part in parts if part[0] not in self.lost]
        works = self._start_batch(wanted) if self._batched else [self._start_one(*operation) for operation in wanted]
        started = [_Operation(*operation, work) for operation, work in zip(wanted, works, strict=True) if work is not None]
        return [one for one in started if one.sends], [one for one in started if not one.sends]

    def finish(self, operations: Iterable[_Operation]) -> None:
        """Wait for these, until the call's time is up."""
        for one in operations:
            if one.rank in self.lost:
                continue
            try:
                while self._device.type == "cuda" and not one.work.is_completed():  # there wait() only puts streams in order
                    if self.left() <= 0:
                        raise RuntimeError("timed out")
                    time.sleep(0.001)
                one.work.wait(timedelta(seconds=max(self.left(), 0.001)))  # 0 would mean the group's own time-out
            except RuntimeError as error:
                self._lose(one.rank, error)
            else:
                self._count(**{"sent" if one.sends else "received": len(one.part)})

    def _start_one(self, sends: bool, rank: int, part: torch.Tensor) -> dist.Work | None:  # noqa: FBT001
        try:
            work: dist.Work = (self._group.send if sends else self._group.recv)([part], rank, _P2P_TAG)
        except RuntimeError as error:
            self._lose(rank, error)
            return None
        return work

    def _start_batch(self, wanted: list[tuple[bool, int, torch.Tensor]]) -> list[dist.Work | None]:
        """As NCCL needs it: between two ranks, operations that are not of one batch wait for each other."""
        verbs = {True: dist.isend, False: dist.irecv}
        try:
            batch = [dist.P2POp(verbs[sends], part, group=self._group, group_peer=rank) for sends, rank, part in wanted]
            works = dist.batch_isend_irecv(batch) if batch else []
        except RuntimeError as error:
            for _, rank, _ in wanted:
                self._lose(rank, error)
            return [None] * len(wanted)
        return list(works) if len(works) == len(wanted) else [works[0]] * len(wanted)  # NCCL has one for the whole batch

    def _lose(self, rank: int, error: RuntimeError) -> None:
        self.lost.setdefault(rank, error.with_traceback(None))


def _in_two(messages: Mapping[int, torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Each message without its last byte, and that byte."""
    return [(rank, part) for rank, data in messages.items() for part in (data[:-1], data[-1:]) if len(part)]


def _private_group(address: str, rank: int, size: int, timeout: float) -> Group:
    if size == 1:
        return _c10d.ProcessGroupGloo(_c10d.HashStore(), 0, 1)
    host, _, port = address.rpartition(":")
    host, limit = host.strip("[]"), timedelta(seconds=timeout)
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not an address: host:port of rank 0 is wanted")
    try:
        store = _c10d.TCPStore(host, int(port), size, rank == 0, limit, wait_for_workers=False)
    except dist.DistError as error:
        if rank == 0:
            raise ExchangeError(f"rank 0 cannot listen on {address}: {error}") from error
        raise RankMissing(f"rank 0 did not answer rank {rank} on {address}, which waited {timeout:.1f} s: restart it", (0,)) from error
    _must_be_complete(store, rank, size, timeout)
    options = _c10d.ProcessGroupGloo._Options()  # noqa: SLF001  there is no other way to name the interface, here and in torch itself
    options._timeout, options._devices = limit, [_device(host, int(port))]  # noqa: SLF001
    try:
        return _c10d.ProcessGroupGloo(_c10d.PrefixStore("gloo", store), rank, size, options)
    except RuntimeError as error:
        raise ExchangeError(f"rank {rank} cannot connect to all others: {error}") from error


def _must_be_complete(store: Any, rank: int, size: int, timeout: float) -> None:
    """Wait for all ranks, each of which says who it is."""
    if store.add(f"processes/{rank}", 1) > 1:
        raise ExchangeError(f"another process is rank {rank} of this group already")
    store.set(f"sizes/{rank}", str(size))
    deadline = time.monotonic() + timeout
    for other in range(size):
        try:
            store.wait([f"sizes/{other}"], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            said = store.get(f"sizes/{other}").decode()
        except dist.DistNetworkError as error:
            raise RankMissing(
                f"rank 0 left while rank {rank} waited for rank {other} to connect: restart what is gone", (0, other)
            ) from error
        except dist.DistStoreError as error:
            absent = tuple(r for r in range(other, size) if not store.check([f"sizes/{r}"]))
            raise RankMissing(
                f"ranks {absent} did not connect, for which rank {rank} waited {timeout:.1f} s: restart them", absent
            ) from error
        if said != str(size):
            raise ExchangeError(f"rank {other} is one of {said} ranks, rank {rank} one of {size}: start all with the same size")


def _device(host: str, port: int) -> object:
    """The interface from which rank 0 is reached: what the host's own name stands for is often none that others reach."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return _c10d.ProcessGroupGloo.create_default_device()
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return _c10d.ProcessGroupGloo.create_device(hostname=probe.getsockname()[0])
