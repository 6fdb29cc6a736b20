import numpy as np
import pytest
from codec_data import ready

from kvjax import codecs
from kvjax.codecs import calibrate


def layers_of(name):
    both = {role: ready(name, role, 32) for role in "kv"}
    return {r: c for r, (c, _) in both.items()}, {r: p for r, (_, p) in both.items()}


@pytest.mark.parametrize("name", ["kvquant3", "pca2"])
def test_round_trip(tmp_path, name):
    pair, params = layers_of(name)
    path = tmp_path / "c.safetensors"
    calibrate.save(path, {0: params, 11: params}, fingerprint="llama-a1", codecs=pair)
    got = calibrate.load(path, fingerprint="llama-a1", codecs=pair)
    assert list(got) == [0, 11]
    for role in "kv":
        assert set(got[11][role]) == set(params[role])
        for leaf, value in params[role].items():
            np.testing.assert_array_equal(got[11][role][leaf], value)
        calibrate.check_params(pair[role], got[0][role], num_kv_heads=2, head_dim=32)
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_another_model_is_refused_naming_both(tmp_path):
    pair, params = layers_of("kvquant3")
    path = tmp_path / "c.safetensors"
    calibrate.save(path, {0: params}, fingerprint="llama-a1", codecs=pair)
    with pytest.raises(ValueError, match="fingerprint: expected 'qwen-b2', got 'llama-a1'"):
        calibrate.load(path, fingerprint="qwen-b2", codecs=pair)
    other = {"k": codecs.get("kvquant4"), "v": pair["v"]}
    with pytest.raises(ValueError, match=r"codec for 'k': expected .*bits=4.*got .*bits=3"):
        calibrate.load(path, fingerprint="llama-a1", codecs=other)


def test_a_broken_file_and_wrong_shapes_are_refused(tmp_path):
    pair, params = layers_of("kvquant3")
    path = tmp_path / "c.safetensors"
    path.write_bytes(b"\x03\x00\x00\x00\x00\x00\x00\x00abc")
    with pytest.raises(ValueError, match="not a safetensors file"):
        calibrate.load(path, fingerprint="a", codecs=pair)
    with pytest.raises(ValueError, match="params: expected"):
        calibrate.check_params(pair["k"], params["k"], num_kv_heads=2, head_dim=64)
