"""What only a process of its own shows: import order, the compilation cache, closed pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SPY = """
import os, sys
class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            print("AT IMPORT", os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"),
                  os.environ.get("XLA_CLIENT_MEM_FRACTION"), os.environ.get("JAX_PLATFORMS"))
            sys.meta_path.remove(self)
sys.meta_path.insert(0, Spy())
from kvjax.infer import main
sys.exit(main(sys.argv[1:]))
"""


def run(*words: str, code: str | None = None, cache: Path | None = None, **env: str):
    start = ["-m", "kvjax.infer"] if code is None else ["-c", code]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    if cache is not None:
        variables["KVJAX_CACHE"] = str(cache)
    return subprocess.run(
        [sys.executable, *start, *words],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_mem_fraction_and_platform_are_set_before_jax_is_imported(folder, tmp_path):
    """Case 110. On a CPU the fraction has no effect, so the run ends there with an error."""
    done = run(
        "--mem-fraction",
        "0.4",
        "--platform",
        "cpu",
        "--model",
        str(folder),
        "hi",
        code=SPY,
        cache=tmp_path,
        XLA_CLIENT_MEM_FRACTION="0.9",
    )
    assert done.stdout.strip() == "AT IMPORT 0.4 None cpu"
    assert done.returncode == 2
    assert "expected a GPU, got cpu" in done.stderr


def test_help_and_usage_errors_do_not_import_jax():
    assert run("--help", code=SPY).stdout.startswith("usage:")
    done = run("--no-such-flag", code=SPY)
    assert (done.returncode, done.stdout) == (2, "")


def test_second_start_compiles_nothing(folder, tmp_path):
    words = ("--model", str(folder), "--json", "--max-tokens", "4", "hi")
    records = []
    for _ in range(2):
        done = run(*words, cache=tmp_path)
        assert done.returncode == 0, done.stderr
        unexpected = [x for x in done.stderr.splitlines() if not x.startswith("kvjax: ")]
        assert unexpected == []
        records.append(json.loads(done.stdout))
    assert records[0]["compiled_programs"] > 0
    assert records[1]["compiled_programs"] == 0
    assert records[0]["text"] == records[1]["text"]
    assert any((tmp_path / "xla").iterdir())


def test_compilation_cache_can_be_off_and_must_be_writable(folder, tmp_path):
    words = ("--model", str(folder), "--json", "--max-tokens", "2", "hi")
    done = run("--no-compilation-cache", *words, cache=tmp_path)
    assert json.loads(done.stdout)["compiled_programs"] > 0
    assert not (tmp_path / "xla").exists()
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = run(*words, cache=blocked)
    assert done.returncode == 2
    assert "--no-compilation-cache" in done.stderr


def test_a_closed_pipe_is_silent(folder, tmp_path):
    words = [sys.executable, "-m", "kvjax.infer", "--no-compilation-cache", "--model", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "KVJAX_CACHE": str(tmp_path)}
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        done = subprocess.run(
            [*words, "--max-tokens", "20", "hi"],
            env=env,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0
    assert "Error" not in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no GPU to miss elsewhere")
def test_a_missing_platform_is_an_error(folder, tmp_path):
    done = run("--platform", "tpu", "--model", str(folder), "hi", cache=tmp_path)
    if done.returncode == 0:
        pytest.skip("this machine has a TPU")
    assert done.returncode == 2
    assert "platform: expected one that JAX can start" in done.stderr
    assert "Traceback" not in done.stderr
