"""A decoder layer and a stack of them, run by `lax.scan` or one by one.

The stack has two storage forms with the same parameters. "stacked" holds each parameter once with a
leading layer axis and scans: compile time is flat in depth, the form for TPU, GPU and training.
"unrolled" holds each layer's arrays apart: XLA's CPU backend would copy a layer's weights out of
the stack before each matrix product (measured: 1.7 times the time of a decode step), so it is the
form for CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvjax.config import ModelConfig, need
from kvjax.layers.attention import Attend, Attention
from kvjax.layers.mlp import GatedMLP
from kvjax.layers.norm import RMSNorm

Form = Literal["stacked", "unrolled"]
#: attention of one layer, given the layer's number (an int, or traced when stacked)
LayerAttend = Callable[[Any], Attend]


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], rope: tuple[Array, Array], attend: Attend
    ) -> tuple[Float[Array, "B T D"], tuple[Array, Array]]:
        with jax.named_scope("attention"):
            out, k, v = self.attention(self.input_norm(x), rope, attend)
            x = x + out
        with jax.named_scope("mlp"):
            x = x + self.mlp(self.post_norm(x))
        return x, (k, v)


class LayerStack(nnx.Module):
    """`num_layers` decoder layers; see the module's text for the two forms."""

    def __init__(self, config: ModelConfig, *, form: Form, dtype: jnp.dtype, rngs: nnx.Rngs):
        need(form in ("stacked", "unrolled"), "form", "'stacked' or 'unrolled'", form)
        self.form = form
        self.num_layers = config.num_layers

        def layer(rngs):
            return DecoderLayer(config, dtype=dtype, rngs=rngs)

        if form == "unrolled":
            self.layers = nnx.List([layer(rngs) for _ in range(config.num_layers)])
        else:
            self.stack = nnx.vmap(layer)(rngs.split(config.num_layers))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: tuple[Array, Array],
        attend: LayerAttend,
        *,
        remat: bool = False,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "L B T K H"], Float[Array, "L B T K H"]]]:
        """The output and every layer's keys and values. remat: recompute layers under `grad`."""
        if self.form == "unrolled":
            fresh = []
            for i, layer in enumerate(self.layers):
                x, kv = _apply(nnx.split(layer), x, rope, attend(i), remat)
                fresh.append(kv)
            return x, jax.tree.map(lambda *a: jnp.stack(a), *fresh)
        graphdef, state = nnx.split(self.stack)

        def body(x, xs):
            i, layer_state = xs
            return _apply((graphdef, layer_state), x, rope, attend(i), remat)

        return jax.lax.scan(body, x, (jnp.arange(self.num_layers), state))


def _apply(layer: tuple, x: Array, rope: Any, attend: Attend, remat: bool):
    graphdef, state = layer

    def run(state, x):
        return nnx.merge(graphdef, state)(x, rope, attend)

    return (jax.checkpoint(run) if remat else run)(state, x)
