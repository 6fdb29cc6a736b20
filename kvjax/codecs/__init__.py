"""Codecs: what the entries of a sealed page are made of. One method a file, one line here.

k_codec, v_codec = codecs.pair("kivi2", group=64)
codec = codecs.get("turboquant4", scale="norm")
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from kvjax.codecs.base import Codec, Codes, Params, code_bytes, effective_bits
from kvjax.codecs.fp8 import Fp8
from kvjax.codecs.int_codec import Int, Int8
from kvjax.codecs.kivi import KiviKey, KiviValue
from kvjax.codecs.klt import Klt, KltKey
from kvjax.codecs.kvquant import KVQuantKey, KVQuantValue
from kvjax.codecs.pca import Pca, PcaPreRope
from kvjax.codecs.qjl import QjlKey
from kvjax.codecs.raw import Raw, RawKey
from kvjax.codecs.turboquant import TurboQuant, TurboQuantMixed, TurboQuantProd

__all__ = [
    "Codec", "Codes", "Params", "code_bytes", "effective_bits",
    "get", "pair", "names", "name_of", "register",
    "Raw", "RawKey", "Int8", "Int", "Fp8", "KiviKey", "KiviValue", "KVQuantKey", "KVQuantValue",
    "QjlKey", "TurboQuant", "TurboQuantMixed", "TurboQuantProd", "Pca", "PcaPreRope",
    "Klt", "KltKey",
]  # fmt: skip

_PAIRS: dict[str, tuple[Codec, Codec]] = {}


def register(
    name: str,
    key: type[Codec],
    value: type[Codec] | None = None,
    *,
    bits: Iterable[int] = (),
    **fields: Any,
) -> None:
    """Adds a method under its command-line name; `{}` in the name stands for each of `bits`.

    value: the class for values where it is another one than for keys.
    """
    for b in bits or (None,):
        own = fields if b is None else {**fields, "bits": b}
        _PAIRS[name.format(b)] = _make(name, key, own), _make(name, value or key, own)


def names() -> list[str]:
    """Every name `pair` and `get` know."""
    return list(_PAIRS)


def pair(name: str, **fields: Any) -> tuple[Codec, Codec]:
    """The codecs of a method for keys and for values, each with those of `fields` it has."""
    if name not in _PAIRS:
        raise ValueError(f"codec: expected a known name, got {name!r}.{_near(name, _PAIRS)}")
    known = {f.name for codec in _PAIRS[name] for f in dataclasses.fields(codec)}
    for field in fields:
        if field not in known:
            raise ValueError(f"codec {name}: no field {field!r}.{_near(field, known)}")
    key, value = _PAIRS[name]
    return _replace(key, fields), _replace(value, fields)


def get(name: str, *, role: str = "k", **fields: Any) -> Codec:
    """One codec by name; role matters to methods that treat keys and values unlike."""
    if role not in ("k", "v"):
        raise ValueError(f"role: expected 'k' or 'v', got {role!r}.")
    return pair(name, **fields)["kv".index(role)]


def name_of(codec: Codec) -> str:
    """The command-line name of a codec, or its repr when its fields are not the name's."""
    return next((name for name, both in _PAIRS.items() if codec in both), repr(codec))


def _make(name: str, cls: type[Codec], fields: dict[str, Any]) -> Codec:
    known = {f.name for f in dataclasses.fields(cls)}
    return cls(**{k: v for k, v in fields.items() if k in known})


def _replace(codec: Codec, fields: dict[str, Any]) -> Codec:
    known = {f.name for f in dataclasses.fields(codec)}
    return dataclasses.replace(codec, **{k: v for k, v in fields.items() if k in known})


def _near(word: str, known: Iterable[str]) -> str:
    hits = difflib.get_close_matches(word, list(known), n=3, cutoff=0.4) or sorted(known)
    return f" Near names: {', '.join(hits)}."


register("raw", RawKey, Raw)
register("int8", Int8)
register("int8-hadamard", Int, bits=(8,), hadamard=True, symmetric=True)
register("int4", Int, bits=(4,))
register("int4-hadamard", Int, bits=(4,), hadamard=True)
register("fp8", Fp8)
register("fp8-e4m3", Fp8)
register("fp8-e5m2", Fp8, format="e5m2")
register("kivi{}", KiviKey, KiviValue, bits=(2, 3, 4, 8))
register("kvquant{}", KVQuantKey, KVQuantValue, bits=(2, 3, 4))
register("qjl", QjlKey, KiviValue)
register("turboquant{}", TurboQuant, bits=range(1, 9))
register("turboquant{}.5", TurboQuantMixed, bits=(2, 3))
register("turboquant-prod{}", TurboQuantProd, bits=(2, 3, 4))
register("pca{}", PcaPreRope, Pca, bits=(1, 2, 3, 4))
register("klt{}", KltKey, Klt, bits=(1, 2, 3, 4, 5, 6))
