"""The corpus: files in a fixed order, split into training and held-out, and a tokenizer of it."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from kvjax.checkpoints.download import cache_dir
from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.config import need
from kvjax.training.config import DataConfig

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
# A space belongs to the word before it, a line end to the punctuation before it: a prompt may then
# end in "def " or ":\n" and is cut as the same text was in training, where "def " is one token.
PIECES = r"\w+ ?|[^\w\s]+(?: |\n+)?|\n+| +|\s"


class File(NamedTuple):
    name: str  # relative to the corpus, with "/"
    text: str


class Corpus(NamedTuple):
    train: list[File]
    heldout: list[File]


def read_corpus(config: DataConfig) -> Corpus:
    """Reads the files, in the order of their names' hashes.

    The split is a function of a file's name alone, so another size cap or new files move no file
    between the halves. Copies of a text are dropped, wherever they are; so are files that are not
    UTF-8.
    """
    root = Path(sysconfig.get_path("stdlib") if config.corpus == "stdlib" else config.corpus)
    need(root.is_dir(), "data.corpus", "'stdlib' or a folder", config.corpus)
    corpus, size, seen = Corpus([], []), 0, set()
    for digest, name in sorted((_digest(n), n) for n in _names(root, config)):
        data = (root / name).read_bytes()
        content = hashlib.sha256(data).digest()
        if content in seen:
            continue
        if size + len(data) > config.max_bytes:
            break
        try:
            text = data.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        seen.add(content)
        size += len(data)
        heldout = int.from_bytes(digest[:8], "big") < config.heldout * 2**64
        (corpus.heldout if heldout else corpus.train).append(File(name, text))
    for half, files, fix in (
        ("training", corpus.train, "lower"),
        ("held-out", corpus.heldout, "raise"),
    ):
        need(
            bool(files),
            "data.corpus",
            f"at least one {half} file",
            f"none of {len(seen)} ({config.pattern} in {root}, up to {config.max_bytes} bytes)",
            f"Use more files, raise data.max_bytes, or {fix} data.heldout={config.heldout}.",
        )
    return corpus


def _names(root: Path, config: DataConfig) -> list[str]:
    paths = (p.relative_to(root) for p in root.rglob(config.pattern) if p.is_file())
    return [p.as_posix() for p in paths if not set(p.parts[:-1]) & set(config.exclude)]


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def get_tokenizer(files: list[File], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer trained on the files, or the same one from the cache folder.

    Ids 0, 1 and 2 are <|bos|>, <|eos|> and <|pad|>; `encode` adds none of them.
    """
    path = cache_dir() / "tokenizers" / f"{_key(files, vocab_size)}.json"
    if path.is_file():
        backend = tokenizers.Tokenizer.from_file(str(path))
    else:
        backend = _train(files, vocab_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tokenizer-") as scratch:
            backend.save(str(Path(scratch) / path.name))
            os.replace(Path(scratch) / path.name, path)
    return Tokenizer(backend, special_tokens=SPECIAL)


def _train(files: list[File], vocab_size: int) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(SPECIAL)
    need(vocab_size >= least, "model.vocab_size", f"at least {least}", vocab_size)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator((f.text for f in files), trainer)
    return backend


def _key(files: list[File], vocab_size: int) -> str:
    settings = [tokenizers.__version__, PIECES, SPECIAL, vocab_size]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for file in files:
        digest.update(_digest(file.text))
    return digest.hexdigest()[:32]
