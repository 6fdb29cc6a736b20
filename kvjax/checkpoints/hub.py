"""Models of the Hugging Face hub, by "organisation/name". Only files that kvjax reads come."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.*",
    "model*.safetensors",
    "model.safetensors.index.json",
]
TIMEOUT = 5.0  # seconds to answer the first question; the download itself has no limit
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def looks_like_hub_id(name: str) -> bool:
    """Whether a name is "organisation/name" and not the path of a file that is not there."""
    if not _HUB_ID.fullmatch(name) or ".." in name:
        return False
    is_file_name = name.lower().endswith((".gguf", ".safetensors", ".json", ".bin", ".whl", ".pt"))
    return not is_file_name and not Path(name).parent.exists()


def fetch(repo: str) -> Path:
    """The folder of a hub model, fetched, or from the hub's cache when the hub does not answer."""
    try:
        # snapshot_download asks the same question first, but waits for the answer for ever
        huggingface_hub.HfApi().model_info(repo, timeout=TIMEOUT)
    except (GatedRepoError, RepositoryNotFoundError, HFValidationError) as error:
        raise _refused(repo, error) from error
    except Exception as error:  # of httpx or requests, by the hub library's version: no common base
        return _cached(repo, error)
    try:
        folder = huggingface_hub.snapshot_download(
            repo, allow_patterns=PATTERNS, etag_timeout=TIMEOUT
        )
    except (HfHubHTTPError, OSError) as error:
        raise _refused(repo, error) from error
    return Path(folder)


def _cached(repo: str, cause: Exception) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
    except LocalEntryNotFoundError:
        raise _refused(repo, cause) from cause


def _refused(repo: str, cause: Exception) -> ValueError:
    first = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    return ValueError(
        f"model: expected {repo!r} on the Hugging Face hub or in its cache, got: {first}. Check the"
        " name and the network, or fetch the model elsewhere (hf download"
        f" {repo} --local-dir FOLDER) and give its folder: --model FOLDER."
    )
