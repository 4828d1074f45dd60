"""A plain PyTorch training loop that publishes every step. Start it, then `python examples/worker.py STORE` beside it.

python examples/trainer.py STORE [STEPS]
"""

import sys

import torch

import pulse
from pulse.torch import ModuleWeights

VOCABULARY, LENGTH = 64, 16


class TinyModel(torch.nn.Module):
    """Predicts the next token; its head is tied to its embedding, as in most small language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 128)
        self.mixer = torch.nn.GRU(128, 128, batch_first=True)
        self.head = torch.nn.Linear(128, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits: (batch, length, vocabulary)."""
        return self.head(self.mixer(self.embedding(tokens))[0])


def batch() -> torch.Tensor:
    """Sequences that count upwards from a random start: (32, LENGTH)."""
    return (torch.randint(VOCABULARY, (32, 1)) + torch.arange(LENGTH)) % VOCABULARY


def main(store: str, steps: int = 20) -> None:
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    # Receivers compute in BF16, so that is what counts as a change. At the learning rates of RL, few weights make one in a step.
    with pulse.Publisher(pulse.open_store(store), ModuleWeights(model, view=torch.bfloat16), anchor_every=10) as publisher:
        publisher.publish(step=0)
        for step in range(1, steps + 1):
            tokens = batch()
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            receipt = publisher.publish(step=step)
            print(f"step {step}: loss {loss:.3f}, version {receipt.version}, {receipt.density:.1%} changed, {receipt.nbytes} bytes")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3])) if len(sys.argv) > 1 else sys.exit(__doc__)
