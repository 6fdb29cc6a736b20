"""infer/quality.py on a tiny model: its rows, its files, and that it goes on where it stopped."""

from __future__ import annotations

import json

import pytest

METHODS = "raw,int4,pca3"


@pytest.fixture
def run(program, tiny, letters, tmp_path, monkeypatch):
    """`run(*arguments)`: (exit code, what the JSON holds)."""
    model = tiny(form="stacked", initializer_range=0.3)
    monkeypatch.setattr("kvjax.load", lambda name, form: (model, letters))
    (tmp_path / "read.txt").write_text("Some text that is read, and read again. " * 20)
    (tmp_path / "other.txt").write_text("Quite another one; it is for calibration! " * 120)

    def call(*arguments: str):
        out = tmp_path / "q.json"
        code = program.main([
            "--text", str(tmp_path / "read.txt"), "--calibration-text", str(tmp_path / "other.txt"),
            "--tokens", "160", "--score-from", "64", "--page-size", "32", "--recent", "8",
            "--chunk", "32", "--passkey-lengths", "240", "--passkey-depths", "0.5",
            "--json-out", str(out), *arguments,
        ])  # fmt: skip
        return code, json.loads(out.read_text()) if out.exists() else None

    return call


def test_table_json_and_resume(run, program, capsys, monkeypatch):
    from kvjax.evaluation.quality import Bench

    real, seen = Bench.row, []

    def interrupted(self, name):
        if name == "pca3":
            raise KeyboardInterrupt
        return real(self, name)

    monkeypatch.setattr(Bench, "row", interrupted)
    code, saved = run("--methods", METHODS, "--no-plot")
    assert code == 130
    assert [row["method"] for row in saved["rows"]] == ["raw", "int4"]
    assert "int4" in capsys.readouterr().out

    monkeypatch.setattr(Bench, "row", lambda self, name: (seen.append(name), real(self, name))[1])
    code, saved = run("--methods", METHODS, "--no-plot")
    assert (code, seen) == (0, ["pca3"])
    raw, int4, pca3 = saved["rows"]
    assert abs(raw["kl"]) < 1e-6
    assert raw["top1"] == 1.0
    assert int4["kl"] > 20 * abs(raw["kl"])
    assert (int4["tokens"], int4["passkey"]["n"]) == (2 * 96, 1)
    assert raw["effective_bits"] == {"k": 16, "v": 16, "mean": 16}
    assert pca3["effective_bits"]["mean"] == 3
    assert (raw["calibrated"], pca3["calibrated"]) == (False, True)
    assert pca3["sealed_bytes_per_token"] == 2 * 2 * 2 * 32 * 3 / 8
    assert saved["about"]["calibration_tokens"] == 4096
    shown = capsys.readouterr().out
    for word in ("raw", "int4", "pca3*", "nats/token", "192 scored", "calibrated on 4096"):
        assert word in shown

    assert run("--methods", METHODS, "--no-plot", "--chunk", "16")[0] == 2
    assert "holds rows of another run (other chunk)" in capsys.readouterr().err


def test_plot(program, tmp_path):
    pytest.importorskip("matplotlib")
    row = {"method": "a", "calibrated": True, "kl": 1e-3, "kl_se": 1e-4, "tokens": 9}
    rows = [
        row | {"effective_bits": {"mean": 3}},
        row | {"kl": 0.0, "effective_bits": {"mean": 16}},
    ]
    program.draw(rows, tmp_path / "q.png", {"model": "m", "text": "t"})
    assert (tmp_path / "q.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "int5"], "codec: expected a known name, got 'int5'"),
        (["--score-from", "40"], "score-from: expected 44"),
        (["--text", "topicz"], "text: expected a file, or one of topics"),
        (["--tokens", "4000"], "text: expected at least 8000 tokens"),
        (
            ["--calibration-text", "topics", "--text", "topics"],
            "calibration-text: expected another",
        ),
    ],
)
def test_refused(run, capsys, arguments, message):
    assert run("--no-plot", *arguments) == (2, None)
    assert message in capsys.readouterr().err
