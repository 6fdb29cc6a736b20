"""Calibration: what codecs are fitted to, and files that belong to one model."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import programs
import pytest

from kvjax import CacheConfig, calibration
from kvjax.checkpoints.load import load
from kvjax.codecs.base import Codec

GOLDEN = programs.ROOT / "tests/data/goldens/llama"
CONFIG = CacheConfig.parse("kvquant3", page_size=32, sinks=4, recent=8)


def rows_of(model, lengths=(70, 40)):
    return [oracles.tokens_for(model, 1, n, seed=n)[0] for n in lengths]


class Spy:
    """Stands in for `calibrate` of two codecs and keeps what each was given."""

    def __init__(self, monkeypatch, *classes: type[Codec]):
        self.seen: list[tuple[str, np.ndarray, np.ndarray | None, dict]] = []
        for cls in classes:
            monkeypatch.setattr(cls, "calibrate", self._stand_in(cls.calibrate))

    def _stand_in(self, real):
        def calibrate(codec, samples, weights=None, **more):
            self.seen.append((type(codec).__name__, samples, weights, more))
            return real(codec, samples, weights, **more)

        return calibrate


def cached_keys(model, tokens, config):
    """Keys and values `[K, S, H]` of every layer as the exact part of a cache holds them."""
    cache = model.init_cache(batch=1, max_len=len(tokens), config=config)
    _, cache = model(tokens[None], cache)
    (group,) = cache.groups
    n = len(tokens)
    keys = np.swapaxes(np.asarray(group.k_exact[:, 0, :, :, :n]), 2, 3)
    return keys, np.asarray(group.v_exact[:, 0, :, :n])


@pytest.mark.parametrize("form", ["unrolled", "stacked"])
@pytest.mark.parametrize("name", ["kvquant2", "pca2+pca2"])
def test_samples_are_what_the_cache_stores(tiny, monkeypatch, form, name):
    """Before RoPE where the codec stores keys so, sinks left out, rows one after another."""
    from kvjax import codecs

    model = tiny(form=form)
    config = CacheConfig.parse(name, page_size=32, sinks=4, recent=8)
    spy = Spy(monkeypatch, codecs.KVQuantKey, codecs.KVQuantValue, codecs.Pca)
    rows = rows_of(model)
    made = calibration.calibrate(model, rows, config, fisher=False)
    # an exact part that holds everything, with keys as this codec's group stores them
    monkeypatch.setattr("kvjax.model.for_cache", lambda model, config: [(k, v) for k, v in made])
    exact = CacheConfig.parse(name, page_size=32, sinks=4, recent=96)
    want = [cached_keys(model, row, exact) for row in rows]
    assert len(spy.seen) == 2 * model.config.num_layers
    for i, (_, samples, weights, _) in enumerate(spy.seen):
        layer, role = divmod(i, 2)
        expected = np.concatenate([kv[role][layer][:, 4:] for kv in want], axis=1)
        np.testing.assert_allclose(samples, expected, atol=2e-5)
        assert weights is None


def test_after_rope_for_codecs_that_store_it(tiny, monkeypatch):
    from kvjax import codecs

    spy = Spy(monkeypatch, codecs.QjlKey, codecs.PcaPreRope, codecs.Pca)
    model = tiny()
    rows = rows_of(model)
    config = CacheConfig(layers="0:qjl+pca2,1:pca2", page_size=32, sinks=0, recent=8)
    calibration.calibrate(model, rows, config)
    (first, roped, *_), _, (third, plain, *_), _ = spy.seen
    assert (first, third) == ("QjlKey", "PcaPreRope")
    raw = CacheConfig(page_size=32, sinks=0, recent=96)
    keys = np.concatenate([cached_keys(model, row, raw)[0] for row in rows], axis=2)
    np.testing.assert_allclose(roped, keys[0], atol=2e-5)
    assert np.abs(plain - keys[1]).max() > 0.1  # layer 1 stores them before RoPE
    np.testing.assert_allclose(plain[:, 0], keys[1][:, 0], atol=2e-5)  # position 0 is not turned


def test_fisher_weights_are_squared_gradients(tiny, monkeypatch):
    """Against finite differences of the loss through a model with one perturbed key or value."""
    from kvjax import codecs

    model = tiny()
    spy = Spy(monkeypatch, codecs.KVQuantKey, codecs.KVQuantValue)
    row = rows_of(model, (40,))[0]
    calibration.calibrate(model, [row], CONFIG)
    weights = {(i // 2, "kv"[i % 2]): w for i, (_, _, w, _) in enumerate(spy.seen)}
    tokens, lengths = jnp.asarray(row[None]), jnp.asarray([40])
    pad = jnp.pad(tokens, ((0, 0), (0, 88)))
    c = model.config
    shape = (c.num_layers, 1, 128, c.num_kv_heads, c.head_dim)

    @jax.jit
    def loss(taps):
        x, _ = calibration._run(model, pad, lengths, (True, True), taps)
        logits = model.logits(x)[0, :39]
        chosen = jnp.take_along_axis(logits, tokens[0, 1:, None], axis=-1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - chosen)

    for layer, role, at in [(0, "k", (10, 1, 3)), (1, "v", (20, 0, 5)), (0, "v", (5, 1, 31))]:
        step = 0.05
        moved = [
            float(loss(tuple(
                jnp.zeros(shape).at[(layer, 0, *at)].set(s * (role == r)) for r in "kv"
            )))
            for s in (step, -step)
        ]  # fmt: skip
        slope = (moved[0] - moved[1]) / (2 * step)
        token, head, channel = at
        got = weights[layer, role][head, token - 4, channel]
        np.testing.assert_allclose(got, slope**2, rtol=0.05, atol=1e-6)


def test_the_metric_is_the_second_moment_of_the_same_gradients(tiny, monkeypatch):
    from kvjax import codecs

    wants = [cls for cls in (codecs.Klt, codecs.KltKey) if "calibrate" in vars(cls)]
    spy = Spy(monkeypatch, codecs.KVQuantKey, codecs.KVQuantValue, *wants)
    model = tiny()
    rows = rows_of(model)
    calibration.calibrate(model, rows, CONFIG)
    weights = [w for _, _, w, _ in spy.seen]
    spy.seen.clear()
    calibration.calibrate(model, rows, CacheConfig.parse("klt2", page_size=32, sinks=4, recent=8))
    for w, (_, _, none, more) in zip(weights, spy.seen, strict=True):
        assert none is None
        diagonal = np.diagonal(more["metric"], axis1=1, axis2=2)
        np.testing.assert_allclose(diagonal, w.mean(1), rtol=1e-4)
        assert np.linalg.eigvalsh(more["metric"]).min() > -1e-5 * diagonal.max()


def test_passes_over_few_layers_give_the_same(tiny):
    model = tiny()
    rows = rows_of(model)
    whole = calibration.calibrate(model, rows, CONFIG)
    parts = calibration.calibrate(model, rows, CONFIG, block_bytes=1)
    oracles.assert_same_tree(whole, parts)


def test_file_round_trip_reaches_the_cache(tiny, tmp_path):
    model = tiny(num_layers=4)
    config = CacheConfig.parse("kvquant3", layers="0:raw,2:pca2+int4,3:raw+kvquant2")
    made = calibration.calibrate(model, rows_of(model), config)
    path = tmp_path / "c.safetensors"
    calibration.save(path, model, config, made)
    oracles.assert_same_tree(calibration.load(path, model, config), made)
    assert made[0] == ({}, {})
    used = CacheConfig.parse("kvquant3", layers=config.layers, calibration=str(path))
    cache = model.init_cache(batch=1, max_len=300, config=used)
    for group in cache.groups:
        for slot, layer in enumerate(group.spec.layers):
            got = jax.tree.map(lambda x, i=slot: x[i], (group.k_params, group.v_params))
            oracles.assert_same_tree(got, made[layer])


def test_the_file_is_read_once_and_again_when_it_changes(tiny, tmp_path, monkeypatch):
    model, path = tiny(), tmp_path / "c.safetensors"
    made = calibration.calibrate(model, rows_of(model), CONFIG, fisher=False)
    calibration.save(path, model, CONFIG, made)
    reads = []
    real = calibration.files.load
    monkeypatch.setattr(
        calibration.files, "load", lambda *a, **k: (reads.append(1), real(*a, **k))[1]
    )
    for _ in range(3):
        calibration.load(path, model, CONFIG)
    assert len(reads) == 1
    other = calibration.calibrate(model, rows_of(model, (90,)), CONFIG, fisher=False)
    calibration.save(path, model, CONFIG, other)
    oracles.assert_same_tree(calibration.load(path, model, CONFIG), other)


def test_fingerprint(tiny):
    base = calibration.model_fingerprint(tiny(form="unrolled"))
    assert base.startswith("2x32-kv2x32-")
    assert base != calibration.model_fingerprint(tiny(seed=1))
    assert base != calibration.model_fingerprint(tiny(rms_norm_eps=1e-6))
    names = {
        calibration.model_fingerprint(load(GOLDEN, dtype, form=form)[0])
        for form in ("unrolled", "stacked")
        for dtype in ("float32", "bfloat16")
    }
    assert len(names) == 1


def test_what_is_refused(tiny, tmp_path):
    model, other = tiny(), tiny(seed=1)
    path = tmp_path / "c.safetensors"
    made = calibration.calibrate(model, rows_of(model), CONFIG, fisher=False)
    calibration.save(path, model, CONFIG, made)
    name = calibration.model_fingerprint

    def cache_of(model, text, **fields):
        config = CacheConfig.parse(text, **fields)
        return lambda: model.init_cache(batch=1, max_len=99, config=config)

    some = CacheConfig(layers="0:kvquant3")
    short = calibration.calibrate(model, rows_of(model), some, fisher=False)
    calibration.save(tmp_path / "one", model, some, short)
    uncalibrated = CacheConfig.parse("int4")
    for call, message in [
        (cache_of(model, "kvquant3"), r"calibration: expected a file, which kvquant3 needs, got "
            r"None. Make one: python infer/calibrate.py --kv-cache-dtype kvquant3 --out FILE"),
        (cache_of(model, "raw", layers="1:pca2"), "--kv-layers 1:pca2 --out FILE"),
        (cache_of(other, "kvquant3", calibration=str(path)),
            f"fingerprint: expected '{name(other)}', got '{name(model)}'"),
        (cache_of(model, "kvquant4", calibration=str(path)), "codec for 'k': expected .*bits=4"),
        (cache_of(model, "kvquant3", calibration=str(tmp_path / "one")), "layer 1's kvquant3"),
        (cache_of(model, "int4", calibration=str(path)), "expected None: no codec of this cache"),
        (cache_of(model, "kvquant3", calibration="nowhere"), "expected an existing file"),
        (lambda: calibration.calibrate(model, rows_of(model), uncalibrated), "config: expected a "),
        (lambda: calibration.calibrate(model, [[1, 2, 3]], CONFIG), "tokens: expected rows of ov"),
        (lambda: calibration.calibrate(model, [[1] * 9 + [97]], CONFIG), "tokens: expected ids 0"),
        (lambda: calibration.calibrate(model, rows_of(model), CacheConfig.parse("pca3"),
            fisher=True), "fisher: expected False"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


def test_calibrated_beats_another_models_arrays(tiny):
    """A calibration that did nothing would pass every check above: arrays must fit the model."""
    model = tiny(initializer_range=0.4)
    config = CacheConfig.parse("pca3", page_size=32, sinks=4, recent=8)
    own = calibration.calibrate(model, rows_of(model, (400, 400)), config)
    wrong = [own[1], own[0]]
    tokens = oracles.tokens_for(model, 2, 200, seed=5)
    dense, _ = model(tokens)

    def error(params):
        from kvjax.cache import init_cache

        cache = init_cache(
            model.config, batch=2, max_len=200, config=config, dtype="float32", calibration=params
        )
        logits, _ = oracles.feed(model, cache, tokens, [50] * 4)
        return float(np.abs(logits - np.asarray(dense))[:, 100:].mean())

    assert error(own) < 0.5 * error(wrong)


@pytest.fixture(scope="module")
def program():
    """The main function of infer/calibrate.py."""
    return programs.load("infer/calibrate.py").main


def test_program(program, tmp_path, capsys, monkeypatch):
    """From a text to a cache; the tokenizer is one letter a token, as the checkpoint has none."""
    model = load(GOLDEN)[0]
    letters = SimpleNamespace(encode=lambda text: [ord(c) % 90 for c in text])
    monkeypatch.setattr("kvjax.load", lambda name, form: (load(name, form=form)[0], letters))
    text, out = tmp_path / "t.txt", tmp_path / "c.safetensors"
    text.write_text("a few words of text. " * 10)
    asked = ["--model", str(GOLDEN), "--text", str(text), "--out", str(out), "--tokens", "128"]
    asked += ["--row", "64", "--kv-cache-dtype", "pca2"]
    assert program(asked) == 0
    assert calibration.model_fingerprint(model) in capsys.readouterr().out
    config = CacheConfig.parse("pca2", calibration=str(out))
    model.init_cache(batch=1, max_len=300, config=config)
    assert program([*asked, "--tokens", "1024"]) == 2
    assert "text: expected at least 1024 tokens" in capsys.readouterr().err


def test_program_refuses_what_it_cannot_do(program, tmp_path, capsys):
    out = tmp_path / "x"
    assert program(["--kv-cache-dtype", "nonsense", "--out", str(out)]) == 2
    assert "codec: expected a known name, got 'nonsense'" in capsys.readouterr().err
    assert not out.exists()
