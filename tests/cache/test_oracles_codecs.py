"""The oracles over codecs, each on a head dim and a GQA ratio of its own.

By default one name of each family and the first and last of each class (fewest and most bits); with
`-m slow` every registered name, and names x head dims x ratios. Compiling dominates, so all oracles
of one codec use two shapes of call: 64 tokens and one.
"""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx

from kvjax import CacheConfig, Engine, cache_report, calibration, codecs
from kvjax.cache import LowBitKeysWarning
from kvjax.cache.build import group_specs
from kvjax.cache.report import bits_of
from kvjax.engine import programs
from kvjax.engine.sampling import Sampling, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::kvjax.cache.LowBitKeysWarning")

#: one of each way to store: the full set of oracles
FAMILIES = (
    "raw", "int8", "int4-hadamard", "fp8-e5m2", "kivi2", "kvquant2", "qjl", "turboquant3",
    "turboquant2.5", "turboquant-prod3", "pca3",
)  # fmt: skip
#: of those, each with other kinds of leaves in its pages
LEAVES = ("raw", "int8", "kivi2", "kvquant2", "qjl", "turboquant2.5", "pca3")
NAMES = list({codecs.pair(name): name for name in reversed(codecs.names())}.values())[::-1]


def quick() -> set[str]:
    """`FAMILIES`, and the first and last name of each class."""
    of_class: dict[tuple, list[str]] = {}
    for name in NAMES:
        of_class.setdefault(tuple(map(type, codecs.pair(name))), []).append(name)
    return {*FAMILIES, *(names[i] for names in of_class.values() for i in (0, -1))}


QUICK = quick()
EVERY_NAME = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES
]
#: (head dim, query heads a KV head, KV heads)
SHAPES = [(64, 1, 2), (96, 2, 2), (128, 4, 1), (80, 2, 2), (64, 8, 1), (72, 4, 2)]
CACHE = {"page_size": 32, "sinks": 3, "recent": 8}
BATCH, LENGTH, CALL = 3, 148, 64
CALLS = [CALL, CALL, *[1] * (LENGTH - 2 * CALL)]


def fits(name: str, head_dim: int) -> bool:
    try:
        for codec, role in zip(codecs.pair(name), "kv", strict=True):
            codec.check(head_dim=head_dim, page_size=CACHE["page_size"], role=role)
    except ValueError:
        return False
    return True


def shape_of(name: str) -> tuple[int, int, int]:
    """Names take the shapes in turn; one that a codec refuses (a group that does not divide the
    head dim) gives way to the next that it takes."""
    at = NAMES.index(name)
    turn = SHAPES[at % len(SHAPES) :] + SHAPES[: at % len(SHAPES)]
    return next(shape for shape in turn if fits(name, shape[0]))


@pytest.fixture
def ready(tiny, tmp_path):
    """`ready(name, shape)`: a model of that shape, and the config of its cache, calibrated."""

    def make(name: str, shape: tuple[int, int, int]):
        head_dim, ratio, heads = shape
        model = tiny(
            form="stacked",
            head_dim=head_dim,
            num_heads=ratio * heads,
            num_kv_heads=heads,
            max_position_embeddings=8192,
        )
        config = CacheConfig.parse(name, **CACHE)
        if calibration.needs_calibration(model.config, config):
            rows = oracles.tokens_for(model, 2, 256, seed=7)
            path = tmp_path / f"{name}-{shape}.safetensors"
            made = calibration.calibrate(model, rows, config, fisher=False)
            calibration.save(path, model, config, made)
            config = CacheConfig.parse(name, **CACHE, calibration=str(path))
        return model, config

    return make


#: fp8 keeps few digits of its 8 bits
DIGITS = {"fp8": 6, "fp8-e4m3": 6, "fp8-e5m2": 5}


def tolerance(model, name: str, config: CacheConfig) -> float:
    """Of the root mean square difference from the dense model's logits, in their deviations: a bit
    halves it (measured: 1.6 to 2.2 times 2^-bits). What fails to be undone gives 1 and more."""
    if name == "raw":
        return 1e-5
    (spec,) = group_specs(model.config, max_len=1, config=config, dtype="float32")
    bits = min(bits_of(codec, spec)[0] for codec in (spec.k_codec, spec.v_codec))
    return min(0.8, 3 * 2.0 ** -DIGITS.get(name, bits))


def distance(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2)) / want.std())


def near_dense(model, config) -> float:
    """3, as far as a lossy codec can keep it: the distance of logits past several sealed pages."""
    tokens = oracles.tokens_for(model, BATCH, LENGTH)
    full, _ = model(tokens)
    cache = model.init_cache(batch=BATCH, max_len=LENGTH, config=config)
    logits, _ = oracles.feed(model, cache, tokens, CALLS)
    # the first call attends to itself alone, exactly as the dense model does
    oracles.close(logits[:, :CALL], full[:, :CALL], 1e-4)
    return distance(logits[:, 2 * CALL :], full[:, 2 * CALL :])


@pytest.mark.parametrize("name", EVERY_NAME)
def test_every_codec(ready, name):
    """Oracles 1, 3 and 6."""
    model, config = ready(name, shape_of(name))
    oracles.exact_bytes(model, config, batch=BATCH, max_len=LENGTH)
    oracles.chunking(model, config, length=LENGTH, batch=BATCH, splits=(CALLS, [1] * LENGTH))
    far = near_dense(model, config)
    assert far < tolerance(model, name, config), far


@pytest.mark.parametrize(
    "name",
    [name if name in LEAVES else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_pages_anywhere_and_poison(ready, name):
    """Oracles 4 and 5; they differ with the leaves of a page, which few names do not share."""
    model, config = ready(name, shape_of(name))
    oracles.paths(model, config, length=LENGTH - 4, batch=BATCH, splits=CALLS[:-4])
    oracles.poison_changes_nothing(model, config, length=CALL, more=CALL)


@pytest.mark.parametrize("name", ["raw", "kivi2", "kvquant2"])
def test_batching(ready, name):
    """2. Sums in another order may move a number over the border between two codes."""
    model, config = ready(name, shape_of(name))
    oracles.batching(model, config, tolerance=1e-4 if name == "raw" else 0.1, pad_alone=90)


@pytest.mark.parametrize("name", ["kivi2", "kvquant2"])
def test_any_split(ready, name):
    """1, with calls that end anywhere: groups along tokens must not follow them (case 4)."""
    model, config = ready(name, shape_of(name))
    oracles.chunking(model, config)


def test_the_tolerance_sees_a_fault(ready, monkeypatch):
    """Queries that are not rotated as the keys were."""
    monkeypatch.setattr(codecs.TurboQuant, "prepare_query", lambda self, q, params: q)
    jax.clear_caches()
    try:
        model, config = ready("turboquant3", (64, 2, 2))
        assert near_dense(model, config) > 1.5 * tolerance(model, "turboquant3", config)
    finally:
        jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"dim{s[0]}-ratio{s[1]}")
@pytest.mark.parametrize("name", NAMES)
def test_every_shape(ready, name, shape):
    if not fits(name, shape[0]):
        pytest.skip(f"{name} has groups that do not divide {shape[0]}")
    model, config = ready(name, shape)
    oracles.exact_bytes(model, config, batch=BATCH, max_len=LENGTH)
    assert near_dense(model, config) < tolerance(model, name, config)
    oracles.poison_changes_nothing(model, config, length=CALL, more=CALL)


# -- memory --------------------------------------------------------------------------------------

WIDTHS = {"f64": 8, "s64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}


def largest_copy(hlo: str) -> int:
    """Bytes of the largest copy instruction."""
    sizes = [0]
    for kind, dims in re.findall(r"= (\w+)\[([\d,]*)\]\S* copy\(", hlo):
        sizes.append(WIDTHS.get(kind, 1) * int(np.prod([int(d) for d in dims.split(",") if d])))
    return max(sizes)


@pytest.mark.parametrize(
    "name",
    [name if name in FAMILIES else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_decode_step_makes_no_dense_copy(ready, name):
    """A step at 8k tokens holds less beside the cache than one layer's keys would take uncoded."""
    model, config = ready(name, (64, 2, 2))
    engine = Engine(model, batch=2, max_model_len=8192, cache_config=config, eos_ids=())
    cache, logits = engine.empty()
    sampling = Sampling.of([SamplingParams()] * 2)
    budget = jnp.asarray([5, 5])
    rows = programs.first_token(logits, sampling, cache.length, budget, engine.eos)
    compiled = programs.decode.lower(
        engine.graphdef, engine.state, cache, rows, sampling, engine.eos, jnp.int32(1)
    ).compile()
    memory = compiled.memory_analysis()
    report = cache_report(cache)
    keys = report["raw_bytes"] // (2 * model.config.num_layers)
    assert keys <= report["raw_bytes"] / 4
    assert memory.alias_size_in_bytes >= report["total_bytes"]
    assert memory.temp_size_in_bytes < keys / 2, (memory.temp_size_in_bytes, keys)
    assert largest_copy(compiled.as_text()) < keys / 10


# -- keys with few bits, many queries a head (case 26) -------------------------------------------

#: least share of tokens whose best next token stays the dense model's, keys by name, values int4.
#: Random weights leave near ties: int8 keys keep 0.87. Measured: kivi3 0.75, turboquant3 0.66, pca3
#: 0.81, pca2 0.73; under the floor that warns, kivi2 0.49 and turboquant2 0.42.
FIDELITY = {"kivi3": 0.68, "turboquant3": 0.58, "pca3": 0.72, "pca2": 0.65, "kivi2": 0.4}


def peaky(tiny):
    """A model with 8 query heads a KV head whose keys have loud, offset channels and whose
    attention is sharp: most of a query's weight lies on a few tokens."""
    model = tiny(
        form="stacked", num_heads=8, num_kv_heads=1, head_dim=64, attention_bias=True, seed=26
    )
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
    attention = model.stack.stack.attention
    loud = jnp.asarray([3, 17, 40])
    kernel, bias = attention.k_proj.kernel, attention.k_proj.bias
    kernel[...] = kernel[...].at[..., loud].multiply(4.0)
    bias[...] = bias[...].at[..., loud].set(jnp.asarray([6.0, -9.0, 4.0])[None])
    return model


@pytest.fixture(scope="module")
def agreement(tiny):
    """`agreement(name)`: (top-1 agreement past the exact window, mean largest weight)."""
    model = peaky(tiny)
    tokens = oracles.tokens_for(model, 4, 320, seed=3)
    dense = np.asarray(model(tokens)[0])

    def of(name: str, path) -> float:
        config = CacheConfig.parse(f"{name}+int4", **CACHE)
        if calibration.needs_calibration(model.config, config):
            rows = oracles.tokens_for(model, 4, 300, seed=8)
            calibration.save(path, model, config, calibration.calibrate(model, rows, config))
            config = CacheConfig.parse(f"{name}+int4", **CACHE, calibration=str(path))
        cache = model.init_cache(batch=4, max_len=320, config=config)
        logits, _ = oracles.feed(model, cache, tokens, [64] * 5)
        past = slice(64, None)
        return float(np.mean(logits[:, past].argmax(-1) == dense[:, past].argmax(-1)))

    return of


@pytest.mark.parametrize("name", FIDELITY)
def test_ratio_8_keeps_the_best_token(agreement, tmp_path, name):
    got = agreement(name, tmp_path / "c")
    assert got >= FIDELITY[name], got


def test_low_bit_keys_warn(tiny):
    """Below 3 bits, or 2 with a calibration; where a cache is made, not where it is planned."""
    model = tiny()

    def make(text: str) -> None:
        model.init_cache(batch=1, max_len=200, config=CacheConfig.parse(text, **CACHE))

    for name in ("kivi2", "turboquant2+int8", "turboquant1", "turboquant-prod2"):
        with pytest.warns(
            LowBitKeysWarning, match=r"keys of layers 0-1 have [12] bits .* floor of 3"
        ):
            make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("kivi3", "turboquant3", "int4+kivi2", "raw+turboquant1", "turboquant-prod3"):
            make(name)
