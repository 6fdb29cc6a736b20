"""Generation with models of other attention kinds: chosen tokens are those of the whole forward."""

from __future__ import annotations

import numpy as np
import oracles
import pytest

import kvjax
from kvjax import CacheConfig, MLAConfig
from kvjax.sharing import yoco

MLA = MLAConfig(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
KINDS = {
    "yoco": {"num_layers": 4, **yoco(4, window=20)},
    "mla": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "mla": MLA},
}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_full_forward(tiny, kind):
    """Two rows of unlike lengths, the longer in two chunks of prefill, past the window."""
    model = tiny(form="stacked", **KINDS[kind])
    prompts = [oracles.tokens_for(model, 1, n, seed=n)[0].tolist() for n in (150, 9)]
    out = kvjax.generate(
        model,
        prompts,
        max_tokens=12,
        cache_config=CacheConfig(page_size=16, recent=4),
        eos_ids=(),
    )
    for prompt, tokens in zip(prompts, out.tokens, strict=True):
        row = np.asarray([prompt + tokens], np.int32)
        logits = np.asarray(model(row)[0])[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
