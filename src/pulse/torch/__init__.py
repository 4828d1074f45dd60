"""The tensor world: weights that live in torch, and trainers that share them."""

from pulse.torch.loco.methods import METHODS
from pulse.torch.loco.outer import OuterOptimizer
from pulse.torch.loco.report import Report
from pulse.torch.weights import ModuleWeights

__all__ = ["METHODS", "ModuleWeights", "OuterOptimizer", "Report"]
