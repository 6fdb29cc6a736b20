"""The corpus and its batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvjax.training.data import Batches, heldout_batches, load_dataset
from kvjax.training.text import get_tokenizer, read_corpus


def test_the_split_is_by_file_and_a_function_of_the_name(config):
    corpus = read_corpus(config.data)
    train, heldout = ({f.name for f in half} for half in corpus)
    assert len(train) + len(heldout) == 24
    assert not train & heldout
    assert corpus == read_corpus(config.data)
    small = read_corpus(dataclasses.replace(config.data, max_bytes=20_000))
    assert {f.name for f in small.train} < train
    assert {f.name for f in small.heldout} <= heldout


def test_copies_and_excluded_folders_are_left_out(config, tmp_path, corpus):
    for path in corpus.rglob("*.py"):
        for folder in ("a", "b", "tests"):
            target = tmp_path / folder / path.name
            target.parent.mkdir(exist_ok=True)
            target.write_text(path.read_text())
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    found = read_corpus(dataclasses.replace(config.data, corpus=str(tmp_path)))
    names = [f.name for half in found for f in half]
    assert len(names) == 24
    assert not any(n.startswith("tests/") for n in names)
    assert len({f.text for half in found for f in half}) == 24


def test_heldout_files_are_never_in_training(config):
    data = load_dataset(config.data, config.model)
    corpus = read_corpus(config.data)
    text = data.tokenizer.decode(data.train)
    assert text == "".join(f.text for f in corpus.train)
    assert not any(f.text in text for f in corpus.heldout)
    assert data.tokenizer.decode(data.heldout) == "".join(f.text for f in corpus.heldout)


def test_batches_are_a_function_of_seed_and_step():
    tokens = np.arange(1000, dtype=np.int32)
    make = {"batch_size": 4, "context": 16}
    a, b = (Batches(tokens, seed=7, **make) for _ in range(2))
    for step in (0, 40, 3, 500, 40):
        np.testing.assert_array_equal(a(step), b(step))
        assert a(step).shape == (4, 17)
        assert (np.diff(a(step), axis=1) == 1).all()
    assert not np.array_equal(a(3), Batches(tokens, seed=8, **make)(3))


def test_an_epoch_visits_each_window_once_and_epochs_differ():
    tokens = np.arange(1000, dtype=np.int32)
    batches = Batches(tokens, seed=0, batch_size=3, context=10)
    starts = np.concatenate([batches(s)[:, 0] for s in range(batches.windows)])
    epochs = starts.reshape(3, batches.windows)
    for epoch in epochs:
        assert len(set(epoch)) == batches.windows
        assert len(set(epoch % 10)) == 1
        assert epoch.max() + 10 < len(tokens)
    assert not np.array_equal(epochs[0], epochs[1])


def test_heldout_batches_are_spread_over_the_stream():
    tokens = np.arange(1000, dtype=np.int32)
    batches = heldout_batches(tokens, batch_size=3, context=10, count=4)
    starts = np.concatenate(batches)[:, 0]
    assert (len(batches), starts.min(), starts.max(), len(set(starts))) == (4, 0, 980, 12)
    assert len(heldout_batches(tokens, batch_size=3, context=10, count=500)) == 33


def test_too_little_data_is_an_error(config, tmp_path):
    with pytest.raises(ValueError, match="training tokens"):
        Batches(np.arange(20, dtype=np.int32), batch_size=1, context=16, seed=0)
    with pytest.raises(ValueError, match="held-out tokens"):
        heldout_batches(np.arange(20, dtype=np.int32), batch_size=4, context=16, count=1)
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"data.corpus: expected at least one .* file"):
        read_corpus(dataclasses.replace(config.data, corpus=str(tmp_path)))
    with pytest.raises(ValueError, match="'stdlib' or a folder"):
        read_corpus(dataclasses.replace(config.data, corpus="nowhere"))


def test_the_tokenizer_is_cached_and_the_same_when_trained_again(
    config, token_cache, tmp_path, monkeypatch
):
    files = read_corpus(config.data).train
    first = get_tokenizer(files, 320)
    (path,) = (p for p in (token_cache / "tokenizers").iterdir())
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    second = get_tokenizer(files, 320)
    assert (tmp_path / "tokenizers" / path.name).read_text() == path.read_text()
    assert (first.bos_id, first.eos_ids, first.pad_id) == (0, (1,), 2)
    assert len(second.encode("def ")) == 1
    assert second.encode("def read(x):\n    x") == second.encode("def read(x):\n") + second.encode(
        "    x"
    )
    text = "def größe(x):\n\treturn x  # 数\r\n\n    pass"
    assert second.decode(second.encode(text)) == text


def test_special_ids_must_be_the_tokenizers(config):
    model = dataclasses.replace(config.model, bos_token_id=5)
    with pytest.raises(
        ValueError, match=r"bos_token_id.*expected the tokenizer's \(0, \(1,\), 2\)"
    ):
        load_dataset(config.data, model)
