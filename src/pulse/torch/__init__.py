"""The tensor world: weights that live in torch."""

from pulse.torch.weights import ModuleWeights

__all__ = ["ModuleWeights"]
