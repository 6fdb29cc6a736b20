"""Where each tensor of a Hugging Face checkpoint goes in the model: one table, both ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.config import ModelConfig
from kvjax.layers.decoder import Form
from kvjax.model import Transformer


class Slot(NamedTuple):
    """One parameter of the model and the tensors that fill it."""

    path: tuple  # in the module tree
    names: tuple[str, ...]  # Hugging Face tensors; several are stacked along a new leading axis
    transpose: bool  # HF stores [out, in], kvjax [in, out]

    @property
    def stacked(self) -> bool:
        """Whether the parameter has a leading axis over `names`."""
        return self.path[:2] == ("stack", "stack")


#: per decoder layer: path in DecoderLayer -> (HF name under model.layers.N, transposed)
LAYER_TENSORS = {
    ("input_norm", "weight"): ("input_layernorm.weight", False),
    ("post_norm", "weight"): ("post_attention_layernorm.weight", False),
} | {
    (module, proj, ours): (f"{theirs}.{proj}.{'weight' if ours == 'kernel' else 'bias'}", kernel)
    for module, theirs, projections in (
        ("attention", "self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("mlp", "mlp", ("gate_proj", "up_proj", "down_proj")),
    )
    for proj in projections
    for ours, kernel in (("kernel", True), ("bias", False))
}

MODEL_TENSORS = {
    ("embedding",): ("model.embed_tokens.weight", False),
    ("norm", "weight"): ("model.norm.weight", False),
    ("lm_head", "kernel"): ("lm_head.weight", True),
}


def slots(model: Transformer) -> Iterator[Slot]:
    """Every parameter of a model (abstract or real) with the tensors it is made of."""
    for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        yield _slot(tuple(path), model.config.num_layers)


def _slot(path: tuple, num_layers: int) -> Slot:
    if path in MODEL_TENSORS:
        name, transpose = MODEL_TENSORS[path]
        return Slot(path, (name,), transpose)
    if path[:2] == ("stack", "layers"):
        layers, rest = [path[2]], path[3:]
    else:
        layers, rest = list(range(num_layers)), path[2:]
    name, transpose = LAYER_TENSORS[rest]
    return Slot(path, tuple(f"model.layers.{i}.{name}" for i in layers), transpose)


def abstract_model(config: ModelConfig, *, dtype: str, form: Form | None) -> Transformer:
    """The model with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=dtype, form=form))


def fill(model: Transformer, tensors) -> Transformer:
    """A model with arrays from a mapping of HF names to things with `.read()` and `.shape`.

    One parameter is read, converted and put on the device at a time: the model is never held twice.
    Raises ValueError on a shape that differs.
    """
    graphdef, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    for slot in slots(model):
        variable = flat[slot.path]
        flat[slot.path] = variable.replace(_array(slot, tensors, variable))
    return nnx.merge(graphdef, nnx.from_flat_state(list(flat.items())))


def _array(slot: Slot, tensors, variable) -> jnp.ndarray:
    want = variable.shape[1:] if slot.stacked else variable.shape
    parts = [_read(name, tensors[name], want, slot.transpose) for name in slot.names]
    if not slot.stacked:
        return jnp.asarray(parts[0], variable.dtype)
    return jnp.stack([jnp.asarray(p, variable.dtype) for p in parts])


def _read(name: str, tensor, want: tuple[int, ...], transpose: bool) -> np.ndarray:
    shape = tuple(tensor.shape)[::-1] if transpose else tuple(tensor.shape)
    if shape != tuple(want):
        raise ValueError(
            f"{name}: expected shape {tuple(want)[::-1] if transpose else tuple(want)} from the "
            f"config, got {tuple(tensor.shape)}. The checkpoint and its config do not belong"
            " together."
        )
    data = tensor.read()
    return data.T if transpose else data
