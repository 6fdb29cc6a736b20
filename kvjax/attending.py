"""What a layer's queries attend to: the call's own tokens, or a cache and them.

The `Attend` and `LatentAttend` that `LayerStack` asks for, one a layer and call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import KVCache
from kvjax.cache.attend import How
from kvjax.cache.heavy import Scored
from kvjax.cache.kv_cache import Kept
from kvjax.cache.latent import LatentChunk, absorbed_query, absorbs, dense_latent
from kvjax.config import ModelConfig
from kvjax.eviction import Prompt, select
from kvjax.layers.attention import KV
from kvjax.layers.kinds import Place
from kvjax.layers.mla import Up
from kvjax.layers.retention import State, retain
from kvjax.layers.rope import score_factor
from pallas_kernels.devices import tpu_generation
from pallas_kernels.flash_attention import flash_attention, unsupported
from pallas_kernels.flash_attention.entry import OLDEST
from pallas_kernels.softmax import finish, with_sinks


def how_of(config: ModelConfig, place: Place) -> How:
    """What is static about a layer's attention."""
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    if config.mla is not None:
        scale = scale * score_factor(config.rope)
    return How(scale, place.kind.rope, config.rope_interleave, config.attn_logit_softcap)


def attended_by(config: ModelConfig, *, dtype: str, tokens: int) -> str:
    """What computes the attention of a row's new tokens to each other on this machine, in words.

    For programs of one device; on several it is plain XLA (`pallas_kernels.devices`).
    """
    platform = jax.default_backend()
    if platform != "tpu":
        return f"plain XLA (no kernel for {platform})"
    if (tpu_generation() or 0) < OLDEST:
        return f"plain XLA (the kernel needs a TPU of v{OLDEST} or later)"
    heads, groups = config.num_kv_heads, config.num_heads // config.num_kv_heads
    key = value = config.head_dim
    if config.mla is not None:
        mla, heads, groups = config.mla, config.num_heads, 1
        key, value, latent = mla.qk_head_dim, mla.v_head_dim, mla.kv_lora_rank
        if absorbs(tokens, latent=latent, key=mla.qk_nope_head_dim, value=value):
            heads, groups = 1, config.num_heads
            key, value = latent + mla.qk_rope_head_dim, latent
    q = jax.ShapeDtypeStruct((1, tokens, heads, groups, key), jnp.dtype(dtype))
    reason = unsupported(q, jax.ShapeDtypeStruct((1, tokens, heads, value), q.dtype))
    return f"plain XLA ({reason})" if reason else "the TPU kernel"


class Dense:
    """Attention of whole sequences to themselves: training, scoring, calibration."""

    def __init__(self, config: ModelConfig, place: Place, lengths: Int[Array, "B"]):
        self.place, self.lengths, self.how = place, lengths, how_of(config, place)

    def fresh(self, k: Array, v: Array, plain: Array) -> KV:
        return KV(k, v, k)

    def keep(self, q: Array, kv: KV, rope: Any) -> KV:
        return kv

    def __call__(
        self, q: Float[Array, "B A K G H"], kv: KV, *, sinks: Any = None
    ) -> Float[Array, "B A K G H"]:
        part = flash_attention(
            q,
            kv.k,
            kv.v,
            lengths=self.lengths,
            scale=self.how.scale,
            softcap=self.how.softcap,
            window=self.place.kind.window,
            at=self.place.at,
        )
        if sinks is not None:
            part = with_sinks(part, sinks[None, :, :, None])
        return jnp.moveaxis(finish(part), 3, 1).astype(q.dtype)


class DenseLatent(Dense):
    """The same with latent attention."""

    def keep(self, q: Array, q_rope: Array, kv: KV, rope: Any, *, up: Up) -> KV:  # type: ignore[override]
        return kv

    def __call__(self, q: Array, q_rope: Array, kv: KV, *, up: Up) -> Array:  # type: ignore[override]
        zero = jnp.zeros_like(self.lengths)
        chunk = LatentChunk(q, q_rope, kv.k, kv.v, *up, zero, self.lengths, self.place.at, self.how)
        return dense_latent(chunk, self.place.kind.window)


class Cached:
    """Attention of a chunk to a cache and to itself."""

    def __init__(self, config: ModelConfig, place: Place, lengths: Int[Array, "B"], cache: KVCache):
        self.place, self.cache, self.config = place, cache, config
        self.options = {
            "new": lengths,
            "how": how_of(config, place),
            "among": place.sources,
            "at": place.at,
        }

    def fresh(self, k: Array, v: Array, plain: Array) -> KV:
        return KV(k, v, self.cache.stored_keys(self.place.source, k, plain))

    def keep(self, q: Array, kv: KV, rope: Any) -> KV:
        return self._scored(q, kv.k, kv) if self.cache.scores_steps else kv

    def _scored(self, q: Float[Array, "B 1 K G H"], k: Float[Array, "B 1 K H"], kv: KV) -> KV:
        """The step's keys with the attention that it pays; its queries and keys as they meet."""
        source, among = self.place.source, self.place.sources
        mass = self.cache.mass(source, q, k, how=self.options["how"], among=among)
        return kv._replace(stored=Scored(kv.stored, mass))

    def __call__(
        self, q: Float[Array, "B A K G H"], kv: KV, *, sinks: Any = None
    ) -> Float[Array, "B A K G H"]:
        return self.cache.attend(self.place.source, q, kv.k, kv.v, sinks=sinks, **self.options)


class CachedLatent(Cached):
    """The same with latent attention."""

    def fresh(self, k: Array, v: Array, plain: Array) -> KV:
        return KV(k, v, k, self.cache.stored_keys(self.place.source, v, plain))

    def keep(self, q: Array, q_rope: Array, kv: KV, rope: Any, *, up: Up) -> KV:  # type: ignore[override]
        if not self.cache.scores_steps:
            return kv
        both = jnp.concatenate([kv.k, kv.v], axis=-1)  # B 1 1 C+R
        return self._scored(absorbed_query(q, q_rope, up.key), both, kv)

    def __call__(self, q: Array, q_rope: Array, kv: KV, *, up: Up) -> Array:  # type: ignore[override]
        return self.cache.attend_latent(
            self.place.source, q, q_rope, kv.k, kv.v, up=up, **self.options
        )


class Prompted(Dense):
    """Dense attention of a whole prompt, of which each owner keeps what the cache's policy says;
    layers with a window keep what it can still reach."""

    def __init__(self, config: ModelConfig, place: Place, lengths: Int[Array, "B"], cache: KVCache):
        super().__init__(config, place, lengths)
        self.cache = cache
        self.spec = cache.groups[cache.layer_map[place.sources[0]][0]].spec

    def fresh(self, k: Array, v: Array, plain: Array) -> KV:
        return KV(k, v, self.cache.stored_keys(self.place.source, k, plain))

    def keep(self, q: Array, kv: KV, rope: Any) -> KV:
        how = self.how
        prompt = Prompt(q, kv.k, kv.v, self.lengths, rope, how.scale, how.softcap)
        return self._survivors(kv, prompt)

    def _survivors(self, kv: KV, prompt: Prompt) -> KV:
        """What of an owner's keys and values stays."""
        T = kv.k.shape[1]
        chosen, scores = self._chosen(prompt, kv.k.shape[2], min(T, self.cache.most_kept))
        place = jnp.minimum(chosen, T - 1)  # B K C
        at = place[..., None]

        def of(x: Array) -> Array:
            kept = jnp.take_along_axis(jnp.moveaxis(x, 1, 2), at, axis=2)
            return jnp.moveaxis(kept, 2, 1)  # B C K H

        left = jnp.take_along_axis(scores, place, axis=2)
        return kv._replace(stored=Kept(of(kv.stored), chosen, left, T), v_stored=of(kv.v))

    def _chosen(self, prompt: Prompt, heads: int, most: int) -> tuple[Array, Array]:
        """Places `[B, heads, most]` of what stays (T for none), and scores `[B, heads, T]`."""
        (B, T), policy = prompt.k.shape[:2], self.cache.policy
        assert policy is not None
        if self.spec.kept is None:
            at = self.spec.reached(self.lengths)[:, None] + jnp.arange(most)[None]  # B C
            at = jnp.where(at < self.lengths[:, None], at, T)
            at = jnp.broadcast_to(at[:, None], (B, heads, most))
            return at, jnp.zeros((B, heads, T), jnp.float32)
        scores = policy.scores(prompt).astype(jnp.float32)
        scores = jnp.mean(scores, axis=1, keepdims=True) if prompt.joint else scores
        return select(policy, scores, self.lengths, self._keep(T), most), scores

    def _keep(self, longest: int) -> Int[Array, "B"]:
        """How many tokens of each row stay in this layer."""
        policy, judged = self.cache.policy, self.cache.judged
        assert policy is not None
        factors = policy.factors(len(judged))
        counts = {
            f: policy.keep(self.lengths, longest=longest, factor=f) for f in dict.fromkeys(factors)
        }
        if len(counts) == 1:
            return counts[factors[0]]
        each = jnp.stack([counts[f] for f in factors])  # judged layers, B
        ordinal = [0] * (max(judged) + 1)
        for i, owner in enumerate(judged):
            ordinal[owner] = i
        return each[jnp.asarray(ordinal)[self.place.index]]


class Retained:
    """Gated retention from a cache's state of the tokens before, or from nothing."""

    def __init__(
        self,
        config: ModelConfig,
        place: Place,
        lengths: Int[Array, "B"],
        cache: KVCache | None = None,
    ):
        self.place, self.lengths, self.cache = place, lengths, cache
        self.scale = how_of(config, place).scale

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        log_decay: Float[Array, "B T N"],
    ) -> tuple[Float[Array, "B A N H"], State]:
        (B, T, N, H), at = q.shape, self.place.at
        real = (jnp.arange(T)[None] < self.lengths[:, None])[..., None]  # B T 1
        k = jnp.where(real[..., None], k.astype(jnp.float32) * self.scale, 0)
        v = jnp.where(real[..., None], v, 0)
        before = (
            jnp.zeros((B, N, H, H), jnp.float32)
            if self.cache is None
            else self.cache.state_of(self.place.index)
        )
        out, state = retain(q, k, v, jnp.where(real, log_decay, 0), before)
        if at is not None:
            out = jnp.take_along_axis(out, at[..., None, None], axis=1)
        return out, State(state)


class PromptedLatent(Prompted, DenseLatent):
    """The same with latent attention: the policy sees the heads' full keys, turned channels first,
    and all heads keep one set, as they share the latents."""

    fresh = Dense.fresh

    def keep(self, q: Array, q_rope: Array, kv: KV, rope: Any, *, up: Up) -> KV:  # type: ignore[override]
        latent = kv.k[:, :, 0]  # B T C
        k = jnp.einsum("btc,cnu->btnu", latent, up.key)
        k_rope = jnp.broadcast_to(kv.v, (*k.shape[:3], kv.v.shape[-1]))
        k = jnp.concatenate([k_rope, k], axis=-1)
        v = jnp.einsum("btc,cnw->btnw", latent, up.value)
        q = jnp.concatenate([q_rope, q], axis=-1)[:, :, :, None]  # B T N 1 R+U
        how = self.how
        prompt = Prompt(q, k, v, self.lengths, rope, how.scale, how.softcap, joint=True)
        return self._survivors(kv, prompt)


def attending(
    config: ModelConfig, lengths: Int[Array, "B"], cache: KVCache | None
) -> Callable[[Place], Any]:
    """The attention of each layer of a call."""

    def attend(place: Place) -> Any:
        if place.kind.retention:
            return Retained(config, place, lengths, cache)
        latent = config.mla is not None
        if cache is None:
            return (DenseLatent if latent else Dense)(config, place, lengths)
        if cache.pending:
            return (PromptedLatent if latent else Prompted)(config, place, lengths, cache)
        return (CachedLatent if latent else Cached)(config, place, lengths, cache)

    return attend
