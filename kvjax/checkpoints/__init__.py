"""Checkpoints: Hugging Face folders, GGUF files, hub names, the default model; and tokenizers."""

from kvjax.checkpoints.families import hf_config, model_config
from kvjax.checkpoints.source import open_checkpoint
from kvjax.checkpoints.stream import TokenStream
from kvjax.checkpoints.tensors import TIED, Checkpoint, LazyTensor, check_names
from kvjax.checkpoints.tokenizer import Tokenizer

__all__ = [
    "Checkpoint",
    "LazyTensor",
    "TIED",
    "TokenStream",
    "Tokenizer",
    "check_names",
    "hf_config",
    "model_config",
    "open_checkpoint",
]
