"""Every registered codec, for keys and for values."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_data import entries, normal, ready, rel_mse

from kvjax import codecs

HEAD_DIMS = (32, 40, 64, 80, 96, 112, 128, 192, 256)
CASES = [(name, role) for name in codecs.names() for role in "kv"]
UNLIKE = [(n, r) for n, r in CASES if r == "k" or codecs.get(n) != codecs.get(n, role="v")]
PAGE, HEADS, H = 64, 2, 64
ROTATED = ("turboquant3", "turboquant2.5", "turboquant-prod3")


def bytes_per_token(codec, role, head_dim):
    """The formulas of the docstrings, written out a second time."""
    bits = getattr(codec, "bits", None)
    groups = head_dim / (getattr(codec, "group", None) or head_dim)
    if codec.name == "raw":
        return 2 * head_dim
    if codec.name in ("int8", "fp8"):
        return head_dim + 2
    if codec.name == "int":
        return head_dim * bits / 8 + (2 if codec.symmetric else 4) * groups
    if codec.name == "kivi":
        return head_dim * bits / 8 + 4 * head_dim / 32
    if codec.name == "kvquant":
        exact = 3 * math.ceil(0.01 * head_dim)
        return head_dim * bits / 8 + exact + (4 if role == "v" else 0)
    if codec.name == "qjl":
        return 2 * (2 * head_dim / 8) + 4
    if codec.name == "turboquant":
        return head_dim * bits / 8 + 2
    if codec.name == "turboquant-mixed":
        return (head_dim * bits + codec.num_outliers(head_dim)) / 8 + 4
    if codec.name == "turboquant-prod":
        return head_dim * (bits - 1) / 8 + head_dim / 8 + 4
    if codec.name == "klt":
        return head_dim * bits / 8 + ((head_dim + 3) / PAGE if role == "k" else 1)
    assert codec.name == "pca"
    return head_dim * bits / 8


def allowed(codec, role, head_dim, page_size=PAGE):
    if type(codec) is not codecs.KiviValue or head_dim % codec.group == 0:
        codec.check(head_dim=head_dim, page_size=page_size, role=role)
        return True
    with pytest.raises(ValueError, match=f"divisor of head_dim={head_dim}, got 32"):
        codec.check(head_dim=head_dim, page_size=page_size, role=role)
    return False


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("name", "role"), UNLIKE)
def test_bytes_are_the_formula_and_decode_fits(name, role, head_dim):
    codec = codecs.get(name, role=role)
    if not allowed(codec, role, head_dim):
        return
    codes = codec.code_shapes(tokens=PAGE, head_dim=head_dim, num_kv_heads=2, dtype=jnp.bfloat16)
    assert codecs.code_bytes(codes) == 2 * PAGE * bytes_per_token(codec, role, head_dim)
    assert all(leaf.shape[0] == 2 for leaf in codes.values())

    params = codec.param_shapes(num_kv_heads=2, head_dim=head_dim)
    heads = jax.ShapeDtypeStruct((2, 4, head_dim), jnp.float32)
    x = jax.eval_shape(functools.partial(codec.decode, dtype=jnp.bfloat16), codes, params)
    assert x.dtype == jnp.bfloat16
    assert x.shape[:2] == (2, PAGE)
    if role == "k":
        q = jax.eval_shape(codec.prepare_query, heads, params)
        assert q.shape == (2, 4, x.shape[-1])
    if role == "v" or codec == codecs.get(name, role="v"):
        o = jax.ShapeDtypeStruct((2, 4, x.shape[-1]), jnp.float32)
        assert jax.eval_shape(codec.finish_output, o, params) == heads


def test_effective_bits():
    for name, bits in (("raw", 16), ("int8", 8.125), ("kivi2", 3), ("turboquant2.5", 2.5)):
        codec = codecs.get(name)
        got = codecs.effective_bits(codec, head_dim=128, page_size=PAGE, dtype=jnp.bfloat16)
        assert got == bits


@functools.cache
def compiled(name, role, head_dim=H):
    """`q . x` for keys, `p . x` for values, through the codec, on `[B, K, T, H]`."""
    codec, params = ready(name, role, head_dim)

    def run(x, q, p):
        read = codec.decode(codec.encode(x, params), params, jnp.float32)
        if role == "k":
            return jnp.einsum("bkgr,bktr->bkgt", codec.prepare_query(q, params), read)
        return codec.finish_output(jnp.einsum("bkgt,bktr->bkgr", p, read), params)

    return jax.jit(run)


@functools.cache
def error(name, role, head_dim=H):
    """Relative squared error of attention's two products."""
    x = entries(role, 2, HEADS, PAGE, head_dim, seed=5)
    q = normal(2, HEADS, 3, head_dim, seed=6)
    p = np.abs(normal(2, HEADS, 3, PAGE, seed=7)) / PAGE
    exact = q @ np.swapaxes(x, -1, -2) if role == "k" else p @ x
    got = np.asarray(compiled(name, role, head_dim)(x, q, p))
    assert got.shape == exact.shape
    return rel_mse(got, exact)


def bound(name, role):
    """Loose: what a swapped axis, a wrong constant or a lost scale would break by far."""
    codec = codecs.get(name, role=role)
    bits = getattr(codec, "bits", 8)
    if codec.name == "pca" and role == "v":
        return (
            0.2 + 3 * 4.0**-bits
        )  # its range is fixed: loud tokens are cut, at any number of bits
    plain = {"raw": 1e-12, "int8": 1e-3, "fp8": 3e-3, "qjl": 0.2}
    # one scale per token suffers from the outlier channels, a sketch is noisy
    slack = {"int": 30, "pca": 8, "klt": 12, "turboquant-prod": 16}.get(codec.name, 8)
    return plain.get(codec.name, slack * 4.0**-bits)


@pytest.mark.parametrize(("name", "role"), CASES)
def test_scores_and_outputs(name, role):
    assert error(name, role) <= bound(name, role)


@pytest.mark.parametrize("head_dim", [h for h in HEAD_DIMS if h != H])
@pytest.mark.parametrize("name", ROTATED)
def test_rotations_work_at_every_head_dim(name, head_dim):
    codec, _ = ready(name, "k", head_dim)
    codec.check(head_dim=head_dim, page_size=PAGE, role="k")
    assert error(name, "k", head_dim) <= bound(name, "k")


FAMILIES = [
    ["kivi2", "kivi3", "kivi4", "kivi8"],
    ["kvquant2", "kvquant3", "kvquant4"],
    [f"turboquant{b}" for b in (1, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)],
    [f"turboquant-prod{b}" for b in (2, 3, 4)],
    [f"pca{b}" for b in (1, 2, 3, 4)],
    [f"klt{b}" for b in (1, 2, 3, 4)],
]


@pytest.mark.parametrize("role", "kv")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f[0])
def test_more_bits_less_error(family, role):
    errors = [error(name, role) for name in family]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == len(errors)


EDGES = {
    "zeros": lambda x: 0 * x,
    "constant": lambda x: 0 * x + 3.25,
    "huge": lambda x: np.clip(x * 1e4, -1e4, 1e4),
    "tiny": lambda x: x * 1e-9,
}


@pytest.mark.parametrize(("name", "role"), CASES)
def test_edges_are_finite(name, role):
    x = entries(role, 2, HEADS, PAGE, H, seed=5)
    q = normal(2, HEADS, 3, H, seed=6)
    p = np.abs(normal(2, HEADS, 3, PAGE, seed=7)) / PAGE
    for edge, make in EDGES.items():
        got = np.asarray(compiled(name, role, H)(make(x).astype(np.float32), q, p))
        assert np.isfinite(got).all(), edge
        calibrated = codecs.get(name, role=role).name in ("kvquant", "pca", "klt")
        if edge == "zeros" and not calibrated:
            assert not got.any()


ONE_OF_EACH = ["raw", "int8", "int4-hadamard", "fp8", "kivi2", "kvquant3", "qjl", "turboquant3"]
ONE_OF_EACH += ["turboquant2.5", "turboquant-prod3", "pca2", "klt2"]


@pytest.mark.parametrize(("name", "role"), [c for c in UNLIKE if c[0] in ONE_OF_EACH])
def test_a_row_is_the_same_alone_in_a_batch_and_in_a_scan(name, role):
    codec, params = ready(name, role)
    x = entries(role, 3, HEADS, PAGE, H, seed=5)
    encode = jax.jit(lambda v: codec.encode(v, params))
    batch = encode(x)
    scanned = jax.jit(lambda v: jax.lax.map(encode, v))(x)
    alone = encode(x[1])
    for leaf, value in alone.items():
        for other in (batch, scanned):
            np.testing.assert_array_equal(np.asarray(other[leaf][1]), np.asarray(value), leaf)


@pytest.mark.parametrize(
    "name", ["int4-hadamard", "turboquant3", "turboquant2.5", "turboquant-prod3"]
)
def test_query_and_output_sides_are_adjoint(name):
    """prepare_query(q) . y == q . finish_output(y): both sides read the same x^."""
    codec, params = ready(name)
    q = jnp.asarray(normal(HEADS, 3, H))
    prepared = codec.prepare_query(q, params)
    y = jnp.asarray(normal(*prepared.shape, seed=1))
    left = jnp.sum(prepared * y, -1)
    right = jnp.sum(q * codec.finish_output(y, params), -1)
    np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


def test_keys_and_values_differ_where_the_method_says_so():
    for name in ("raw", "kivi2", "kivi4", "kvquant3", "qjl", "pca2", "klt2"):
        key, value = codecs.pair(name)
        assert type(key) is not type(value)
    for name in ("int8", "int4", "fp8", "turboquant4"):
        assert codecs.pair(name)[0] == codecs.pair(name)[1]
