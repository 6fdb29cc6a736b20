"""Attention to cached latents (DeepSeek-V2 2405.04434, appendix C): one latent and one rotated key
a token, for all heads.

A head's key is [W_uk c, k_r], its value W_uv c. Few queries are *absorbed*: W_uk is moved to the
query, which then meets the latent itself as key and as value, and W_uv follows the weighted sum.
Many queries *expand*: keys and values of all heads are made of the latents, tile by tile, since a
score then costs U + R + W products instead of 2 C + R. Both are equal to rounding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import codecs
from kvjax.cache import kernel
from kvjax.cache.attend import (
    Chunk,
    How,
    LayerView,
    beyond,
    chunk_part,
    exact_seen,
    pages_seen,
)
from kvjax.cache.spec import GroupSpec
from kvjax.cache.turning import turned_back
from kvjax.codecs.base import Codec
from kvjax.config import need
from kvjax.layers.rope import apply_rope, rope_tables
from pallas_kernels.paged_attention import paged_partial
from pallas_kernels.softmax import Partial, attend_tile, finish, merge

# Shapes: N heads, C latent, R rotated key, U key without position, W value, M heads that attend:
# 1 when absorbed, N when expanded.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentChunk:
    """As `Chunk`, of latent attention."""

    q: Float[Array, "B A N U"]
    q_rope: Float[Array, "B A N R"]
    latent: Float[Array, "B T 1 C"]
    k_rope: Float[Array, "B T 1 R"]
    up_k: Float[Array, "C N U"]
    up_v: Float[Array, "C N W"]
    length: Int[Array, "B"]
    new: Int[Array, "B"]
    at: Int[Array, "B A"] | None
    how: How = dataclasses.field(metadata={"static": True})

    def angles(self, positions: Int[Array, "B S"]) -> tuple[Array, Array]:
        """cos and sin of positions, for rotated keys."""
        assert self.how.rope is not None
        return rope_tables(self.how.rope, self.q_rope.shape[-1], positions, self.length + self.new)


def latent_codecs(pair: tuple[Codec, Codec], rope_bits: int | None) -> tuple[Codec, Codec]:
    """The codecs of latents and of rotated keys. A latent is key and value, so its codec is one per
    token: that of both. Raises ValueError on pairs that treat them unlike."""
    k_codec, v_codec = pair
    raw = k_codec.name == v_codec.name == "raw"
    same = k_codec == v_codec and not k_codec.pre_rope
    free = not k_codec.param_shapes(num_kv_heads=1, head_dim=64) if same else True
    need(
        raw or (same and free),
        "kv-cache-dtype",
        "one codec for keys and values that works token by token, as a latent is both (raw, int8,"
        " int4, int4-hadamard, fp8, turboquant4)",
        f"{codecs.name_of(k_codec)}+{codecs.name_of(v_codec)}",
        "Take turboquant4 or int4. Calibrated codecs (klt, pca, kvquant) are fitted to heads of"
        " keys and of values, which latent attention does not cache.",
    )
    return v_codec, rope_codec(rope_bits)


def rope_codec(bits: int | None) -> Codec:
    """The codec of rotated keys: exact, or integers per token."""
    if bits is None:
        return codecs.get("raw", role="v")
    return codecs.get("int8") if bits == 8 else codecs.get("int4", bits=bits)


def absorbs(queries: int, *, latent: int, key: int, value: int) -> bool:
    """Whether attending to the latents themselves costs fewer products than expanding them.

    A score and its share of the output cost 2 C absorbed, U + W expanded (and R more in both);
    expanding a token costs C (U + W) once for all queries.
    """
    return queries * (2 * latent - key - value) <= latent * (key + value)


def dense_latent(chunk: LatentChunk, window: int | None) -> Float[Array, "B A N W"]:
    """Attention of a chunk to itself alone."""
    return _finish(chunk, chunk_part(_as_chunk(chunk), window))


@jax.jit  # traced once for all layers of a group; XLA inlines the calls
def attend_latent(layer: LayerView, chunk: LatentChunk) -> Float[Array, "B A N W"]:
    """See `KVCache.attend_latent`."""
    spec = layer.spec
    if layer.evicted is not None:  # the cache numbers its tokens without the evicted ones
        chunk = dataclasses.replace(chunk, length=chunk.length - layer.evicted)
    plain = _as_chunk(chunk)
    part = merge(_exact_part(layer, chunk, plain), chunk_part(plain, spec.window))
    if spec.pages_per_row:
        part = merge(part, _paged_part(layer, chunk, plain))
    return _finish(chunk, part)


def _exact_part(layer: LayerView, chunk: LatentChunk, plain: Chunk) -> Partial:
    spec, how = layer.spec, chunk.how
    if spec.heavy:
        assert layer.positions is not None
        valid = layer.positions[:, 0] >= 0  # B E
        seen = valid[:, None, None]
    else:
        valid, seen = exact_seen(spec, plain)
    latent = jnp.swapaxes(layer.k_exact, 2, 3)  # B 1 E C
    latent = jnp.where(valid[:, None, :, None], latent, 0)  # an unused slot may hold anything
    token = spec.token_in_slot(chunk.length)
    k, v = _keys_values(chunk, latent, _turned(layer, chunk, layer.v_exact[:, 0], token)[:, None])
    k_t = jnp.swapaxes(k, 2, 3)
    n = spec.sinks if spec.turns and how.rope is not None and chunk.q.shape[1] > 1 else 0
    options: dict[str, Any] = {"scale": how.scale, "softcap": how.softcap}
    part = attend_tile(plain.rows, k_t[..., n:], v[:, :, n:], seen[..., n:], **options)
    if not n:
        return part
    # later tokens of the call stand no farther from the sinks than the first
    near = _as_chunk(dataclasses.replace(chunk, q_rope=_as_near(spec, chunk))).rows
    return merge(part, attend_tile(near, k_t[..., :n], v[:, :, :n], seen[..., :n], **options))


def _turned(
    layer: LayerView, chunk: LatentChunk, k_rope: Float[Array, "B S R"], token: Int[Array, "B S"]
) -> Float[Array, "B S R"]:
    """Cached rotated keys as the queries meet them: a stream turns them when they are read."""
    if not layer.spec.turns or chunk.how.rope is None:
        return k_rope
    angles = chunk.angles(layer.position(token, chunk.length))
    return apply_rope(k_rope[:, :, None], *angles, interleave=chunk.how.interleave)[:, :, 0]


def _as_near(spec: GroupSpec, chunk: LatentChunk) -> Float[Array, "B A N R"]:
    """The chunk's rotated queries, turned back to where a full stream has its newest token."""
    rope = chunk.how.rope
    assert rope is not None
    at = beyond(spec, chunk.length, _as_chunk(chunk).tokens)
    return turned_back(chunk.q_rope, chunk.angles(at), rope)


def absorbed_query(
    q: Float[Array, "B A N U"], q_rope: Float[Array, "B A N R"], up_k: Float[Array, "C N U"]
) -> Float[Array, "B A 1 N C+R"]:
    """Queries that meet latents and rotated keys themselves, of one head."""
    return jnp.concatenate([jnp.einsum("banu,cnu->banc", q, up_k), q_rope], axis=-1)[:, :, None]


def _absorbed(chunk: LatentChunk) -> bool:
    C, _, U = chunk.up_k.shape
    return absorbs(chunk.q.shape[1], latent=C, key=U, value=chunk.up_v.shape[2])


def _as_chunk(chunk: LatentChunk) -> Chunk:
    """The chunk with the heads that attend: one of N queries, or N of one."""
    k, v = _keys_values(chunk, *(jnp.moveaxis(x, 1, 2) for x in (chunk.latent, chunk.k_rope)))
    k, v = jnp.moveaxis(k, 2, 1), jnp.moveaxis(v, 2, 1)
    if _absorbed(chunk):
        q = absorbed_query(chunk.q, chunk.q_rope, chunk.up_k)
    else:
        q = jnp.concatenate([chunk.q, chunk.q_rope], axis=-1)[:, :, :, None]  # B A N 1 U+R
    return Chunk(q, k, v, chunk.length, chunk.new, chunk.at, None, chunk.how)


def _keys_values(
    chunk: LatentChunk, latent: Float[Array, "*lead 1 S C"], k_rope: Float[Array, "*lead 1 S R"]
) -> tuple[Float[Array, "*lead M S H"], Float[Array, "*lead M S V"]]:
    """What the queries meet of some tokens."""
    if _absorbed(chunk):
        return jnp.concatenate([latent, k_rope], axis=-1), latent
    N = chunk.up_k.shape[1]
    one = latent[..., 0, :, :]
    k = jnp.einsum("...sc,cnu->...nsu", one, chunk.up_k)
    k_rope = jnp.broadcast_to(k_rope, (*k.shape[:-1], k_rope.shape[-1]))
    v = jnp.einsum("...sc,cnw->...nsw", one, chunk.up_v)
    assert k.shape[-3] == N
    return jnp.concatenate([k, k_rope], axis=-1), v


def _finish(chunk: LatentChunk, part: Partial) -> Float[Array, "B A N W"]:
    B, A, N, _ = chunk.q.shape
    out = finish(part).astype(chunk.q.dtype)  # B M Q V
    out = jnp.moveaxis(out.reshape(B, N, A, out.shape[-1]), 2, 1)  # B A N V
    return jnp.einsum("banc,cnw->banw", out, chunk.up_v) if _absorbed(chunk) else out


def _paged_part(layer: LayerView, chunk: LatentChunk, plain: Chunk) -> Partial:
    """The pages' part, its values in the space of the chunk's. Absorbed, the codec's own space is
    left once, after the sum; expanded, tile by tile, as W_uk and W_uv want the latents."""
    spec = layer.spec
    codec, rope = spec.k_codec, spec.v_codec
    params, rope_params = layer.k_params, layer.v_params
    q, dtype, C = plain.rows, chunk.q.dtype, spec.head_dim

    def parts(codes: Any, tokens: Int[Array, "S"]) -> tuple[Array, Array]:
        """Latents, in their codec's space, and rotated keys of a tile: [B, n, 1, S, ...]."""
        if spec.packed is not None:
            latent, k_rope = (x.astype(dtype) for x in spec.packed.unpack(codes[0]["page"]))
        else:
            latent = codec.decode(codes[0], params, dtype)
            k_rope = rope.decode(codes[1], rope_params, dtype)
        k_rope = rope.finish_output(k_rope, rope_params)
        flat = k_rope.reshape(k_rope.shape[0], -1, k_rope.shape[-1])
        token = spec.paged_token(tokens, chunk.length)
        return latent, _turned(layer, chunk, flat, token).reshape(k_rope.shape)

    if _absorbed(chunk):
        q_latent = codec.prepare_query(q[..., :C], params)
        if kernel.takes(spec, plain):
            q_rope = rope.prepare_query(q[..., C:], rope_params)
            q = jnp.concatenate([q_latent.astype(dtype), q_rope.astype(dtype)], axis=-1)
            part = kernel.kernel_part(layer, plain, q)
            return part._replace(acc=codec.finish_output(part.acc, params).astype(jnp.float32))
        q = jnp.concatenate([q_latent.astype(dtype), q[..., C:]], axis=-1)

        def tile(codes: Any, tokens: Any) -> tuple[Array, Array]:
            latent, k_rope = parts(codes, tokens)
            return jnp.concatenate([latent, k_rope], axis=-1), latent
    else:

        def tile(codes: Any, tokens: Any) -> tuple[Array, Array]:
            latent, k_rope = parts(codes, tokens)
            latent = codec.finish_output(latent.astype(jnp.float32), params).astype(dtype)
            return _keys_values(chunk, latent, k_rope)

    pages = (layer.k_pages, layer.v_pages)
    part = paged_partial(
        q,
        pages,
        pages,
        layer.table,
        spec.used_pages(chunk.length),
        decode_k=lambda codes, tokens: tile(codes, tokens)[0],
        decode_v=lambda codes, tokens: tile(codes, tokens)[1],
        page_size=spec.page_size,
        scale=chunk.how.scale,
        softcap=chunk.how.softcap,
        mask=pages_seen(spec, plain),
    )
    if _absorbed(chunk):
        return part._replace(acc=codec.finish_output(part.acc, params).astype(jnp.float32))
    return part
