"""The TPU kernels in interpret mode against dense attention and its autodiff, in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_data import dense as plain

from pallas_kernels import aot
from pallas_kernels.flash_attention import causal_partial, flash_attention
from pallas_kernels.softmax import finish, log_sum_exp

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def arrays(B, T, S, K, G, H, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, T, K, G, H), (B, S, K, H), (B, S, K, H))
    return [
        jnp.asarray(rng.normal(size=s) + mean, jnp.bfloat16).astype(jnp.float32)
        for s, mean in zip(shapes, (0.0, 0.0, 0.5), strict=True)
    ]


def dense(q, k, v, lengths, *, scale, offset=0, window=None, softcap=None, documents=None):
    T, S = q.shape[1], k.shape[1]
    s = jnp.einsum("btkgh,bskh->bkgts", q, k, precision="highest") * scale
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    own, key = offset + jnp.arange(T)[:, None], jnp.arange(S)[None]
    seen = (key <= own) & (key > own - (window or S + T))
    seen = seen[None] & (key[None] < lengths[:, None, None])
    if documents is not None:
        seen &= documents[:, offset : offset + T, None] == documents[:, None]
    p = jax.nn.softmax(jnp.where(seen[:, None, None], s, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bskh->bkgth", p, v, precision="highest")


def packed(*rows, ids=range(9)):
    """Ids of rows of documents, by their lengths."""
    return jnp.asarray([np.repeat(ids[: len(row)], row) for row in rows], jnp.int32)


CASES = {
    "plain": ((2, 256, 256, 2, 2, 64), {}),
    "ragged": ((2, 200, 200, 1, 3, 128), {}),
    "offset": ((1, 130, 700, 1, 2, 64), {"offset": 570}),
    "window": ((1, 640, 640, 1, 1, 64), {"window": 100}),
    "softcap": ((1, 128, 128, 2, 2, 80), {"softcap": 1.5}),
    "documents": ((2, 640, 640, 1, 2, 64), {"documents": packed((100, 300, 240), (512, 128))}),
    "documents again": (
        (1, 640, 640, 2, 1, 64),
        {"documents": packed((200, 300, 140), ids=(7, -3, 7))},
    ),
    "documents, all": (
        (2, 130, 700, 1, 2, 64),
        {
            "offset": 500,
            "window": 150,
            "softcap": 1.5,
            "documents": packed((20, 500, 60, 120), (570, 130)),
        },
    ),
    "all": ((2, 130, 700, 1, 2, 64), {"offset": 500, "window": 150, "softcap": 1.5}),
}
#: the XLA form in blocks so small that there are several, of queries and of keys
SMALL = functools.partial(causal_partial, block=96)


@pytest.mark.parametrize("attend", ["tpu", "xla", "xla in blocks"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, attend):
    shape, options = CASES[name]
    q, k, v = arrays(*shape)
    lengths = jnp.asarray([shape[2], shape[2] - 70][: shape[0]], jnp.int32)
    real = (jnp.arange(shape[1])[None] + options.get("offset", 0) < lengths[:, None])[
        :, None, None, :, None
    ]
    weights = jnp.asarray(np.random.default_rng(1).normal(size=shape[-1]), jnp.float32)

    def loss(attend, q, k, v):
        out = jnp.where(real, attend(q, k, v), 0)
        return jnp.sum(jnp.sin(out) @ weights), out

    def kernel(q, k, v):
        call = functools.partial(flash_attention, implementation=attend, interpret=True)
        call = SMALL if attend == "xla in blocks" else call
        return finish(call(q, k, v, lengths=lengths, scale=0.3, **options))

    reference = functools.partial(dense, lengths=lengths, scale=0.3, **options)
    got, expected = (
        jax.jit(
            jax.grad(functools.partial(loss, f), argnums=(0, 1, 2), has_aux=True),
            compiler_options=QUICK,
        )(q, k, v)
        for f in (kernel, reference)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        tolerance = 0.04 if attend == "tpu" else 1e-5
        assert float(jnp.abs(a - b).max()) < tolerance * float(jnp.abs(b).max())


def test_it_merges_like_the_xla_form():
    """Partials of both: same output, log-sum-exp and zero mass where no key is seen."""
    q, k, v = arrays(2, 128, 128, 1, 2, 64)
    lengths = jnp.asarray([100, 0], jnp.int32)
    k, v = k.at[:, 100:].set(jnp.nan), v.at[:, 100:].set(jnp.nan)
    k, v = k.at[1].set(jnp.nan), v.at[1].set(jnp.nan)
    got = flash_attention(q, k, v, lengths=lengths, scale=0.1, implementation="tpu", interpret=True)
    expected = causal_partial(q, k, v, lengths=lengths, scale=0.1)
    np.testing.assert_allclose(finish(got), finish(expected), atol=0.02)
    lse = expected.top[0] + jnp.log(expected.mass[0])
    np.testing.assert_allclose(got.top[0] + jnp.log(got.mass[0]), lse, atol=0.02)
    assert float(got.mass[1].max()) == 0.0


@pytest.mark.parametrize("implementation", ["tpu", "xla"])
def test_nan_past_the_end_reaches_no_gradient(implementation):
    """Under a soft cap too, whose slope at NaN is NaN."""
    q, k, v = arrays(1, 100, 100, 1, 2, 64)
    call = functools.partial(
        flash_attention,
        lengths=jnp.asarray([60]),
        scale=0.3,
        softcap=2.0,
        implementation=implementation,
        interpret=True,
    )

    def loss(q, k, v):
        return jnp.sum(jnp.sin(finish(call(q, k, v))[..., :60, :]))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=QUICK)
    clean = gradients(q, k.at[:, 60:].set(0), v.at[:, 60:].set(0))
    spoilt = gradients(q, k.at[:, 60:].set(jnp.nan), v.at[:, 60:].set(jnp.nan))
    for a, b in zip(clean, spoilt, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("attend", ["tpu", "xla", "xla in blocks"])
def test_each_document_is_as_it_is_alone(attend):
    """And as dense attention in float64 has it."""
    q, k, v = arrays(1, 256, 256, 1, 2, 64)
    call = functools.partial(flash_attention, implementation=attend, interpret=True)
    call = jax.jit(
        functools.partial(SMALL if attend == "xla in blocks" else call, scale=0.3),
        compiler_options=QUICK,
    )
    sizes = (60, 100, 96)
    part = call(q, k, v, lengths=jnp.asarray([240]), documents=packed(sizes))
    out, lse = np.asarray(finish(part)), np.asarray(log_sum_exp(part))
    start = 0
    for size in sizes:
        real = min(size, 240 - start)
        own = slice(start, start + size)
        alone = call(q[:, own], k[:, own], v[:, own], lengths=jnp.asarray([real]))
        kept = slice(start, start + real)
        tolerance = 0.02 if attend == "tpu" else 1e-5
        np.testing.assert_allclose(out[..., kept, :], finish(alone)[..., :real, :], atol=tolerance)
        np.testing.assert_allclose(lse[..., kept], log_sum_exp(alone)[..., :real], atol=tolerance)
        start += size
    rows = [np.moveaxis(np.asarray(x, np.float64), 1, -2) for x in (q[:, :, 0], k, v)]
    ids, token = np.asarray(packed(sizes))[0], np.arange(256)
    seen = (ids[:, None] == ids) & (token <= token[:, None]) & (token < 240)
    queries = jnp.asarray(rows[0].reshape(1, 1, 512, 64))
    expected, _ = plain(queries, *rows[1:], np.tile(seen, (2, 1))[None], scale=0.3)
    np.testing.assert_allclose(
        out[..., :240, :], expected.reshape(1, 1, 2, 256, 64)[..., :240, :], atol=tolerance
    )


def test_a_few_tokens_see_their_own_document():
    q, k, v = arrays(2, 40, 40, 1, 2, 8)
    how = {"lengths": jnp.asarray([40, 33]), "scale": 0.3, "documents": packed((9, 31), (20, 20))}
    at = jnp.asarray([[3, 39], [19, 20]])
    few = causal_partial(jnp.take_along_axis(q, at[..., None, None, None], 1), k, v, at=at, **how)
    every = finish(causal_partial(q, k, v, **how))
    expected = jnp.take_along_axis(every, at[:, None, None, :, None], axis=3)
    np.testing.assert_allclose(finish(few), expected, atol=1e-5)


@pytest.mark.parametrize("implementation", ["tpu", "xla"])
def test_blocks_of_other_documents_are_left_out(implementation):
    """Else the NaN of one would reach the other, as 0 * NaN is NaN."""
    q, k, v = arrays(1, 1024, 1024, 1, 1, 64)
    call = functools.partial(
        flash_attention,
        lengths=jnp.asarray([1024]),
        documents=packed((512, 512)),
        scale=0.3,
        implementation=implementation,
        interpret=True,
    )
    halves = slice(0, 512), slice(512, 1024)

    def loss(q, k, v, own):
        out = finish(call(q, k, v))[..., own, :]
        return jnp.sum(jnp.sin(out)), out

    for own, other in (halves, halves[::-1]):
        spoilt = [x.at[:, other].set(jnp.nan) for x in (q, k, v)]
        f = jax.grad(functools.partial(loss, own=own), argnums=(0, 1, 2), has_aux=True)
        gradients, out = jax.jit(f, compiler_options=QUICK)(*spoilt)
        assert np.isfinite(out).all()
        for g in gradients:
            assert np.isfinite(g[:, own]).all()
            assert np.any(g[:, own])


def test_refusals():
    q, k, v = arrays(1, 8, 8, 1, 1, 8)
    call = functools.partial(flash_attention, lengths=jnp.asarray([8]), scale=1.0)
    with pytest.raises(NotImplementedError, match="no GPU kernel yet"):
        call(q, k, v, implementation="gpu")
    with pytest.raises(ValueError, match="implementation: expected one of"):
        call(q, k, v, implementation="cuda")
    with pytest.raises(ValueError, match=r"k: expected \(1, 'S', 1, 8\), got \(1, 8, 2, 8\)"):
        call(q, jnp.repeat(k, 2, axis=2), v)
    with pytest.raises(ValueError, match=r"v: expected \(1, 8, 1, 'R'\), got \(1, 7, 1, 8\)"):
        call(q, k, v[:, :7])
    with pytest.raises(ValueError, match=r"lengths: expected \(1,\), got \(2,\)"):
        call(q, k, v, lengths=jnp.asarray([8, 8]))
    ids = jnp.zeros((1, 8), jnp.int32)
    for implementation in ("tpu", "xla"):
        more = functools.partial(call, implementation=implementation)
        with pytest.raises(ValueError, match=r"documents: .* \(1, 8\), got \(1, 7\)"):
            more(q, k, v, documents=ids[:, :7])
        with pytest.raises(ValueError, match="documents: dtype: expected integers, got float32"):
            more(q, k, v, documents=ids.astype(jnp.float32))
        with pytest.raises(ValueError, match="among the 8 keys, got 2 and 8 queries"):
            more(q, k, v, documents=ids, offset=2)
    with pytest.raises(ValueError, match="offset: expected 0 or more, got -1"):
        call(q, k, v, offset=-1)
    with pytest.raises(ValueError, match="window: expected None or a positive int, got 0"):
        call(q, k, v, window=0)


@pytest.mark.skipif(not aot.available(), reason="needs libtpu, of the extra kvjax[aot]")
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize(
    ("K", "G", "H", "documents", "options"),
    [
        (8, 4, 128, False, {}),
        (8, 4, 128, True, {}),
        (1, 4, 256, False, {"window": 512, "softcap": 50.0}),
    ],
    ids=["llama-3-8b", "llama-3-8b-documents", "gemma-3-1b"],
)
def test_compiles_with_its_gradients(chip, K, G, H, documents, options, libtpu_environment):
    T = 2048
    shapes = [(1, T, K, G, H), (1, T, K, H), (1, T, K, H)]
    q, k, v = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)

    def loss(q, k, v, lengths, ids):
        call = functools.partial(flash_attention, lengths=lengths, implementation="tpu", **options)
        part = call(q, k, v, scale=0.1, documents=ids if documents else None)
        return jnp.sum(finish(part) ** 2)

    rows = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1,), (1, T))]
    done = aot.compile_for(chip, jax.value_and_grad(loss, argnums=(0, 1, 2)), q, k, v, *rows)
    text = done.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') >= 3
    # memory stays linear in the tokens: no T by T scores anywhere
    assert f"{T},{T}" not in text
