"""A true DDP, to compare with: gradients are averaged over the ranks before every step of the optimizer, so that all take the same step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pulse.digest import sha256
from pulse.errors import WeightsMismatch
from pulse.exchange import Exchange
from pulse.torch.loco.calls import Calls
from pulse.torch.loco.layout import local_of


class GradientMean:
    """Replaces the gradients of these parameters by their mean over the ranks.

    `attach` it to an optimizer, or call `average` between the backward pass and the step, before anything that looks at all gradients, such
    as clipping. All ranks end with the same bits: each sums one range of the gradients, FP32 and in rank order, and hands the mean to the
    others. So a rank sends, and receives, 2 (R - 1) / R times the gradients, as in a ring.

    wire: what travels, float32 or bfloat16; gradients, and then their mean, are rounded to it. A rank that has no gradient for a parameter
    counts as 0; a parameter for which no rank has one stays without. What is not finite on one rank is then not finite on any.
    """

    def __init__(self, parameters: Iterable[Tensor], exchange: Exchange, *, wire: torch.dtype = torch.float32) -> None:
        if wire not in {torch.float32, torch.bfloat16}:
            raise ValueError(f"wire={wire}; float32 and bfloat16 are possible")
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self._parameters:
            raise WeightsMismatch("no parameter that trains: hand in model.parameters()")
        self._sizes = [local_of(parameter).numel() for parameter in self._parameters]
        self._layout = sha256(str((wire, [tuple(local_of(parameter).shape) for parameter in self._parameters])).encode()).encode()
        self._calls, self._wire = Calls(exchange), wire

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Average before every step of `optimizer`, until the handle that comes back is asked to `remove()` this."""
        return optimizer.register_step_pre_hook(lambda *_: self.average())

    @torch.no_grad()
    def average(self) -> None:
        """Average now; all ranks must.

        Raises `WeightsMismatch` on all of them if their parameters differ, `ExchangeError` if they do not meet.
        """
        held = self._held()
        flat = torch.cat([self._gradient(parameter) for parameter in self._parameters])
        ranges = flat.to(self._wire).tensor_split(self._calls.exchange.size)
        arrived = self._calls.scatter("gradients", [_bytes(piece) for piece in ranges])
        mean = _mean([self._tensor(data) for data in arrived]).to(self._wire)
        whole = torch.cat([self._tensor(data) for data in self._calls.gather("mean", _bytes(mean))])
        cuts = list(accumulate(self._sizes))[:-1]
        for parameter, values, some in zip(self._parameters, whole.tensor_split(cuts), held, strict=True):
            if some:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local = local_of(parameter.grad)
                local.copy_(values.view(local.shape))

    def _held(self) -> list[bool]:
        """For which parameters any rank has a gradient."""
        mine = bytes(parameter.grad is not None for parameter in self._parameters)
        words = self._calls.gather("held", self._layout + mine)
        layouts = [word[: len(self._layout)] for word in words]
        usual = Counter(layouts).most_common(1)[0][0]
        odd = [rank for rank, layout in enumerate(layouts) if layout != usual]
        if odd:
            raise WeightsMismatch(f"rank {', '.join(map(str, odd))} has other parameters (shapes, order, wire) than the rest")
        return [any(bits) for bits in zip(*(word[len(self._layout) :] for word in words), strict=True)]

    @staticmethod
    def _gradient(parameter: Tensor) -> Tensor:
        """(elements,) FP32 on the host."""
        if parameter.grad is None:
            return torch.zeros(local_of(parameter).numel())
        return local_of(parameter.grad).reshape(-1).to("cpu", torch.float32)

    def _tensor(self, data: bytes) -> Tensor:
        carrier = np.float32 if self._wire == torch.float32 else np.int16  # numpy has no BF16
        return torch.from_numpy(np.frombuffer(data, carrier).copy()).view(self._wire).float()


def _bytes(values: Tensor) -> bytes:
    found: bytes = (values if values.dtype == torch.float32 else values.view(torch.int16)).numpy().tobytes()
    return found


def _mean(pieces: Sequence[Tensor]) -> Tensor:
    """In rank order, each operation rounded by itself."""
    total = torch.zeros_like(pieces[0])
    for piece in pieces:
        total.add_(piece)
    return total.div_(len(pieces))
