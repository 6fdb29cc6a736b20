"""Text of running generations: stop strings, cut characters, rows that end apart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.engine.text import RowText, StopStrings, TextGeneration

words = st.text("ab .", min_size=0, max_size=24)
stops = st.lists(st.text("ab .", min_size=1, max_size=5), max_size=3)


class Bytes:
    """A tokenizer whose tokens are bytes; 256 is the end of a sequence, shown as <end>."""

    def stream(self, *, inside=False):
        import codecs

        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def push(ids):
            return "".join("<end>" if i == 256 else utf8.decode(bytes([i])) for i in ids)

        return SimpleNamespace(push=push, finish=lambda: "")


class Run:
    """A Generation that chooses given tokens."""

    def __init__(self, rows, eos_ids=(256,)):
        self.engine = SimpleNamespace(eos_ids=eos_ids)
        self.prompts = rows
        self._rows = [list(r) for r in rows]
        self.tokens = [[r.pop(0)] for r in self._rows]
        self.kept = {}

    @property
    def done(self):
        return not any(self._rows)

    def step(self, steps):
        fresh = [[row.pop(0) for _ in range(min(steps, len(row)))] for row in self._rows]
        for row, chosen in zip(self.tokens, fresh, strict=True):
            row.extend(chosen)
        return fresh

    def stop(self, row, *, keep):
        self.kept[row] = keep
        self._rows[row] = []
        del self.tokens[row][keep:]


def expected(text: str, stops: list[str]) -> str:
    """The definition: read a character at a time, end when a stop string is complete."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=400)
@given(words, stops, st.lists(st.integers(1, 5), min_size=24, max_size=24))
def test_stop_strings_are_found_however_text_is_cut(text, stops, sizes):
    watch, out, at = StopStrings(stops), "", 0
    for size in sizes:
        fresh = watch.push(text[at : at + size])
        at += size
        out += fresh
        assert expected(text, stops).startswith(out)  # never more than will stay
    out += watch.finish()
    assert out == expected(text, stops)
    assert watch.found == (expected(text, stops) != text or any(text.endswith(s) for s in stops))


@given(words, stops)
def test_only_what_may_begin_a_stop_string_is_held_back(text, stops):
    watch = StopStrings(stops)
    out = watch.push(text)
    if not watch.found:
        held = text[len(out) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stops)


@settings(max_examples=200)
@given(st.text("aé你👋", max_size=8), st.integers(1, 7), st.integers(0, 40))
def test_characters_are_never_broken(text, portion, cut):
    """Case 124: a cut inside a character drops its bytes, and nothing else."""
    data = list(text.encode())[:cut]
    row = RowText(Bytes(), (), (256,), False)
    out = ""
    for at in range(0, len(data), portion):
        out += row.push(data[at : at + portion])
        assert "�" not in out
    out += row.finish()
    assert out == row.text == bytes(data).decode("utf-8", errors="ignore")
    assert row.tokens == len(data)
    assert row.finish() == ""


def test_end_of_sequence_has_no_text():
    text = TextGeneration(Run([[*b"hi", 256]]), Bytes())
    assert "".join(fresh[0] for fresh in text) == "hi"


@pytest.mark.parametrize("steps", [1, 4, 32])
def test_a_row_that_stops_costs_nothing_more(steps):
    rows = [list(b"one STOP two three four"), list(b"no end here, none at all"), [*b"x", 256]]
    run = Run(rows)
    text = TextGeneration(run, Bytes(), stop=["STOP", "nd x"], steps=steps)
    streamed = ["", "", ""]
    for fresh in text:
        streamed = [a + b for a, b in zip(streamed, fresh, strict=True)]
    streamed = [a + b for a, b in zip(streamed, text.finish(), strict=True)]
    assert streamed == text.texts == ["one ", "no end here, none at all", "x"]
    assert run.kept == {0: len("one STOP")}
    assert bytes(run.tokens[0]) == b"one STOP"


def test_empty_stop_strings_are_refused():
    with pytest.raises(ValueError, match="stop: expected strings that are not empty"):
        TextGeneration(Run([[1]]), Bytes(), stop=["a", ""])


def test_real_rows_stop_and_keep_their_tokens(tiny):
    """Through the engine: a stopped row reports "stop", keeps its tokens, leaves others alone."""
    from kvjax import Engine

    model = tiny(vocab_size=97)
    alphabet = SimpleNamespace(
        stream=lambda inside=False: SimpleNamespace(
            push=lambda ids: "".join(chr(33 + i) for i in ids), finish=lambda: ""
        )
    )
    engine = Engine(model, batch=2, max_model_len=64, eos_ids=())

    def texts(stop):
        run = engine.start([[1, 2, 3], [4, 5]], max_tokens=20)
        text = TextGeneration(run, alphabet, stop=stop, steps=7)
        for _ in text:
            pass
        text.finish()
        return text.texts, run.result()

    (first, second), _ = texts([])
    stop = first[9:12]
    (short, other), result = texts([stop])
    assert short == first[: first.index(stop)]
    assert other == expected(second, [stop])
    assert result.finish_reasons[0] == "stop"
    assert len(result.tokens[0]) == len(short) + len(stop)
    assert len(first) == len(second) == 20
