"""New models from old: what is exact, what the errors say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx

from kvjax import CacheConfig, Transformer, convert

MHA = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "num_layers": 2}


def own(tiny, **fields) -> Transformer:
    """A model of this test's own, to be changed."""
    graphdef, state = nnx.split(tiny(**(MHA | fields)))
    return nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


def test_alike_heads_pool_to_the_same_model(tiny):
    """Heads that are equal in a group: mean and first are exact; random is not (methods.md 1)."""
    model = own(tiny, form="stacked", attention_bias=True)
    for name in ("k_proj", "v_proj"):
        linear = getattr(model.stack.stack.attention, name)
        for param in (linear.kernel, linear.bias):
            heads = param[...].reshape(*param.shape[:-1], 2, 2, 8)
            param[...] = jnp.repeat(heads[..., :1, :], 2, axis=-2).reshape(param.shape)
    tokens = oracles.tokens_for(model, 2, 12)
    for how in ("mean", "first"):
        made = convert.to_grouped(model, num_kv_heads=2, how=how)
        assert made.model.config.num_kv_heads == 2
        oracles.close(made.model(tokens)[0], model(tokens)[0], 1e-5)
        assert made.errors[1]["k"] == made.errors[0]["v"] == 0
    made = convert.to_grouped(model, num_kv_heads=2, how="random")
    assert min(e for layer in made.errors.values() for e in layer.values()) > 0.5


@pytest.mark.parametrize("form", ["stacked", "unrolled"])
def test_the_mean_errs_least(tiny, form):
    model = own(tiny, form=form)
    tokens = oracles.tokens_for(model, 2, 12)
    errors = {}
    for how in ("mean", "first", "random"):
        made = convert.to_grouped(model, num_kv_heads=1, how=how)
        errors[how] = made.errors[0]["k"]
    assert errors["mean"] == pytest.approx(0.75, abs=0.05)  # three of four independent quarters
    assert errors["mean"] < errors["first"] < errors["random"]
    assert convert.kl_from(made.model, model, tokens) > 0.1
    assert convert.kl_from(model, model, tokens) < 1e-6


def test_cla(tiny):
    """Factor 1 is the model; equal projections in a group err by nothing."""
    model = own(tiny, form="stacked", num_layers=4)
    tokens = oracles.tokens_for(model, 1, 12)
    same = convert.to_cla(model, factor=1).model
    oracles.close(same(tokens)[0], model(tokens)[0], 1e-6)
    made = convert.to_cla(model, factor=2)
    assert made.model.config.owners == (0, 2)
    assert sorted(made.errors) == [0, 1, 2, 3]
    assert made.errors[3]["v"] == pytest.approx(0.5, abs=0.1)
    kernel = made.model.stack.layer_array(2, "attention", "k_proj", "kernel")
    both = [model.stack.layer_array(n, "attention", "k_proj", "kernel") for n in (2, 3)]
    np.testing.assert_allclose(kernel, (both[0] + both[1]) / 2, atol=1e-6)
    assert made.model.stack.layer_array(3, "attention", "k_proj", "kernel") is None
    with pytest.raises(ValueError, match="kv_source: expected a model whose layers share nothing"):
        convert.to_cla(made.model)


def test_latent(tiny):
    """Errors fall with the rank, values are whole at full rank, and the cache works."""
    model = own(tiny, form="unrolled", num_kv_heads=2)
    tokens = oracles.tokens_for(model, 2, 24)
    made = {rank: convert.to_latent(model, kv_lora_rank=rank) for rank in (2, 8, 24)}
    values = [made[rank].errors[1]["v"] for rank in (2, 8, 24)]
    assert values[0] > values[1] > values[2]
    assert values[2] < 1e-10
    keys = [made[rank].errors[0]["k"] for rank in (2, 24)]
    assert keys[0] > keys[1] > 0.1  # one rotated key for two heads
    new = made[24].model
    assert new.config.cache_shape == (1, 24, 4)
    cache = new.init_cache(batch=2, max_len=24, config=CacheConfig(page_size=4))
    logits, _ = oracles.feed(new, cache, tokens, [12, *[1] * 12])
    oracles.close(logits, new(tokens)[0], 2e-5)
    far = [convert.kl_from(made[rank].model, model, tokens) for rank in (2, 24)]
    assert far[0] > far[1]


def test_one_head_without_rope_stays_near(tiny):
    """One KV head, all but one pair of channels unrotated anyway: a full latent changes little."""
    fields = {"num_kv_heads": 1, "no_rope_layers": (0, 1), "initializer_range": 0.05}
    model = own(tiny, form="unrolled", **fields)
    tokens = oracles.tokens_for(model, 1, 20)
    made = convert.to_latent(model, kv_lora_rank=14, qk_rope_head_dim=2)
    assert made.errors[0]["k"] + made.errors[0]["v"] < 1e-10
    # what is left is the latent's norm; a rank of 1 loses much more
    near = convert.kl_from(made.model, model, tokens)
    low = convert.to_latent(model, kv_lora_rank=1, qk_rope_head_dim=2).model
    assert near < 0.5 * convert.kl_from(low, model, tokens)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: convert.to_grouped(m, num_kv_heads=3), "num_kv_heads: expected a divisor of 4"),
        (lambda m: convert.to_grouped(m, num_kv_heads=2, how="men"), "Did you mean 'mean'"),
        (lambda m: convert.to_latent(m, kv_lora_rank=0), "kv_lora_rank: expected 1 to"),
        (lambda m: convert.to_latent(m, kv_lora_rank=4, qk_rope_head_dim=3), "an even number"),
    ],
)
def test_refuses(tiny, call, message):
    with pytest.raises(ValueError, match=message):
        call(tiny(**MHA))
