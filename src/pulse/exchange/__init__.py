"""Exchanges: how the ranks of a run meet, in memory or through a store. `pulse.torch.exchange` has the one over torch.distributed."""

from pulse.exchange.base import Exchange, Traffic
from pulse.exchange.memory import MemoryExchange
from pulse.exchange.store import StoreExchange

__all__ = ["Exchange", "MemoryExchange", "StoreExchange", "Traffic"]
