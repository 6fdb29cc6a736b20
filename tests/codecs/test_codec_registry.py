import pytest

from kvjax import codecs

NAMES = [
    "raw",
    "int8",
    "int8-hadamard",
    "int4",
    "int4-hadamard",
    "fp8",
    "fp8-e4m3",
    "fp8-e5m2",
    "kivi2",
    "kivi4",
    "kvquant2",
    "kvquant3",
    "kvquant4",
    "qjl",
    "turboquant1",
    "turboquant2",
    "turboquant2.5",
    "turboquant3",
    "turboquant3.5",
    "turboquant4",
    "turboquant-prod3",
    "pca2",
    "pca3",
]


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    key, value = codecs.pair(name)
    assert codecs.get(name) == key
    assert codecs.get(name, role="v") == value
    assert codecs.name_of(key) == ("fp8" if name == "fp8-e4m3" else name)


def test_fields():
    key, value = codecs.pair("qjl", rows=64, group=16)  # each takes what it has
    assert key.rows == 64
    assert value.group == 16
    assert codecs.get("turboquant4", scale="norm").scale == "norm"
    assert codecs.name_of(codecs.get("turboquant4", seed=3)).startswith("TurboQuant(bits=4")


def test_near_names_are_listed():
    with pytest.raises(ValueError, match=r"got 'turbo4'.*Near names: .*turboquant4"):
        codecs.get("turbo4")
    with pytest.raises(ValueError, match=r"no field 'groups'. Near names: group"):
        codecs.get("kivi2", groups=64)
    with pytest.raises(ValueError, match="role: expected 'k' or 'v'"):
        codecs.get("raw", role="q")


def test_a_new_codec_is_one_registration(monkeypatch):
    monkeypatch.setattr(codecs, "_PAIRS", dict(codecs._PAIRS))
    codecs.register("mine{}", codecs.Int, bits=(5, 6), symmetric=True)
    assert codecs.get("mine6") == codecs.Int(bits=6, symmetric=True)
    assert codecs.name_of(codecs.Int(bits=5, symmetric=True)) == "mine5"
