"""The TPU kernel in interpret mode, and its XLA form, against dense attention in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernel_data import all_codes, dense, latent_pool, random_pool

from pallas_kernels.codes import Symmetric
from pallas_kernels.paged_attention import (
    check_table,
    choose,
    paged_attention,
    paged_attention_logits,
    tpu,
)
from pallas_kernels.paged_attention.tpu import paged_attention_tpu
from pallas_kernels.softmax import MASKED, Partial, attention_mass, finish, log_sum_exp, merge

#: XLA's optimiser takes most of the time of these tests, for programs that run once
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def run(pool, q, lengths, *, interpret=True, block_pages=2, **options):
    options |= {"block_pages": block_pages, "params": pool.params}
    call = functools.partial(paged_attention_tpu, fmt=pool.fmt, interpret=interpret, **options)
    arrays = (q, pool.pages, pool.table, jnp.asarray(lengths, jnp.int32))
    part, logits = jax.jit(call, compiler_options=QUICK if interpret is True else None)(*arrays)
    return part if logits is None else (*part, logits)


def queries(pool, Q, seed=1):
    B, K, _, D = pool.k.shape
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, K, Q, D)), jnp.bfloat16)


def prefix(lengths, S, Q):
    seen = np.arange(S)[None] < np.asarray(lengths)[:, None]
    return np.broadcast_to(seen[:, None], (len(lengths), Q, S))


def assert_close(part, expected, tolerance):
    out, lse = expected
    known = np.isfinite(lse)
    assert np.all(np.asarray(part.mass)[~known] == 0)
    got = np.asarray(part.top)[known] + np.log(np.asarray(part.mass)[known])
    np.testing.assert_allclose(got, lse[known], atol=0.03, rtol=0)
    error = np.abs(np.asarray(finish(part)) - out).max() / out.std()
    assert error < tolerance, error


@pytest.mark.parametrize("name", all_codes())
def test_every_code(name):
    """Ragged: a token, a page less one, a page, a page and one, an odd number, all, and none."""
    pool = random_pool(name, K=2, H=128, B=7, M=3)
    lengths = [1, 127, 128, 129, 301, 384, 0]
    q = queries(pool, 3)
    part = run(pool, q, lengths, scale=0.06)
    expected = dense(q, pool.k, pool.v, prefix(lengths, 384, 3), scale=0.06)
    assert_close(part, expected, 0.05)


@pytest.mark.parametrize(
    "name", ["bf16", "int8", "int4-low-pairs", pytest.param("turboquant4", marks=pytest.mark.slow)]
)
def test_latents(name):
    """One latent as key and value, and a rotated key; 16 heads of 2 tokens as queries."""
    pool = latent_pool(name, C=256, R=64, B=4, M=2)
    lengths = [1, 129, 256, 0]
    q = queries(pool, 32)
    part = run(pool, q, lengths, scale=0.03)
    expected = dense(q, pool.k, pool.v, prefix(lengths, 256, 32), scale=0.03)
    assert_close(part, expected, 0.05)


@pytest.mark.slow
def test_latents_of_deepseek_with_coded_rotated_keys():
    pool = latent_pool("int8", C=512, R=64, B=2, M=3, rope=Symmetric(8))
    q, lengths = queries(pool, 128), [300, 384]
    part = run(pool, q, lengths, scale=0.02, positions=jnp.asarray([290, 380]))
    seen = prefix([291, 381], 384, 128)
    assert_close(part, dense(q, pool.k, pool.v, seen, scale=0.02), 0.05)


SHAPES = [(1, 256, 32), (8, 64, 1), (4, 96, 9), (3, 80, 2)]  # K, H, Q


@pytest.mark.parametrize(("K", "H", "Q"), SHAPES)
@pytest.mark.parametrize("name", all_codes(["int4-low-pairs"]))
def test_shapes(name, K, H, Q):
    if name.startswith(("turboquant3", "smooth3", "kvquant3", "mixed")) and H == 80:
        pytest.skip("80 numbers of one bit do not fill words")
    pool = random_pool(name, K=K, H=H, B=2, M=2)
    q = queries(pool, Q)
    part = run(pool, q, [131, 256], scale=0.06, block_pages=1)
    expected = dense(q, pool.k, pool.v, prefix([131, 256], 256, Q), scale=0.06)
    assert_close(part, expected, 0.05)


MASKS = [
    {"softcap": 2.0},
    {"positions": [150, 380], "queries": 2},
    {"positions": [150, 380], "queries": 2, "window": 40},
]


@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("implementation", ["tpu", "xla"])
def test_masks(options, implementation):
    """Causal blocks of two queries, a window that starts past the first block, a soft cap."""
    pool = random_pool("int8", K=2, H=128, B=2, M=3)
    q, S = queries(pool, 4), 384
    given = dict(options)
    seen = prefix([160, 384], S, 4)
    if "positions" in options:
        own = np.asarray(options["positions"])[:, None] + np.arange(4)[None] % 2
        given["positions"] = jnp.asarray(options["positions"], jnp.int32)
        token = np.arange(S)[None, None]
        seen = seen & (token <= own[..., None])
        seen = seen & (token > own[..., None] - options.get("window", S))
    expected = dense(q, pool.k, pool.v, seen, scale=0.2, softcap=options.get("softcap"))
    assert_close(entry(pool, q, [160, 384], implementation, scale=0.2, **given), expected, 0.05)


def entry(pool, q, lengths, implementation, *, logits=False, **options):
    call = functools.partial(
        paged_attention_logits if logits else paged_attention,
        fmt=pool.fmt,
        implementation=implementation,
        interpret=True,
        params=pool.params,
        **options,
    )
    arrays = (q, pool.pages, pool.table, jnp.asarray(lengths, jnp.int32))
    return jax.jit(call, compiler_options=QUICK)(*arrays)


LOGITS = {
    "ragged": ([1, 129, 0], 3, {}),
    "soft cap": ([384, 300, 128], 8, {"softcap": 2.0}),
    "window": ([384, 200, 384], 4, {"positions": [380, 150, 1000], "queries": 2, "window": 40}),
}


@pytest.mark.parametrize("implementation", ["tpu", "xla"])
@pytest.mark.parametrize("case", LOGITS)
def test_logits(case, implementation):
    """MASKED past the end, before a window that starts past the first block, and where the window
    is past the end; what they sum to is the part's own log-sum-exp. The part is what it is
    without them."""
    lengths, Q, options = LOGITS[case]
    pool = random_pool("int8", K=2, H=64, B=3, M=3)
    q, S = queries(pool, Q), 384
    seen, given = prefix(lengths, S, Q), dict(options)
    if "positions" in options:
        given["positions"] = jnp.asarray(options["positions"], jnp.int32)
        own = np.asarray(options["positions"])[:, None] + np.arange(Q)[None] % options["queries"]
        token, own = np.arange(S)[None, None], own[..., None]
        seen = seen & (token <= own) & (token > own - options["window"])
    part, logits = entry(pool, q, lengths, implementation, logits=True, scale=0.2, **given)
    alone = entry(pool, q, lengths, implementation, scale=0.2, **given)
    for a, b in zip(part, alone, strict=True):
        np.testing.assert_array_equal(a, b)
    s = np.einsum("bkqd,bksd->bkqs", np.asarray(q, np.float64), pool.k) * 0.2
    s = 2 * np.tanh(s / 2) if "softcap" in options else s
    np.testing.assert_allclose(logits, np.where(seen[:, None], s, MASKED), rtol=1e-5, atol=0.02)
    mass = attention_mass(logits, log_sum_exp(part))
    some = np.broadcast_to(seen.any(-1)[:, None], part.mass.shape).sum(-1)
    np.testing.assert_allclose(jnp.sum(mass, axis=-1), some, rtol=0.02)


def test_each_program_writes_its_own_rows(monkeypatch):
    pool = random_pool("int8", K=2, H=64, B=3, M=2)
    q, lengths = queries(pool, 2), [130, 256, 3]
    expected = run(pool, q, lengths, scale=0.2, logits=True)
    monkeypatch.setattr(tpu, "ROW_BYTES", 1)
    assert tpu._split(3, 1024) == (1, 3)
    for a, b in zip(run(pool, q, lengths, scale=0.2, logits=True), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_mass_over_merged_parts_is_that_of_one_softmax():
    """Keys of the pages and exact ones elsewhere: together each query gives 1."""
    pool = random_pool("int8", K=1, H=64, B=1, M=2)
    q = queries(pool, 3)
    part, logits = entry(pool, q, [200], "xla", logits=True, scale=0.1)
    other = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, 3, 5)), jnp.float32)
    exact = Partial(jnp.zeros((1, 1, 3, 64)), jnp.zeros((1, 1, 3)), jnp.sum(jnp.exp(other), -1))
    lse = log_sum_exp(merge(part, exact))
    got = [attention_mass(x, lse)[0, 0] for x in (logits, other)]
    both = np.concatenate([np.asarray(logits[0, 0, :, :200]), np.asarray(other[0, 0])], axis=1)
    expected = np.asarray(jax.nn.softmax(both, axis=-1)).sum(0)
    np.testing.assert_allclose(np.concatenate([got[0][:200], got[1]]), expected, rtol=1e-4)
    assert not np.any(got[0][200:])


@pytest.mark.parametrize("name", ["bf16", "fp8-e4m3", "int4-low", "kvquant4"])
@pytest.mark.parametrize("H", [64, 128])
def test_nothing_unused_is_seen(name, H):
    """NaN, or all ones, in every unused slot of the last page, in spare pages and past the table's
    used part changes no bit."""
    pool = random_pool(name, K=2, H=H, B=2, M=3)
    q, lengths = queries(pool, 4), [130, 256]
    clean = run(pool, q, lengths, scale=0.1, logits=True)
    table = np.asarray(pool.table)
    pages = pool.pages
    for row, length in enumerate(lengths):
        last = table[row, (length - 1) // 128]
        real = (length - 1) % 128 + 1
        pages = pages.at[last].set(spoil(pool.fmt, pages[last], real))
        for page in table[row, (length + 127) // 128 :]:
            pages = pages.at[page].set(-1)
    pool.pages = pages
    spoilt = run(pool, q, lengths, scale=0.1, logits=True)
    for a, b in zip(clean, spoilt, strict=True):
        np.testing.assert_array_equal(a, b)


def spoil(fmt, page, real):
    """All ones in every bit of tokens from `real` on: NaN in bfloat16 and float8."""
    page = np.array(page)
    for k in range(fmt.num_kv_heads):
        first = k * fmt.head_rows
        page[first : first + fmt.key_rows, real:] = -1
        values = page[first + fmt.key_rows : first + fmt.head_rows]
        if fmt.values_channels_first:
            values[:, real:] = -1
            continue
        fields = 32 // fmt.v.bits
        for tile in range(fmt.value_tiles):
            rows = values[tile * fmt.value_tile_rows : (tile + 1) * fmt.value_tile_rows]
            for token in range(real, 128):
                row, field = divmod(token, fields)
                ones = ((1 << fmt.v.bits) - 1) << (fmt.v.bits * field)
                rows[row] = (rows[row].astype(np.int64) | ones).astype(np.uint32).view(np.int32)
    page[fmt.side_row :, real:] = -1
    return jnp.asarray(page)


def test_no_race_in_the_copies(capsys):
    """Nor in those of the scores: at blocks that are not visited, memory holds NaN."""
    pool = random_pool("int4-low", K=2, H=128, B=2, M=5)
    q, lengths = queries(pool, 2), [600, 140]
    strict = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    *part, logits = run(pool, q, lengths, scale=0.1, interpret=strict, block_pages=1, logits=True)
    seen = prefix(lengths, 640, 2)
    assert_close(Partial(*part), dense(q, pool.k, pool.v, seen, scale=0.1), 0.05)
    np.testing.assert_array_equal(logits != MASKED, np.broadcast_to(seen[:, None], logits.shape))
    assert np.isfinite(logits).all()
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_ids_outside_of_the_pool_read_the_null_page():
    pool = random_pool("int8", K=1, H=64, B=1, M=2)
    q = queries(pool, 2)
    pool.table = pool.table.at[0, 1].set(10**6)
    part = run(pool, q, [256], scale=0.1)
    pool.k[:, :, 128:], pool.v[:, :, 128:] = 0, 0
    expected = dense(q, pool.k, pool.v, prefix([256], 256, 2), scale=0.1)
    assert_close(part, expected, 0.05)


def test_checked_mode_names_the_entry():
    table, lengths = jnp.asarray([[1, 2], [3, 9]]), jnp.asarray([256, 129])
    with pytest.raises(ValueError, match=r"table\[1, 1\]: expected a page id of 0 to 8, got 9"):
        check_table(table, lengths, num_pages=9)
    check_table(table, jnp.asarray([256, 128]), num_pages=9)
    with pytest.raises(ValueError, match=r"lengths: expected 0 to 256, got \[257, 0\]"):
        check_table(table, jnp.asarray([257, 0]), num_pages=10)


def test_cases_that_do_not_fit_are_refused_with_the_reason():
    pool = random_pool("int8", K=1, H=64, B=1, M=1)
    arrays = (queries(pool, 2), pool.pages, pool.table, jnp.asarray([128], jnp.int32))
    call = functools.partial(paged_attention, fmt=pool.fmt, scale=0.1)
    with pytest.raises(NotImplementedError, match="layout of their own"):
        call(*arrays, implementation="gpu")
    with pytest.raises(ValueError, match="implementation: expected one of"):
        call(*arrays, implementation="cuda")
    with pytest.raises(ValueError, match="window: expected positions"):
        call(*arrays, window=4)
    with pytest.raises(ValueError, match="queries: expected a divisor of Q=2"):
        call(*arrays, queries=3)
    calibrated = random_pool("kvquant3", K=1, H=64, B=1, M=1)
    for params, field in (
        (({}, {}), r"params: k: levels: expected \(1, 8\), got None"),
        (
            (calibrated.params[0], {"levels": jnp.zeros((1, 4))}),
            r"params: v: levels: .* got \(1, 4\)",
        ),
    ):
        with pytest.raises(ValueError, match=field):
            paged_attention(
                arrays[0],
                calibrated.pages,
                *arrays[2:],
                fmt=calibrated.fmt,
                scale=0.1,
                params=params,
            )
    with pytest.raises(ValueError, match="KV heads: expected 1, got 2"):
        call(jnp.repeat(arrays[0], 2, axis=1), *arrays[1:])
    assert choose(pool.fmt, "cpu") == "xla"
    assert choose(pool.fmt, "tpu") == "tpu"
