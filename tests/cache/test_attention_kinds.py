"""The oracles over attention kinds x codecs, and what each kind's cache costs a token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from kvjax import CacheConfig, MLAConfig, ModelConfig, cache_report
from kvjax.cache import init_cache
from kvjax.plan import cache_bytes
from kvjax.sharing import cla, yoco
from pallas_kernels.softmax import attend_tile, finish, with_sinks

pytestmark = pytest.mark.filterwarnings("ignore::kvjax.cache.LowBitKeysWarning")

SLIDING, FULL = "sliding_attention", "full_attention"
MLA = MLAConfig(kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
KINDS = {
    "gqa": {},
    "window": {"layer_types": (SLIDING, FULL), "sliding_window": 72},
    "gemma": {
        "layer_types": (SLIDING, FULL),
        "sliding_window": 72,
        "qk_norm": "head",
        "norm_placement": "sandwich",
        "norm_type": "rms_offset",
        "embedding_scale": 5.0,
        "attn_logit_softcap": 5.0,
        "final_logit_softcap": 8.0,
    },
    "sinks": {"attention_sinks": True, "no_rope_layers": (1,)},
    "mla": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "mla": MLA},
    "mqa+cla2": {"num_kv_heads": 1, "num_layers": 4, **cla(4)},
    "yoco": {"num_layers": 4, **yoco(4, window=72)},
}
CODECS = ("raw", "int4", "turboquant4", "kivi2")
#: run by default; all pairs with -m slow
QUICK = {
    ("window", "kivi2"), ("gemma", "raw"), ("sinks", "raw"), ("mqa+cla2", "int4"),
}  # fmt: skip
#: of those, the state's oracles too: a ring of pages, latents
QUICK_STATE = {("window", "kivi2"), ("mla", "turboquant4")}
CACHE = {"page_size": 32, "sinks": 3, "recent": 8}
CALLS = [64, 64, *[1] * 12]
#: of the root mean square difference from the dense model's logits
TOLERANCE = {"raw": 1e-5, "int4": 0.4, "turboquant4": 0.4, "kivi2": 0.9}


def cases(quick) -> list:
    return [
        pytest.param(kind, codec, marks=() if quick(kind, codec) else pytest.mark.slow)
        for kind in KINDS
        for codec in CODECS
        if not (kind == "mla" and codec == "kivi2")  # groups along tokens: refused
    ]


def model_of(tiny, kind: str):
    model = tiny(form="stacked", **KINDS[kind])
    if model.config.attention_sinks:
        (layers,) = model.stack.runs
        for layer, logits in zip(
            layers, [[1.0, -2.0, 3.0, 0.0], [2.0, 0.0, -1.0, 1.0]], strict=True
        ):
            layer.attention.sinks[...] = jnp.asarray(logits)
    return model


@pytest.mark.parametrize(("kind", "codec"), cases(lambda k, c: (k, c) in QUICK))
def test_near_dense(tiny, kind, codec):
    """3 and 6, in calls of 64 tokens and of one; raw is equal, codecs are near."""
    model = model_of(tiny, kind)
    config = CacheConfig.parse(codec, **CACHE)
    oracles.exact_bytes(model, config)
    tokens = oracles.tokens_for(model, 2, 140)
    full = np.asarray(model(tokens)[0])
    cache = model.init_cache(batch=2, max_len=140, config=config)
    logits, cache = oracles.feed(model, cache, tokens, CALLS)
    past = slice(128, None)
    far = np.sqrt(np.mean((logits - full)[:, past] ** 2)) / full.std()
    assert far < TOLERANCE[codec], far


@pytest.mark.parametrize(("kind", "codec"), cases(lambda k, c: (k, c) in QUICK_STATE))
def test_state(tiny, kind, codec):
    """1, 4 and 5: any split, pages anywhere, poison."""
    model = model_of(tiny, kind)
    config = CacheConfig.parse(codec, **CACHE)
    oracles.chunking(model, config, length=140, splits=(CALLS, [1] * 140))
    oracles.paths(model, config, length=136, splits=CALLS[:-4])
    oracles.poison_changes_nothing(model, config, length=64, more=64)


@pytest.mark.slow  # by default tests/test_model.py pads windows and latents, on goldens
@pytest.mark.parametrize("kind", ["window", "mla", "yoco"])
def test_batching(tiny, kind):
    """Rows of unlike lengths, past the window, padded on either side (cases 52, 53)."""
    config = CacheConfig(page_size=16, sinks=3, recent=8)
    oracles.batching(model_of(tiny, kind), config, tolerance=2e-5)


def test_window_past_many_borders(tiny):
    """Token by token over five windows, with pages and with an exact ring alone."""
    model = tiny(form="unrolled", num_layers=1, layer_types=(SLIDING,), sliding_window=21)
    tokens = oracles.tokens_for(model, 2, 110)
    full, _ = model(tokens)
    for page_size, recent, pages in ((4, 3, 5), (8, 16, 0)):
        config = CacheConfig(page_size=page_size, recent=recent)
        cache = model.init_cache(batch=2, max_len=110, config=config)
        assert cache.groups[0].spec.pages_per_row == pages
        logits, _ = oracles.feed(model, cache, tokens, [37, 7, *[1] * 66])
        oracles.close(logits, full, 2e-5)


def test_a_window_sees_what_it_should(tiny):
    """The last W tokens, itself included, and no more; the global layer beside it sees token 0
    (case 73)."""
    for types, reach in (((SLIDING,), False), ((FULL,), True)):
        fields = {"sliding_window": 4} if SLIDING in types else {}
        model = tiny(form="unrolled", num_layers=1, layer_types=types, **fields)
        a = oracles.tokens_for(model, 1, 9)
        for at, seen in ((5, True), (4, reach)):  # of the last token, 8
            b = a.copy()
            b[0, at] = (b[0, at] + 1) % 97
            last = [np.asarray(model(x)[0])[0, -1] for x in (a, b)]
            assert (np.abs(last[0] - last[1]).max() > 1e-6) == seen, (types, at)


def test_a_window_wider_than_the_cache_is_none(tiny):
    model = model_of(tiny, "window")
    cache = model.init_cache(batch=1, max_len=72, config=CacheConfig(page_size=8))
    assert [g.spec.window for g in cache.groups] == [None]


def test_soft_caps_and_sinks_by_hand():
    """tanh-capped scores, and a key without a value that takes its share."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, n, 8)).astype(np.float32) for n in (3, 5, 5))
    sinks = np.asarray([0.5, -1.0], np.float32)
    mask = np.ones((1, 3, 5), bool)
    part = attend_tile(q, np.swapaxes(k, 1, 2), v, mask, scale=2.0, softcap=1.5)
    got = finish(with_sinks(part, jnp.asarray(sinks)[:, None]))
    scores = 1.5 * np.tanh(np.einsum("bth,bsh->bts", q, k) * 2.0 / 1.5)
    weights = np.exp(scores)
    total = weights.sum(-1) + np.exp(sinks)[:, None]
    want = np.einsum("bts,bsh->bth", weights, v) / total[..., None]
    np.testing.assert_allclose(got, want, atol=1e-5)


# -- bytes -----------------------------------------------------------------------------------------


def sized(heads: int, head_dim: int, layers: int = 20, **fields) -> ModelConfig:
    return ModelConfig(
        vocab_size=16,
        hidden_size=2048,
        intermediate_size=16,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=1 << 20,
        **fields,
    )


DEEPSEEK = MLAConfig(
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    q_lora_rank=1536,
)
#: bytes a token in bfloat16: CLA (2405.12981), table 1, as methods.md section 14 has it; MLA of
#: DeepSeek-V3; YOCO's one pair of all layers
TABLE = {
    "MHA": (sized(16, 128), 163_840),
    "GQA4": (sized(4, 128), 40_960),
    "GQA2": (sized(2, 128), 20_480),
    "MQA-128": (sized(1, 128), 10_240),
    "MQA-64": (sized(1, 64), 5_120),
    "MQA-32": (sized(1, 32), 2_560),
    "MHA+CLA2": (sized(16, 128, **cla(20)), 81_920),
    "MQA-128+CLA2": (sized(1, 128, **cla(20)), 5_120),
    "MQA-64+CLA2": (sized(1, 64, **cla(20)), 2_560),
    "H256-CLA2": (sized(1, 256, **cla(20)), 10_240),
    "H512-CLA2": (sized(1, 512, **cla(20)), 20_480),
    "MQA-128+CLA3": (sized(1, 128, **cla(20, 3)), 3_584),
    "MQA-128+CLA4": (sized(1, 128, **cla(20, 4)), 2_560),
    "MLA": (sized(16, 192, 61, mla=DEEPSEEK), 70_272),
    "YOCO": (sized(4, 128, **yoco(20, window=128)), 2 * 2 * 4 * 128),
    "window": (sized(4, 128, layer_types=(SLIDING,) * 20, sliding_window=128), 0),
    "1 of 4 global": (
        sized(4, 128, layer_types=(SLIDING, SLIDING, SLIDING, FULL) * 5, sliding_window=128),
        40_960 // 4,
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_bytes_a_token(name):
    """By the formula and by the arrays that are made, as a cache grows by eight pages."""
    config, want = TABLE[name]
    if config.mla is not None:
        config = dataclasses.replace(config, num_kv_heads=config.num_heads)
    sizes = {}
    for max_len in (256, 512):
        size = {"batch": 1, "max_len": max_len, "config": CacheConfig(page_size=32)}
        planned = cache_bytes(config, **size, dtype="bfloat16")
        cache = jax.eval_shape(lambda size=size: init_cache(config, **size, dtype="bfloat16"))
        made = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        assert made == sum(planned.values())
        sizes[max_len] = planned["codes"]
    assert (sizes[512] - sizes[256]) / 256 == want


def test_window_bytes_by_hand():
    """A window of 128 with pages of 32 and 16 recent tokens: four pages and 48 exact slots."""
    config, _ = TABLE["window"]
    cache = init_cache(
        config, batch=2, max_len=4096, config=CacheConfig(page_size=32, recent=16), dtype="bfloat16"
    )
    (group,) = cache.groups
    assert group.table.shape == (20, 2, 4)
    token = 2 * 4 * 128 * 2
    report = cache_report(cache)["bytes"]
    assert report["codes"] == 20 * 2 * 4 * 32 * token
    assert report["exact"] == 20 * 2 * 48 * token
