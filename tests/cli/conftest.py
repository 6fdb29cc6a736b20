"""A tiny model folder with a byte tokenizer, and the command line run in this process."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvjax.checkpoints import Tokenizer
from kvjax.checkpoints.stream import _BYTE_OF
from kvjax.cli.main import main

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
SPECIAL = ("<pad>", "<s>", "</s>")  # ids 0, 1, 2 as in the golden's config
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(chat_template: str | None = TEMPLATE) -> Tokenizer:
    """256 tokens: three special ones, and every byte that UTF-8 can have."""
    of_byte = {b: c for c, b in _BYTE_OF.items()}
    vocab = {text: i for i, text in enumerate([*SPECIAL, *(of_byte[b] for b in range(253))])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, special_tokens=names, chat_template=chat_template)


@dataclass(frozen=True)
class Outcome:
    """What a command line left behind."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """The golden llama model with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("cli") / "model"
    shutil.copytree(GOLDENS / "llama", path)
    byte_tokenizer().save(path)
    return path


@pytest.fixture
def cli(folder, capsys):
    """Runs a command line on the tiny model; argparse's exits are outcomes too."""

    def run(*words: str, model: Path | None = folder) -> Outcome:
        argv = [*words]
        at = argv.index("--") if "--" in argv else len(argv)
        argv[at:at] = ["--no-compilation-cache"]
        if model is not None:
            argv[at:at] = ["--model", str(model)]
        capsys.readouterr()
        try:
            code = main(argv)
        except SystemExit as exit_:
            code = exit_.code
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def ask(cli):
    """The JSON records of a successful run of 12 tokens."""

    def run(*words: str, **options) -> list[dict]:
        done = cli("--json", "--max-tokens", "12", *words, **options)
        assert done.code == 0, done.err
        return done.records

    return run
