"""What is compared, and on what: one place for every number."""

from __future__ import annotations

from dataclasses import dataclass

from bench.loco.task import Task
from pulse.torch import METHODS
from pulse.torch.loco.methods import Method, method_of
from pulse.torch.loco.rounds import Residual


@dataclass(frozen=True)
class Setup:
    """The model, its trainers, and how they learn.

    epsilon: Adam's. It is some eight times the median gradient: gradients far below the usual one then move their weights by far less than
    the learning rate. Without that, a model this small learns next to nothing while 4 to 5 % of its weights become visible in a window.
    right: share of right answers that the starting model was taught. scored: sums that a policy is scored on, of those trained on and of
    those held out.
    """

    digits: int = 2
    width: int = 256
    layers: int = 2
    heads: int = 4
    taught_steps: int = 800
    taught_batch: int = 256
    right: float = 0.4
    ranks: int = 4
    inner_steps: int = 8
    rounds: int = 45
    prompts: int = 2
    group: int = 8
    lr: float = 1.3e-6
    epsilon: float = 1e-3
    scored: int = 512

    @property
    def task(self) -> Task:
        """What is learnt."""
        return Task(self.digits)

    @property
    def tokens_per_round(self) -> int:
        """Answers' tokens that all trainers together learn from in a round."""
        return self.ranks * self.inner_steps * self.prompts * self.group * self.task.answer_length


FULL = Setup()
QUICK = Setup(
    digits=1, width=32, layers=1, heads=2, taught_steps=150, taught_batch=64, ranks=2, inner_steps=2, rounds=3, lr=1e-5, scored=64
)


@dataclass(frozen=True)
class Contestant:
    """A method under a name. method: None for DDP; forgets: error feedback is emptied after each round; faster: the inner learning rate is
    that many times the others'."""  # noqa: D205, D209

    name: str
    method: Method | None
    residual: Residual = "feedback"
    forgets: bool = False
    faster: float = 1.0


_GAIN = 7.0  # what Nesterov with 0.7 and 0.9 makes of a direction that stays: 0.7 / (1 - 0.9); those without it learn at this rate too

CONTESTANTS = (
    Contestant("pulseloco", METHODS["pulseloco"]),
    Contestant("pulseloco, bf16 values", method_of("pulseloco", "bfloat16")),
    Contestant("pulseloco, fp8 values", method_of("pulseloco", "float8")),
    Contestant("pulseloco, rest in masters", METHODS["pulseloco"], residual="masters"),
    Contestant("pulseloco, no feedback", METHODS["pulseloco"], forgets=True),
    Contestant("diloco", METHODS["diloco"]),
    Contestant("diloco, 8 bits", METHODS["diloco-int8"]),
    Contestant("diloco, 4 bits", METHODS["diloco-int4"]),
    Contestant("sparseloco", METHODS["sparseloco"]),
    Contestant("sparseloco, lr x 7", METHODS["sparseloco"], faster=_GAIN),
    Contestant("localsgd", METHODS["localsgd"]),
    Contestant("localsgd, lr x 7", METHODS["localsgd"], faster=_GAIN),
    Contestant("ddp", None),
    Contestant("ddp, lr x 7", None, faster=_GAIN),
)
