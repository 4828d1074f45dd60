"""Computing the same bits every time: a fixed number of threads and deterministic kernels."""

from __future__ import annotations

import torch


def pin(threads: int) -> None:
    """Pin what PyTorch lets the machine decide."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
