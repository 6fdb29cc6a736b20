"""The parts of a model's config: RoPE, latent attention, mixture of experts."""

from __future__ import annotations

import dataclasses
from typing import Literal

from kvjax.checks import among, near, need, positive

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, 2104.09864) and its published length extensions.

    type: "default"; "linear" (position interpolation, 2306.15595); "dynamic" (NTK-aware, the base
    grows with the sequence); "llama3" (Llama 3.1's frequency bands); "yarn" (2309.00071).
    factor: the extension factor of all but "default".
    """

    theta: float = 10000.0
    type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: from factor and mscale
    mscale: float | None = None  # yarn, DeepSeek
    mscale_all_dim: float | None = None  # yarn, DeepSeek
    truncate: bool = True  # yarn: round the correction range to whole dimensions

    @property
    def trained_length(self) -> int:
        """original_max_position_embeddings, which some types need; checked when built."""
        assert self.original_max_position_embeddings is not None
        return self.original_max_position_embeddings

    def __post_init__(self):
        need(
            self.type in ROPE_TYPES,
            "rope.type",
            f"one of {ROPE_TYPES}",
            self.type,
            near(str(self.type), ROPE_TYPES).strip(),
        )
        need(self.theta > 0, "rope.theta", "a positive number", self.theta)
        need(self.factor >= 1.0, "rope.factor", "a number >= 1", self.factor)
        if self.type in ("llama3", "yarn", "dynamic"):
            need(
                self.original_max_position_embeddings is not None,
                "rope.original_max_position_embeddings",
                f"the trained length, which rope.type={self.type!r} needs",
                None,
            )
        if self.type == "llama3":
            need(
                self.high_freq_factor > self.low_freq_factor,
                "rope.high_freq_factor",
                f"more than low_freq_factor={self.low_freq_factor}",
                self.high_freq_factor,
            )


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2 2405.04434, section 2.1).

    A token's keys and values are made from one normed latent of `kv_lora_rank` numbers, and one
    rotated key of `qk_rope_head_dim` that all heads share: these two are all that is cached.
    q_lora_rank: queries are made from a normed latent too; None: from the state itself.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name != "q_lora_rank":
                positive(f"mla.{field.name}", value)
        even = self.qk_rope_head_dim % 2 == 0
        need(even, "mla.qk_rope_head_dim", "an even number (RoPE)", self.qk_rope_head_dim)

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query: without and with position."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the feed-forward (DeepSeekMoE 2401.06066; V3 2412.19437).

    first_dense_layers: layers before the first mixture. scoring: of the router's logits.
    num_groups, topk_groups: experts are chosen from the best `topk_groups` of `num_groups` groups,
    a group's score being its best expert ("max", V2) or its best two ("top2", V3). correction_bias:
    a learned offset that counts for the choice alone (V3). normalize: chosen weights sum to 1
    before `scale`.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    num_shared_experts: int = 0
    first_dense_layers: int = 0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    correction_bias: bool = False
    normalize: bool = False
    scale: float = 1.0

    def __post_init__(self):
        for field in ("num_experts", "num_experts_per_tok", "intermediate_size", "num_groups"):
            positive(f"moe.{field}", getattr(self, field))
        for field, allowed in (("scoring", SCORINGS), ("group_score", GROUP_SCORES)):
            among(f"moe.{field}", getattr(self, field), allowed)
        need(self.num_experts > 1, "moe.num_experts", "at least 2", self.num_experts)
        whole = self.num_experts % self.num_groups == 0
        need(whole, "moe.num_groups", f"a divisor of {self.num_experts} experts", self.num_groups)
        ok = 0 < self.topk_groups <= self.num_groups
        need(ok, "moe.topk_groups", f"1 to num_groups={self.num_groups}", self.topk_groups)
        room = self.topk_groups * (self.num_experts // self.num_groups)
        ok = self.num_experts_per_tok <= room
        need(ok, "moe.num_experts_per_tok", f"at most {room} experts", self.num_experts_per_tok)
        for field in ("num_shared_experts", "first_dense_layers"):
            value = getattr(self, field)
            need(isinstance(value, int) and value >= 0, f"moe.{field}", "an int >= 0", value)
