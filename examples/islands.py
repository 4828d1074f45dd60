"""Several trainers train one model and meet in a store. Start every rank in a shell of its own; `examples/worker.py STORE` follows them.

python examples/islands.py STORE RANK RANKS [WINDOWS]
"""

import sys

import torch
from trainer import TinyModel, batch

import pulse
from pulse.exchange import StoreExchange
from pulse.torch import ModuleWeights, OuterOptimizer

INNER_STEPS = 8


def main(url: str, rank: int, ranks: int, windows: int = 3) -> None:
    torch.manual_seed(rank)  # each rank has its own data, and even its own first weights: those of rank 0 will be taken
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    store = pulse.open_store(url)
    exchange = StoreExchange(store, rank, ranks, run="islands", timeout=120)
    outer = OuterOptimizer(model.named_parameters(), exchange=exchange, inner_steps=INNER_STEPS, view=torch.bfloat16)
    outer.start()
    publisher = pulse.Publisher(store, ModuleWeights(model, view=torch.bfloat16)) if rank == 0 else None
    if publisher:
        publisher.publish(step=0)
    for step in range(1, windows * INNER_STEPS + 1):
        tokens = batch()
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (report := outer.step()) is not None:  # the same weights on every rank, bit for bit
            print(f"loss {loss:.3f}, {report}")
            if publisher:
                publisher.publish(step=step)  # before the next inner step: what is published is the anchor's view
    reports = outer.finish()  # the others may have had data left
    if publisher:
        if reports:
            publisher.publish(step=step)
        publisher.close()
    print(f"rank {rank}: anchor {outer.digest} after {outer.rounds} rounds")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5])) if len(sys.argv) > 3 else sys.exit(__doc__)
