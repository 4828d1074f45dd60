"""The state digest: 128 bits over a whole set of weights, updated in O(changed), and SHA-256 over objects.

Per tensor, two 64-bit lanes sum a mixer (`pulse.mixer`) over all positions and bits. Sums compose over shards and blocks, in any order.
Tensors are combined by SHA-256 over (name, dtype, shape, lanes) in name order, cut to 128 bits; tied tensors count once, under their
canonical name.

This guards against faults. SHA-256 over payloads and manifests guards against people.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse import mixer
from pulse.arrays import as_bits, must_be_mapping
from pulse.bits import Spec, TensorBits
from pulse.errors import DigestMismatch
from pulse.threads import each

_MASK = (1 << 64) - 1
_CHUNK = 1 << 18  # units per pass of the plain version: its five temporaries stay inside the cache
_FAST_FROM = 1 << 14  # units from which compiled kernels pay, even if they must first be loaded


class Sum(NamedTuple):
    """The two lanes of one tensor, or of a part of it."""

    lane0: int
    lane1: int

    def __add__(self, other: object) -> Sum:
        if not isinstance(other, Sum):
            return NotImplemented
        return Sum((self.lane0 + other.lane0) & _MASK, (self.lane1 + other.lane1) & _MASK)

    def __sub__(self, other: Sum) -> Sum:
        return Sum((self.lane0 - other.lane0) & _MASK, (self.lane1 - other.lane1) & _MASK)

    @property
    def hex(self) -> str:
        """Both lanes as 32 hexadecimal digits."""
        return f"{self.lane0:016x}{self.lane1:016x}"

    @classmethod
    def from_hex(cls, digits: str) -> Sum:
        """The inverse of `hex`."""
        return cls(int(digits[:16], 16), int(digits[16:], 16))


ZERO = Sum(0, 0)


def mix_sum(positions: NDArray[np.uint64], values: NDArray[Any]) -> Sum:
    """The sum of the mixer over some positions. positions: (n,) uint64; values: (n,) unsigned. The plain reference."""
    return Sum(*mixer.lanes(positions, values))


def sum_at(positions: NDArray[np.uint64], values: NDArray[Any]) -> Sum:
    """`mix_sum`, by a compiled kernel where that pays."""
    if values.size < _FAST_FROM:
        return mix_sum(positions, values)
    from pulse import kernels  # numba loads only when there is work for it

    return Sum(*map(int, kernels.sum_at(positions, values)))


def flat_sum(flat: NDArray[Any]) -> Sum:
    """The sum over a whole tensor. flat: (units,) unsigned."""
    if flat.size >= _FAST_FROM:
        from pulse import kernels

        return Sum(*map(int, kernels.sum_flat(flat)))
    return plain_flat_sum(flat)


def plain_flat_sum(flat: NDArray[Any]) -> Sum:
    """`flat_sum` in numpy alone: the reference."""
    total = ZERO
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        total += mix_sum(np.arange(start, start + chunk.size, dtype=np.uint64), chunk)
    return total


def tensor_sums(tensors: Mapping[str, TensorBits]) -> dict[str, Sum]:
    """The sum of each tensor, by name."""
    return dict(zip(tensors, each(lambda bits: flat_sum(bits.flat), tensors.values()), strict=True))


def state_digest(specs: Mapping[str, Spec], sums: Mapping[str, Sum]) -> str:
    """The state digest, 32 hexadecimal digits, of tensors with these specs and sums."""
    total = hashlib.sha256(b"pulse state digest 0\n")
    for name in sorted(specs):
        spec = specs[name]
        total.update(f"{len(name.encode())}:{name} {spec.dtype} {list(spec.shape)} {sums[name].hex}\n".encode())
    return total.hexdigest()[:32]


def digest_of(tensors: Mapping[str, Any]) -> str:
    """The state digest of a whole set of weights (name -> `TensorBits`, numpy array or torch tensor): one pass over all bits."""
    must_be_mapping(tensors)
    bits = {name: as_bits(tensor) for name, tensor in tensors.items()}
    return state_digest({name: tensor.spec for name, tensor in bits.items()}, tensor_sums(bits))


def sha256(*pieces: bytes | memoryview) -> str:
    """SHA-256 of the pieces in turn, as 64 hexadecimal digits."""
    total = hashlib.sha256()
    for piece in pieces:
        total.update(piece)
    return total.hexdigest()


def check(what: str, expected: str, found: str) -> None:
    """Raise `DigestMismatch`, naming `what`, unless the two digests are equal."""
    if expected != found:
        raise DigestMismatch(f"{what}: expected digest {expected}, found {found}")
