"""The calls of one exchange, numbered: ranks that are out of step then notice."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pulse.errors import ExchangeError
from pulse.exchange import Exchange


class Calls:
    """What a round asks of an exchange. After `Regrouped` the numbers begin anew, on all ranks."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._number = 0
        self._failure: ExchangeError | None = None

    def gather(self, what: str, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        return self.exchange.all_gather(self._tag(what), data)

    def scatter(self, what: str, data: Sequence[bytes]) -> list[bytes]:
        """Send data[r] to rank r; what every rank has for this one, in rank order."""
        ranks = range(self.exchange.size)
        found = self.exchange.route(self._tag(what), dict(zip(ranks, data, strict=True)), ranks)
        return [found[rank] for rank in ranks]

    def route(self, what: str, outgoing: Mapping[int, bytes], sources: Collection[int]) -> dict[int, bytes]:
        """From some ranks to some."""
        return self.exchange.route(self._tag(what), outgoing, sources)

    def begin_anew(self) -> None:
        """Another rank is a new process, which has made no call yet."""
        self._number = 0

    def fail_next(self, failure: ExchangeError) -> None:
        """The ranks did not meet, where this rank could do without: the next call says so."""
        self._failure = failure

    def _tag(self, what: str) -> str:
        if self._failure is not None:
            raise self._failure
        self._number += 1
        return f"{self._number:08d}/{what}"
