"""What a cache is made of; and, from their own files, what a model is. Frozen, checked when built.

Names are the field's: `num_kv_heads`, `rope_theta`, `page_size`. All are hashable, so they can be
static under `jit`, and print as the call that makes them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from kvjax import codecs, eviction
from kvjax.checks import near, need
from kvjax.codecs.base import Codec
from kvjax.model_config import (
    ACTIVATIONS,
    DTYPES,
    ModelConfig,
    model_config_from_dict,
    to_dict,
)
from kvjax.model_parts import ROPE_TYPES, MLAConfig, MoEConfig, RopeConfig

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "ROPE_TYPES",
    "CacheConfig",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "RopeConfig",
    "model_config_from_dict",
    "near",
    "need",
    "to_dict",
]

#: TPUs whose pages a cache can have, by name
TPU_GENERATIONS = {"tpu-v5e": 5, "tpu-v5p": 5, "tpu-v6e": 6, "tpu-7x": 7}
#: `CacheConfig.kernel`
KERNELS = ("auto", "xla", "gpu", *TPU_GENERATIONS)


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """What the KV cache is made of.

    k, v: codec names of sealed keys and values (`kvjax.codecs.names()`), with options after a slash
    (`kivi2/group=64`). layers: other codecs for some layers, `0-1:raw,28-29:int8+int4` (a name, or
    keys+values; ranges include both ends). page_size: tokens of a page. sinks: first tokens that
    stay exact (in the model's dtype). recent: most recent tokens that are always exact; a page is
    sealed once it lies wholly before them. None: 4 and 64, or 0 and 0 where both codecs are raw.
    calibration: file of calibrated arrays (`kvjax.codecs.calibrate`) that some codecs need.
    mla_rope_bits: bits of a cached rotated key of latent attention (2 to 8); None: exact.
    evict: which tokens stay (`kvjax.eviction`); None: all. `POLICY:BUDGET` judges a prompt, which
    the first call then takes whole; `streaming:SINKS+RECENT` bounds the cache for ever. max_new:
    with a policy, tokens that fit after the prompt. kernel: what reads sealed pages
    (`kvjax.cache.kernel`): "auto", "xla", "gpu", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x".
    """

    k: str = "raw"
    v: str = "raw"
    layers: str | None = None
    page_size: int = 128
    sinks: int | None = None
    recent: int | None = None
    calibration: str | None = None
    mla_rope_bits: int | None = None
    evict: str | None = None
    max_new: int = 256
    kernel: str = "auto"

    def __post_init__(self):
        if self.evict is not None:
            eviction.parse(self.evict)
        need(
            isinstance(self.max_new, int) and self.max_new > 0 and self.max_new is not True,
            "max_new",
            "a positive int",
            self.max_new,
        )
        need(self.kernel in KERNELS, "kernel", f"one of {KERNELS}", self.kernel)
        bits = self.mla_rope_bits
        ok = bits is None or (isinstance(bits, int) and 2 <= bits <= 8)
        need(ok, "mla_rope_bits", "an int from 2 to 8 or None", bits)
        need(
            isinstance(self.page_size, int) and self.page_size > 0,
            "page_size",
            "a positive int",
            self.page_size,
        )
        for field in ("sinks", "recent"):
            value = getattr(self, field)
            ok = value is None or (isinstance(value, int) and value >= 0)
            need(ok, field, "an int >= 0 or None", value)
        fixed = self.stream is not None or (self.policy is not None and self.policy.decodes)
        need(
            not (fixed and self.sinks is not None),
            "sinks",
            "None, as the policy names the first tokens that stay",
            self.sinks,
            "Write streaming:SINKS+RECENT, or h2o:TOKENS/sinks=N.",
        )
        for name in (self.k, self.v, *(n for *_, k, v in self._rules() for n in (k, v))):
            _codec_pair(name)

    @classmethod
    def parse(
        cls,
        text: str = "raw",
        *,
        k: str | None = None,
        v: str | None = None,
        layers: str | None = None,
        **fields: Any,
    ) -> CacheConfig:
        """The config of `--kv-cache-dtype TEXT --kv-k K --kv-v V --kv-layers LAYERS`.

        text: one name for keys and values, or `K+V`; k and v replace its parts.
        """
        first, second = _split_names(text, "kv-cache-dtype")
        return cls(k=k or first, v=v or second, layers=layers, **fields)

    @property
    def policy(self) -> eviction.Policy | None:
        """The policy that judges prompts, if `evict` names one."""
        named = None if self.evict is None else eviction.parse(self.evict)
        return named if isinstance(named, eviction.Policy) else None

    @property
    def stream(self) -> eviction.Streaming | None:
        """What `evict` names, if that is a stream of sinks and recent tokens."""
        named = None if self.evict is None else eviction.parse(self.evict)
        return named if isinstance(named, eviction.Streaming) else None

    def codecs(self, num_layers: int) -> list[tuple[Codec, Codec]]:
        """(key codec, value codec) of each layer. Raises ValueError on ranges past the model."""
        each = [(self.k, self.v)] * num_layers
        for first, last, k, v in self._rules():
            need(
                last < num_layers,
                "layers",
                f"layers 0 to {num_layers - 1} of this model",
                f"{first}-{last}",
            )
            each[first : last + 1] = [(k, v)] * (last + 1 - first)
        return [(_codec_pair(k)[0], _codec_pair(v)[1]) for k, v in each]

    def _rules(self) -> list[tuple[int, int, str, str]]:
        rules = []
        for part in (self.layers or "").split(",") if self.layers else []:
            match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?:(\S+)\s*", part)
            need(match is not None, "layers", "FIRST-LAST:CODEC[+CODEC], ...", part)
            assert match is not None
            first, last = int(match[1]), int(match[2] or match[1])
            need(first <= last, "layers", "ranges from the first to the last layer", part)
            rules.append((first, last, *_split_names(match[3], "layers")))
        return rules


def _split_names(text: str, field: str) -> tuple[str, str]:
    parts = text.split("+")
    need(len(parts) in (1, 2) and all(parts), field, "a codec, or KEYS+VALUES", text)
    return parts[0], parts[-1]


@functools.cache
def _codec_pair(text: str) -> tuple[Codec, Codec]:
    """The codecs that `name/option=value/...` names."""
    name, *options = text.split("/")
    fields = {}
    for option in options:
        field, equals, value = option.partition("=")
        need(bool(equals), f"codec {name}", "options as field=value", option)
        fields[field] = _literal(value)
    return codecs.pair(name, **fields)


def _literal(value: str) -> Any:
    named = {"true": True, "false": False, "none": None}
    if value.lower() in named:
        return named[value.lower()]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
