"""DeepSeek-V2 (2405.04434) and V3 (2412.19437): latent attention and a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.checkpoints.fields import Fields
from kvjax.config import MLAConfig, ModelConfig, MoEConfig

#: transformers' defaults
_V2 = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_COMMON = {
    "first_k_dense_replace": 0,
    "n_shared_experts": 2,
    "n_group": None,
    "topk_group": None,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": None,
}
#: keys that leave a decoder's logits alone: training losses, layouts, layers for drafting
_HARMLESS = {
    "moe_layer_freq": (1,),
    "ep_size": (1,),
    "num_nextn_predict_layers": (0, 1),
}
_TRAINING = ("aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef")


def deepseek_v2(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    """Softmax scores; experts from all (greedy) or from the groups with the best expert."""
    method = fields.take("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"{fields.where}: topk_method: expected 'greedy' or 'group_limited_greedy', got"
            f" {method!r}. kvjax does not implement this value."
        )
    fields.drop({"scoring_func": ("softmax",)})
    grouped = method == "group_limited_greedy"
    moe = _moe(fields, known, group_score="max", grouped=grouped, normalize=False)
    return {**_attention(fields, known), "moe": moe, "rope_interleave": True}


def deepseek_v3(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    """Sigmoid scores, a correction bias for the choice, groups by their best two experts."""
    fields.drop({"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)})
    norm = fields.take("norm_topk_prob", bool, True)
    moe = _moe(fields, known, group_score="top2", grouped=True, normalize=norm)
    interleave = fields.take("rope_interleave", bool, True)
    return {**_attention(fields, known), "moe": moe, "rope_interleave": interleave}


def _attention(fields: Fields, known: Mapping[str, Any]) -> dict[str, Any]:
    for key in _TRAINING:
        fields.take(key, (int, float, bool), None)
    fields.drop(_HARMLESS)
    sizes: dict[str, Any] = {
        key: fields.take(key, int, None if key == "q_lora_rank" and fields.has(key) else default)
        for key, default in _V2.items()
    }
    mla = MLAConfig(**sizes)
    fields.drop({"qk_head_dim": (mla.qk_head_dim,)})
    bias = fields.take("attention_bias", bool, False)
    return {
        "mla": mla,
        "head_dim": mla.qk_head_dim,
        "num_kv_heads": known["num_heads"],
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": fields.take("mlp_bias", bool, False),
    }


def _moe(
    fields: Fields, known: Mapping[str, Any], *, group_score: Any, grouped: bool, normalize: bool
) -> MoEConfig | None:
    v3 = group_score == "top2"
    if not v3:
        # transformers ignores it for V2, and every published V2 has false
        fields.take("norm_topk_prob", bool, False)
    experts = fields.take("n_routed_experts", int, 256 if v3 else 64)
    values = {key: fields.take(key, (int, float), default) for key, default in _COMMON.items()}
    first = values["first_k_dense_replace"]
    size = fields.take("moe_intermediate_size", int, 2048 if v3 else 1407)
    if first >= known["num_layers"]:
        return None
    groups = int(values["n_group"] or 1) if grouped else 1
    return MoEConfig(
        num_experts=experts,
        num_experts_per_tok=int(values["num_experts_per_tok"] or 8),
        intermediate_size=size,
        num_shared_experts=int(values["n_shared_experts"]),
        first_dense_layers=int(first),
        scoring="sigmoid" if v3 else "softmax",
        num_groups=groups,
        topk_groups=int(values["topk_group"] or 1) if grouped else 1,
        group_score=group_score if groups > 1 else "max",
        correction_bias=v3,
        normalize=normalize,
        scale=float(values["routed_scaling_factor"]),
    )


def write_deepseek(config: ModelConfig) -> dict[str, Any]:
    """Keys of both versions; which one can say it all is for the caller to find."""
    mla, moe = config.mla, config.moe
    if mla is None:
        return {}
    own: dict[str, Any] = {key: getattr(mla, key) for key in _V2}
    own |= {
        "attention_bias": config.attention_bias,
        "head_dim": mla.qk_rope_head_dim,
        "qk_head_dim": mla.qk_head_dim,
        "first_k_dense_replace": config.num_layers,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
    }
    if moe is None:
        return own
    return own | {
        "first_k_dense_replace": moe.first_dense_layers,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "n_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.intermediate_size,
        "n_group": moe.num_groups,
        "topk_group": moe.topk_groups,
        "routed_scaling_factor": moe.scale,
        "norm_topk_prob": moe.normalize,
        "scoring_func": moe.scoring,
        "topk_method": "noaux_tc"
        if moe.correction_bias
        else "greedy"
        if moe.num_groups == 1
        else "group_limited_greedy",
    }
