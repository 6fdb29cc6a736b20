"""The default command as a whole: batches, streaming, JSON, interruption."""

from __future__ import annotations

import signal
import sys

import pytest

from kvjax.cli import options
from kvjax.engine.generate import Generation

PROMPTS = ("hello", "Why is the sky blue?", "你好 👋")


def test_rows_of_a_batch_equal_single_rows(ask):
    batch = ask(*PROMPTS)
    assert [r["prompt"] for r in batch] == list(PROMPTS)
    for record in batch:
        (single,) = ask(record["prompt"])
        assert record["text"] == single["text"]
        assert record["prompt_tokens"] == single["prompt_tokens"]


def test_json_shape(ask):
    (record,) = ask("hello")
    assert set(record) == {
        "prompt",
        "text",
        "finish_reason",
        "prompt_tokens",
        "new_tokens",
        "model",
        "dtype",
        "platform",
        "batch",
        "seconds",
        "decode_steps",
        "compiled_programs",
        "cache",
    }
    assert set(record["seconds"]) == {"load", "compile", "prefill", "decode"}
    assert all(s >= 0 for s in record["seconds"].values())
    assert record["cache"]["total_bytes"] == sum(record["cache"]["bytes"].values())


def test_streamed_text_is_the_json_text(cli, ask):
    (record,) = ask("hello")
    done = cli("--max-tokens", "12", "hello")
    assert done.out == record["text"].removesuffix("\n") + "\n"
    last = done.err.splitlines()[-1]
    assert f"prompt {record['prompt_tokens']} tokens" in last
    assert "new 12 tokens" in last
    assert "cache" in last


def test_batch_prints_a_header_a_prompt(cli):
    done = cli("--max-tokens", "3", *PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        assert f"=== {row + 1}/3: {prompt}\n" in done.out
    assert "3 length" in done.err


def test_prompts_may_stand_anywhere(folder):
    args = options.parse_generate(
        ["a", "--seed", "3", "b", "--raw", "-5 + 3", "--", "--raw", "bench"]
    )
    assert args.prompts == ["a", "b", "-5 + 3", "--raw", "bench"]
    assert (args.seed, args.raw) == (3, True)


def test_interrupt_keeps_what_was_generated(cli, monkeypatch):
    step = Generation.step

    def interrupted(self, steps):
        fresh = step(self, steps)
        signal.raise_signal(signal.SIGINT)
        return fresh

    handler = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    whole = cli("--max-tokens", "60", "hello").out
    monkeypatch.setattr(Generation, "step", interrupted)
    done = cli("--max-tokens", "60", "hello")
    assert done.code == 130
    assert "end: abort" in done.err
    assert 0 < len(done.out.strip()) < len(whole.strip())
    assert whole.startswith(done.out.rstrip("\n"))
    assert signal.getsignal(signal.SIGINT) is handler


def test_interrupt_while_loading(cli, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvjax.checkpoints.load.load", interrupted)
    done = cli("hello")
    assert done.code == 130
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--temprature", "1", "hi"), "--temperature"),
        (("--max_tokens=3", "hi"), "--max-tokens"),
        (("-x", "hi"), "unknown option -x"),
        (("--max-tokens", "many", "hi"), "--max-tokens"),
        (("--max-tokens", "0", "hi"), "max_tokens: expected an int > 0"),
        (("--temperature", "-1", "hi"), "temperature"),
        (("--top-p", "0", "hi"), "top_p"),
        (("--top-k", "-1", "hi"), "top_k"),
        (("--min-p", "2", "hi"), "min_p"),
        (("--seed", "-1", "hi"), "seed"),
        (("--stop", "", "hi"), "stop"),
        (("--dtype", "int8", "hi"), "--dtype"),
        (("--page-size", "0", "hi"), "page_size"),
        (("--kv-cache-dtype", "no-such", "hi"), "no-such"),
        (("--max-model-len", "513", "hi"), "max_model_len: expected 1 to 512"),
        (("--max-model-len", "20", "a long prompt indeed"), "max_model_len is 20"),
        (("x" * 600,), "Shorten the prompt"),
        (("--raw", ""), "1 to 511 tokens"),
        (("--raw", "--system", "s", "hi"), "--system"),
        (("--prompt-file", "f", "hi"), "--prompt-file"),
        (("--prompt-file", "/no/such/file"), "/no/such/file"),
        (("--mem-fraction", "0.5", "hi"), "already is"),
        (("--mem-fraction", "2", "hi"), "(0, 1]"),
        (("\udcff",), "UTF-8"),
    ],
)
def test_wrong_usage_ends_with_2_and_no_traceback(cli, words, says):
    done = cli(*words)
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_no_prompt_on_a_terminal_says_what_to_do(cli, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    done = cli()
    assert done.code == 2
    assert "expected one" in done.err


def test_missing_parts_of_a_model_are_named(cli, folder, tmp_path):
    done = cli("hi", model=tmp_path / "nothing")
    assert done.code == 2
    assert "nothing" in done.err
    import shutil

    bare = shutil.copytree(folder, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    assert "tokenizer" in cli("hi", model=bare).err


def test_base_model_needs_raw(cli, folder, tmp_path):
    import shutil

    from .conftest import byte_tokenizer

    base = shutil.copytree(folder, tmp_path / "base")
    byte_tokenizer(chat_template=None).save(base)
    done = cli("hi", model=base)
    assert done.code == 2
    assert "Pass --raw" in done.err
    assert cli("hi", "--raw", "--max-tokens", "1", model=base).code == 0


def test_help_and_version(cli):
    for words, says in (
        (["--help"], "examples:"),
        (["--version"], "kvjax 0."),
        (["bench", "--help"], "--context"),
    ):
        done = cli(*words, model=None)
        assert done.code == 0
        assert says in done.out
