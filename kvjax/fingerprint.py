"""A name of a model's weights, that binds files made for it (calibrations) to it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.config import ModelConfig, to_dict

if TYPE_CHECKING:
    from kvjax.model import Transformer

#: what of the config names the model; the rest (special tokens, limits) varies with the file kind
_IDENTITY = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
    "head_dim", "rope", "rms_norm_eps", "hidden_act", "attention_bias", "tie_word_embeddings",
)  # fmt: skip
#: and these where they are not what they are in a plain model
_UNUSUAL = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.name
    in (
        "attention_out_bias", "mlp_bias", "qk_norm", "norm_placement", "norm_type",
        "attention_scale", "embedding_scale", "residual_scale", "logit_scale",
        "attn_logit_softcap", "final_logit_softcap", "layer_types", "sliding_window",
        "rope_local", "rope_interleave", "no_rope_layers", "attention_sinks", "kv_source",
        "kv_norm", "mla", "moe",
    )
}  # fmt: skip


def model_fingerprint(model: Transformer) -> str:
    """A name of these weights: sizes in the clear, then a digest.

    It covers the shape, RoPE and activation fields of the config, the first rows of the embedding
    and of every layer's K and V projections, rounded to bfloat16: the same for stacked and unrolled
    models and for float32 and bfloat16 ones; another for other weights, a quantised copy included.
    """
    fields = to_dict(model.config)
    config = {name: fields[name] for name in _IDENTITY}
    config |= {name: fields[name] for name, usual in _UNUSUAL.items() if fields[name] != usual}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for array in _probes(model):
        digest.update(np.asarray(array.astype(jnp.bfloat16)).tobytes())
    c = model.config
    return (
        f"{c.num_layers}x{c.hidden_size}-kv{c.num_kv_heads}x{c.head_dim}-{digest.hexdigest()[:16]}"
    )


def _probes(model: Transformer) -> Iterator[Array]:
    yield model.embedding[...][:4]
    for name in ("k_proj", "v_proj", "kv_a_proj"):
        for layer in model.config.owners:
            kernel = model.stack.layer_array(layer, "attention", name, "kernel")
            if kernel is not None:
                yield kernel[:2]
