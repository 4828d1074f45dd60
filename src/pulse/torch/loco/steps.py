"""Outer steps: how the anchor moves by the mean pseudo-gradient. FP32, elementwise, each operation rounded by itself: the same bits on
every rank, whatever it runs on."""  # noqa: D205, D209

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class OuterStep(Protocol):
    """An optimizer of anchors."""

    def step(self, anchor: Sequence[Tensor], gradients: Iterator[Tensor]) -> None:
        """Move each anchor in place by its gradient, taken in turn: the next is asked for when the one before has moved."""

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on, besides the anchor."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. `state` is left as it is."""

    @property
    def settings(self) -> dict[str, Any]:
        """What must be equal on all ranks, as JSON has it."""


class Nesterov:
    """B := m B + g (B := g the first time), A := A - lr (g + m B), as DiLoCo has it (arXiv 2311.08105); without momentum A := A - lr g."""

    def __init__(self, lr: float, momentum: float) -> None:
        if not (lr > 0 and 0 <= momentum < 1):
            raise ValueError(f"lr={lr}, momentum={momentum}: lr is positive, momentum from 0 to below 1")
        self.lr, self.momentum = lr, momentum
        self._buffers: list[Tensor] = []

    @torch.no_grad()
    def step(self, anchor: Sequence[Tensor], gradients: Iterator[Tensor]) -> None:
        """See `OuterStep`."""
        first = not self._buffers
        for i, gradient in enumerate(gradients):
            if self.momentum:
                if first:
                    self._buffers.append(gradient.clone())
                else:
                    self._buffers[i].mul_(self.momentum).add_(gradient)
                gradient.add_(self._buffers[i].mul(self.momentum))
            anchor[i].sub_(gradient.mul_(self.lr))

    def state_dict(self) -> dict[str, Any]:
        """See `OuterStep`."""
        return {"momentum": [buffer.clone() for buffer in self._buffers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `OuterStep`."""
        self._buffers = [buffer.clone() for buffer in state["momentum"]]

    @property
    def settings(self) -> dict[str, Any]:
        """See `OuterStep`."""
        return {"outer": "nesterov", "lr": self.lr, "momentum": self.momentum}


class TorchStep:
    """Any optimizer of torch.optim. Whether its arithmetic is the same on every rank is the optimizer's affair: digests will tell."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        tried = factory([torch.nn.Parameter(torch.zeros(1))])  # what it makes must be the same on all ranks
        self._name, self._defaults = type(tried).__name__, str(sorted(tried.defaults.items(), key=lambda item: item[0]))
        self._optimizer: torch.optim.Optimizer | None = None
        self._waiting: dict[str, Any] | None = None

    def step(self, anchor: Sequence[Tensor], gradients: Iterator[Tensor]) -> None:
        """See `OuterStep`."""
        optimizer = self._of(anchor)
        parameters = optimizer.param_groups[0]["params"]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _of(self, anchor: Sequence[Tensor]) -> torch.optim.Optimizer:
        if self._optimizer is None:
            self._optimizer = self._factory([torch.nn.Parameter(tensor) for tensor in anchor])
            if self._waiting is not None:
                self._optimizer.load_state_dict(self._waiting)
        return self._optimizer

    def state_dict(self) -> dict[str, Any]:
        """See `OuterStep`."""
        if self._optimizer is None:
            return {"optimizer": copy.deepcopy(self._waiting)}
        return {"optimizer": copy.deepcopy(self._optimizer.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `OuterStep`."""
        self._waiting = copy.deepcopy(state["optimizer"])
        self._optimizer = None

    @property
    def settings(self) -> dict[str, Any]:
        """See `OuterStep`."""
        return {"outer": self._name, "defaults": self._defaults}
