"""Attention to a cached row: exact tokens, sealed pages and the chunk itself, merged exactly."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import kernel
from kvjax.cache.slots import slot_keys, slot_values
from kvjax.cache.spec import GroupSpec
from kvjax.cache.turning import Turn, rope_tile, turned_back
from kvjax.codecs.base import Codec, Codes, Params
from kvjax.config import RopeConfig
from kvjax.layers.rope import rope_tables
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.paged_attention import paged_partial, pool_partial
from pallas_kernels.softmax import Partial, attend_tile, finish, merge, soft_cap, with_sinks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerView:
    """What one layer reads of its group's cache. Equal shapes share one trace: no layer number."""

    k_pages: Codes  # leaves [P, K, ...], perhaps with other layers' pages
    v_pages: Codes
    k_exact: Float[Array, "B K H E"]
    v_exact: Float[Array, "B K E R"]
    table: Int[Array, "B M"]  # page ids in k_pages
    k_params: Params
    v_params: Params
    spec: GroupSpec = dataclasses.field(metadata={"static": True})
    evicted: Int[Array, "B"] | None = None  # tokens of each row that are gone
    positions: Int[Array, "B K C"] | None = None  # in the text, of each head's first C tokens

    def position(
        self, tokens: Int[Array, "B S"], length: Int[Array, "B"]
    ) -> Int[Array, "B S"] | Int[Array, "B K S"]:
        """What RoPE sees of the row's tokens, which are numbered as the cache numbers them."""
        if self.spec.stream is not None:
            return jnp.where(
                tokens < self.spec.sinks, tokens, tokens - self.spec.shift(length)[:, None]
            )
        if self.evicted is None:
            return tokens
        tokens = tokens[:, None]  # B 1 S
        later = tokens + self.evicted[:, None, None]
        if self.positions is None:
            return later[:, 0]
        C = self.positions.shape[-1]
        at = jnp.broadcast_to(
            jnp.clip(tokens, 0, C - 1), (*self.positions.shape[:2], tokens.shape[2])
        )
        return jnp.where(tokens < C, jnp.take_along_axis(self.positions, at, axis=2), later)

    @property
    def one_row(self) -> bool:
        """All pages are one row's, and are used where they lie."""
        pages = {leaf.shape[0] for leaf in jax.tree.leaves(self.k_pages)}
        in_place = self.spec.k_codec.in_place and self.spec.v_codec.in_place
        in_place &= self.spec.kernel == "xla"
        in_place &= self.spec.window is None  # whose pages are few, and not in the tokens' order
        return in_place and self.table.shape[0] == 1 and pages == {self.table.shape[1]}


class How(NamedTuple):
    """What is static about a layer's attention. rope: of cached keys, for codecs that keep them
    before it; None where the layer does not rotate."""

    scale: float
    rope: RopeConfig | None = None
    interleave: bool = False
    softcap: float | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """The tokens of one call, in one layer: what attends, and what else it may see."""

    q: Float[Array, "B A K G H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    length: Int[Array, "B"]  # tokens of each row in the cache before this call
    new: Int[Array, "B"]  # real tokens of each row in this call
    at: Int[Array, "B A"] | None  # which of the T tokens attend; None: all
    sinks: Float[Array, "K G"] | None  # learned logits that take a share of the softmax
    how: How = dataclasses.field(metadata={"static": True})
    evicted: Int[Array, "B"] | None = None  # tokens that the text has besides

    def angles(self, positions: Int[Array, "B S"]) -> tuple[Array, Array]:
        """cos and sin of positions, for keys that are stored before RoPE."""
        assert self.how.rope is not None
        total = self.length + self.new
        total = total if self.evicted is None else total + self.evicted
        total = jnp.repeat(total, positions.shape[0] // total.shape[0], axis=0)
        return rope_tables(self.how.rope, self.q.shape[-1], positions, total)

    @property
    def rows(self) -> Float[Array, "B K Q H"]:
        """Queries by KV head; all of them, Q = G A, see the same history."""
        B, A, K, G, H = self.q.shape
        return jnp.moveaxis(self.q, 1, 3).reshape(B, K, G * A, H)

    @property
    def tokens(self) -> Int[Array, "B A"]:
        """Which tokens of their rows the queries are."""
        at = jnp.arange(self.q.shape[1])[None] if self.at is None else self.at
        return self.length[:, None] + at

    def within(self, tokens: Int[Array, "B S"], window: int) -> Bool[Array, "B 1 Q S"]:
        """Which cached tokens each query's window reaches."""
        oldest = jnp.tile(self.tokens, (1, self.q.shape[3])) - window  # B Q
        return (tokens[:, None] > oldest[:, :, None])[:, None]


@jax.jit  # traced once for all layers of a group; XLA inlines the calls
def attend_layer(layer: LayerView, chunk: Chunk) -> Float[Array, "B A K G H"]:
    """See `KVCache.attend`. The chunk's tokens are attended as they came, whatever the codec."""
    B, A, K, G, H = chunk.q.shape
    if layer.evicted is not None:  # the cache numbers its tokens without the evicted ones
        chunk = dataclasses.replace(
            chunk, length=chunk.length - layer.evicted, evicted=layer.evicted
        )
    exact = _slot_part if layer.spec.heavy else _exact_part
    part = merge(exact(layer, chunk), chunk_part(chunk, layer.spec.window))
    if layer.spec.pages_per_row and not layer.spec.heavy:
        part = _sealed_part(layer, chunk, part)
    if chunk.sinks is not None:
        part = with_sinks(part, jnp.repeat(chunk.sinks, A, axis=1)[None])
    out = finish(part).astype(chunk.q.dtype).reshape(B, K, G, A, H)
    return jnp.moveaxis(out, 3, 1)  # B A K G H


def exact_seen(spec: GroupSpec, chunk: Chunk) -> tuple[Bool[Array, "B E"], Bool[Array, "B 1 Q E"]]:
    """Exact slots that hold a token, and those that each query may see."""
    valid = spec.exact_valid(chunk.length)
    seen = valid[:, None, None, :]
    if spec.window is not None:
        token = spec.token_in_slot(chunk.length)
        near = chunk.within(token, spec.window)
        seen = seen & (near | (token < spec.sinks)[:, None, None] if spec.stream else near)
    return valid, seen


def pages_seen(spec: GroupSpec, chunk: Chunk) -> Callable[[Array], Array] | None:
    """Which tokens of a tile of pages each query may see, beyond that they are there."""
    window = spec.window
    if window is None:
        return None
    return lambda tokens: chunk.within(spec.paged_token(tokens, chunk.length), window)


def _exact_part(layer: LayerView, chunk: Chunk) -> Partial:
    spec, how = layer.spec, chunk.how
    valid, seen = exact_seen(spec, chunk)
    k_t = layer.k_exact
    v = jnp.where(valid[:, None, :, None], layer.v_exact, 0)  # an unused slot may hold anything
    if spec.turns and how.rope is not None:
        token = spec.token_in_slot(chunk.length)
        k_t = rope_tile(k_t, chunk, layer.position(token, chunk.length))
    apart = spec.stream is not None and spec.turns and how.rope is not None
    n = spec.sinks if apart and chunk.q.shape[1] > 1 else 0
    options: dict[str, Any] = {"scale": how.scale, "softcap": how.softcap}
    part = attend_tile(chunk.rows, k_t[..., n:], v[:, :, n:], seen[..., n:], **options)
    if not n:
        return part
    # later tokens of the call stand no farther from the sinks than the first
    near = _as_near(spec, chunk)
    return merge(part, attend_tile(near, k_t[..., :n], v[:, :, :n], seen[..., :n], **options))


def _slot_part(layer: LayerView, chunk: Chunk) -> Partial:
    """Attention to slots that single tokens take from each other (`kvjax.cache.heavy`)."""
    assert layer.positions is not None
    spec, how, q = layer.spec, chunk.how, chunk.rows
    options: dict[str, Any] = {"scale": how.scale, "softcap": how.softcap}
    valid = layer.positions >= 0  # B K E+Z
    v = jnp.where(valid[..., : spec.ring, None], layer.v_exact, 0)
    part = attend_tile(q, layer.k_exact, v, valid[:, :, None, : spec.ring], **options)
    if not spec.coded:
        return part
    dtype = q.dtype
    turned = spec.k_codec.prepare_query(q, layer.k_params).astype(dtype)
    tile = slot_keys(layer, dtype), slot_values(layer, dtype), valid[:, :, None, spec.ring :]
    coded = attend_tile(turned, *tile, **options)
    acc = spec.v_codec.finish_output(coded.acc, layer.v_params).astype(jnp.float32)
    return merge(part, coded._replace(acc=acc))


def _as_near(spec: GroupSpec, chunk: Chunk) -> Float[Array, "B K Q H"]:
    """The chunk's queries, turned back to where a full stream has its newest token."""
    assert chunk.how.rope is not None
    at = beyond(spec, chunk.length, chunk.tokens)
    B, A, K, G, H = chunk.q.shape
    q = turned_back(chunk.q.reshape(B, A, K * G, H), chunk.angles(at), chunk.how.rope)
    return dataclasses.replace(chunk, q=q.reshape(chunk.q.shape)).rows


def beyond(
    spec: GroupSpec, length: Int[Array, "B"], tokens: Int[Array, "B A"]
) -> Int[Array, "B A"]:
    """How far tokens of a call stand behind the place of a full stream's newest token."""
    assert spec.stream is not None
    full = jnp.maximum(length, spec.stream.sinks + spec.stream.recent)
    return jnp.maximum(0, tokens - full[:, None])


def chunk_part(chunk: Chunk, window: int | None) -> Partial:
    """Attention of the chunk to itself."""
    rows, how = chunk.rows, chunk.how
    if chunk.k.shape[1] > 1:
        part = flash_attention(
            chunk.q,
            chunk.k,
            chunk.v,
            lengths=chunk.new,
            scale=how.scale,
            softcap=how.softcap,
            window=window,
            at=chunk.at,
        )
        return jax.tree.map(lambda x: x.reshape(*rows.shape[:3], *x.shape[4:]), part)
    # One token sees itself; a row without a new token has no use for its output.
    k, v = (jnp.moveaxis(x, 1, 2).astype(jnp.float32) for x in (chunk.k, chunk.v))  # B K 1 H
    score = soft_cap(jnp.sum(rows.astype(jnp.float32) * k, axis=-1) * how.scale, how.softcap)
    return Partial(jnp.broadcast_to(v, (*score.shape, v.shape[-1])), score, jnp.ones_like(score))


def _sealed_part(layer: LayerView, chunk: Chunk, others: Partial) -> Partial:
    """The others with the sealed pages merged in."""
    used, how = layer.spec.used_pages(chunk.length), chunk.how
    if not layer.one_row or layer.k_pages["x"].dtype != chunk.q.dtype:
        return _paged_part(layer, chunk, others, used)

    def whole(part: Partial) -> Partial:
        k_t, v = layer.k_pages["x"], layer.v_pages["x"]
        scores = functools.partial(pool_partial, scale=how.scale, softcap=how.softcap)
        return merge(part, scores(chunk.rows, k_t, v, layer.table, used))

    # no copy, but every page of the row is read, used or not
    most = 2 * used[0] >= layer.table.shape[1]
    return jax.lax.cond(most, whole, lambda part: _paged_part(layer, chunk, part, used), others)


def _paged_part(layer: LayerView, chunk: Chunk, others: Partial, used: Int[Array, "B"]) -> Partial:
    """The pages' part merged into the others, while they are read where values need no way back."""
    spec, v_codec = layer.spec, layer.spec.v_codec
    q = spec.k_codec.prepare_query(chunk.rows, layer.k_params)
    q = q.astype(chunk.q.dtype)
    turn = Turn(layer, chunk, q) if spec.turns and chunk.how.rope is not None else None
    decode_k, decode_v, tokens_last = _decoders(layer, chunk, turn)

    def tiles(q: Array, start: Partial | None) -> Partial:
        return paged_partial(
            q,
            layer.k_pages,
            layer.v_pages if spec.packed is None else layer.k_pages,
            layer.table,
            used,
            decode_k=decode_k,
            decode_v=decode_v,
            page_size=spec.page_size,
            scale=chunk.how.scale,
            softcap=chunk.how.softcap,
            mask=pages_seen(spec, chunk),
            start=start,
            tokens_last=tokens_last,
            queries=None if turn is None or turn.whole else turn.queries,
        )

    if kernel.takes(spec, chunk):
        part = kernel.kernel_part(layer, chunk, q, tiles)
    elif type(v_codec).finish_output is Codec.finish_output:
        return tiles(q, others)
    else:
        part = tiles(q, None)
    acc = v_codec.finish_output(part.acc, layer.v_params).astype(jnp.float32)
    return merge(others, part._replace(acc=acc))


def _decoders(layer: LayerView, chunk: Chunk, turn: Turn | None) -> tuple[Callable, Callable, bool]:
    """`decode_k`, `decode_v` and `tokens_last` of `paged_partial` for a layer's pages."""
    spec, k_codec, dtype = layer.spec, layer.spec.k_codec, chunk.q.dtype
    packed, params = spec.packed, (layer.k_params, layer.v_params)
    tokens_last = packed is None and k_codec.tokens_last and turn is None

    def read(codes: Any) -> Array:
        if packed is not None:
            return packed.unpack(codes["page"], params)[0].astype(dtype)
        decode = k_codec.decode_t if tokens_last else k_codec.decode
        return decode(codes, layer.k_params, dtype)

    def decode_k(codes: Any, tokens: Int[Array, "S"]) -> Any:
        if turn is None:
            return read(codes)
        if turn.whole:
            return turn.turned(read(codes), tokens)
        # what a branch gives is an array of its own: else XLA decodes once for each of its two uses
        shape = jax.eval_shape(read, codes)
        in_use = tokens[0] < spec.page_size * jnp.max(spec.used_pages(chunk.length))
        nothing = functools.partial(jnp.zeros, shape.shape, shape.dtype)
        return turn.keys(jax.lax.cond(in_use, read, lambda _: nothing(), codes), tokens)

    def decode_v(codes: Any, tokens: Int[Array, "S"]) -> Array:
        if packed is not None:
            return packed.unpack(codes["page"], params)[1].astype(dtype)
        return spec.v_codec.decode(codes, layer.v_params, dtype)

    return decode_k, decode_v, tokens_last
