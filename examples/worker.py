"""An inference worker that follows a trainer's versions while it serves.

python examples/worker.py STORE [SECONDS WITHOUT A NEW VERSION]
"""

import sys

import torch
from trainer import VOCABULARY, TinyModel

import pulse
from pulse.torch import ModuleWeights


@torch.no_grad()
def serve(policy: TinyModel) -> list[int]:
    """Something that uses the weights: continues the count from 7."""
    tokens = torch.tensor([[7]])
    for _ in range(5):
        tokens = torch.cat([tokens, policy(tokens)[:, -1:].argmax(-1)], 1)
    return tokens[0].tolist()


def main(store: str, patience: float = 5.0) -> None:
    policy = TinyModel().to(torch.bfloat16)
    subscriber = pulse.Subscriber(pulse.open_store(store), ModuleWeights(policy))
    while (update := subscriber.wait(timeout=patience)) is not None:  # an engine serves here, and calls fetch() now and then
        subscriber.apply(update)  # in the engine's pause: only what changed is written
        print(f"version {subscriber.version} by {update.kind} ({update.nbytes} bytes): {serve(policy)} of {VOCABULARY}")
    if subscriber.version is None:
        sys.exit(f"nothing was published in {store} within {patience:g} seconds")
    subscriber.verify()
    print(f"version {subscriber.version}, state digest {subscriber.state_digest}, verified")


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:3])) if len(sys.argv) > 1 else sys.exit(__doc__)
