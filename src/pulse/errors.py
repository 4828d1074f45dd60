"""Every exception that PULSE raises on purpose: one class for each thing that a caller can do about it.

PulseError
├─ FormatError             these bytes are not what they claim        discard, fetch again, report
│  ├─ UnsupportedFormat    a version or feature this reader lacks     upgrade
│  └─ DigestMismatch       the digest differs; says which, both ways  discard, fetch again
├─ WeightsMismatch         names, shapes or dtypes differ             configuration fault: stop
├─ ChainError
│  ├─ BaseMismatch         a patch or update for another base         fetch again
│  ├─ NoPath               no anchor leads to that version            wait, or ask for an anchor
│  └─ Fenced               another publisher took over the run        stop this publisher
├─ RoundRefused             a round, by all ranks; nothing changed   roll back, or mend its cause
├─ TornUpdate              an apply was interrupted                   apply it again, or fetch
├─ ExchangeError           the ranks of a run did not meet            mend the cause, make another exchange
│  ├─ RankMissing          some ranks did not come; says which        restart those ranks
│  └─ Regrouped            a rank came back as another process        begin the round again
├─ StoreError
│  ├─ NotFound             no such object                             part of the protocol
│  ├─ AlreadyExists        put-if-absent lost                         part of the protocol
│  ├─ InvalidKey           a key that would leave the store           report
│  ├─ StoreUnsuitable      the store lacks what the protocol needs    use another store
│  └─ StoreUnavailable     the outcome is unknown                     retry
└─ FileError               a local file cannot be read or written     mend the path or the disk
"""


class PulseError(Exception):
    """Base of everything below."""


class FormatError(PulseError):
    """Bytes that are not what they claim to be: truncated, altered, or made by something else."""


class UnsupportedFormat(FormatError):
    """Well-formed as far as can be told, but of a version or feature that this reader does not know."""


class DigestMismatch(FormatError):
    """A digest differs from the one expected. The message names the object, expected and found."""


class WeightsMismatch(PulseError):
    """The names, shapes or dtypes of two sets of weights differ."""


class ChainError(PulseError):
    """Versions that do not fit together."""


class BaseMismatch(ChainError):
    """A patch or update made for other weights than those at hand."""


class NoPath(ChainError):
    """No anchor and patches in the store lead to the wanted version."""


class Fenced(ChainError):
    """Another publisher has taken over this run; this one must stop."""


class TornUpdate(PulseError):
    """An apply was interrupted: the live weights are between two versions until it is repeated."""


class RoundRefused(PulseError):
    """All ranks have refused a round, since one of them cannot take part in it. Nothing has changed on any. `.ranks` are those ranks."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class ExchangeError(PulseError):
    """The ranks of a run did not meet: they made different calls, hold different sizes, or a message is not what it claims."""


class RankMissing(ExchangeError):
    """Some ranks did not come, or are gone. `missing` are their numbers, ascending."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class Regrouped(ExchangeError):
    """A rank came back as another process. Nothing of this attempt counts: begin the round again, with the same exchange."""


class StoreError(PulseError):
    """Base of what an object store can answer."""


class NotFound(StoreError):
    """There is no object under that key."""


class AlreadyExists(StoreError):
    """Put-if-absent found an object under that key."""


class InvalidKey(StoreError):
    """A key that is not plain relative, or that would leave the store."""


class StoreUnsuitable(StoreError):
    """The store lacks what the protocol needs, such as put-if-absent, or is read only."""


class StoreUnavailable(StoreError):
    """The store did not answer, or answered that it could not: whether the call took effect is unknown."""


class FileError(PulseError):
    """A local file that cannot be read or written."""
