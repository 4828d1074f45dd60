"""Where bits live: the seam between the wire side and whatever holds weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from pulse.arrays import as_bits
from pulse.bits import Spec, TensorBits
from pulse.errors import WeightsMismatch
from pulse.patch import Positions, TensorPatch, diff_tensor, scatter


@runtime_checkable
class Weights(Protocol):
    """A set of named tensors of which a view is published, or into which one is received.

    `read`, `diff` and `gather` are called from several threads at once.

    Names are the Hugging Face names; of several names for one storage, the first is canonical and the others are `aliases`.
    `view` says what tensors are cast to when read, as it is written into manifests; None: they are read as they are.
    """

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of tensors that are stored once: alias -> canonical name."""

    @property
    def view(self) -> str | Mapping[str, str] | None:
        """The cast, as a dtype code or a mapping of name patterns to dtype codes."""

    def specs(self) -> dict[str, Spec]:
        """The dtype and shape of every canonical tensor, in the view."""

    def read(self, name: str) -> TensorBits:
        """The bits of one tensor's view. They may share the live memory: copy what must stay."""

    def diff(self, name: str, base: TensorBits) -> TensorPatch | TensorBits | None:
        """What changed since `base`, as `patch.diff_tensor` says. Nothing in it shares the live memory."""

    def gather(self, name: str, positions: Positions) -> NDArray[Any]:
        """The bits at some positions of the flattened tensor. (n,) unsigned."""

    def scatter(self, name: str, positions: Positions, values: NDArray[Any]) -> None:
        """Write bits at some positions, in place, and nothing elsewhere."""

    def assign(self, name: str, bits: TensorBits) -> None:
        """Write a whole tensor, in place where it lives."""


def must_be_weights(weights: object) -> None:
    """`TypeError`, with what to do, for a module or a mapping where weights are wanted."""
    if not isinstance(weights, Weights):
        raise TypeError(
            f"weights are wanted, not {type(weights).__name__}: wrap a torch module as pulse.torch.ModuleWeights(module), "
            "a mapping of names to tensors as pulse.MemoryWeights(tensors)"
        )


class MemoryWeights:
    """Weights in host memory: a checkpoint that was read, or the twin that tests use. Copies what it is given."""

    def __init__(self, tensors: Mapping[str, Any], *, aliases: Mapping[str, str] | None = None) -> None:
        self.tensors = {name: as_bits(tensor).copy() for name, tensor in tensors.items()}
        self.aliases: Mapping[str, str] = dict(aliases or {})
        self.view: str | Mapping[str, str] | None = None

    def specs(self) -> dict[str, Spec]:
        """See `Weights.specs`."""
        return {name: bits.spec for name, bits in self.tensors.items()}

    def read(self, name: str) -> TensorBits:
        """See `Weights.read`."""
        return self.tensors[name]

    def diff(self, name: str, base: TensorBits) -> TensorPatch | TensorBits | None:
        """See `Weights.diff`."""
        found = diff_tensor(name, base, self.tensors[name])
        return found.copy() if isinstance(found, TensorBits) else found

    def gather(self, name: str, positions: Positions) -> NDArray[Any]:
        """See `Weights.gather`."""
        return self.tensors[name].flat[positions]

    def scatter(self, name: str, positions: Positions, values: NDArray[Any]) -> None:
        """See `Weights.scatter`."""
        scatter(self.tensors[name].flat, positions, values)

    def assign(self, name: str, bits: TensorBits) -> None:
        """See `Weights.assign`."""
        if self.tensors[name].spec != bits.spec:
            raise WeightsMismatch(f"{name}: {bits.spec} does not fit {self.tensors[name].spec}")
        self.tensors[name].flat[:] = bits.flat
