"""Small checkpoints and tokenizers that the tests make themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from kvjax.checkpoints import Tokenizer

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
CORPUS = [
    "The quick brown fox jumps over the lazy dog, 1234 times.",
    "你好，世界！我們在學習。今天天气很好。",
    "emoji 😀😃 👩‍👩‍👧 flags 🇨🇭 and é ü ñ",
]


@pytest.fixture
def golden(tmp_path):
    """Copies a golden checkpoint to a folder that the test may change."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(GOLDENS / name, tmp_path / name))

    return copy


def byte_level_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE of 320 tokens: characters outside ASCII are cut across tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|start|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """BPE with byte fallback over text with spaces as ▁, as Llama 2's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "你", "th", "▁th", "▁the"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(
        byte_level_backend(),
        special_tokens={"bos_token": "<|start|>", "eos_token": "<|end|>", "pad_token": "<pad>"},
    )


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer(
        sentencepiece_backend(),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        add_bos=True,
    )
