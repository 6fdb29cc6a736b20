"""Passkeys: where they lie, and that a verdict is what greedy decoding would give."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from kvjax import CacheConfig
from kvjax.evaluation import passkey

RAW = CacheConfig(page_size=8, sinks=2, recent=4)


def text(tokens) -> str:
    return "".join(chr(t + 31) if t else "\n" for t in tokens)


def test_cases(letters):
    given = passkey.cases(letters, lengths=(300, 400), depths=(0.0, 0.5, 1.0), keys=2)
    assert len(given) == 12
    assert len({case.key for case in given}) == 12
    for case in given:
        assert case.tokens.size == case.length
        assert text(case.tokens[-case.answer :]) == case.key
        assert text(case.tokens).count(case.key) == 3
    places = [text(case.tokens).index("The pass key is") for case in given[:6:2]]
    assert places[0] == len(passkey.INTRO) + 1
    assert places == sorted(set(places))
    with pytest.raises(ValueError, match=r"passkey length: expected at least \d+ tokens, got 100"):
        passkey.cases(letters, lengths=(100,), depths=(0.5,), keys=1)


def test_needles(letters):
    """Each case hides its digits in a part of the text of its own."""
    haystack = np.arange(2000) % 90 + 1
    given = passkey.cases(letters, lengths=(300,), depths=(0.5,), keys=3, haystack=haystack)
    for case in given:
        assert case.needle
        assert case.tokens.size == 300
        assert text(case.tokens).count(case.key) == 3
        start = len(passkey.INTRO)
        hidden = text(case.tokens).index("\nThe pass key is") - start
        assert np.all(np.diff(case.tokens[start + 1 : start + hidden]) % 90 == 1)
    assert len({case.tokens[len(passkey.INTRO) + 1] for case in given}) == 3
    with pytest.raises(ValueError, match="haystack: expected at least 300 tokens, got 200"):
        passkey.cases(letters, lengths=(300,), depths=(0.5,), keys=1, haystack=haystack[:200])


def test_the_verdict_is_greedy_decoding(tiny, letters):
    """Answers replaced by what the model itself would say are right; any other digit is not."""
    model = tiny(form="stacked")
    given = passkey.cases(letters, lengths=(230, 260), depths=(0.3, 0.8), keys=1)
    for i, case in enumerate(given):
        prompt = case.tokens[: -case.answer].tolist()
        said = kvjax.generate(model, [prompt], max_tokens=case.answer).tokens[0]
        case.tokens[-case.answer :] = said
        if i == 2:  # the last digit alone
            case.tokens[-1] = (said[-1] + 1) % 97
    right = passkey.score(model, given, config=RAW, chunk=32, max_len=288, batch=3)
    assert right == [True, True, False, True]
    cells = passkey.by_cell(given, right)
    assert cells[2] == {"length": 260, "depth": 0.3, "right": 0, "n": 1}
    assert len(cells) == 4


def test_digits_far_from_the_borders_of_calls(tiny, letters):
    model = tiny(form="stacked")
    (case,) = passkey.cases(letters, lengths=(225,), depths=(0.5,), keys=1)
    scores = {
        tuple(passkey.score(model, [case], config=RAW, chunk=c, max_len=256, batch=1))
        for c in (16, 32)
    }
    assert len(scores) == 1
    assert np.isfinite(case.tokens).all()
