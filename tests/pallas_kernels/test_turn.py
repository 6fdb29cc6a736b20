"""Keys stored before RoPE, turned in the kernel, against dense attention in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernel_data import CODES, dense, latent_pool, param_shapes, random_pool

from pallas_kernels import aot
from pallas_kernels.codes import for_generation
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.tpu import paged_attention_tpu
from pallas_kernels.pages import PageFormat
from pallas_kernels.softmax import finish
from pallas_kernels.turn import Turn

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def frequencies(half, theta=1e4):
    return theta ** (-np.arange(half) / half)


def turned(k, start, freq, factor=1.0):
    """Keys `[B, K, S, D]` as RoPE turns those of positions start, start + 1, ..."""
    half = len(freq)
    angles = (np.asarray(start)[:, None] + np.arange(k.shape[2]))[..., None] * freq
    cos, sin = (f(angles)[:, None] * factor for f in (np.cos, np.sin))
    a, b, rest = np.split(k, (half, 2 * half), axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attend(pool, q, lengths, turn, implementation="tpu", **options):
    """On one block of two pages at a time, in interpret mode."""
    if implementation == "tpu":
        call = functools.partial(paged_attention_tpu, interpret=True, block_pages=2)
    else:
        call = functools.partial(paged_attention, implementation=implementation)
    call = functools.partial(call, fmt=pool.fmt, turn=turn, params=pool.params, **options)
    arrays = (q, pool.pages, pool.table, jnp.asarray(lengths, jnp.int32))
    got = jax.jit(call, compiler_options=QUICK)(*arrays)
    return got[0] if implementation == "tpu" else got  # without logits


def queries(pool, Q):
    B, K, _, D = pool.k.shape
    return jnp.asarray(np.random.default_rng(1).normal(size=(B, K, Q, D)), jnp.bfloat16)


def assert_close(part, expected, tolerance=0.05):
    out, lse = expected
    got = np.asarray(part.top) + np.log(np.asarray(part.mass))
    np.testing.assert_allclose(got, lse, atol=0.03, rtol=0)
    error = np.abs(np.asarray(finish(part)) - out).max() / out.std()
    assert error < tolerance, error


def seen(lengths, S, Q):
    tokens = np.arange(S)[None] < np.asarray(lengths)[:, None]
    return np.broadcast_to(tokens[:, None], (len(lengths), Q, S))


@pytest.mark.parametrize("implementation", ["tpu", "xla"])
@pytest.mark.parametrize(
    "name",
    [
        "bf16",
        "int8-narrow",
        "int4-low-narrow",
        "int4-low-pairs",
        "int4-groups",
        "fp8-e5m2",
        "kvquant3",
        "kvquant3-narrow",
    ]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "int8",
            "int4-pairs",
            "int4-low",
            "fp8-e4m3",
            "turboquant4",
            "smooth3",
            "kvquant2",
            "kvquant4",
        )
    ],
)
def test_every_code(name, implementation):
    """Three queries of a head, ragged rows, each from a place of its own: the last page is partly
    filled, and the last block partly."""
    pool = random_pool(name, K=2, H=64, B=3, M=3)
    lengths, start, freq = [129, 384, 5], [0, 1000, 37], frequencies(32)
    q = queries(pool, 3)
    turn = Turn(jnp.asarray(start), jnp.asarray(freq))
    part = attend(pool, q, lengths, turn, implementation, scale=0.06)
    keys = turned(pool.k, start, freq)
    expected = dense(q, keys, pool.v, seen(lengths, 384, 3), scale=0.06)
    assert_close(part, expected)
    plain = dense(q, pool.k, pool.v, seen(lengths, 384, 3), scale=0.06)
    assert np.abs(plain[1] - expected[1]).max() > 0.1  # turning matters


@pytest.mark.parametrize("implementation", ["tpu", "xla"])
@pytest.mark.parametrize(("H", "half"), [(128, 64), (128, 32), (80, 40), (256, 128)])
def test_some_channels_and_a_factor(H, half, implementation):
    """The factor is of the turned channels alone, and is applied once."""
    pool = random_pool("int8", K=1, H=H, B=2, M=2)
    freq = frequencies(half)
    turn = Turn(jnp.asarray([3, 500]), jnp.asarray(freq), 1.5)
    q = queries(pool, 2)
    part = attend(pool, q, [256, 140], turn, implementation, scale=0.05)
    keys = turned(pool.k, [3, 500], freq, 1.5)
    assert_close(part, dense(q, keys, pool.v, seen([256, 140], 256, 2), scale=0.05))


def test_a_window_starts_past_the_first_block():
    pool = random_pool("int8", K=2, H=64, B=1, M=5)
    freq = frequencies(32)
    turn = Turn(jnp.asarray([100]), jnp.asarray(freq))
    q = queries(pool, 2)
    options = {"positions": jnp.asarray([600]), "queries": 2, "window": 200}
    part = attend(pool, q, [602], turn, scale=0.06, **options)
    token, own = np.arange(640)[None, None], 600 + np.arange(2)[None, :, None]
    mask = (token <= own) & (token > own - 200)
    assert_close(part, dense(q, turned(pool.k, [100], freq), pool.v, mask, scale=0.06))


def test_far_places_keep_the_distances():
    """A row that begins at 100,000: only distances to the query count."""
    pool = random_pool("bf16", K=1, H=64, B=1, M=2)
    freq = frequencies(32)
    q = np.asarray(queries(pool, 1), np.float64)
    near, far = (
        attend(
            pool,
            jnp.asarray(turned(q, [256 + start], freq), jnp.bfloat16),
            [256],
            Turn(jnp.asarray([start]), jnp.asarray(freq)),
            scale=0.1,
        )
        for start in (0, 100_000)
    )
    np.testing.assert_allclose(near.top, far.top, atol=0.05)
    np.testing.assert_allclose(finish(near), finish(far), atol=0.05)


def test_no_race_and_nothing_unused_is_seen(capsys):
    """NaN in memory that nothing was copied to, and in keys past the end of each row."""
    pool = random_pool("bf16", K=2, H=64, B=2, M=3)
    q, lengths, start, freq = queries(pool, 2), [300, 140], [7, 900], frequencies(32)
    for row, length in enumerate(lengths):
        page = pool.table[row, length // 128]
        for first in range(0, pool.fmt.side_row, pool.fmt.head_rows):
            keys = slice(first, first + pool.fmt.key_rows)
            pool.pages = pool.pages.at[page, keys, length % 128 :].set(-1)
    strict = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    arrays = (q, pool.pages, pool.table, jnp.asarray(lengths, jnp.int32))
    turn = Turn(jnp.asarray(start), jnp.asarray(freq))
    options = {"fmt": pool.fmt, "scale": 0.06, "turn": turn, "block_pages": 1}
    part, _ = paged_attention_tpu(*arrays, interpret=strict, **options)
    keys = turned(pool.k, start, freq)
    assert_close(part, dense(q, keys, pool.v, seen(lengths, 384, 2), scale=0.06))
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_what_does_not_turn_is_refused_with_the_reason():
    def call(pool, turn, **options):
        arrays = (queries(pool, 2), pool.pages, pool.table, jnp.asarray([128], jnp.int32))
        return paged_attention(*arrays, fmt=pool.fmt, scale=0.1, turn=turn, **options)

    start = jnp.asarray([0])
    pool = random_pool("int8", K=1, H=64, B=1, M=1)
    with pytest.raises(ValueError, match=r"turn\.frequencies: expected 1 to 32 of them, got 64"):
        call(pool, Turn(start, jnp.ones(64)))
    with pytest.raises(ValueError, match=r"turn\.start: rows: expected 1, got \(2,\)"):
        call(pool, Turn(jnp.zeros(2, jnp.int32), jnp.ones(32)))
    with pytest.raises(NotImplementedError, match=r"multiple of 8 pairs .* got 30"):
        call(pool, Turn(start, jnp.ones(30)))
    for name in ("kivi2", "qjl"):
        with pytest.raises(NotImplementedError, match=r"turned keys: .* no angle turns"):
            call(random_pool(name, K=1, H=64, B=1, M=1), Turn(start, jnp.ones(32)))
    with pytest.raises(NotImplementedError, match="not those of latents"):
        call(latent_pool("int8", C=128, R=64, B=1, M=1), Turn(start, jnp.ones(32)))


@pytest.mark.skipif(not aot.available(), reason="needs libtpu, of the extra kvjax[aot]")
@pytest.mark.usefixtures("libtpu_environment")
@pytest.mark.parametrize(
    ("name", "shape", "chip"),
    [
        ("int8", (8, 4, 128), "v5e"),
        ("int4-low", (8, 4, 128), "v6e"),
        ("kvquant3", (8, 4, 128), "v6e"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("int4", (8, 4, 128), "v5e"),
                ("int8", (8, 4, 128), "v6e"),
                ("int4-groups", (8, 2, 64), "v5e"),
                ("fp8-e4m3", (8, 2, 80), "v5e"),
                ("mixed", (8, 2, 128), "v6e"),
                ("bf16", (1, 4, 256), "v6e"),
                ("kvquant3", (8, 4, 128), "v5e"),
                ("kvquant4", (8, 2, 64), "v6e"),
                ("kvquant2", (1, 4, 256), "v5e"),
            )
        ],
    ],
)
def test_compiles_at_real_sizes(name, shape, chip):
    """Llama-3-8B's and others, 8 rows of 8,192 tokens."""
    K, Q, H = shape
    k, v = (for_generation(c, {"v5e": 5, "v6e": 6}[chip]) for c in CODES[name])
    fmt, B, M = PageFormat(k, v, K, H), 8, 64

    def step(q, pages, table, lengths, start, freq, params):
        turn = Turn(start, freq)
        return paged_attention_tpu(
            q, pages, table, lengths, fmt=fmt, scale=H**-0.5, turn=turn,
            positions=lengths, window=4096, params=params,
        )[0]  # fmt: skip

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    shapes = [array((B, K, Q, H), jnp.bfloat16), array((B * M + 1, fmt.rows, 128)), array((B, M))]
    shapes += [array((B,)), array((B,)), array((H // 2,), jnp.float32)]
    done = aot.compile_for(chip, step, *shapes, param_shapes(fmt))
    assert 'custom_call_target="tpu_custom_call"' in done.as_text()
    assert done.memory_analysis().temp_size_in_bytes < 2**23
