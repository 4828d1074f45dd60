"""The real model's directory, prepared once; a tiny model of the same kind for what needs no real one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct as a directory."""
    done = subprocess.run([sys.executable, "-m", "demo.model"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def tiny_config(vocabulary: int = 128) -> LlamaConfig:
    """A Llama with tied embeddings that computes in milliseconds."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


@pytest.fixture
def tiny() -> LlamaForCausalLM:
    """A tiny model with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config()).eval()
