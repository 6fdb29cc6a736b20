"""Whole decode steps with the kernel in them, compiled by libtpu at the sizes of real models."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax import CacheConfig, MLAConfig, ModelConfig, RopeConfig, Transformer, codecs
from kvjax.cache import init_cache
from pallas_kernels import aot

pytestmark = [
    pytest.mark.skipif(not aot.available(), reason="needs libtpu, of the extra kvjax[aot]"),
    pytest.mark.usefixtures("libtpu_environment"),
]

SLIDING, FULL = "sliding_attention", "full_attention"
MODELS = {
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "qk_norm": "head",
        "tie_word_embeddings": True,
        "rope": RopeConfig(theta=1e6),
    },
    "gemma-3-1b": {
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_layers": 26,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 256,
        "qk_norm": "head",
        "norm_placement": "sandwich",
        "norm_type": "rms_offset",
        "hidden_act": "gelu_tanh",
        "tie_word_embeddings": True,
        "rope": RopeConfig(theta=1e6),
        "rope_local": RopeConfig(theta=1e4),
        "sliding_window": 512,
        "layer_types": tuple(FULL if i % 6 == 5 else SLIDING for i in range(26)),
        "embedding_scale": 1152**0.5,
    },
    "llama-3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "rope": RopeConfig(theta=5e5),
    },
    "deepseek-v3": {  # its attention; the feed-forward of its first, dense layers
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_layers": 3,
        "num_heads": 128,
        "num_kv_heads": 128,
        "head_dim": 192,
        "rope_interleave": True,
        "mla": MLAConfig(
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
    },
}
GIB = 2**30


def compiled(name, chip, codec, *, batch=8, tokens=8192, chunk=1, evict=None, **fields):
    """(the compiled step of `chunk` tokens a row, its cache's shapes)."""
    config = ModelConfig(**MODELS[name] | {"max_position_embeddings": tokens} | fields)

    def make():
        return Transformer(config, rngs=nnx.Rngs(0), dtype="bfloat16", form="stacked")

    graphdef, state = nnx.split(nnx.eval_shape(make))
    cache_config = CacheConfig(k=codec, v=codec, kernel=f"tpu-{chip}", evict=evict)

    def empty():
        return init_cache(
            config,
            batch=batch,
            max_len=tokens,
            config=cache_config,
            dtype="bfloat16",
            calibration=[calibration_of(config, codec)] * config.num_layers,
        )

    def step(state, tokens, cache):
        model = nnx.merge(graphdef, state)
        x, cache = model.hidden(tokens, cache, jnp.full((batch,), chunk, jnp.int32))
        return jnp.argmax(model.logits(x[:, -1]), axis=-1), cache

    cache = jax.eval_shape(empty)
    token = jax.ShapeDtypeStruct((batch, chunk), jnp.int32)
    return aot.compile_for(chip, step, state, token, cache, donate_argnums=2), cache


def calibration_of(config, codec):
    """Zeros for a layer's key and value codecs; nothing for those that need none."""
    sizes = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    shapes = [own.param_shapes(**sizes) for own in codecs.pair(codec)]
    return tuple({n: jnp.zeros(s.shape, s.dtype) for n, s in own.items()} for own in shapes)


def assert_decodes_in_place(step, cache, *, memory, temporaries=2**25):
    text, used = step.as_text(), step.memory_analysis()
    assert 'custom_call_target="tpu_custom_call"' in text
    assert re.search(r"%seal\S* = s32", text)
    for leaf in jax.tree.leaves([group.pool for group in cache.groups]):
        shape = ",".join(map(str, leaf.shape))
        assert not re.search(rf"\[{shape}\]\S* copy", text)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert used.alias_size_in_bytes >= held  # written in place
    # with latents W_uk and W_uv of a layer, 16 MiB each, are laid out anew
    assert used.temp_size_in_bytes < (2**27 if cache.groups[0].spec.latent else temporaries)
    total = used.argument_size_in_bytes + used.temp_size_in_bytes
    assert total + used.output_size_in_bytes - used.alias_size_in_bytes < memory


@pytest.mark.parametrize(
    ("name", "codec"),
    [("qwen3-0.6b", "turboquant4"), ("gemma-3-1b", "int8"), ("deepseek-v3", "int8")],
)
def test_decode_on_a_v5e(name, codec):
    assert_decodes_in_place(*compiled(name, "v5e", codec), memory=15.75 * GIB)


def test_a_prompt_is_sealed_where_it_lies():
    """Its pages by one call, which reads the chunk: before, XLA laid it out anew for each page."""
    step, cache = compiled("qwen3-0.6b", "v5e", "int8", batch=1, chunk=1024)
    text = step.as_text()
    assert len(re.findall(r"%seal\S* = s32", text)) == 2  # of the ring's page, and of the chunk's
    assert not re.search(r"bf16\[28,1,1024,8,128\]\S* copy", text)
    pool = ",".join(map(str, cache.groups[0].pool.k[0]["page"].shape))
    assert not re.search(rf"\[{pool}\]\S* copy", text)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "codec"), [("v5e", "int8"), ("v6e", "int4")])
def test_a_stream(chip, codec):
    """Its keys are turned in the kernel."""
    step, cache = compiled("qwen3-0.6b", chip, codec, evict="streaming:4+4092")
    assert_decodes_in_place(step, cache, memory=15.75 * GIB)


@pytest.mark.slow
def test_calibrated_codecs():
    """Keys before RoPE, turned in the kernel. A page is sealed in float32, 14 MiB in all layers,
    and sorted for its outliers. For a v6e it compiles too, but jaxlib does not print its text."""
    step, cache = compiled("qwen3-0.6b", "v5e", "kvquant3")
    assert_decodes_in_place(step, cache, memory=15.75 * GIB, temporaries=2**26)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["raw", "int8", "int4", "turboquant4", "kivi4"])
def test_llama_on_a_v6e(codec):
    """Its weights alone fill a v5e; here 8 rows of 8,192 tokens lie beside them."""
    assert_decodes_in_place(*compiled("llama-3-8b", "v6e", codec), memory=31.25 * GIB)


@pytest.mark.slow
def test_half_of_llama_on_a_v5e():
    step, cache = compiled("llama-3-8b", "v5e", "int4", num_layers=16)
    assert_decodes_in_place(step, cache, memory=15.75 * GIB)
