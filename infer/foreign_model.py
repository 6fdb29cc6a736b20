"""kvjax's attention and compressed cache in a model that is not kvjax's, in Flax NNX and in Linen.

    python infer/foreign_model.py

`Block` is an own design (a LayerNorm, one attention, a small MLP, no config file); from kvjax it
takes `Attention`, whose keys and values go into a 4-bit paged `KVCache`. The same network is then a
Linen module, by `flax.nnx.bridge`, with the cache as an argument and a result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import bridge

from kvjax import CacheConfig, KVCache, ModelConfig
from kvjax.attending import attending
from kvjax.cache import init_cache
from kvjax.layers.attention import Attention
from kvjax.layers.kinds import Place, layer_kind
from kvjax.layers.rope import rope_tables

# Shapes: B batch, T tokens of a call, D model dim.

#: what the attention is; a foreign model has no other use for it
HEADS = ModelConfig(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    initializer_range=0.1,
)
CACHE = CacheConfig.parse("turboquant4", page_size=32, sinks=4, recent=16)


class Block(nnx.Module):
    """x + attention(norm(x)), then a small MLP."""

    def __init__(self, layer: int, *, rngs: nnx.Rngs):
        self.layer, D = layer, HEADS.hidden_size
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        kind = layer_kind(HEADS, layer)
        self.attention = Attention(HEADS, kind, dtype=jnp.dtype("float32"), rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(D, 2 * D, rngs=rngs), nnx.tanh, nnx.Linear(2 * D, D, rngs=rngs)
        )

    def __call__(self, x, rope, attend):
        place = Place(
            layer_kind(HEADS, self.layer), self.layer, (self.layer,), self.layer, (self.layer,)
        )
        h = self.norm(x)
        out, kv = self.attention(h, rope, attend(place), source=h, source_rope=rope, shared=None)
        x = x + out
        return x + self.mlp(x), kv


class Tagger(nnx.Module):
    """A sequence tagger with a memory: scores of 5 tags for each token it is fed."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(HEADS.vocab_size, HEADS.hidden_size, rngs=rngs)
        self.blocks = nnx.List([Block(i, rngs=rngs) for i in range(HEADS.num_layers)])
        self.head = nnx.Linear(HEADS.hidden_size, 5, rngs=rngs)

    def __call__(self, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        B, T = tokens.shape
        new = jnp.full((B,), T, jnp.int32)
        positions = cache.length[:, None] + jnp.arange(T)[None]
        rope = rope_tables(HEADS.rope, HEADS.head_dim, positions, cache.length + new)
        x, attend, made = self.embed(tokens), attending(HEADS, new, cache), []
        for block in self.blocks:
            x, kv = block(x, rope, attend)
            made.append(kv)
        keys, values = (jnp.stack([kv[i] for kv in made]) for i in (2, 1))  # stored keys, values
        return self.head(x), cache.append(keys, values, new=new)


def empty_cache(batch: int, max_len: int) -> KVCache:
    """The tagger's cache: 4 bits a number once a page is sealed."""
    return init_cache(
        HEADS, batch=batch, max_len=max_len, config=CACHE, dtype="float32", apart=True
    )


def run_nnx(tokens: jax.Array, calls: list[int]) -> jax.Array:
    """Tags, the tokens fed in calls of these lengths."""
    graphdef, state = nnx.split(Tagger(rngs=nnx.Rngs(0)))

    @jax.jit
    def step(state, tokens, cache):
        return nnx.merge(graphdef, state)(tokens, cache)

    cache, out, at = empty_cache(*tokens.shape), [], 0
    for n in calls:
        tags, cache = step(state, tokens[:, at : at + n], cache)
        out.append(tags)
        at += n
    return jnp.concatenate(out, axis=1)


def run_linen(tokens: jax.Array, calls: list[int]) -> jax.Array:
    """The same as a Linen module: `init`, `apply`, parameters in a dict."""
    module = bridge.to_linen(Tagger)
    cache = empty_cache(*tokens.shape)
    variables = module.init(jax.random.key(0), tokens[:, :1], cache)
    step = jax.jit(module.apply)
    out, at = [], 0
    for n in calls:
        tags, cache = step(variables, tokens[:, at : at + n], cache)
        out.append(tags)
        at += n
    return jnp.concatenate(out, axis=1)


def main() -> None:
    tokens = jax.random.randint(jax.random.key(1), (2, 120), 0, HEADS.vocab_size)
    whole = run_nnx(tokens, [120])
    for name, run in (("NNX", run_nnx), ("Linen", run_linen)):
        pieces = run(tokens, [60, *[1] * 60])
        print(f"{name}: tags {pieces.shape}, largest score {float(jnp.max(pieces)):.3f}")
    piece = run_nnx(tokens, [60, *[1] * 60])
    far = float(jnp.abs(piece - whole).mean() / whole.std())
    print(f"4-bit cache against none: {far:.3f} deviations")


if __name__ == "__main__":
    main()
