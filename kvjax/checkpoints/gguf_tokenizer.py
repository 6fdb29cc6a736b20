"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` library.

Kinds (tokenizer.ggml.model): "gpt2" is byte-level BPE, whose word splitting tokenizer.ggml.pre
names; "llama" is SentencePiece BPE with byte fallback, whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.config import near

# tokenizer.ggml.token_type
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Splits by each pattern in turn, then turns bytes into GPT-2's characters."""
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


# What llama.cpp does for each name.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _smollm,
    "gpt-2": lambda: _split(_GPT2),
    "default": lambda: _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a GGUF file's metadata; None if the file has none."""
    model = metadata.get("tokenizer.ggml.model", "none")
    if model == "none":
        return None
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece}
    if model not in builders:
        raise ValueError(
            f"tokenizer.ggml.model: expected one of {sorted(builders)}, got {model!r}."
            f"{near(model, builders)} Use the model's Hugging Face folder."
        )
    tokens = _required(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise ValueError(
            "tokenizer.ggml.tokens: expected different tokens, each with a type, got"
            f" {len(tokens)} of which {len(vocab)} differ, and {len(types)} types."
        )
    backend, add_bos = builders[model](metadata, vocab)
    _add_tokens(backend, tokens, types, sentencepiece=model == "llama")
    return Tokenizer(
        backend,
        special_tokens=_special_tokens(metadata, tokens),
        extra_eos_ids=end_ids(metadata),
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        add_eos=metadata.get("tokenizer.ggml.add_eos_token", False),
    )


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a generation: of the text, of a turn, of a message."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _required(metadata: Mapping[str, Any], name: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise ValueError(
            f"tokenizer.ggml.{name}: expected a value, got none. Convert the model to GGUF again,"
            " or use its Hugging Face folder."
        )
    return value


def _byte_level_bpe(
    metadata: Mapping[str, Any], vocab: dict[str, int]
) -> tuple[tokenizers.Tokenizer, bool]:
    pre = _required(metadata, "pre")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre: expected one of {sorted(PRE_TOKENIZERS)}, got {pre!r}."
            f"{near(pre, PRE_TOKENIZERS)} Use the model's Hugging Face folder."
        )
    merges = [tuple(merge.split(" ")) for merge in _required(metadata, "merges")]
    llama3 = pre == "llama-bpe"
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3)  # Llama 3: whole words first
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend, llama3


def _sentencepiece(
    metadata: Mapping[str, Any], vocab: dict[str, int]
) -> tuple[tokenizers.Tokenizer, bool]:
    scores = _required(metadata, "scores")
    unknown = list(vocab)[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_from_scores(vocab, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    prepend = [normalizers.Prepend("▁")] if space else []
    backend.normalizer = normalizers.Sequence([*prepend, replace])
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


def merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece BPE keeps a score for each piece and no merges: every split of a piece into two
    pieces is a merge, best score first (as transformers converts it)."""
    merges = []
    for piece, i in vocab.items():
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        local = [(a, b) for a, b in splits if a in vocab and b in vocab]
        local.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(scores[i], len(a), len(b), a, b) for a, b in local]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(a, b) for *_, a, b in merges]


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int], sentencepiece: bool
) -> None:
    """Tokens that are found in the text before anything else splits it."""
    for token, kind in zip(tokens, types, strict=True):
        if kind in (UNKNOWN, CONTROL):
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            # runs of spaces (Gemma) are found once spaces are ▁, as SentencePiece finds them
            spaces = sentencepiece and "▁" in token
            backend.add_tokens([AddedToken(token, special=False, normalized=spaces)])


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {}
    for name, ours in names.items():
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if i is None:
            continue
        if not 0 <= i < len(tokens):
            raise ValueError(
                f"tokenizer.ggml.{name}_token_id: expected an id below {len(tokens)}, got {i}."
            )
        special[ours] = tokens[i]
    return special
