import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_data import normal, rel_mse, round_trip

from kvjax import codecs
from kvjax.codecs import klt
from kvjax.config import CacheConfig


def correlated(*shape, seed=0):
    """Entries whose variance falls along random axes, off centre."""
    H = shape[-1]
    axes = np.linalg.qr(normal(shape[0], H, H, seed=7))[0]
    z = normal(*shape, seed=seed) * (2.0 ** (-4 * np.arange(H) / H)).astype(np.float32)
    return (z @ axes + 0.5).astype(np.float32)


def metric(K, H, seed=3):
    """A second moment of gradients that are large in a few directions."""
    axes = np.linalg.qr(normal(K, H, H, seed=seed))[0]
    return (axes * (2.0 ** (-6 * np.arange(H) / H))) @ np.swapaxes(axes, 1, 2)


def cost(M, error):
    return float(np.einsum("kth,khg,ktg->", error, M, error))


def test_axes_invert_and_variances_are_the_cost():
    x, M = correlated(2, 4096, 16), metric(2, 16)
    analysis, synthesis, variances = klt.axes(x, M, floor=0.0)
    np.testing.assert_allclose(analysis @ synthesis, np.eye(16)[None].repeat(2, 0), atol=1e-8)
    centred = x - x.mean(1, keepdims=True)
    z = centred.astype(np.float64) @ analysis
    covariance = np.swapaxes(z, 1, 2) @ z / x.shape[1]
    off = covariance - np.eye(16) * np.diagonal(covariance, axis1=1, axis2=2)[:, None]
    assert np.abs(off).max() < 1e-6 * covariance.max()
    assert (np.diff(variances) <= 0).all()
    total = np.einsum("kth,khg,ktg->k", centred, M, centred) / x.shape[1]
    np.testing.assert_allclose(variances.sum(1), total, rtol=1e-5)


def test_the_metric_buys_what_it_weighs():
    x, M = correlated(2, 1536, 64), metric(2, 64)
    train, test = x[:, :1024], x[:, 1024:]
    codec = codecs.get("klt2", role="v", token_scale=False, decay=2.0)
    plain = round_trip(codec, codec.calibrate(train), test) - test
    wise = round_trip(codec, codec.calibrate(train, metric=M), test) - test
    assert cost(M, wise) < 0.6 * cost(M, plain)
    number = dataclasses.replace(codec, trellis=False)
    number = round_trip(number, number.calibrate(train), test) - test
    assert np.sum(plain**2) < 0.9 * np.sum(number**2)


def test_rare_tokens_are_kept():
    x = correlated(1, 1024, 32)
    test = x[:, -128:].copy()
    test[0, 77] = 30 * normal(32, seed=5)
    key = codecs.get("klt3")
    params = key.calibrate(x[:, :896])
    kept = round_trip(key, params, test)
    assert rel_mse(kept[0, 77], test[0, 77]) < 1e-3
    cut = round_trip(dataclasses.replace(key, outliers=0), params, test)
    assert rel_mse(cut[0, 77], test[0, 77]) > 0.5
    rest = np.arange(128) != 77
    np.testing.assert_allclose(kept[0, rest], cut[0, rest], atol=1e-5)


def test_token_scale_follows_loud_and_quiet_tokens():
    x = correlated(2, 512, 32) - 0.5
    loud = x[:, :64] * np.linspace(0.02, 20, 64, dtype=np.float32)[:, None]
    plain = codecs.get("klt3", role="v", token_scale=False)
    scaled = codecs.get("klt3", role="v")
    errors = [rel_mse(round_trip(c, c.calibrate(x), loud), loud) for c in (plain, scaled)]
    assert errors[1] < 0.2 * errors[0]


def test_both_roles_read_the_same_entries():
    x, M = correlated(2, 512, 32), metric(2, 32)
    key = codecs.get("klt3")
    value = codecs.Klt(bits=3, decay=key.decay, outliers=1, token_scale=False)
    params = key.calibrate(x, metric=M)
    np.testing.assert_allclose(
        round_trip(key, params, x[:, :64]), round_trip(value, params, x[:, :64]), atol=1e-4
    )
    read = jax.jit(lambda v: value.decode(value.encode(v, params), params, "float32"))(x[:, :64])
    q = jnp.asarray(normal(2, 3, 32))
    got = jnp.einsum("kgr,ktr->kgt", value.prepare_query(q, params), read)
    direct = q @ np.swapaxes(round_trip(key, params, x[:, :64]), -1, -2)
    np.testing.assert_allclose(got, direct, rtol=1e-3, atol=1e-3)


def test_effective_bits_count_outliers_and_scales():
    key, value = codecs.pair("klt3")
    bits = {"head_dim": 64, "page_size": 128, "dtype": jnp.bfloat16}
    assert codecs.effective_bits(key, **bits) == 3 + 8 * 67 / (64 * 128)
    assert codecs.effective_bits(value, **bits) == 3 + 8 / 64


def test_a_plan_spends_where_errors_cost():
    flat = (1.0 + np.arange(64)) ** -1.5 * np.ones((3, 2, 1))
    cheap, dear = 1e-3 * flat, flat
    keys, values = np.stack([cheap[0], dear[0], dear[0]]), np.stack([cheap[0], cheap[0], dear[0]])
    plan = klt.plan(keys, values, 3)
    assert sum(k + v for k, v in plan) == 2 * 3 * 3
    assert plan[0][0] < plan[1][0] == plan[2][0]
    assert plan[1][1] < plan[2][1]
    assert klt.layers_option([(1, 2), (1, 2), (3, 2)]) == "0-1:klt1+klt2,2:klt3+klt2"
    with_layers = CacheConfig(layers=klt.layers_option(plan)).codecs(3)
    assert [(k.bits, v.bits) for k, v in with_layers] == plan


def test_refusals():
    with pytest.raises(ValueError, match="a calibration file is needed"):
        codecs.get("klt2").init_params(num_kv_heads=1, head_dim=32)
    with pytest.raises(ValueError, match=r"not increasing, got \(1, 2\)"):
        codecs.Klt(allocation=(1, 2))
    with pytest.raises(ValueError, match=r"head_dim=32 axes, got 2"):
        codecs.Klt(allocation=(2, 1)).check(head_dim=32, page_size=32, role="v")
    with pytest.raises(ValueError, match="page_size at most 256"):
        codecs.get("klt2").check(head_dim=32, page_size=512, role="k")
    with pytest.raises(ValueError, match="expected role 'k'"):
        codecs.KltKey().check(head_dim=32, page_size=32, role="v")
