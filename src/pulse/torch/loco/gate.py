"""Gates: which entries of a pseudo-gradient a rank sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pulse.torch.tensors import signed_view


def visible(before: Tensor, after: Tensor, view: torch.dtype) -> Tensor:
    """Where the casts of two tensors to `view` differ in bits: what the forward pass sees of a change. Boolean, of their shape.

    Bits, not values: a NaN equals itself, and +0 and -0 differ. So a weight at +0 whose change is below the view's smallest number is
    visible if it turns the view's zero negative, and invisible otherwise. (The paper's code compares values, to which all zeros are one; a
    receiver of patches compares bits.)
    """
    return signed_view(before.to(view)) != signed_view(after.to(view))


class Gate(Protocol):
    """Decides which entries are sent."""

    def opens(self, anchor: Tensor, s: Tensor, view: torch.dtype) -> Tensor | None:
        """True where an entry is sent, or None for everywhere. anchor, s: (n,) FP32."""


@dataclass(frozen=True)
class Visible:
    """PULSELoCo's: an entry is sent when A and A - s differ in the view."""

    def opens(self, anchor: Tensor, s: Tensor, view: torch.dtype) -> Tensor | None:
        """See `Gate`."""
        return visible(anchor, anchor - s, view)


@dataclass(frozen=True)
class Everything:
    """Dense: every entry is sent."""

    def opens(self, anchor: Tensor, s: Tensor, view: torch.dtype) -> Tensor | None:  # noqa: ARG002
        """See `Gate`."""
        return None


@dataclass(frozen=True)
class Largest:
    """SparseLoCo's: the `count` largest entries of every `chunk`, by magnitude; of equal ones the first. Zeros are not sent."""

    count: int = 64
    chunk: int = 4096

    def opens(self, anchor: Tensor, s: Tensor, view: torch.dtype) -> Tensor | None:  # noqa: ARG002
        """See `Gate`."""
        if not s.numel():  # a shard may be empty
            return torch.zeros_like(s, dtype=torch.bool)
        rows = torch.nn.functional.pad(s.abs(), (0, -s.numel() % self.chunk)).view(-1, self.chunk)
        order = rows.sort(dim=1, descending=True, stable=True).indices[:, : self.count]
        chosen = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, order, value=True)
        return chosen.view(-1)[: s.numel()] & (s != 0)
