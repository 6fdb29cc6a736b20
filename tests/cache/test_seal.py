"""Sealing by the TPU's kernel: every codec, and the cache's own calls of it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, ModelConfig, codecs
from kvjax.cache import init_cache
from kvjax.cache import seal as sealing
from kvjax.cache.packed import pack_page, page_format
from kvjax.cache.quantisers import quantisers
from kvjax.cache.spec import GroupSpec
from pallas_kernels import seal

pytestmark = pytest.mark.filterwarnings("ignore::kvjax.cache.LowBitKeysWarning")

BY_KERNEL = [
    "raw", "int8", "int8-hadamard", "int4", "int4-hadamard", "fp8", "fp8-e5m2", "kivi2", "kivi4",
    "kivi8", "turboquant2", "turboquant3", "turboquant4",
]  # fmt: skip

#: whose words lie otherwise on the older chip
UNLIKE = ("int4", "kivi2", "turboquant4")


def spec_of(name, *, generation, heads=2, head_dim=64):
    k, v = codecs.pair(name)
    spec = GroupSpec(
        layers=(0,), num_kv_heads=heads, head_dim=head_dim, v_head_dim=head_dim, k_codec=k,
        v_codec=v, page_size=128, sinks=4, recent=64, max_len=1024, dtype=jnp.dtype(jnp.bfloat16),
    )  # fmt: skip
    return dataclasses.replace(spec, packed=page_format(spec, generation=generation))


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        pytest.param(name, n, marks=pytest.mark.slow if n == 5 and name not in UNLIKE else ())
        for name in BY_KERNEL
        for n in (5, 6)
    ],
)
def test_the_kernel_quantises_as_the_codec(name, generation):
    spec = spec_of(name, generation=generation)
    made = quantisers(spec)
    assert made is not None
    rng = np.random.default_rng(0)
    x = [jnp.asarray(rng.normal(size=(2, 150, 2, 64)) * s + s - 1, jnp.bfloat16) for s in (1, 3)]
    codes = [
        codec.quantise(jnp.swapaxes(tokens[:, 9:137], 1, 2), {})
        for codec, tokens in zip((spec.k_codec, spec.v_codec), x, strict=True)
    ]
    want = np.asarray(pack_page(spec.packed, spec, *codes))
    pool, ids = jnp.zeros((2, spec.packed.rows, 128), jnp.int32), jnp.asarray([[1], [0]])
    how = {"fmt": spec.packed, "quantisers": made, "start": jnp.full(2, 9)}
    got = seal.seal(pool, ids, *x, implementation="tpu", interpret=True, **how)
    # sums add up in another order: a number may round to its neighbour
    assert (np.asarray(got)[::-1] == want).mean() > 0.999


def test_what_plain_xla_seals():
    for name in ("qjl", "kvquant3"):
        assert quantisers(spec_of(name, generation=6)) is None
    exact = dataclasses.replace(spec_of("int8", generation=6), dtype=jnp.dtype(jnp.float32))
    assert quantisers(exact) is None
    assert quantisers(dataclasses.replace(spec_of("int8", generation=6), packed=None)) is None


SLIDING = "sliding_attention"


WINDOWS = {"layer_types": (SLIDING,) * 2, "sliding_window": 400}


@pytest.mark.parametrize(
    ("by", "apart", "sinks", "fields"),
    [
        pytest.param("kernel", False, 4, {}, marks=pytest.mark.slow),
        ("kernel", True, 4, WINDOWS),
        ("cutting", False, 300, {}),
        pytest.param("cutting", True, 0, WINDOWS, marks=pytest.mark.slow),
    ],
)
def test_a_cache_filled_as_on_a_tpu_is_the_same(monkeypatch, by, apart, sinks, fields):
    """Calls of many lengths, ragged rows: pages from the ring, from the chunk and from both; more
    sinks than a page has tokens."""
    config = ModelConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=2,
        num_kv_heads=2, head_dim=32, max_position_embeddings=2048, **fields,
    )  # fmt: skip
    cache_config = CacheConfig(k="int8", v="int8", kernel="tpu-v6e", sinks=sinks)
    rng = np.random.default_rng(5)
    calls = [(300, (300, 170)), (1, (1, 1)), (700, (0, 700)), (40, (40, 3)), (129, (129, 129))]
    chunks = [
        (jnp.asarray(rng.normal(size=(2, 2, 2, n, 2, 32)), jnp.bfloat16), jnp.asarray(new))
        for n, new in calls
    ]

    def filled():
        cache = init_cache(
            config, batch=2, max_len=1300, config=cache_config, dtype="bfloat16", apart=apart
        )
        assert cache.groups[0].spec.packed is not None
        for (k, v), new in chunks:
            append = jax.jit(lambda cache, k, v, new: cache.append(k, v, new=new))
            cache = append(cache, k, v, new)
        return [np.asarray(x) for x in jax.tree.leaves([group.pool for group in cache.groups])]

    want, called = filled(), []

    def by_kernel(kernel, plain, *operands):
        return kernel(*operands)

    def reference(*operands, implementation, **how):
        called.append(operands[1].shape)
        assert implementation == "tpu"
        return seal.seal(*operands, implementation="xla", **how)

    monkeypatch.setattr(sealing, "on_tpu", by_kernel)
    monkeypatch.setattr(sealing, "seal", reference)
    if by == "cutting":  # codecs that the kernel does not take
        monkeypatch.setattr(sealing, "quantisers", lambda spec: None)
    got = filled()
    if by == "kernel":
        assert {shape[1] for shape in called} > {1}  # a page from the ring, several of a chunk
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)
