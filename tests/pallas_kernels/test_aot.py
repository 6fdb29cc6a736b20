"""Compiles for chips that are not here, with libtpu: decode at the real sizes of three models."""

import re

import jax
import jax.numpy as jnp
import pytest
from kernel_data import CODES, all_codes, param_shapes

from pallas_kernels import aot
from pallas_kernels.codes import for_generation
from pallas_kernels.paged_attention.tpu import paged_attention_tpu
from pallas_kernels.pages import LatentFormat, PageFormat

pytestmark = [
    pytest.mark.skipif(not aot.available(), reason="needs libtpu, of the extra kvjax[aot]"),
    pytest.mark.usefixtures("libtpu_environment"),
]

#: KV heads, queries of a KV head, head dim
MODELS = {"llama-3-8b": (8, 4, 128), "qwen3-0.6b": (8, 2, 128), "gemma-3-1b": (1, 4, 256)}
GENERATION = {"v5e": 5, "v6e": 6}


def compiled(chip, name, shape, *, batch=8, tokens=8192, **options):
    """(HLO text, bytes of temporaries, pool's shape)."""
    K, Q, H = shape
    k_code, v_code = (for_generation(c, GENERATION[chip]) for c in CODES[name])
    fmt = PageFormat(k_code, v_code, K, H)
    return compiled_format(chip, fmt, Q, batch=batch, tokens=tokens, **options)


def compiled_format(chip, fmt, Q, *, batch=8, tokens=8192, **options):
    K, H, M = fmt.num_kv_heads, fmt.head_dim, tokens // 128
    q = jax.ShapeDtypeStruct((batch, K, Q, fmt.query_width), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((batch * M + 1, fmt.rows, 128), jnp.int32)
    table = jax.ShapeDtypeStruct((batch, M), jnp.int32)
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def step(q, pages, table, lengths, positions, params):
        more = {"positions": positions} if options else {}
        return paged_attention_tpu(
            q, pages, table, lengths, fmt=fmt, scale=H**-0.5, params=params, **more, **options
        )

    done = aot.compile_for(chip, step, q, pages, table, row, row, param_shapes(fmt))
    return done.as_text(), done.memory_analysis().temp_size_in_bytes, pages.shape


def assert_reads_in_place(text, temporaries, pool):
    shape = ",".join(map(str, pool))
    copies = [line for line in text.splitlines() if re.search(rf"s32\[{shape}\].* copy", line)]
    assert not copies, copies
    assert 'custom_call_target="tpu_custom_call"' in text
    assert temporaries < 2**23, temporaries  # a cache of these sizes has 70 MB or more


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", all_codes(["int8", "int4"], skip="pairs"))
def test_decode_at_real_sizes(name, model, chip):
    assert_reads_in_place(*compiled(chip, name, MODELS[model]))


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize(
    "name", ["int8", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bf16", "int4-low"))]
)
def test_latents_of_deepseek_v3(name, chip):
    code = for_generation(CODES[name][0], GENERATION[chip])
    fmt = LatentFormat(code, code, 1, 512, rope_dim=64)
    assert_reads_in_place(*compiled_format(chip, fmt, 128))


@pytest.mark.parametrize("name", all_codes(skip="pairs"))
def test_every_code(name):
    assert_reads_in_place(*compiled("v5e", name, (2, 4, 128)))


@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_head_dims_without_whole_lanes(head_dim):
    assert_reads_in_place(*compiled("v5e", "int4-low", (8, 4, head_dim)))


def test_speculation_with_a_window_and_a_soft_cap():
    """Gemma's: four query heads, eight new tokens."""
    options = {"queries": 8, "window": 512, "softcap": 50.0}
    assert_reads_in_place(*compiled("v6e", "int8", (1, 32, 256), **options))


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_with_the_scores(chip):
    """Beside the pool there is but one more array: the kernel's scores of 8 rows, 8 heads, 8 rows
    of queries (4 of them padding) and 8,192 tokens, float32."""
    text, temporaries, pool = compiled(chip, "int8", MODELS["llama-3-8b"], logits=True)
    assert_reads_in_place(text, temporaries - 4 * 8 * 8 * 8 * 8192, pool)
