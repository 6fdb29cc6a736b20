"""The cache in the TPU kernel's pages: the same model, read through plain XLA on this machine."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheConfig, MLAConfig, RopeConfig, cache_report, calibration
from kvjax.cache import format_report, init_cache
from kvjax.cache.build import group_specs
from kvjax.plan import cache_bytes
from kvjax.sharing import cla
from pallas_kernels.paged_attention import gpu

pytestmark = pytest.mark.filterwarnings("ignore::kvjax.cache.LowBitKeysWarning")

SLIDING, FULL = "sliding_attention", "full_attention"
BASE = {"head_dim": 32, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2}
KINDS = {
    "gqa": {},
    "mqa": {"num_kv_heads": 1, "attn_logit_softcap": 5.0},
    "window": {"layer_types": (SLIDING, FULL), "sliding_window": 200},
    "cla2": {"num_layers": 4, **cla(4)},
    "mla": {
        "mla": MLAConfig(kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16),
        "num_kv_heads": 4,
    },
}
#: of the largest logit: queries and weights are rounded to bfloat16 by the kernel
CLOSE = 0.02


def run(model, config, tokens, calls, *, lengths=None):
    """Logits of the last call's tokens, and the cache."""
    cache = model.init_cache(batch=tokens.shape[0], max_len=tokens.shape[1] + 64, config=config)
    start, out = 0, None
    for n in calls:
        new = None if lengths is None else np.clip(lengths - start, 0, n)
        out, cache = model(tokens[:, start : start + n], cache, lengths=new)
        start += n
    return np.asarray(out), cache


def tokens_of(model, shape):
    return np.random.default_rng(1).integers(0, model.config.vocab_size, shape)


@pytest.mark.parametrize(
    ("kind", "form"), [("gqa", "unrolled"), *((kind, "stacked") for kind in KINDS if kind != "gqa")]
)
def test_packed_pages_give_the_same_model(tiny, kind, form):
    model = tiny(**BASE | KINDS[kind], form=form)
    tokens = tokens_of(model, (2, 604))
    # each chunk of 300 tokens goes tile by tile, those of 2 to the kernel's stand-in
    calls = [300, 300, 2, 2]
    config = {"k": "int8", "v": "int4", "recent": 8, "sinks": 2}
    if kind == "mla":
        config |= {"v": "int8", "mla_rope_bits": 8}
    expected, _ = run(model, CacheConfig(**config, kernel="xla"), tokens, calls)
    got, cache = run(model, CacheConfig(**config, kernel="tpu-v5e"), tokens, calls)
    assert {group.spec.kernel for group in cache.groups} == {"tpu"}
    assert np.abs(got - expected).max() < CLOSE * np.abs(expected).max()
    empty, _ = run(model, CacheConfig(**config, kernel="xla"), tokens[:, -4:], [2, 2])
    assert np.abs(empty - expected).max() > 5 * CLOSE * np.abs(expected).max()  # pages matter


@pytest.mark.parametrize(
    "codec", ["kivi2", *(pytest.param(c, marks=pytest.mark.slow) for c in ("qjl", "turboquant3"))]
)
def test_codecs_in_packed_pages(tiny, codec):
    model = tiny(**BASE, form="stacked")
    tokens = tokens_of(model, (3, 400))
    lengths, calls = np.array([400, 290, 7]), [384, *[1] * 16]
    pair = {"k": codec, "v": "kivi2" if codec == "qjl" else codec, "recent": 8, "sinks": 2}
    expected, _ = run(model, CacheConfig(**pair, kernel="xla"), tokens, calls, lengths=lengths)
    got, _ = run(model, CacheConfig(**pair, kernel="tpu-v6e"), tokens, calls, lengths=lengths)
    assert np.abs(got[0] - expected[0]).max() < CLOSE * np.abs(expected[0]).max()


YARN = RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=256)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("kvquant3", {"no_rope_layers": (1,), "rope": YARN}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("kvquant4", {"layer_types": (SLIDING, FULL), "sliding_window": 200}),
                ("kvquant2+int8", {"num_kv_heads": 1, "head_dim": 64}),
            )
        ),
    ],
)
def test_calibrated_codecs_in_packed_pages(tiny, tmp_path, name, fields):
    """Keys before RoPE, turned or, in a layer without it, not; of two rows the second is shorter.
    A chunk of 300 tokens goes tile by tile, those of 2 to the kernel's stand-in."""
    model = tiny(**BASE | fields, form="stacked")
    tokens, lengths = tokens_of(model, (2, 604)), np.array([604, 603])
    own = {"recent": 8, "sinks": 2, "page_size": 128}
    config = CacheConfig.parse(name, **own)
    made = calibration.calibrate(model, tokens_of(model, (2, 300)), config, fisher=False)
    calibration.save(tmp_path / "file", model, config, made)

    def logits(kernel):
        config = CacheConfig.parse(name, **own, calibration=str(tmp_path / "file"), kernel=kernel)
        out, cache = run(model, config, tokens, [300, 300, 2, 2], lengths=lengths)
        assert {group.spec.kernel for group in cache.groups} == {kernel.split("-")[0]}
        return [out[0], out[1, :1]]

    for got, expected in zip(logits("tpu-v5e"), logits("xla"), strict=True):
        assert np.abs(got - expected).max() < CLOSE * np.abs(expected).max()


def test_a_page_moves_with_its_id(tiny):
    """The table is read: pages in another order in the pool change no bit."""
    model = tiny(**BASE)
    tokens = tokens_of(model, (2, 401))
    _, cache = run(model, CacheConfig(k="int8", v="int8", kernel="tpu-v5e"), tokens, [400])
    (group,) = cache.groups
    pages = group.pool.pages
    order = np.random.default_rng(0).permutation(pages)
    rows = np.concatenate([slot * pages + order for slot in range(group.pool.slots)])
    blocks = [{"page": b["page"][order if group.pool.apart else rows]} for b in group.pool.k]
    pool = dataclasses.replace(group.pool, k=tuple(blocks))
    table = jnp.asarray(np.argsort(order), jnp.int32)[group.table]

    def step(**changes):
        groups = (dataclasses.replace(group, **changes),)
        return np.asarray(model(tokens[:, 400:], dataclasses.replace(cache, groups=groups))[0])

    np.testing.assert_array_equal(step(pool=pool, table=table), step())
    assert np.abs(step(pool=pool) - step()).max() > 0


def test_a_prompt_that_was_evicted_from(tiny):
    model = tiny(**BASE)
    tokens = tokens_of(model, (2, 401))
    config = {"k": "int8", "v": "int8", "recent": 8, "sinks": 2, "evict": "keydiff:300"}
    expected, _ = run(model, CacheConfig(**config, kernel="xla"), tokens, [400, 1])
    got, cache = run(model, CacheConfig(**config, kernel="tpu-v5e"), tokens, [400, 1])
    assert cache.groups[0].spec.kernel == "tpu"
    assert np.abs(got - expected).max() < CLOSE * np.abs(expected).max()


@pytest.mark.parametrize(
    ("codec", "calls", "fields"),
    [
        ("int8", [400, 300, 1], {"rope": YARN, "no_rope_layers": (1,)}),
        # the last call goes tile by tile
        ("int4", [300, 300], {"layer_types": (SLIDING, FULL), "sliding_window": 200}),
    ],
)
def test_a_stream_turns_its_keys_in_the_pages(tiny, codec, calls, fields):
    """Of two rows the second is shorter than the stream."""
    model = tiny(**BASE | fields, form="stacked")
    tokens, lengths = tokens_of(model, (2, sum(calls))), np.array([sum(calls), 330])
    config = {"k": codec, "v": "int8", "recent": 8, "evict": "streaming:4+420"}
    same = {"tokens": tokens, "calls": calls, "lengths": lengths}
    expected, _ = run(model, CacheConfig(**config, kernel="xla"), **same)
    got, cache = run(model, CacheConfig(**config, kernel="tpu-v5e"), **same)
    assert {group.spec.kernel for group in cache.groups} == {"tpu"}
    assert np.abs(got - expected).max() < CLOSE * np.abs(expected).max()


def test_keys_that_the_kernel_cannot_turn(tiny):
    def made(codec, evict="streaming:4+300", **fields):
        config = CacheConfig(
            k=codec,
            v=codec if "mla" in fields else "int8",
            evict=evict,
            kernel="tpu-v6e",
            mla_rope_bits=8 if "mla" in fields else None,
        )
        model = tiny(**BASE | fields).config
        return group_specs(model, max_len=900, config=config, dtype="float32")

    dynamic = RopeConfig(type="dynamic", factor=2.0, original_max_position_embeddings=256)
    for codec, fields, reason in (
        ("turboquant4", {}, "turboquant4 has them in a basis of its own"),
        ("int4-hadamard", {}, "int4-hadamard has them in a basis"),
        ("kvquant4", {"evict": "keydiff:300"}, "each head of an evicted prompt has positions"),
        ("kivi4", {}, "KiviKey has them in a form that no angle turns"),
        ("int8", {"rope": dynamic}, "frequencies of rope.type='dynamic' differ by row"),
        ("int8", {"rope_interleave": True}, "halves, not neighbours"),
        ("int8", {"head_dim": 24}, "needs a multiple of 8 pairs"),
        ("int8", KINDS["mla"], "not those of latents"),
    ):
        with pytest.raises(ValueError, match=f"kernel: .*turned keys: .*{reason}"):
            made(codec, **fields)


def test_no_buffer_stands_twice_in_a_cache(tiny):
    """It is donated at every step."""
    config = CacheConfig(k="int8", v="int8", kernel="tpu-v5e")
    cache = tiny(**BASE).init_cache(batch=1, max_len=600, config=config)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache) if leaf.size]
    assert len(set(places)) == len(places)
    out = kvjax.generate(tiny(**BASE), [[1, 2, 3]], max_tokens=3, cache_config=config)
    assert len(out.tokens[0]) == 3


def test_bytes_of_packed_latents(tiny):
    model = tiny(**BASE | KINDS["mla"], dtype="bfloat16")
    config = CacheConfig(k="int8", v="int8", kernel="tpu-v6e", mla_rope_bits=8)
    cache = model.init_cache(batch=2, max_len=1000, config=config)
    plan = cache_bytes(model.config, batch=2, max_len=1000, config=config, dtype="bfloat16")
    report = cache_report(cache)
    assert plan == report["bytes"]
    # 64 and 16 numbers of 8 bits, two float16 scales
    used = 2 * 2 * cache.groups[0].spec.pages_per_row * 128 * (64 + 16 + 4)
    padded = report["bytes"]["codes"] + report["bytes"]["scales"]
    assert used <= padded < 1.2 * used


@pytest.mark.parametrize("codec", ["int8", "turboquant3", "kivi2"])
def test_bytes_are_those_of_the_packed_pages(tiny, codec):
    model = tiny(**BASE)
    config = CacheConfig(k=codec, v=codec, kernel="tpu-v5e", recent=8)
    cache = model.init_cache(batch=2, max_len=1000, config=config)
    (group,) = cache.groups
    fmt, report = group.spec.packed, cache_report(cache)
    pool = 2 * 2 * group.spec.pages_per_row * fmt.rows * 128 * 4
    assert report["bytes"]["codes"] + report["bytes"]["scales"] == pool
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(group.pool)) == pool
    plan = cache_bytes(model.config, batch=2, max_len=1000, config=config, dtype="float32")
    assert plan == report["bytes"]
    k, v = fmt.bits()
    assert (k + v) / 2 == 8 * fmt.page_bytes / (2 * 128 * 2 * 32)
    assert report["effective_bits"]["mean"] == pytest.approx((k + v) / 2)
    assert "read by plain XLA, in place of the TPU kernel" in format_report(report)


def test_what_no_kernel_takes_is_refused_by_name_and_said_otherwise(tiny):
    model = tiny(**BASE)

    def made(**fields):
        return model.init_cache(batch=1, max_len=600, config=CacheConfig(**fields))

    for fields, reason in (
        ({"k": "turboquant5", "v": "int8"}, "turboquant"),
        ({"k": "int8", "v": "int8", "page_size": 64}, "page_size"),
    ):
        with pytest.raises(ValueError, match=f"kernel: .*{reason}"):
            made(kernel="tpu-v6e", **fields)
    with pytest.raises(ValueError, match="kernel: expected one of"):
        made(kernel="triton")
    report = cache_report(made(k="int8", v="int8"))
    assert "read by plain XLA (no kernel for cpu)" in format_report(report)


def test_auto_takes_the_tpus_kernel_on_a_tpu(tiny, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr("kvjax.cache.kernel._generation", lambda: 6)

    def spec(dtype, codec):
        model = tiny(**BASE, dtype=dtype)
        config = CacheConfig(k=codec, v=codec)
        return model.init_cache(batch=1, max_len=600, config=config).groups[0].spec

    assert spec("bfloat16", "int4").kernel == "tpu"
    assert "bfloat16" in spec("float32", "int4").why_xla
    assert "turboquant" in spec("bfloat16", "turboquant5").why_xla
    fields = {"batch": 1, "max_len": 600, "config": CacheConfig(k="int4", v="int4")}
    config = tiny(**BASE).config
    spread = init_cache(config, dtype="bfloat16", devices=4, **fields)
    assert spread.groups[0].spec.why_xla == "the model lies on 4 devices"
    assert spread.groups[0].spec.packed is None


def test_the_gpus_kernel_needs_jax_triton(tiny, monkeypatch):
    monkeypatch.setattr("pallas_kernels.paged_attention.gpu.available", lambda: False)
    with pytest.raises(ValueError, match=r"kernel: .*kvjax\[cuda\]"):
        tiny(**BASE).init_cache(
            batch=1, max_len=600, config=CacheConfig(k="int8", v="int8", kernel="gpu")
        )


@pytest.mark.skipif(not gpu.available(), reason="needs jax-triton, of the extra kvjax[cuda]")
@pytest.mark.parametrize("codec", ["turboquant4"])
def test_the_gpu_kernels_cache_is_the_plain_one_elsewhere(tiny, codec):
    model = tiny(**BASE, form="stacked")
    tokens = tokens_of(model, (2, 400))
    config = {"k": codec, "v": codec, "recent": 8}
    expected, _ = run(model, CacheConfig(**config, kernel="xla"), tokens, [398, 1, 1])
    got, cache = run(model, CacheConfig(**config, kernel="gpu"), tokens, [398, 1, 1])
    assert cache.groups[0].spec.kernel == "gpu"
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
