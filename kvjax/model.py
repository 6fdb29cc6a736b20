"""The decoder: embed -> layers -> logits. `model(tokens, cache) -> (logits, cache)`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kvjax.attending import attending
from kvjax.cache import KVCache
from kvjax.cache import init_cache as _init_cache
from kvjax.calibration import for_cache
from kvjax.config import DTYPES, CacheConfig, ModelConfig, need
from kvjax.layers.decoder import Form, LayerStack, Ropes, take_tokens
from kvjax.layers.linear import Linear
from kvjax.layers.norm import norm_of
from kvjax.layers.rope import rope_tables
from pallas_kernels.softmax import soft_cap

# Shapes: B batch, T tokens of this call, A of them that are wanted, D model dim, V vocabulary.


class Transformer(nnx.Module):
    """A decoder language model.

    dtype: of parameters and activations ("float32", "bfloat16", "float16"); norms, angles and
    softmax are float32 inside. form: see `kvjax.layers.decoder`; None takes the fast one for the
    default backend.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: str = "float32",
        form: Form | None = None,
    ):
        need(dtype in DTYPES, "dtype", f"one of {DTYPES}", dtype)
        kind = jnp.dtype(dtype)
        self.config = config
        self.dtype = dtype
        V, D, std = config.vocab_size, config.hidden_size, config.initializer_range
        embedding = jax.random.normal(rngs.params(), (V, D), jnp.float32) * std
        self.embedding = nnx.Param(embedding.astype(kind))
        self.stack = LayerStack(config, form=form or default_form(), dtype=kind, rngs=rngs)
        self.norm = norm_of(config, D, dtype=kind)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(D, V, bias=False, std=std, dtype=kind, rngs=rngs)
        )

    # -- the public face -------------------------------------------------------------------------

    def __call__(
        self,
        tokens: Int[Array, "B T"] | Int[np.ndarray, "B T"],
        cache: KVCache | None = None,
        *,
        lengths: Int[Array, "B"] | Any = None,
        mask: Bool[Array, "B T"] | Any = None,
    ) -> tuple[Float[Array, "B T V"], KVCache | None]:
        """Logits of every token, and the cache with the tokens appended (None without a cache).

        lengths [B]: how many tokens of each row are real, the rest being padding on the right.
        mask [B, T]: the same for padding on either side, True for real tokens, which must be
        contiguous. Positions count real tokens only. Logits at padding are meaningless.

        Compiled once per shape. Inside your own `jit` it is inlined; donate the cache there.
        Raises ValueError on token ids, lengths, masks or a cache that do not fit.
        """
        tokens, lengths, shift = _check_inputs(self.config, tokens, cache, lengths, mask)
        graphdef, state = nnx.split(self)
        return _forward(graphdef, state, tokens, cache, lengths, shift)

    def init_cache(self, *, batch: int, max_len: int, config: CacheConfig | None = None) -> KVCache:
        """An empty cache for `batch` rows of up to `max_len` tokens.

        Raises ValueError on codecs that do not fit the model or need a calibration that is not
        given (`CacheConfig.calibration`); warns with `LowBitKeysWarning` where keys have too few
        bits.
        """
        config = CacheConfig() if config is None else config
        return _init_cache(
            self.config,
            batch=batch,
            max_len=max_len,
            config=config,
            dtype=self.dtype,
            calibration=for_cache(self, config),
            apart=self.stack.form == "unrolled",
            devices=_devices_of(self.embedding[...]),
        )

    # -- the parts, for loops that need only some logits -----------------------------------------

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        cache: KVCache | None,
        lengths: Int[Array, "B"],
        *,
        at: Int[Array, "B A"] | None = None,
        remat: bool = False,
    ) -> tuple[Float[Array, "B A D"], KVCache | None]:
        """Normed final states, and the cache with the tokens appended. For use inside `jit`.

        at: which of the T tokens of each row are wanted; None: all. With layers that read an
        earlier layer's keys (YOCO), those from its attention on run for these tokens alone.
        """
        start = jnp.zeros_like(lengths) if cache is None else cache.start
        most = tokens.shape[1] if cache is None else cache.longest_call or tokens.shape[1]
        need(
            tokens.shape[1] <= most,
            "tokens",
            f"at most {most} a call with this eviction"
            " (a stream's recent tokens; one while h2o decodes)",
            tokens.shape[1],
            "Feed the text in shorter calls.",
        )
        ropes = self.ropes(start, tokens.shape[1], lengths)
        x = self.embed(tokens)
        if cache is None:
            attend = attending(self.config, lengths, None)
            x, _ = self.stack(x, ropes, attend, at=at, remat=remat)
            return self.norm(x), None
        if cache.pending:
            return self._prompt(x, ropes, cache, lengths, at)
        x, made = self._read(x, ropes, cache, lengths, at)
        with jax.named_scope("append"):
            cache = cache.append(made.k, made.v, new=lengths, states=made.states)
        return self.norm(x), cache

    def _prompt(self, x, ropes, cache, lengths, at):
        """A whole prompt through dense attention, and the cache of what its policy keeps."""
        x, made = self.stack(x, ropes, attending(self.config, lengths, cache))
        with jax.named_scope("evict"):
            cache = cache.fill(made.k, made.v, lengths=lengths)
        return self.norm(x if at is None else take_tokens(x, at)), cache

    def ropes(self, start: Int[Array, "B"], count: int, lengths: Int[Array, "B"]) -> Ropes:
        """Angles of `count` tokens of each row from `start` on, by the model's kinds of RoPE."""
        config = self.config
        positions = start[:, None] + jnp.arange(count)[None]
        kinds = dict.fromkeys(config.rope_of(layer) for layer in range(config.num_layers))
        return {
            kind: rope_tables(kind, config.rope_dim, positions, start + lengths)
            for kind in kinds
            if kind is not None
        }

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The states that enter the first layer."""
        with jax.named_scope("embed"):
            x = self.embedding[...][tokens]
            scale = self.config.embedding_scale  # rounded to the dtype, as Gemma does
            return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)

    def _read(self, x, ropes, cache, lengths, at):
        """All layers over an unchanging cache.

        In a branch of its own, so that XLA sees every read of the cache before the append writes
        it: otherwise it saves a copy of the whole pool for the reads (seen on CPU, unrolled).
        """

        def run(cache):
            return self.stack(x, ropes, attending(self.config, lengths, cache), at=at)

        skipped = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(run, cache))
        return jax.lax.cond(jnp.any(lengths > 0), run, lambda cache: skipped, cache)

    def logits(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead V"]:
        """float32 logits of normed final states."""
        with jax.named_scope("logits"):
            if self.lm_head is None:
                table = self.embedding[...]
                out = jnp.einsum("...d,vd->...v", x, table, preferred_element_type=jnp.float32)
            else:
                head = self.lm_head.kernel[...]
                out = jnp.matmul(x, head, preferred_element_type=jnp.float32)
            scale = self.config.logit_scale
            return soft_cap(out if scale == 1.0 else out * scale, self.config.final_logit_softcap)


def _devices_of(weights: Array) -> int:
    """Over how many devices a model lies; 1 where that is not known yet, under a trace."""
    if isinstance(weights, jax.core.Tracer) or not hasattr(weights, "sharding"):
        return 1
    return len(weights.sharding.device_set)


def default_form() -> Form:
    """The storage form that decodes fastest on the default backend."""
    return "unrolled" if jax.default_backend() == "cpu" else "stacked"


@functools.partial(jax.jit, static_argnums=0)
def _forward(graphdef, state, tokens, cache, lengths, shift):
    model = nnx.merge(graphdef, state)
    if shift is not None:  # left padding: real tokens go to the front, logits back behind the pads
        tokens = _roll(tokens, -shift)
    x, cache = model.hidden(tokens, cache, lengths)
    logits = model.logits(x)
    return (logits if shift is None else _roll(logits, shift)), cache


def _roll(x: Array, shift: Int[Array, "B"]) -> Array:
    return jax.vmap(lambda row, s: jnp.roll(row, s, axis=0))(x, shift)


def padding(mask: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(lengths, left padding) of each row of a mask of real tokens; they must be contiguous."""
    mask = np.asarray(mask).astype(bool)
    need(mask.shape == shape, "mask", f"the shape of tokens {shape}", mask.shape)
    lengths = mask.sum(axis=1).astype(np.int32)
    left = np.where(lengths > 0, mask.argmax(axis=1), 0).astype(np.int32)
    whole = np.arange(shape[1]) - left[:, None]
    gaps = np.flatnonzero(((whole >= 0) & (whole < lengths[:, None])).__ne__(mask).any(axis=1))
    need(gaps.size == 0, "mask", "contiguous real tokens in each row", f"gaps in rows {gaps}")
    return lengths, left


def _check_inputs(config: ModelConfig, tokens, cache, lengths, mask):
    tokens = jnp.asarray(tokens)
    need(
        tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer),
        "tokens",
        "integers of shape [B, T]",
        f"{tokens.dtype} of shape {tokens.shape}",
    )
    B, T = tokens.shape
    need(
        cache is None or cache.batch == B,
        "tokens",
        f"a batch of {getattr(cache, 'batch', B)}, as the cache has",
        B,
    )
    need(lengths is None or mask is None, "lengths, mask", "one of the two", "both")
    shift: Array | None = None
    if mask is not None:
        lengths, left = padding(mask, (B, T))
        shift = jnp.asarray(left)
    lengths = jnp.full((B,), T, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    need(lengths.shape == (B,), "lengths", f"shape ({B},)", lengths.shape)
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((tokens, lengths, cache))):
        _check_values(config, np.asarray(tokens), cache, np.asarray(lengths))
    return tokens.astype(jnp.int32), lengths, shift


def _check_values(config: ModelConfig, tokens: np.ndarray, cache, lengths: np.ndarray) -> None:
    T = tokens.shape[1]
    need(
        bool(((lengths >= 0) & (lengths <= T)).all()),
        "lengths",
        f"0 to {T}, the tokens of this call",
        lengths.tolist(),
    )
    bad = tokens[(tokens < 0) | (tokens >= config.vocab_size)]
    need(bad.size == 0, "tokens", f"ids 0 to {config.vocab_size - 1}", bad[:5].tolist())
    if cache is not None:
        total = np.asarray(cache.length) + lengths
        need(
            bool((total <= cache.max_len).all()),
            "cache.max_len",
            f"at least {int(total.max())}, the longest row after this call",
            cache.max_len,
            "Make the cache with a larger max_len.",
        )
        if cache.policy is not None and not cache.pending:
            _check_room(cache, lengths)


def _check_room(cache: KVCache, lengths: np.ndarray) -> None:
    """Raises ValueError if rows that were evicted from would outgrow what was set aside."""
    for group in cache.groups:
        if group.spec.heavy:
            continue
        rows = int((np.asarray(group.rows(cache.length)) + lengths).max())
        need(
            rows <= group.spec.max_len,
            "max_new",
            f"at least {rows - (group.spec.kept or 0)}: rows would have {rows} tokens with what"
            f" stayed of the prompt, and there is room for {group.spec.max_len}",
            group.spec.max_len - (group.spec.kept or 0),
            "Make the cache with a larger CacheConfig.max_new.",
        )
