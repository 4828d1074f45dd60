"""A small decoder-only transformer: FP32 masters, a forward pass that sees their BF16 view and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width, bias=False)
        self.outward = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (n, length, width)."""
        n, length, width = x.shape
        q, k, v = self.inward(_normed(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.outward(seen.transpose(1, 2).reshape(n, length, width))
        added: Tensor = self.down(functional.gelu(self.up(_normed(x)), approximate="tanh"))
        return x + added


class Decoder(nn.Module):
    """Tokens to logits. All parameters are matrices, which autocast casts to BF16; those that are looked up are cast here."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(vocabulary, width) * 0.02)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (n, length) int64; returns logits, (n, length, vocabulary) FP32."""
        with torch.autocast("cpu", torch.bfloat16):
            looked_up = functional.embedding(tokens, self.tokens.bfloat16()) + self.places.bfloat16()[: tokens.shape[1]]
            x = looked_up.float()
            for block in self.blocks:
                x = block(x)
            logits: Tensor = self.head(_normed(x))
        return logits.float()


def _normed(x: Tensor) -> Tensor:
    """Divided by its root mean square: a norm without weights."""
    return functional.rms_norm(x, x.shape[-1:])
