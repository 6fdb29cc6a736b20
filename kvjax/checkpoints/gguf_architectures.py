"""What differs between the architectures of GGUF files: names, row order, metadata keys.

Sources: llama.cpp's convert_hf_to_gguf.py and src/llama-arch.cpp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.checkpoints.fields import Fields

_LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_BLOCK = (
    _LLAMA_BLOCK
    | _QK_NORMS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
#: every sixth layer of Gemma 3 is global; llama.cpp has it in its code
_GEMMA_PERIOD = 6
#: layers of the one Gemma 3 model (27B) whose queries are scaled by hidden_size / heads
_GEMMA_27B_LAYERS = 62

Own = Callable[[Fields, Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One general.architecture.

    interleaved: rows of q and k are stored for RoPE of neighbours. norm_offset: what was added to
    the norms' weights. own: keys of the Hugging Face config beyond the common ones, from its
    metadata, the common ones and the tensors.
    """

    model_type: str
    hf: str
    block: Mapping[str, str]
    own: Own
    interleaved: bool = False
    norm_offset: int = 0


def _llama(fields: Fields, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors or "blk.0.ffn_down.bias" in tensors,
    }


def _qwen(fields: Fields, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _gemma3(
    fields: Fields, config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    wide = config["num_hidden_layers"] == _GEMMA_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": fields.take("attention.sliding_window", int),
        "sliding_window_pattern": fields.take(
            "attention.sliding_window_pattern", int, _GEMMA_PERIOD
        ),
        "rope_local_base_freq": fields.take("rope.freq_base_swa", float, 10000.0),
        "final_logit_softcapping": fields.take("final_logit_softcapping", float, None),
        "attn_logit_softcapping": fields.take("attn_logit_softcapping", float, None),
    }


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA_BLOCK, _llama, interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA_BLOCK, _qwen),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LLAMA_BLOCK | _QK_NORMS, _qwen),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _GEMMA_BLOCK, _gemma3, norm_offset=1
    ),
}
