"""Generation with models of other attention kinds: chosen tokens are those of the whole forward."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import kvjax
from kvjax import CacheConfig, Engine, MLAConfig, SamplingParams, cache_report
from kvjax.engine import programs
from kvjax.engine.sampling import Sampling
from kvjax.sharing import yoco

MLA = MLAConfig(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
KINDS = {
    "yoco": {"num_layers": 4, **yoco(4, window=20)},
    "mla": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "mla": MLA},
}


@pytest.mark.parametrize("kind", ["yoco", pytest.param("mla", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("kind", ["mla", pytest.param("yoco", marks=pytest.mark.slow)])
def test_a_decode_step_copies_no_cache(tiny, kind):
    """Beside the cache a step holds little, and no copy is near a layer's keys."""
    model = tiny(form="stacked", max_position_embeddings=8192, **KINDS[kind])
    config = CacheConfig(page_size=64)
    engine = Engine(model, batch=2, max_model_len=8192, cache_config=config, eos_ids=())
    cache, logits = engine.empty()
    sampling = Sampling.of([SamplingParams()] * 2)
    budget = jnp.asarray([5, 5])
    rows = programs.first_token(logits, sampling, cache.length, budget, engine.eos)
    compiled = programs.decode.lower(
        engine.graphdef, engine.state, cache, rows, sampling, engine.eos, jnp.int32(1)
    ).compile()
    memory, total = compiled.memory_analysis(), cache_report(cache)["total_bytes"]
    assert memory.alias_size_in_bytes >= total
    assert memory.temp_size_in_bytes < total / 8
    copies = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", compiled.as_text())
    largest = max((4 * int(np.prod([int(d) for d in c.split(",")])) for c in copies), default=0)
    assert largest < total / 50
