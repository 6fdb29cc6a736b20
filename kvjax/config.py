"""What a model is and what its cache is made of: two frozen dataclasses, checked when built.

Names are the field's: `num_kv_heads`, `rope_theta`, `page_size`. Both are hashable, so they can be
static under `jit`, and print as the call that makes them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from typing import Any, Literal

from kvjax import codecs
from kvjax.codecs.base import Codec

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
DTYPES = ("float32", "bfloat16", "float16")


def need(condition: bool, field: str, expected: str, got: Any, fix: str = "") -> None:
    """Raises ValueError naming the field, what was expected, what came, and the fix."""
    if not condition:
        raise ValueError(f"{field}: expected {expected}, got {got!r}." + (f" {fix}" if fix else ""))


def near(word: str, words: Any) -> str:
    """`did you mean ...?` for a word that is not among `words`, or an empty string."""
    hits = difflib.get_close_matches(word, list(words), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, hits))}?" if hits else ""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, 2104.09864) and its published length extensions.

    type: "default"; "linear" (position interpolation, 2306.15595); "dynamic" (NTK-aware, the base
    grows with the sequence); "llama3" (Llama 3.1's frequency bands); "yarn" (2309.00071).
    factor: the extension factor of all but "default".
    """

    theta: float = 10000.0
    type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: from factor and mscale
    mscale: float | None = None  # yarn, DeepSeek
    mscale_all_dim: float | None = None  # yarn, DeepSeek
    truncate: bool = True  # yarn: round the correction range to whole dimensions

    @property
    def trained_length(self) -> int:
        """original_max_position_embeddings, which some types need; checked when built."""
        assert self.original_max_position_embeddings is not None
        return self.original_max_position_embeddings

    def __post_init__(self):
        need(
            self.type in ROPE_TYPES,
            "rope.type",
            f"one of {ROPE_TYPES}",
            self.type,
            near(str(self.type), ROPE_TYPES).strip(),
        )
        need(self.theta > 0, "rope.theta", "a positive number", self.theta)
        need(self.factor >= 1.0, "rope.factor", "a number >= 1", self.factor)
        if self.type in ("llama3", "yarn", "dynamic"):
            need(
                self.original_max_position_embeddings is not None,
                "rope.original_max_position_embeddings",
                f"the trained length, which rope.type={self.type!r} needs",
                None,
            )
        if self.type == "llama3":
            need(
                self.high_freq_factor > self.low_freq_factor,
                "rope.high_freq_factor",
                f"more than low_freq_factor={self.low_freq_factor}",
                self.high_freq_factor,
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder language model. `num_kv_heads` makes it MHA (= num_heads), GQA, or MQA (= 1)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig = RopeConfig()
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    attention_bias: bool = False  # on the q, k and v projections
    attention_out_bias: bool = False  # on the output projection
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, field)
            need(isinstance(value, int) and value > 0, field, "a positive int", value)
        need(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            f"a divisor of num_heads={self.num_heads}",
            self.num_kv_heads,
        )
        need(self.head_dim % 2 == 0, "head_dim", "an even number (RoPE turns pairs)", self.head_dim)
        need(
            self.hidden_act in ACTIVATIONS,
            "hidden_act",
            f"one of {ACTIVATIONS}",
            self.hidden_act,
            near(self.hidden_act, ACTIVATIONS).strip(),
        )
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        for token in (*self.eos_token_ids, self.bos_token_id, self.pad_token_id):
            need(
                token is None or 0 <= token < self.vocab_size,
                "bos_token_id, eos_token_ids, pad_token_id",
                f"token ids below vocab_size={self.vocab_size}",
                token,
            )

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    def num_params(self) -> int:
        """Parameters of the model, tied embeddings counted once."""
        D, F, H = self.hidden_size, self.intermediate_size, self.head_dim
        N, K = self.num_heads, self.num_kv_heads
        attention = 2 * D * N * H + 2 * D * K * H
        biases = self.attention_bias * (N + 2 * K) * H + self.attention_out_bias * D
        mlp = 3 * D * F + self.mlp_bias * (2 * F + D)
        layer = attention + biases + mlp + 2 * D
        embeddings = self.vocab_size * D * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + D


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON data."""
    return dataclasses.asdict(config)


def model_config_from_dict(data: dict[str, Any]) -> ModelConfig:
    """The inverse of `to_dict` for ModelConfig. Unknown keys are an error that lists near names."""
    names = {f.name for f in dataclasses.fields(ModelConfig)}
    for key in data:
        need(key in names, "model config", "a known key", key, near(key, names).strip())
    rope = data.get("rope", {})
    rope = rope if isinstance(rope, RopeConfig) else RopeConfig(**rope)
    return ModelConfig(**{**data, "rope": rope})


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """What the KV cache is made of.

    k, v: codec names of sealed keys and values (`kvjax.codecs.names()`), with options after a slash
    (`kivi2/group=64`). layers: other codecs for some layers, `0-1:raw,28-29:int8+int4` (a name, or
    keys+values; ranges include both ends). page_size: tokens of a page. sinks: first tokens that
    stay exact (in the model's dtype). recent: most recent tokens that are always exact; a page is
    sealed once it lies wholly before them. None: 4 and 64, or 0 and 0 where both codecs are raw.
    calibration: file of calibrated arrays (`kvjax.codecs.calibrate`) that some codecs need.
    """

    k: str = "raw"
    v: str = "raw"
    layers: str | None = None
    page_size: int = 128
    sinks: int | None = None
    recent: int | None = None
    calibration: str | None = None

    def __post_init__(self):
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
