"""New models from old ones with a smaller cache, and the error each makes before training.

    made = to_grouped(model, num_kv_heads=2)         # MHA -> GQA or MQA (2305.13245)
    made = to_cla(model, factor=2)                   # any -> CLA (2405.12981)
    made = to_latent(model, kv_lora_rank=64)         # GQA -> MLA, low rank (TransMLA 2502.07864)
    print(made.errors)                               # relative squared error of K and V, a layer
    made.model

Errors are of the weights: |W - W'|^2 / |W|^2, W' what the new model computes with; `kl_from`
measures what they do on tokens. Train on afterwards: the papers use 5% of the original steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvjax.config import MLAConfig, ModelConfig, near, need
from kvjax.model import Transformer
from kvjax.sharing import cla

Pool = Literal["mean", "first", "random"]
POOLS = ("mean", "first", "random")

# Shapes: D model dim, N old KV heads, K new KV heads, H head dim, C latent, O layers that own.


class Converted(NamedTuple):
    """A new model, and by owner layer the relative squared errors of its keys and values."""

    model: Transformer
    errors: dict[int, dict[str, float]]


def kl_from(model: Transformer, old: Transformer, tokens: Any) -> float:
    """Mean KL divergence (nats a token) of the old model's next-token distribution from the new."""
    q, p = (jax.nn.log_softmax(m(tokens)[0]) for m in (model, old))
    return float(jnp.mean(jnp.sum(jnp.exp(p) * (p - q), axis=-1)))


def to_grouped(
    model: Transformer, *, num_kv_heads: int, how: Pool = "mean", seed: int = 0
) -> Converted:
    """Fewer KV heads: each new one is made of a group of consecutive old ones (2305.13245, 2.1).

    how: their mean (best), the first of them, or new random weights (for comparison).
    """
    old = model.config
    need(how in POOLS, "how", f"one of {POOLS}", how, near(how, POOLS).strip())
    need(old.mla is None, "model", "one without latent attention", "mla")
    need(old.qk_norm != "full", "qk_norm", "'none' or 'head'", old.qk_norm)
    whole = isinstance(num_kv_heads, int) and 0 < num_kv_heads <= old.num_kv_heads
    whole = whole and old.num_kv_heads % num_kv_heads == 0
    need(whole, "num_kv_heads", f"a divisor of {old.num_kv_heads}", num_kv_heads)
    config = dataclasses.replace(old, num_kv_heads=num_kv_heads)
    rng = np.random.default_rng(seed)

    def pooled(x: np.ndarray) -> np.ndarray:
        heads = x.reshape(*x.shape[:-1], num_kv_heads, -1, old.head_dim)
        if how == "mean":
            return heads.mean(-2)
        if how == "first":
            return heads[..., 0, :]
        return rng.normal(size=heads[..., 0, :].shape) * x.std()

    errors: dict[int, dict[str, float]] = {}

    def change(layer: int, path: tuple, x: np.ndarray) -> np.ndarray:
        if path[1] not in ("k_proj", "v_proj") or layer not in old.owners:
            return x
        new = pooled(x)
        back = np.repeat(new[..., None, :], old.num_kv_heads // num_kv_heads, axis=-2)
        if path[-1] == "kernel":
            errors.setdefault(layer, {})[path[1][0]] = relative(x, back.reshape(x.shape))
        return new.reshape(*x.shape[:-1], -1)

    return Converted(_rebuilt(model, config, change), errors)


def to_cla(model: Transformer, *, factor: int = 2) -> Converted:
    """Layers in groups of `factor` that share keys and values: a group's projections become their
    mean in its first layer, the others drop theirs. Errors are of every layer's projections."""
    old = model.config
    need(not old.kv_source, "kv_source", "a model whose layers share nothing", old.kv_source)
    config = dataclasses.replace(old, **cla(old.num_layers, factor))
    owned = ("k_proj", "v_proj", "kv_a_proj", "k_norm", "kv_a_norm")
    errors: dict[int, dict[str, float]] = {}

    def change(layer: int, path: tuple, x: np.ndarray) -> np.ndarray:
        if path[1] not in owned:
            return x
        group = [n for n in range(old.num_layers) if config.source_of(n) == layer]
        each = {n: _array(model, n, path) for n in group}
        mean = np.mean(list(each.values()), axis=0)
        if path[-1] == "kernel":
            for n, own in each.items():
                name = "latent" if path[1] == "kv_a_proj" else path[1][0]
                errors.setdefault(n, {})[name] = relative(own, mean)
        return mean

    return Converted(_rebuilt(model, config, change), errors)


def to_latent(
    model: Transformer, *, kv_lora_rank: int, qk_rope_head_dim: int | None = None
) -> Converted:
    """Keys and values of all heads from one latent: the best of rank `kv_lora_rank` for the joint
    projections [W_K, W_V], by their singular values.

    RoPE has no place in a latent, so some of each key's channels leave it: the fastest-turning
    `qk_rope_head_dim` (half by default) become the one rotated key of all heads, their mean; the
    others lose their rotation. And the latent is normed, which is the identity only for inputs of
    unit variance. So this is a start for training, not a copy. Errors are of the weights of keys,
    the heads' mean counted in, and of values.
    """
    old = model.config
    H, R = old.head_dim, qk_rope_head_dim or old.head_dim // 2
    need(old.mla is None, "model", "one without latent attention", "mla")
    plain = old.qk_norm == "none" and not (old.attention_bias or old.rope_interleave)
    plain = plain and not (old.attention_sinks or old.rope_local or old.kv_norm)
    need(plain, "model", "plain attention: no biases, QK-norm, sinks or second RoPE", "another")
    need(old.rope.type != "dynamic", "rope.type", "a fixed RoPE", old.rope.type)
    need(0 < R < H and R % 2 == 0, "qk_rope_head_dim", f"an even number below {H}", R)
    most = min(old.hidden_size, old.num_kv_heads * (2 * H - R))
    need(0 < kv_lora_rank <= most, "kv_lora_rank", f"1 to {most}", kv_lora_rank)
    scale = H**-0.5 if old.attention_scale is None else old.attention_scale
    mla = MLAConfig(kv_lora_rank, H - R, R, H)
    config = dataclasses.replace(
        old,
        mla=mla,
        num_kv_heads=old.num_heads,
        head_dim=H,
        attention_scale=scale,
        rope=dataclasses.replace(old.rope, theta=old.rope.theta ** (R / H)),  # the same angles
    )
    turned = _turned_channels(H, R)
    kept = np.setdiff1d(np.arange(H), turned)
    errors: dict[int, dict[str, float]] = {}
    parts = {layer: _factor(model, layer, kept, turned, kv_lora_rank) for layer in old.owners}

    def change(layer: int, path: tuple, x: np.ndarray) -> np.ndarray:
        owner = old.source_of(layer)
        errors.setdefault(owner, parts[owner].errors)
        if path[1] == "q_proj":
            heads = x.reshape(-1, old.num_heads, H)
            return heads[..., np.concatenate([kept, turned])].reshape(x.shape)
        return x

    def new(layer: int, path: tuple) -> np.ndarray:
        made = parts[old.source_of(layer)]
        return {"kv_a_proj": made.down, "kv_a_norm": made.norm, "kv_b_proj": made.up}[path[1]]

    return Converted(_rebuilt(model, config, change, new), errors)


class _Factors(NamedTuple):
    down: np.ndarray  # D C+R
    norm: np.ndarray  # C
    up: np.ndarray  # C N(U+W)
    errors: dict[str, float]


def _turned_channels(head_dim: int, count: int) -> np.ndarray:
    """The channels of the `count / 2` fastest pairs, halves as RoPE splits them."""
    pairs = np.arange(count // 2)
    return np.concatenate([pairs, pairs + head_dim // 2])


def _factor(
    model: Transformer, layer: int, kept: np.ndarray, turned: np.ndarray, rank: int
) -> _Factors:
    """One owner's projections in the form of latent attention."""
    c = model.config
    K, H, G = c.num_kv_heads, c.head_dim, c.group_size
    k, v = (
        _array(model, layer, ("attention", name, "kernel")).reshape(-1, K, H).astype(np.float64)
        for name in ("k_proj", "v_proj")
    )
    joint = np.concatenate([k[..., kept], v], axis=-1)  # D K U+W
    u, s, vt = np.linalg.svd(joint.reshape(joint.shape[0], -1), full_matrices=False)
    size = np.sqrt(np.mean(s[:rank] ** 2))  # so that a latent has unit variance, as its norm wants
    down, up = u[:, :rank] * s[:rank] / size, vt[:rank] * size
    rope_key = k[..., turned].mean(1)  # D R
    low = (down @ up).reshape(joint.shape)
    shared = np.broadcast_to(rope_key[:, None], k[..., turned].shape)
    both = np.concatenate([low[..., : kept.size], shared], axis=-1)
    want = np.concatenate([k[..., kept], k[..., turned]], axis=-1)
    errors = {"k": relative(want, both), "v": relative(v, low[..., kept.size :])}
    heads = np.repeat(up.reshape(rank, K, -1), G, axis=1)  # a latent's key for each query head
    ones = np.ones((rank,))
    return _Factors(np.concatenate([down, rope_key], 1), ones, heads.reshape(rank, -1), errors)


def relative(want: np.ndarray, got: np.ndarray) -> float:
    """|want - got|^2 / |want|^2."""
    want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
    return float(((want - got) ** 2).sum() / (want**2).sum())


def _array(model: Transformer, layer: int, path: tuple) -> np.ndarray:
    found = model.stack.layer_array(layer, *path)
    assert found is not None
    return np.asarray(found.astype(jnp.float32))


def _rebuilt(
    model: Transformer,
    config: ModelConfig,
    change: Callable[[int, tuple, np.ndarray], np.ndarray],
    new: Callable[[int, tuple], np.ndarray] | None = None,
) -> Transformer:
    """A model of `config` in the old one's form: every parameter of a layer through `change`, those
    that the old one lacks from `new`."""
    made = nnx.eval_shape(
        lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=model.dtype, form=model.stack.form)
    )
    graphdef, state = nnx.split(made)
    old = dict(nnx.to_flat_state(nnx.state(model)))
    flat = dict(nnx.to_flat_state(state))
    for path, variable in flat.items():
        if path[0] != "stack":
            flat[path] = variable.replace(old[path][...])
            continue
        layers, inner = _layers_of(made, path)
        values = [_value(model, layer, inner, change, new) for layer in layers]
        value = np.stack(values).reshape(variable.shape)
        flat[path] = variable.replace(jnp.asarray(value, variable.dtype))
    return nnx.merge(graphdef, nnx.from_flat_state(list(flat.items())))


def _layers_of(model: Transformer, path: tuple) -> tuple[tuple[int, ...], tuple]:
    if path[1] == "layers":
        return (path[2],), path[3:]
    return model.stack.plan[path[2]].layers(path[3]), path[4:]


def _value(model: Transformer, layer: int, path: tuple, change: Any, new: Any) -> np.ndarray:
    found: Float[Array, "..."] | None = model.stack.layer_array(layer, *path)
    if found is None:
        return new(layer, path)
    return change(layer, path, np.asarray(found.astype(jnp.float32)))
