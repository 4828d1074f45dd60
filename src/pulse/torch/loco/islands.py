"""The ranks of one trainer whose parameters are sharded: what one shard may not do, none may."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed
from torch import Tensor


class Island:
    """Agrees within the device meshes of sharded parameters; for whole parameters there is nobody to agree with."""

    def __init__(self, groups: list[Any], device: torch.device) -> None:
        self._groups, self._device = groups, device

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> Island:
        """The island that holds these parameters."""
        groups: list[Any] = []
        device = torch.device("cpu")
        for parameter in parameters:
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                device = torch.device(mesh.device_type)
                groups += [group for group in mesh.get_all_groups() if group not in groups]
        return cls(groups, device)

    @property
    def sharded(self) -> bool:
        """Whether there are other shards."""
        return bool(self._groups)

    def any(self, *facts: bool) -> tuple[bool, ...]:
        """Of each, whether it is true of any shard. All shards ask at the same places, for as many facts."""
        if not self._groups:
            return facts
        found = torch.tensor(facts, dtype=torch.int32, device=self._device)
        for group in self._groups:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group)
        return tuple(map(bool, found.tolist()))
