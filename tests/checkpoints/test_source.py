"""What `open_checkpoint` accepts, and what it says of the rest."""

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from kvjax.checkpoints import hub, open_checkpoint, source

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder(kind):
    checkpoint = open_checkpoint(kind(GOLDENS / "llama"))
    assert checkpoint.path == GOLDENS / "llama"
    assert checkpoint.config.num_layers == 3


@pytest.mark.parametrize("name", [None, "smollm2", "default"])
def test_the_default_model(name, monkeypatch):
    opened = dataclasses.replace(open_checkpoint(GOLDENS / "llama"), path=Path("here.gguf"))
    monkeypatch.setattr(source, "default_model_path", lambda: Path("here.gguf"))
    monkeypatch.setattr(source, "open_gguf", {opened.path: opened}.get)
    assert open_checkpoint(name) is opened


@pytest.mark.parametrize(
    "name",
    [
        "/no/such/folder",
        "./org/name",
        "~/nowhere/model",
        "models/model.gguf",
        "model.gguf",
        "org/name/deeper",
        "org/",
        "../name",
        Path("org/name"),
    ],
)
def test_paths_that_do_not_exist_never_reach_the_hub(name, monkeypatch):
    monkeypatch.setattr(hub, "fetch", lambda repo: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="path that does not exist"):
        open_checkpoint(name)


def test_a_missing_folder_in_an_existing_one_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "fetch", lambda repo: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="path that does not exist"):
        open_checkpoint("runs/17")


def test_other_names_list_what_is_accepted(tmp_path):
    with pytest.raises(ValueError, match=r"expected a Hugging Face folder.*got 'smollm'"):
        open_checkpoint("smollm")
    (tmp_path / "model.zip").write_bytes(b"")
    with pytest.raises(ValueError, match=r"got the file .*model.zip"):
        open_checkpoint(tmp_path / "model.zip")


class Api:
    """The hub's answer to the first question: none, or an error."""

    error: Exception | None = None

    def model_info(self, repo, *, timeout):
        assert timeout <= 10  # a hub that does not answer is not waited for
        if self.error is not None:
            raise self.error


def test_hub(monkeypatch):
    asked = []

    def snapshot(repo, **kwargs):
        asked.append((repo, kwargs))
        return str(GOLDENS / "llama")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert open_checkpoint("org/name-1.5B").config.num_layers == 3
    ((repo, kwargs),) = asked
    assert repo == "org/name-1.5B"
    assert not any(pattern.endswith(".bin") for pattern in kwargs["allow_patterns"])


@pytest.mark.parametrize("cached", [False, True])
def test_hub_out_of_reach(cached, monkeypatch):
    def snapshot(repo, local_files_only):
        if not cached:
            raise LocalEntryNotFoundError("not in the cache")
        return str(GOLDENS / "llama")

    monkeypatch.setattr(Api, "error", ConnectionError("Name or service not known\nand more"))
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    if cached:
        assert open_checkpoint("org/name").config.num_layers == 3
        return
    with pytest.raises(ValueError, match=r"'org/name'.*Name or service not known.*--model FOLDER"):
        open_checkpoint("org/name")


def test_a_silent_hub_is_not_waited_for(tmp_path):
    """A server that takes the connection and says nothing, in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        code = (
            "from kvjax.checkpoints import hub\nhub.TIMEOUT = 0.5\n"
            "try: hub.fetch('org/name')\nexcept ValueError as e: print('said:', e)"
        )
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=GOLDENS.parents[2],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert "said: model: expected 'org/name'" in done.stdout, done.stderr
