"""`OuterOptimizer`: what a training loop of PULSELoCo holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from pulse.exchange import Exchange, MemoryExchange
from pulse.torch.loco.attempt import Attempt
from pulse.torch.loco.calls import Calls
from pulse.torch.loco.layout import View
from pulse.torch.loco.meeting import Stand, is_weight
from pulse.torch.loco.methods import Method, Sparse, method_of
from pulse.torch.loco.rank import Options, Rank, Share
from pulse.torch.loco.report import Report
from pulse.torch.loco.rounds import Residual
from pulse.torch.loco.steps import Factory, Nesterov, TorchStep


class OuterOptimizer:
    """Trains one model with several trainers that exchange, every `inner_steps` steps, what their steps would show in the view.

    Call `step()` after every step of the inner optimizer, whether or not that step was skipped; every `inner_steps`-th call is a round. In
    it all ranks exchange their payloads and end with the same weights, bit for bit. The inner optimizer is not touched: its moments stay
    each rank's own, and so do learning rates and schedules.

    named_parameters: `model.named_parameters()`; FP32; those that do not train do not count, tied ones count once; of a model sharded by
    FSDP2 each rank hands in its shards, and `exchange` joins the ranks that hold the same shard.
    exchange: how ranks meet; alone by default. lr, momentum: of the outer step, FP32 Nesterov, by default the method's (0.7 and 0.9);
    `lr=1, momentum=0` is plain averaging. outer: instead of these, a function from parameters to any `torch.optim` optimizer.
    view: what the forward pass computes with. method: `pulseloco`, or one to compare it with (`pulse.torch.METHODS`). value_dtype: of
    what is sent, float32 (lossless), bfloat16 or float8; what rounding leaves stays in error feedback.
    residual: where the rest waits, in error feedback (`feedback`, 4 bytes per parameter) or in the local weights (`masters`; they are then
    the anchor only up to that, and `rollback` gives it up).
    weight: this rank's in the mean; may be set anew before each round. share: `gather`, or `scatter` for many ranks.
    on_nonfinite: `refuse` the round on all ranks, by `RoundRefused`, or `drop` the window of the rank that has it.
    on_resync: called when this rank has taken over another's state: the place to reset the inner optimizer, which otherwise goes on.
    buffers: `model.named_buffers()` if they must be equal on all ranks: they are compared at every meeting, and never exchanged.
    track_age: whether reports say how long entries have waited, for 1 byte per parameter.

    Raises `WeightsMismatch` for parameters that cannot take part, `TypeError` and `ValueError` for options that are none.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        exchange: Exchange | None = None,
        inner_steps: int = 8,
        lr: float | None = None,
        momentum: float | None = None,
        outer: Factory | None = None,
        view: View = torch.bfloat16,
        method: str | Method = "pulseloco",
        value_dtype: str = "float32",
        residual: Residual = "feedback",
        weight: float = 1.0,
        share: Share = "gather",
        on_nonfinite: Literal["refuse", "drop"] = "refuse",
        on_resync: Callable[[], None] | None = None,
        buffers: Iterable[tuple[str, Tensor]] = (),
        track_age: bool = True,
    ) -> None:
        if exchange is not None and not hasattr(exchange, "all_gather"):
            raise TypeError(f"an exchange is wanted, such as pulse.exchange.StoreExchange, not {type(exchange).__name__}")
        found = method_of(method, value_dtype)
        if type(inner_steps) is not int or inner_steps < 1:
            raise ValueError(f"inner_steps={inner_steps!r}: 1 or more are wanted")
        _must_be_one_of("residual", residual, "feedback", "masters")
        _must_be_one_of("share", share, "gather", "scatter")
        _must_be_one_of("on_nonfinite", on_nonfinite, "refuse", "drop")
        if share == "scatter" and not isinstance(found.wire, Sparse):
            raise ValueError(f"share='scatter' is for methods that send some entries, and {found.name} sends all")
        if residual == "masters" and found.decay != 1:
            raise ValueError(f"residual='masters': {found.name} lets error feedback decay, and there would be none")
        if outer is not None and (lr, momentum) != (None, None):
            raise ValueError("lr and momentum are Nesterov's; an optimizer of your own has its own")
        rate, factor = found.lr if lr is None else lr, found.momentum if momentum is None else momentum
        step = Nesterov(rate, factor) if outer is None else TorchStep(outer)
        options = Options(found, inner_steps, view, residual, share, on_nonfinite == "drop", on_resync, tuple(buffers))
        self._rank = Rank(list(named_parameters), options, step, track_age=track_age)
        self._calls = Calls(exchange if exchange is not None else MemoryExchange.group(1)[0])
        self._met = False
        self.weight = weight

    # --- what a training loop calls ---

    def start(self) -> Report | None:
        """Meet the other ranks for the first time: all get the weights of the one that is furthest, of the lowest rank if none is.

        `step` does it if nobody has; then a rank that gets other weights has taken its first inner step in vain. A rank that comes back
        into a round under way takes part in it, with nothing to say; then this returns the round's report.
        """
        report = Attempt(self._rank, self._calls, Stand.INSIDE).run()
        self._met = True
        return report

    def step(self) -> Report | None:
        """Count one inner step; at the end of a window run a round and return its report.

        Raises `RoundRefused` if a round cannot be, on all ranks, with nothing changed on any: call `rollback` on those that it names, or
        mend the cause, and go on; the next step, or `round`, tries again. Raises an `ExchangeError`, such as `RankMissing`, if the ranks
        did not meet: set `exchange` to a new one, as a restarted process would, and call `round`; nothing else is lost.
        """
        if not self._met and (report := self.start()) is not None:
            return report
        self._rank.steps += 1
        return self.round() if self._rank.steps >= self._rank.options.inner_steps else None

    def round(self) -> Report | None:
        """Run a round now; all ranks must. None if this rank has just joined, and the others are not that far."""
        report = Attempt(self._rank, self._calls, Stand.READY).run()
        self._met = True
        return report

    def finish(self) -> list[Report]:
        """Take part in the others' rounds until nobody has data left; the last inner steps are exchanged too."""
        reports = []
        while (report := Attempt(self._rank, self._calls, Stand.DONE).run()) is not None:
            reports.append(report)
        return reports

    def rollback(self) -> None:
        """Give up this rank's window: the local weights are the anchor again, and the count of inner steps begins anew."""
        self._rank.rollback()

    @property
    def weight(self) -> float:
        """This rank's in the mean."""
        return self._rank.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        if not is_weight(weight):
            raise ValueError(f"weight={weight!r}: a number above 0 and below 1e9 is wanted")
        self._rank.weight = float(weight)

    @property
    def inner_steps(self) -> int:
        """Of a window."""
        return self._rank.options.inner_steps

    @property
    def exchange(self) -> Exchange:
        """How the ranks meet. After a failure that it does not survive, set a new one, and call again: nothing else is lost."""
        return self._calls.exchange

    @exchange.setter
    def exchange(self, exchange: Exchange) -> None:
        self._calls = Calls(exchange)
        self._met = False

    @property
    def rounds(self) -> int:
        """How many rounds there have been."""
        return self._rank.state.round

    @property
    def digest(self) -> str:
        """The state digest of the anchor, FP32, as of the last round."""
        return self._rank.digest

    @property
    def anchor(self) -> dict[str, Tensor]:
        """The shared weights of the last round, FP32, by name; treat as read only. After a round the local weights are the same."""
        layout = self._rank.layout
        rows = zip(layout.names, self._rank.state.anchor, layout.shapes, strict=True)
        return {name: tensor.view(shape) for name, tensor, shape in rows}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: anchor, outer state, error feedback, counters. Save it on every rank, beside the model and inner optimizer.

        Raises `TornUpdate` if the anchor is not what the last round made it.
        """
        return self._rank.to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which is left as it is. The local weights are the model's own to restore.

        E is in units of parameters, so another number of ranks or of inner steps rescales nothing. Raises `WeightsMismatch` for the state
        of other parameters or another method, and what else `pulse.torch.loco.saved.load` says.
        """
        if not isinstance(state, dict):
            raise TypeError(f"what state_dict() returned is wanted, not {type(state).__name__}")
        self._rank.load(state)
        self._met = False


def _must_be_one_of(name: str, value: str, *known: str) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}; known are {' and '.join(known)}")
