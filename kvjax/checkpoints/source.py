"""One door for every kind of checkpoint: the default model, a folder, a GGUF file, a hub name."""

from __future__ import annotations

from pathlib import Path

from kvjax.checkpoints import hub
from kvjax.checkpoints.download import default_model_path
from kvjax.checkpoints.gguf import open_gguf
from kvjax.checkpoints.hf import open_hf
from kvjax.checkpoints.tensors import Checkpoint, LazyTensor

__all__ = ["Checkpoint", "LazyTensor", "open_checkpoint"]

DEFAULT_NAMES = ("smollm2", "default")
ACCEPTED = (
    "a Hugging Face folder (config.json and *.safetensors), a .gguf file, a hub name such as"
    " 'HuggingFaceTB/SmolLM2-135M-Instruct', or 'smollm2' (the default model, 98 MB)"
)


def open_checkpoint(name: str | Path | None = None) -> Checkpoint:
    """Opens a checkpoint without reading its weights.

    name: None, "smollm2" or "default" (downloaded once, then cached); a folder; a .gguf file; or a
        hub name. What exists on disk wins over hub names.
    """
    if name is None or name in DEFAULT_NAMES:
        return open_gguf(default_model_path())
    path = Path(name).expanduser()
    if path.is_dir():
        return open_hf(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return open_gguf(path)
        raise ValueError(f"model: expected {ACCEPTED}, got the file {str(path)!r}.")
    if isinstance(name, str) and hub.looks_like_hub_id(name):
        return open_hf(hub.fetch(name))
    if "/" in str(name) or "\\" in str(name) or path.suffix:
        raise ValueError(
            f"model: expected {ACCEPTED}, got a path that does not exist: {str(path)!r}."
        )
    raise ValueError(f"model: expected {ACCEPTED}, got {str(name)!r}.")
