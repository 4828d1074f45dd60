"""SHA-256 over a model's weights, the same procedure in the trainer and in the workers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers in name order, tied weights once."""
    once = dict(model.named_parameters()) | dict(model.named_buffers())
    saved = model.state_dict(keep_vars=True)
    yield from ((name, once[name]) for name in sorted(once) if name in saved)


def _sha256(tensors: Iterator[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def view_sha256(model: torch.nn.Module) -> str:
    """Over every byte of the BF16 view, in name order. A model that is BF16 already is hashed as it lies in memory."""
    view = (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for _, tensor in named_weights(model))
    return _sha256(view)


def masters_sha256(model: torch.nn.Module) -> str:
    """Over every byte of the weights as the optimizer holds them (FP32), in name order."""
    return _sha256(tensor for _, tensor in named_weights(model))
