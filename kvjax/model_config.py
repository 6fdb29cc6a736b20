"""What a model is: `ModelConfig` and its parts, checked when built.

One decoder has every attention kind. Head counts make it MHA (= num_heads), GQA or MQA (= 1);
`mla` makes it DeepSeek's latent attention; `layer_types` and `sliding_window` bound some layers;
`kv_source` names the layer whose keys and values each layer reads.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from kvjax.checks import among, near, need, positive
from kvjax.model_parts import MLAConfig, MoEConfig, RopeConfig

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
DTYPES = ("float32", "bfloat16", "float16")
QK_NORMS = ("none", "head", "full")
NORM_PLACEMENTS = ("pre", "sandwich", "post", "parallel")
NORM_TYPES = ("rms", "rms_offset", "layer")
LAYER_TYPES = ("full_attention", "sliding_attention", "gated_retention")
DEFAULT_ROPE = RopeConfig()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder language model.

    qk_norm: RMSNorm of queries and keys before RoPE, over each head ("head") or over all ("full").
    norm_placement: of the norms of a layer's two parts: before ("pre"), before and after
    ("sandwich"), after ("post"), or one before both, which run side by side ("parallel").
    norm_type: "rms", "rms_offset" (times 1 + weight), "layer" (LayerNorm without a bias).
    attention_scale: what scores are multiplied by; None: head_dim ** -0.5.
    attn_logit_softcap, final_logit_softcap: c tanh(x / c) of scores, of logits.
    layer_types: for each layer "full_attention"; "sliding_attention", which sees the last
    `sliding_window` tokens, itself included; or "gated_retention", which has a state in place of
    keys and values (`kvjax.layers.retention`); empty: all full. rope_local: of sliding layers;
    None: as the others. no_rope_layers: layers that do not rotate. attention_sinks: a learned logit
    a head that takes its share of the softmax. kv_source: for each layer the layer whose keys and
    values it reads, itself or an earlier one; empty: its own (`kvjax.sharing` has helpers).
    kv_norm: an owner that others read makes keys and values through a norm of its own (YOCO).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig = DEFAULT_ROPE
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    attention_bias: bool = False  # on the q, k and v projections
    attention_out_bias: bool = False  # on the output projection
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    qk_norm: Literal["none", "head", "full"] = "none"
    norm_placement: Literal["pre", "sandwich", "post", "parallel"] = "pre"
    norm_type: Literal["rms", "rms_offset", "layer"] = "rms"
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attn_logit_softcap: float | None = None
    final_logit_softcap: float | None = None
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    rope_local: RopeConfig | None = None
    rope_interleave: bool = False  # pairs (0, 1), (2, 3) instead of halves
    no_rope_layers: tuple[int, ...] = ()
    attention_sinks: bool = False
    kv_source: tuple[int, ...] = ()
    kv_norm: bool = False
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None

    def __post_init__(self):
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            positive(field, getattr(self, field))
        need(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            f"a divisor of num_heads={self.num_heads}",
            self.num_kv_heads,
        )
        need(self.head_dim % 2 == 0, "head_dim", "an even number (RoPE turns pairs)", self.head_dim)
        for field, allowed in (
            ("hidden_act", ACTIVATIONS),
            ("qk_norm", QK_NORMS),
            ("norm_placement", NORM_PLACEMENTS),
            ("norm_type", NORM_TYPES),
        ):
            among(field, getattr(self, field), allowed)
        for field in ("eos_token_ids", "layer_types", "no_rope_layers", "kv_source"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        for token in (*self.eos_token_ids, self.bos_token_id, self.pad_token_id):
            need(
                token is None or 0 <= token < self.vocab_size,
                "bos_token_id, eos_token_ids, pad_token_id",
                f"token ids below vocab_size={self.vocab_size}",
                token,
            )
        self._check_numbers()
        self._check_layers()
        self._check_sources()
        if self.mla is not None:
            self._check_mla(self.mla)

    def _check_numbers(self) -> None:
        for field in ("attention_scale", "attn_logit_softcap", "final_logit_softcap"):
            value = getattr(self, field)
            need(value is None or value > 0, field, "a positive number or None", value)
        for field in ("embedding_scale", "residual_scale", "logit_scale"):
            need(getattr(self, field) > 0, field, "a positive number", getattr(self, field))

    def _check_layers(self) -> None:
        for name in self.layer_types:
            among("layer_types", name, LAYER_TYPES)
        count = len(self.layer_types)
        need(count in (0, self.num_layers), "layer_types", f"{self.num_layers} entries", count)
        sliding = "sliding_attention" in self.layer_types
        if sliding:
            positive("sliding_window", self.sliding_window)
        else:
            fix = "Name the layers that it bounds in layer_types."
            for field in ("sliding_window", "rope_local"):
                value = getattr(self, field)
                need(value is None, field, "None without sliding_attention layers", value, fix)
        if self.retaining:
            self._check_retention()
        for layer in self.no_rope_layers:
            ok = 0 <= layer < self.num_layers
            need(ok, "no_rope_layers", f"layers 0 to {self.num_layers - 1}", layer)

    def _check_retention(self) -> None:
        some = len(self.retaining) < self.num_layers
        need(some, "layer_types", "a layer with attention beside gated_retention", "none")
        for field, off in (
            ("mla", None),
            ("qk_norm", "none"),
            ("attention_sinks", False),
            ("attn_logit_softcap", None),
        ):
            value = getattr(self, field)
            need(value == off, field, f"{off!r} with gated_retention layers", value)

    def _check_sources(self) -> None:
        n, source = self.num_layers, self.kv_source
        need(len(source) in (0, n), "kv_source", f"{n} entries, one a layer", len(source))
        for layer, owner in enumerate(source):
            need(0 <= owner <= layer, f"kv_source[{layer}]", f"a layer from 0 to {layer}", owner)
            fix = f"Point it at {source[owner]}, the owner."
            need(source[owner] == owner, f"kv_source[{layer}]", "an owner", owner, fix)
            alike = self._position(layer) == self._position(owner)
            fix = "Layers that share keys have one layer type and one RoPE."
            need(alike, f"kv_source[{layer}]", "an owner of the same layer type", owner, fix)
            ok = layer == owner or layer not in self.retaining
            need(ok, f"kv_source[{layer}]", f"{layer}: gated_retention has no keys to share", owner)
        shared = any(owner != layer for layer, owner in enumerate(source))
        need(shared or not self.kv_norm, "kv_norm", "False without layers that share", self.kv_norm)

    def _position(self, layer: int) -> tuple[str, bool]:
        kind = self.layer_types[layer] if self.layer_types else "full_attention"
        return kind, layer in self.no_rope_layers

    def _check_mla(self, mla: MLAConfig) -> None:
        fix = "MLA caches one latent for all heads."
        ok = self.num_kv_heads == self.num_heads
        need(ok, "num_kv_heads", f"num_heads={self.num_heads} with mla", self.num_kv_heads, fix)
        ok = self.head_dim == mla.qk_head_dim
        need(ok, "head_dim", f"{mla.qk_head_dim}, mla's query channels", self.head_dim)
        for field, off in (("qk_norm", "none"), ("attention_sinks", False), ("kv_norm", False)):
            value = getattr(self, field)
            need(value == off, field, f"{off!r} with mla", value)
        need(not self.rope_local, "rope_local", "None with mla", self.rope_local)

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    def window_of(self, layer: int) -> int | None:
        """How many tokens back a layer sees, itself included; None: all."""
        return self.sliding_window if self._position(layer)[0] == "sliding_attention" else None

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The RoPE of a layer; None where it does not rotate."""
        if layer in self.no_rope_layers:
            return None
        local = self.window_of(layer) is not None and self.rope_local is not None
        return self.rope_local if local else self.rope

    def source_of(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        return self.kv_source[layer] if self.kv_source else layer

    @property
    def owners(self) -> tuple[int, ...]:
        """Layers that make keys and values, in order; others read theirs, or have a state."""
        layers = (n for n in range(self.num_layers) if self.source_of(n) == n)
        return tuple(n for n in layers if n not in self.retaining)

    @property
    def retaining(self) -> tuple[int, ...]:
        """Layers of gated retention, in order: each has a state in place of keys and values."""
        return tuple(n for n, kind in enumerate(self.layer_types) if kind == "gated_retention")

    def is_moe(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.moe is not None and layer >= self.moe.first_dense_layers

    @property
    def rope_dim(self) -> int:
        """Channels that RoPE turns."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(heads, channels of a key, channels of a value) that the cache keeps of a token.

        Of MLA: one head, the latent and the rotated key.
        """
        if self.mla is None:
            return self.num_kv_heads, self.head_dim, self.head_dim
        return 1, self.mla.kv_lora_rank, self.mla.qk_rope_head_dim

    def num_params(self) -> int:
        """Parameters of the model, tied embeddings counted once."""
        D = self.hidden_size
        norms = {"pre": 2, "sandwich": 4, "post": 2, "parallel": 1}[self.norm_placement] * D
        layers = sum(
            self._attention_params(layer) + self._mlp_params(layer) + norms
            for layer in range(self.num_layers)
        )
        embeddings = self.vocab_size * D * (1 if self.tie_word_embeddings else 2)
        return layers + embeddings + D

    def _attention_params(self, layer: int) -> int:
        D, N, K, H = self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim
        out = N * H * D + self.attention_out_bias * D
        if layer in self.retaining:  # queries, keys, values; the output's gate; the decay
            return 3 * N * H * (D + self.attention_bias) + D * N * H + D * N + out
        owns = self.source_of(layer) == layer
        if self.mla is not None:
            return self._mla_params(self.mla, owns)
        kv = 2 * (D * K * H + self.attention_bias * K * H) if owns else 0
        q = D * N * H + self.attention_bias * N * H
        q_norm, k_norm = {"none": (0, 0), "head": (H, H), "full": (N * H, K * H)}[self.qk_norm]
        kv_norm = D * (self.kv_norm and layer in self.shared_owners)
        return q + kv + out + q_norm + k_norm * owns + kv_norm + N * self.attention_sinks

    @property
    def shared_owners(self) -> frozenset[int]:
        """Owners that other layers read too."""
        layers = range(self.num_layers)
        return frozenset(self.source_of(n) for n in layers if self.source_of(n) != n)

    def _mla_params(self, mla: MLAConfig, owns: bool) -> int:
        D, N, rank = self.hidden_size, self.num_heads, mla.q_lora_rank
        bias = self.attention_bias
        q = D * N * mla.qk_head_dim
        if rank is not None:
            q = D * rank + bias * rank + rank + rank * N * mla.qk_head_dim
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        kv = D * latent + bias * latent + mla.kv_lora_rank if owns else 0
        up = mla.kv_lora_rank * N * (mla.qk_nope_head_dim + mla.v_head_dim)
        return q + kv + up + N * mla.v_head_dim * D + self.attention_out_bias * D

    def _mlp_params(self, layer: int) -> int:
        D, F = self.hidden_size, self.intermediate_size
        if self.moe is None or not self.is_moe(layer):
            return 3 * D * F + self.mlp_bias * (2 * F + D)
        moe = self.moe
        experts = 3 * D * moe.intermediate_size * (moe.num_experts + moe.num_shared_experts)
        return experts + D * moe.num_experts + moe.correction_bias * moe.num_experts


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON data."""
    return dataclasses.asdict(config)


def model_config_from_dict(data: dict[str, Any]) -> ModelConfig:
    """The inverse of `to_dict` for ModelConfig. Unknown keys are an error that lists near names."""
    names = {f.name for f in dataclasses.fields(ModelConfig)}
    for key in data:
        need(key in names, "model config", "a known key", key, near(key, names).strip())
    parts = {"rope": RopeConfig, "rope_local": RopeConfig, "mla": MLAConfig, "moe": MoEConfig}
    made = {k: kind(**data[k]) for k, kind in parts.items() if isinstance(data.get(k), dict)}
    return ModelConfig(**{**data, **made})
