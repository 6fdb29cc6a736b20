"""Where each tensor of a Hugging Face checkpoint goes in the model: one table, both ways."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.config import ModelConfig
from kvjax.layers.decoder import Form
from kvjax.model import Transformer


class Slot(NamedTuple):
    """One parameter of the model and the tensors that fill it."""

    path: tuple  # in the module tree
    names: tuple[str, ...]  # Hugging Face tensors, in the order of the leading axes
    lead: tuple[int, ...]  # leading axes over them: of layers, of experts
    transpose: bool  # HF stores [out, in], kvjax [in, out]


#: in a decoder layer: our module -> HF's, under model.layers.N
_NORMS = {
    "input_norm": "input_layernorm",
    "kv_norm": "kv_layernorm",  # kvjax's own: no Hugging Face family has it
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_ATTENTION = {
    "q_a_norm": "q_a_layernorm",
    "kv_a_norm": "kv_a_layernorm",
    "kv_a_proj": "kv_a_proj_with_mqa",
}
_MODEL = {
    ("embedding",): ("model.embed_tokens.weight", False),
    ("norm", "weight"): ("model.norm.weight", False),
    ("lm_head", "kernel"): ("lm_head.weight", True),
}


def slots(model: Transformer) -> Iterator[Slot]:
    """Every parameter of a model (abstract or real) with the tensors it is made of."""
    for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        yield _slot(tuple(path), model)


def _slot(path: tuple, model: Transformer) -> Slot:
    if path in _MODEL:
        name, transpose = _MODEL[path]
        return Slot(path, (name,), (), transpose)
    config = model.config
    if path[:2] == ("stack", "layers"):
        layers, rest = (path[2],), path[3:]
    else:
        layers, rest = model.stack.plan[path[2]].layers(path[3]), path[4:]
    names = [f"model.layers.{n}.{name}" for n in layers for name in _tensors(config, n, rest)]
    axes = (len(layers), len(names) // len(layers))
    lead = tuple(axis for axis in axes if axis > 1)
    return Slot(path, tuple(names), lead, rest[-1] == "kernel")


def _tensors(config: ModelConfig, layer: int, path: tuple) -> list[str]:
    """The tensors of a layer's parameter: one, or one an expert."""
    end = {"kernel": ".weight", "weight": ".weight", "bias": ".bias"}.get(path[-1], "")
    part, module = path[0], path[1]
    if part == "attention":
        name = _ATTENTION.get(module, module)
        return [f"self_attn.{name}{end}"]
    if part != "mlp":
        after = "pre_feedforward" if config.norm_placement == "sandwich" else "post_attention"
        return [f"{_NORMS.get(part, f'{after}_layernorm')}{end}"]
    if config.moe is None or not config.is_moe(layer):
        return [f"mlp.{module}{end}"]
    if module in ("router", "correction"):
        return [f"mlp.gate{end}" if end else "mlp.gate.e_score_correction_bias"]
    if module == "shared":
        return [f"mlp.shared_experts.{path[2]}{end}"]
    return [f"mlp.experts.{e}.{module}{end}" for e in range(config.moe.num_experts)]


def abstract_model(config: ModelConfig, *, dtype: str, form: Form | None) -> Transformer:
    """The model with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=dtype, form=form))


#: where a parameter goes, by its path in the module tree and its shape
Placement = Callable[[tuple, tuple[int, ...]], jax.sharding.Sharding]


def fill(model: Transformer, tensors, *, sharding: Placement | None = None) -> Transformer:
    """A model with arrays from a mapping of HF names to things with `.read()` and `.shape`.

    One parameter is read, converted and put on its devices at a time: the host never holds the
    model, and a device only its own part. sharding: None for the default device.
    Raises ValueError on a shape that differs.
    """
    graphdef, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    for slot in slots(model):
        variable = flat[slot.path]
        where = None if sharding is None else sharding(slot.path, variable.shape)
        flat[slot.path] = variable.replace(_array(slot, tensors, variable, where))
    return nnx.merge(graphdef, nnx.from_flat_state(list(flat.items())))


def _array(slot: Slot, tensors, variable, where: jax.sharding.Sharding | None) -> jax.Array:
    """One parameter on its devices. A stack is filled there, layer by layer, in place. Each copy is
    waited for: JAX would keep the host's arrays meanwhile, and the next be read beside them."""
    if not slot.lead:
        value = _host(slot, slot.names, tensors, variable.shape, variable.dtype)
        array = jnp.asarray(value) if where is None else jax.device_put(value, where)
        return jax.block_until_ready(array)
    array = jnp.zeros(variable.shape, variable.dtype, device=where)
    count = len(slot.names) // slot.lead[0]
    for i in range(slot.lead[0]):
        names = slot.names[i * count : (i + 1) * count]
        value = _host(slot, names, tensors, variable.shape[1:], variable.dtype)
        array = jax.block_until_ready(_put(array, value, i))
    return array


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, value: jax.Array, i: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, value, i, 0)


def _host(slot: Slot, names, tensors, shape: tuple[int, ...], dtype) -> np.ndarray:
    """Some of a slot's tensors as one array; shape: without the axes that they do not fill."""
    lead = slot.lead[1:]
    value = np.empty(shape, dtype)
    for index, name in zip(np.ndindex(lead), names, strict=True):
        value[index] = _read(name, tensors[name], shape[len(lead) :], slot.transpose)
    return value


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
