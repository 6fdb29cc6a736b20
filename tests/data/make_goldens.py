"""Makes the small goldens of `families/`: random checkpoints with the logits of transformers.

    python tests/data/make_goldens.py        # needs torch and transformers (written with 5.24.0)

Each folder is what `save_pretrained` writes, and `golden.npz` with ids and float32 logits. Every
parameter is random, norms and biases too, so that a forgotten one is seen.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent / "families"
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "logits_scaling": 4.0,
            "attention_bias": True,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 12, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "num_hidden_layers": 4}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 8,
            "sliding_window": 12,
            "query_pre_attn_scalar": 11,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "qwen3_window": (
        "Qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "deepseek_v2_groups": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "num_hidden_layers": 2,
            "routed_scaling_factor": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
    ),
    "deepseek_v3_groups": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
}


def make(name: str) -> None:
    kind, fields = FAMILIES[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **fields})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for key, value in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith(("inv_freq", "embed_scale")):
                continue
            around = 1.0 if "norm" in key and not name.startswith("gemma") else 0.0
            value.copy_(around + torch.randn_like(value) * (0.3 if value.ndim == 1 else 0.25))
    ids = torch.from_numpy(np.random.default_rng(7).integers(3, 64, (2, 40)))
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits.float().numpy()
    folder = HERE / name
    model.save_pretrained(folder, safe_serialization=True)
    np.savez_compressed(folder / "golden.npz", ids=ids.numpy().astype(np.int32), logits=logits)


if __name__ == "__main__":
    for name in FAMILIES:
        make(name)
