"""Scores, budgets and the choice of what stays, against plain NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import eviction
from kvjax.eviction.attention import column_mass, window_mass
from kvjax.eviction.base import Prompt
from kvjax.eviction.snapkv import pooled

LENGTHS = np.asarray([40, 23])


@pytest.fixture(scope="module")
def prompt():
    """Two rows of 40 and 23 tokens, 2 KV heads of 3 queries; NaN in the padding."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 40, 2, 3, 8)) * 2
    k, v = rng.normal(size=(2, 40, 2, 8)) * 3, rng.uniform(-1, 1, (2, 40, 2, 8))
    angle = np.arange(40)[:, None] * 0.5 ** np.arange(4)[None]
    rope = tuple(
        jnp.asarray(np.broadcast_to(f(angle), (2, 40, 4)), "float32") for f in (np.cos, np.sin)
    )
    arrays = [jnp.asarray(x, "float32") for x in (q, k, v)]
    return Prompt(*arrays, jnp.asarray(LENGTHS), rope, 8**-0.5, None)


def weights(prompt) -> np.ndarray:
    """Softmax weights [B, K, G, T, T]; rows of padding are zero."""
    s = np.einsum("bqkgh,btkh->bkgqt", prompt.q, prompt.k, dtype=np.float64) * prompt.scale
    T = s.shape[-1]
    seen = np.tril(np.ones((T, T), bool))[None] & (np.arange(T) < LENGTHS[:, None])[:, :, None]
    s = np.where(seen[:, None, None], s, -np.inf)
    e = np.exp(s - np.maximum(s.max(-1, keepdims=True), -1e300))
    return e / np.maximum(e.sum(-1, keepdims=True), 1e-300)


def test_attention_masses(prompt):
    full = weights(prompt)
    np.testing.assert_allclose(column_mass(prompt, block=16), full.sum(3), atol=1e-4)
    for b, n in enumerate(LENGTHS):
        got = np.asarray(window_mass(prompt, 7))[b]
        np.testing.assert_allclose(got, full[b, :, :, n - 7 : n].sum(2), atol=1e-5)
    # every query pays one in all (methods.md 10)
    np.testing.assert_allclose(np.asarray(column_mass(prompt)).sum(-1)[:, 0, 0], LENGTHS, rtol=1e-5)


def test_pooling_by_hand():
    """methods.md 11: s = [0,0,8,0,0,0,4,0], kernel 5."""
    s = jnp.asarray([[[0.0, 0, 8, 0, 0, 0, 4, 0]]])
    np.testing.assert_allclose(
        pooled(s, 5, "avg")[0, 0], [1.6, 1.6, 1.6, 1.6, 2.4, 0.8, 0.8, 0.8], rtol=1e-6
    )
    np.testing.assert_allclose(pooled(s, 5, "max")[0, 0], [8, 8, 8, 8, 8, 4, 4, 4])


def test_snapkv_scores(prompt):
    policy = eviction.parse("snapkv:20/window=6/sinks=2/kernel=3/pool=max")
    got = np.asarray(policy.scores(prompt))
    full = weights(prompt).mean(2)
    for b, n in enumerate(LENGTHS):
        votes = full[b, :, n - 6 : n].sum(1)
        votes[:, n - 6 :] = 0
        padded = np.pad(votes, ((0, 0), (1, 1)))
        want = np.maximum(np.maximum(padded[:, :-2], padded[:, 1:-1]), padded[:, 2:])
        np.testing.assert_allclose(got[b, :, : n - 7], want[:, : n - 7], atol=1e-5)


def test_observed_scores(prompt):
    full = weights(prompt).sum((2, 3))
    plain = eviction.parse("observed:50/normalise=false").scores(prompt)
    np.testing.assert_allclose(plain, full, atol=1e-4)
    seen_by = np.maximum(LENGTHS[:, None] - np.arange(40), 1)
    got = eviction.parse("observed:50").scores(prompt)
    np.testing.assert_allclose(got, full / seen_by[:, None], atol=1e-4)


def test_expected_scores(prompt):
    """Against the formula with explicit rotation matrices."""
    policy = eviction.parse("expected:50/future=5/sinks=2")
    got = np.asarray(policy.scores(prompt), np.float64)
    freq = 0.5 ** np.arange(4)

    def rotation(position):
        c, s = np.diag(np.cos(position * freq)), np.diag(np.sin(position * freq))
        return np.block([[c, -s], [s, c]])

    for b, n in enumerate(LENGTHS):
        turn = np.mean([rotation(n - 1 + i) for i in range(1, 6)], axis=0)
        for h in range(2):
            total = 0
            for g in range(3):
                q = np.stack([rotation(t).T @ prompt.q[b, t, h, g] for t in range(2, n)])
                mu, cov = turn @ q.mean(0), turn @ np.cov(q.T, bias=True) @ turn.T
                k = np.asarray(prompt.k[b, :n, h], np.float64)
                z = (
                    k @ mu * prompt.scale
                    + np.einsum("th,hl,tl->t", k, cov, k) * prompt.scale**2 / 2
                )
                total = total + np.exp(z - z.max()) / np.exp(z - z.max()).sum() / 3
            want = total * np.linalg.norm(prompt.v[b, :n, h], axis=-1)
            np.testing.assert_allclose(got[b, h, :n], want, rtol=2e-3, atol=1e-6)


def test_keys_alone(prompt):
    k = np.asarray(prompt.k, np.float64)
    norm = np.linalg.norm(k, axis=-1)
    np.testing.assert_allclose(
        eviction.parse("knorm:50").scores(prompt), -np.moveaxis(norm, 1, 2), rtol=1e-5
    )
    got = np.asarray(eviction.parse("keydiff:50").scores(prompt))
    unit = k / norm[..., None]
    for b, n in enumerate(LENGTHS):
        centre = unit[b, :n].mean(0)
        centre /= np.linalg.norm(centre, axis=-1, keepdims=True)
        np.testing.assert_allclose(
            got[b, :, :n], -np.einsum("tkh,kh->kt", unit[b, :n], centre), atol=1e-5
        )


def test_the_best_stay():
    """Sinks and the window whatever they score; then the highest; each row by its own length."""
    policy = eviction.parse("knorm:8/sinks=1/window=2")
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(2, 3, 20)).astype(np.float32)
    scores[0, 0, 5], scores[1, 2, 3] = np.nan, np.inf
    lengths, keep = np.asarray([20, 6]), np.asarray([8, 5])
    got = np.asarray(
        eviction.select(policy, jnp.asarray(scores), jnp.asarray(lengths), jnp.asarray(keep), 8)
    )
    for b in range(2):
        n = lengths[b]
        safe = {0, *range(n - 2, n)}
        for h in range(3):
            rest = [t for t in range(n) if t not in safe]
            best = sorted(rest, key=lambda t: -np.nan_to_num(scores[b, h, t], nan=-np.inf))
            want = sorted(safe | set(best[: keep[b] - len(safe)]))
            assert got[b, h].tolist() == want + [20] * (8 - len(want))


@pytest.mark.parametrize("name", eviction.names())
def test_budgets(name):
    """Case 29: something always stays; a budget no smaller than the prompt keeps all of it."""
    for percent in () if name == "h2o" else (10, 40, 60, 99, 100):  # h2o's is of the cache
        policy = eviction.parse(f"{name}:{percent}%/sinks=0/window=1")
        for n in range(1, 60):
            kept = policy.kept(n)
            assert 1 <= kept <= max(2, -(-percent * n // 100))
            assert kept <= n
            assert percent < 100 or kept == n
    policy = eviction.parse(f"{name}:64/sinks=4/window=16")
    for factor in policy.factors(12):
        counts = [policy.kept(n, factor) for n in range(400)]
        assert counts == sorted(counts)
    assert [policy.kept(n) for n in (1, 63, 64, 65, 5000)] == [1, 63, 64, 64, 64]


@pytest.mark.parametrize("layers", [1, 4, 30, 32])
@pytest.mark.parametrize("beta", [1.0, 2.0, 20.0])
@pytest.mark.parametrize("budget", [40, 128, 2048])
def test_a_pyramid_keeps_its_promise(layers, beta, budget):
    """Case 31: never more than layers x budget, falling with depth, and most of it used."""
    policy = eviction.parse(f"pyramidkv:{budget}/beta={beta}/levels={layers}")
    kept = [policy.kept(100_000, f) for f in policy.factors(layers)]
    assert sum(kept) <= layers * budget
    assert sum(kept) > layers * (budget - 1)
    assert kept == sorted(kept, reverse=True)
    if beta == 20.0 and layers > 1:
        assert kept[0] - policy.protected == int(39 / 20 * (budget - policy.protected) + 1e-9)
    coarse = eviction.parse(f"pyramidkv:{budget}/beta={beta}/levels=3").factors(layers)
    assert len(set(coarse)) <= 3
    assert np.isclose(np.mean(coarse), 1)


@pytest.mark.parametrize("name", ["snapkv", "observed", "expected"])
def test_scoring_memory_is_linear(name):
    """Cases 43 and 44: no T x T matrix."""
    policy = eviction.parse(f"{name}:50%")

    def temp(T):
        def shape(*s):
            return jax.ShapeDtypeStruct(s, jnp.float32)

        def run(q, k, v, n, cos, sin):
            return policy.scores(Prompt(q, k, v, n, (cos, sin), 0.1, None))

        q, k, rope = shape(1, T, 2, 2, 8), shape(1, T, 2, 8), shape(1, T, 4)
        lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
        compiled = jax.jit(run).lower(q, k, k, lengths, rope, rope).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp(8192) < 2.2 * temp(4096)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapkv", "evict: expected snapkv:BUDGET"),
        ("snapk:100", "evict: expected one of .* got 'snapk'. Did you mean 'snapkv'"),
        ("h2o:100/window=100", "budget: expected at least 105"),
        ("snapkv:0", "expected a budget as tokens"),
        ("snapkv:-5", "expected a budget as tokens"),
        ("snapkv:12x", "expected a budget as tokens .* or bytes"),
        ("snapkv:0MiB", "a budget of at least one byte"),
        ("snapkv:1TiB", "expected a budget as tokens"),
        ("streaming:4MiB", "expected SINKS\\+RECENT"),
        ("snapkv:0%", "expected a share"),
        ("snapkv:101%", "expected a share"),
        ("snapkv:x%", "expected a share"),
        ("snapkv:20", "budget: expected at least 37 tokens"),
        ("snapkv:100/kernel=4", "kernel: expected an odd int"),
        ("snapkv:100/kernel=x", "kernel: expected a number"),
        ("snapkv:100/kernal=5", "got 'kernal'. Did you mean 'kernel'"),
        ("snapkv:100/pool=sum", "pool: expected one of"),
        ("observed:100/normalise=1", "normalise: expected true or false"),
        ("pyramidkv:100/beta=0.5", "beta: expected a number >= 1"),
        ("snapkv:²", "a budget as tokens"),
        ("snapkv:99999999999", "a budget as tokens"),
        ("snapkv:100/window=8/window=9", "expected each option once"),
        ("expected:100/future=0", "future: expected an int > 0"),
        ("pyramidkv:100/beta=inf", "beta: expected a number >= 1"),
        ("knorm:100/sinks=-1", "sinks: expected an int >= 0"),
    ],
)
def test_bad_policies_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        eviction.parse(text)


@pytest.mark.parametrize("name", eviction.names())
def test_what_always_stays(name):
    """Cases 34 and 40: by default the first tokens and the last stay; a prompt within the budget or
    the window loses nothing."""
    policy = eviction.parse(f"{name}:100")
    assert policy.sinks >= 4
    assert policy.window >= 8
    wide = eviction.parse(f"{name}:100/window=64")
    late = min(wide.factors(30))
    assert all(wide.kept(n) == n for n in range(1, 101))
    assert all(wide.kept(n, late) == n for n in range(1, 65))


def test_descriptions_parse_back():
    for text in (
        "snapkv:100",
        "pyramidkv:25%/window=16/beta=5",
        "observed:64/normalise=False",
        "knorm:64MiB",
        "h2o:1500B",
        "keydiff:2kB",
    ):
        policy = eviction.parse(text.replace("False", "false"))
        assert eviction.describe(policy) == text
