"""What a trainer's steps change in the bits of its weights. `analyze` counts along checkpoints or a chain; docs/analysis.md explains."""

from pulse.analysis.counts import Counts, count
from pulse.analysis.entropy import reference_bits
from pulse.analysis.figures import figures
from pulse.analysis.sequences import Checkpoints, chain_of

__all__ = ["Checkpoints", "Counts", "chain_of", "count", "figures", "reference_bits"]
