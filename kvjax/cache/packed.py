"""A group's sealed pages as the TPU kernels read them: which codecs they take, and the way there.

`page_format` gives the format of a group, or says why there is none; `pack_page` turns what the
codecs encode into pages of it, without a change of any number, when a page is sealed. The query and
the output stay the codecs' business: `prepare_query` before the kernel, `finish_output` after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.cache.spec import GroupSpec
from kvjax.codecs.base import Codec, Codes
from kvjax.codecs.codebook import lloyd_max
from kvjax.codecs.fp8 import Fp8
from kvjax.codecs.int_codec import Int, Int8
from kvjax.codecs.kivi import KiviKey, KiviValue
from kvjax.codecs.kvquant import KVQuantKey, KVQuantValue
from kvjax.codecs.qjl import QjlKey
from kvjax.codecs.raw import Raw, RawKey
from kvjax.codecs.turboquant import TurboQuant
from pallas_kernels import codes as tiles
from pallas_kernels.pages import LatentFormat, PageFormat

TOKENS = tiles.LANES


def page_format(spec: GroupSpec, *, generation: int) -> PageFormat:
    """The kernels' format of a group's pages, for TPUs of this generation.

    Raises NotImplementedError, with the reason, when its codecs or its page size have none.
    """
    if spec.page_size != TOKENS:
        raise NotImplementedError(
            f"page_size: TPU kernels need {TOKENS} tokens a page, got {spec.page_size}."
        )
    k, v = (
        tiles.for_generation(tile_code(codec, spec, dim), generation)
        for codec, dim in ((spec.k_codec, spec.head_dim), (spec.v_codec, spec.v_head_dim))
    )
    if spec.latent:  # keys and values are one latent, whose codec is the keys'
        return LatentFormat(k, k, 1, spec.head_dim, rope=v, rope_dim=spec.v_head_dim)
    return PageFormat(k, v, spec.num_kv_heads, spec.head_dim)


def tile_code(codec: Codec, spec: GroupSpec, dim: int) -> tiles.Code:
    """What the kernels call a codec of `dim` channels.

    Raises NotImplementedError with the reason.
    """
    if type(codec) not in _KNOWN:
        raise NotImplementedError(f"{codec.name}: no TPU kernel reads this codec yet.")
    if getattr(codec, "scale_dtype", "float16") != "float16":
        raise NotImplementedError(f"{codec.name}: kernels read float16 scales only, got {codec}.")
    code = _KNOWN[type(codec)][0](codec, spec.dtype, dim)
    if code is None:
        raise NotImplementedError(f"{codec.name}: no TPU kernel reads {codec!r}.")
    return code


def pack_page(fmt: PageFormat, spec: GroupSpec, k: Codes, v: Codes) -> Int32[Array, "*lead r 128"]:
    """A page of what the group's codecs quantised (`Codec.quantise`): leaves `[..., K, ...]`."""
    k_leaves, v_leaves = (
        _KNOWN[type(codec)][1](codec, codes)
        for codec, codes in ((spec.k_codec, k), (spec.v_codec, v))
    )
    return fmt.pack(k_leaves, v_leaves)


def in_own_space(codec: Codec) -> bool:
    """Whether what is stored of keys are channels of the head's own, which RoPE may turn."""
    if isinstance(codec, Int):
        return not codec.hadamard
    return type(codec).prepare_query is Codec.prepare_query


def _raw_code(codec: Raw | RawKey, dtype: Any, dim: int) -> tiles.Code | None:
    own = getattr(codec, "dtype", None) or dtype
    return tiles.BFloat16() if jnp.dtype(own) == jnp.bfloat16 else None


def _int_code(codec: Int, dtype: Any, dim: int) -> tiles.Code | None:
    if codec.bits not in (2, 4, 8):
        return None
    kind = tiles.Symmetric if codec.symmetric else tiles.Asymmetric
    return kind(codec.bits, groups=dim // (codec.group or dim))


def _int_leaves(codec: Int, codes: Codes) -> Codes:
    q = codes["words"].astype(jnp.int32)
    return codes | {"q": q - codec._zero if codec.symmetric else q}


def _fp8_code(codec: Fp8, dtype: Any, dim: int) -> tiles.Code:
    return tiles.Float8(format={"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[codec.format])


def _kivi_key_code(codec: KiviKey, dtype: Any, dim: int) -> tiles.Code | None:
    fits = codec.bits in (2, 4, 8) and TOKENS % codec.group == 0
    return tiles.KiviKey(codec.bits, span=codec.group) if fits else None


def _kivi_value_code(codec: KiviValue, dtype: Any, dim: int) -> tiles.Code | None:
    groups = dim // codec.group
    return tiles.Asymmetric(codec.bits, groups=groups) if codec.bits in (2, 4, 8) else None


def _words_leaves(codec: Codec, codes: Codes) -> Codes:
    return codes | {"q": codes["words"]}


def _kvquant_code(codec: KVQuantKey | KVQuantValue, dtype: Any, dim: int) -> tiles.Code | None:
    if codec.bits not in (2, 3, 4) or codec.num_outliers(dim) > 8:
        return None
    kind = tiles.OutlierKey if isinstance(codec, KVQuantKey) else tiles.OutlierValue
    code = kind(codec.bits, outliers=codec.num_outliers(dim))
    code.word_rows(dim)  # raises where its words do not fit the channels
    return code


def _turboquant_code(codec: TurboQuant, dtype: Any, dim: int) -> tiles.Code | None:
    if codec.bits not in (2, 3, 4):
        return None
    return tiles.Codebook(codec.bits, table=lloyd_max(codec.bits))


def _qjl_code(codec: QjlKey, dtype: Any, dim: int) -> tiles.Code | None:
    rows = codec.rows or 2 * dim
    if not codec.num_outliers:
        return tiles.Signs(rows=rows)
    same = (codec.outlier_rows or 2 * dim) == rows
    return tiles.Signs(groups=2, rows=2 * rows) if same else None


def _qjl_leaves(codec: QjlKey, codes: Codes) -> Codes:
    tags = ("", "_outlier") if codec.num_outliers else ("",)
    signs = [codes[f"words{tag}"] for tag in tags]
    norms = [codes[f"norm{tag}"] for tag in tags]
    return {"q": jnp.concatenate(signs, axis=-1), "scale": jnp.stack(norms, axis=-2)}


_KNOWN: dict[type[Codec], tuple[Callable, Callable]] = {
    Raw: (_raw_code, lambda codec, codes: {"q": codes["x"]}),
    RawKey: (_raw_code, lambda codec, codes: {"q": jnp.swapaxes(codes["x"], -1, -2)}),
    Int8: (
        lambda *_: tiles.Symmetric(8),
        lambda codec, codes: codes | {"q": codes["x"]},
    ),
    Int: (_int_code, _int_leaves),
    Fp8: (_fp8_code, lambda codec, codes: codes | {"q": codes["x"]}),
    KiviKey: (_kivi_key_code, _words_leaves),
    KiviValue: (_kivi_value_code, _words_leaves),
    KVQuantKey: (_kvquant_code, _words_leaves),
    KVQuantValue: (_kvquant_code, _words_leaves),
    TurboQuant: (_turboquant_code, _words_leaves),
    QjlKey: (_qjl_code, _qjl_leaves),
}
