"""Every option of generation is shown to change something (case 13)."""

from __future__ import annotations

import io
import sys

import pytest


@pytest.fixture(scope="module")
def plain(request):
    """The record of the prompt "hello" with no option, made once."""
    made = {}

    def get(ask):
        if not made:
            (made["record"],) = ask("hello")
        return made["record"]

    return get


def test_max_tokens_bounds_the_answer(ask, plain):
    record = plain(ask)
    assert record["new_tokens"] == 12
    assert record["finish_reason"] == "length"
    (short,) = ask("hello", "--max-tokens", "3")
    assert short["new_tokens"] == 3
    assert record["text"].startswith(short["text"].rstrip("�"))


def test_greedy_is_reproducible(ask, plain):
    assert ask("hello")[0]["text"] == plain(ask)["text"]


def test_temperature_and_seed_change_the_text(ask, plain):
    texts = [ask("hello", "--temperature", "5", "--seed", s)[0]["text"] for s in ("1", "2", "1")]
    assert texts[0] == texts[2]
    assert len({plain(ask)["text"], *texts}) == 3


@pytest.mark.parametrize("option", [("--top-k", "1"), ("--top-p", "1e-6"), ("--min-p", "1")])
def test_sampling_limits_hold_hot_text_to_the_likeliest(ask, plain, option):
    (record,) = ask("hello", "--temperature", "5", *option)
    assert record["text"] == plain(ask)["text"]


def test_stop_ends_before_its_text(ask, plain):
    text = plain(ask)["text"]
    stop = text[4:7]
    (record,) = ask("hello", "--stop", "never there", "--stop", stop)
    assert record["text"] == text[: text.index(stop)]
    assert record["finish_reason"] == "stop"
    assert record["new_tokens"] < 12


def test_stop_may_be_a_special_token(cli, folder, ask):
    (record,) = ask("hello", "--stop", "<pad>")
    assert record["finish_reason"] in ("stop", "length")
    from argparse import Namespace  # its id ends a row, since it has no text

    from kvjax.checkpoints import Tokenizer
    from kvjax.cli.generate import _eos_ids
    from kvjax.config import ModelConfig

    model = Namespace(config=ModelConfig(256, 8, 8, 1, 1, 1, 8, eos_token_ids=(2,)))
    session = Namespace(tokenizer=Tokenizer.from_folder(folder), model=model)
    assert _eos_ids(session, ["<pad>", "a"]) == [2, 0]


def test_system_message_joins_the_prompt(ask, plain):
    (record,) = ask("hello", "--system", "Be short.")
    assert record["prompt_tokens"] == plain(ask)["prompt_tokens"] + len("system: Be short.\n")


def test_raw_leaves_the_template_out(ask, plain):
    (record,) = ask("hello", "--raw")
    assert record["prompt_tokens"] == len("hello")
    assert record["text"] != plain(ask)["text"]


def test_max_model_len_sizes_the_cache_and_ends_the_text(ask, plain):
    prompt = plain(ask)["prompt_tokens"]
    (record,) = ask("hello", "--max-model-len", str(prompt + 5))
    assert record["cache"]["max_len"] == prompt + 5
    assert record["cache"]["total_bytes"] < plain(ask)["cache"]["total_bytes"]
    assert (record["new_tokens"], record["finish_reason"]) == (5, "length")
    assert plain(ask)["cache"]["max_len"] == 512


def test_dtype_halves_the_cache(ask, plain):
    (record,) = ask("hello", "--dtype", "bfloat16")
    assert (plain(ask)["dtype"], record["dtype"]) == ("float32", "bfloat16")
    parts, full = record["cache"]["bytes"], plain(ask)["cache"]["bytes"]
    assert 2 * (parts["codes"] + parts["exact"]) == full["codes"] + full["exact"]


def test_kv_cache_dtype_reaches_the_cache(ask, plain):
    (record,) = ask("hello", "--kv-cache-dtype", "int8")
    (codecs,) = record["cache"]["codecs"]
    assert codecs["k"].startswith("int8")
    assert codecs["v"].startswith("int8")
    assert record["cache"]["bytes"]["codes"] < plain(ask)["cache"]["bytes"]["codes"]
    (raw,) = plain(ask)["cache"]["codecs"]
    assert (raw["k"], raw["v"]) == ("raw", "raw")


def test_page_size_reaches_the_cache(ask, plain):
    (record,) = ask("hello", "--page-size", "16")
    assert record["cache"]["codecs"][0]["page_size"] == 16
    assert plain(ask)["cache"]["codecs"][0]["page_size"] == 128
    assert record["text"] == plain(ask)["text"]


def test_evict_reaches_the_cache(ask, plain):
    prompt = " ".join(["hello there"] * 40)
    (record,) = ask(prompt, "--evict", "snapkv:50%/window=4")
    (whole,) = ask(prompt)
    assert record["cache"]["evict"] == "snapkv:50%/window=4"
    assert record["cache"]["codecs"][0]["rows"][0] < whole["cache"]["codecs"][0]["rows"][0]
    (record,) = ask(prompt, "--evict", "streaming:4+20")
    assert record["cache"]["codecs"][0]["rows"] == [24]


def test_report_prints_bytes_by_part(cli):
    done = cli("--report", "--max-tokens", "2", "hello")
    assert "pages" in done.err
    assert "32 tokens attend to each other by plain XLA (no kernel for cpu)" in done.err
    assert "pages" not in cli("--max-tokens", "2", "hello").err


def test_prompt_file_and_stdin(ask, plain, tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_text("hello\n")
    (from_file,) = ask("--prompt-file", str(path))
    assert from_file["prompt"] == "hello"
    for words in ((), ("--prompt-file", "-")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
        (record,) = ask(*words)
        assert record["text"] == plain(ask)["text"]


def test_keys_and_values_choose_apart(ask):
    (record,) = ask("hello", "--kv-k", "int8", "--kv-v", "fp8")
    (group,) = record["cache"]["codecs"]
    assert (group["k"], group["v"]) == ("int8", "fp8")


def test_layers_choose_apart(ask):
    (record,) = ask("hello", "--kv-cache-dtype", "int8", "--kv-layers", "0:raw,2:raw+int4")
    codecs = {layer: (g["k"], g["v"]) for g in record["cache"]["codecs"] for layer in g["layers"]}
    assert codecs == {0: ("raw", "raw"), 1: ("int8", "int8"), 2: ("raw", "int4")}


def test_sinks_and_recent_reach_the_cache(ask):
    (record,) = ask("hello", "--kv-cache-dtype", "int8", "--sinks", "2", "--recent", "33")
    (group,) = record["cache"]["codecs"]
    assert (group["sinks"], group["recent"]) == (2, 33)


def test_mla_rope_bits_reach_the_cache(cli):
    """Here to be refused, as this model has no latents (tests/layers/test_mla.py uses them)."""
    outcome = cli("hello", "--mla-rope-bits", "8")
    assert outcome.code == 2
    assert "mla_rope_bits: expected None: this model has no latent attention" in outcome.err


def test_a_missing_calibration_file_is_named(cli):
    outcome = cli("hello", "--kv-cache-dtype", "kvquant4", "--kv-calibration", "/no/such")
    assert outcome.code == 2
    assert "/no/such" in outcome.err


def test_a_kernel_is_chosen_or_refused(cli):
    """A TPU's pages are of 128 tokens; an unknown kernel is none."""
    for name, said in (("tpu-v5e", "page_size: TPU kernels need 128"), ("cuda", "one of ('auto'")):
        words = ["--kv-cache-dtype", "int8", "--page-size", "32", "--max-model-len", "512"]
        outcome = cli("hello", *words, "--kernel", name)
        assert outcome.code == 2
        assert said in outcome.err


def test_a_preset_fits_the_cache_once(ask, cli, tmp_path, monkeypatch):
    import numpy as np

    from kvjax import presets
    from kvjax.evaluation import texts

    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    rows = np.random.default_rng(0).integers(3, 256, (2, 160)).astype(np.int32)
    monkeypatch.setattr(texts, "windows", lambda *a, **k: rows)
    (record,) = ask("hello", "--kv-cache-dtype", "aggressive")
    assert all(group["k"].startswith("klt") for group in record["cache"]["codecs"])
    monkeypatch.setattr(presets, "collect", None)  # the second start fits nothing
    assert ask("hello", "--kv-cache-dtype", "aggressive")[0]["text"] == record["text"]
    refused = cli("hello", "--kv-cache-dtype", "aggressive", "--kv-k", "int8")
    assert refused.code == 2
    assert "kv-k" in refused.err
