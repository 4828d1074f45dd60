"""A toy trainer and its followers, small enough to be run thousands of times."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pulse import MemoryWeights, ObjectStore, Publisher, Subscriber
from pulse.bits import TensorBits, dtype_of
from pulse.digest import digest_of
from pulse.manifest import manifest_key
from pulse.versions import Versions

Bits = dict[str, TensorBits]

SHAPES = {
    "embed.weight": ("BF16", (16, 8)),
    "frozen.weight": ("BF16", (64, 16)),
    "norm.weight": ("F32", (7,)),
    "scale": ("F16", ()),
    "empty": ("F32", (0, 3)),
    "counter": ("I64", (1,)),
}


def random_bits(seed: int, shapes: Mapping[str, tuple[str, tuple[int, ...]]] = SHAPES) -> Bits:
    """Tensors of arbitrary bit patterns: NaNs, infinities and both zeros are among them."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, (dtype, shape) in shapes.items():
        unsigned = dtype_of(dtype).unsigned
        size = int(np.prod(shape, dtype=np.int64))
        flat = rng.integers(0, 2 ** (8 * unsigned.itemsize), size, unsigned, endpoint=False)
        found[name] = TensorBits(dtype, shape, flat)
    return found


class Trainer:
    """Weights in host memory that change a little with every step."""

    def __init__(self, seed: int = 0) -> None:
        self.weights = MemoryWeights(random_bits(seed))
        self.history: list[Bits] = []
        self._rng = np.random.default_rng(seed + 1)

    def step(self, share: float = 0.1) -> None:
        """Change some bits, here and there; the frozen tensor stays."""
        for name, bits in self.weights.tensors.items():
            if name != "frozen.weight" and bits.flat.size:
                count = self._rng.binomial(bits.flat.size, share)
                at = self._rng.choice(bits.flat.size, count, replace=False)
                bits.flat[at] = self._rng.integers(0, 2 ** (8 * bits.flat.dtype.itemsize), count, bits.flat.dtype, endpoint=False)

    def bits(self) -> Bits:
        """What the weights are now."""
        return copied(self.weights)


def copied(weights: MemoryWeights) -> Bits:
    """A copy of all bits."""
    return {name: bits.copy() for name, bits in weights.tensors.items()}


def receiver(seed: int = 99) -> MemoryWeights:
    """Weights of the trainer's shapes that hold something else."""
    return MemoryWeights(random_bits(seed))


def follow(store: ObjectStore, version: int | None = None) -> tuple[int, Bits]:
    """What a fresh follower of the store ends up with; the digest is checked by another way than the subscriber's."""
    weights = receiver()
    subscriber = Subscriber(store, weights)
    update = subscriber.fetch(version)
    assert update is not None
    subscriber.apply(update)
    assert subscriber.version == update.version
    assert subscriber.state_digest == digest_of(weights.tensors)
    return update.version, copied(weights)


def advance(subscriber: Subscriber) -> None:
    """Take the newest version, if there is one that is not held."""
    if (update := subscriber.fetch()) is not None:
        subscriber.apply(update)


def published(store: ObjectStore, versions: int, *, seed: int = 0, **options: object) -> tuple[Trainer, Publisher, list[Bits]]:
    """A trainer and publisher with that many versions behind them, and the bits of each."""
    trainer = Trainer(seed)
    publisher = Publisher(store, trainer.weights, **options)  # type: ignore[arg-type]
    history = []
    for number in range(versions):
        if number:
            trainer.step()
        publisher.publish(number)
        history.append(trainer.bits())
    return trainer, publisher, history


def assert_linear(store: ObjectStore, history: Mapping[int, Bits] | list[Bits] | None = None) -> int:
    """Every version exists, follows the one before, and restores to its digest (and to its bits, where they are known)."""
    versions = Versions(store)
    newest = versions.newest()
    assert newest is not None
    for version in range(newest + 1):
        manifest = versions.manifest(version)  # checks the links to its neighbours
        tensors = versions.restore(version)
        assert digest_of(tensors) == manifest.state_digest
        if history is not None:
            assert tensors == history[version]
    try:
        store.get(manifest_key(newest + 1))
    except Exception as error:  # noqa: BLE001  of whichever kind
        assert type(error).__name__ == "NotFound"
    return newest
