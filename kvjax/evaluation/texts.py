"""Texts that every machine has: they come with Python and with the packages kvjax needs."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvjax.config import near, need

_MODULES = (
    "argparse", "calendar", "collections", "configparser", "csv", "datetime", "decimal", "difflib",
    "doctest", "fractions", "functools", "gettext", "heapq", "inspect", "json", "locale", "logging",
    "optparse", "pathlib", "pickle", "random", "re", "shutil", "socket", "statistics", "string",
    "subprocess", "tarfile", "tempfile", "textwrap", "threading", "trace", "typing", "unittest",
    "urllib.request", "warnings", "zipfile",
)  # fmt: skip
_LICENSED = ("jax", "flax", "numpy", "optax", "orbax-checkpoint", "safetensors")


def topics() -> str:
    """The language reference behind `help("topics")`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def docstrings() -> str:
    """Docstrings of the standard library."""
    out: list[str] = []
    for name in _MODULES:
        module = importlib.import_module(name)
        members = [v for k, v in sorted(vars(module).items()) if not k.startswith("_")]
        own = [m for m in members if getattr(m, "__module__", None) == name]
        docs = [inspect.getdoc(x) for x in (module, *own)]
        out += [f"{name}\n{doc}" for doc in docs if doc and len(doc) > 200]
    return "\n\n".join(out)


def licences() -> str:
    """The licences of Python (where it is installed with it) and of some packages."""
    python = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    files = [python] if python.is_file() else []
    for package in _LICENSED:
        names = importlib.metadata.files(package) or []
        found = [Path(str(f.locate())) for f in names if f.name.upper().startswith("LICENSE")]
        files += sorted(path for path in found if path.is_file())
    each = dict.fromkeys(f.read_text(encoding="utf-8", errors="replace") for f in files)
    return "\n\n".join(each)


#: by name, for `--text`
TEXTS: dict[str, Callable[[], str]] = {
    "topics": topics,
    "docstrings": docstrings,
    "licences": licences,
}


def read(name: str, field: str = "text") -> str:
    """A text of `TEXTS`, several joined by `+`, or a file; others raise ValueError by `field`."""
    parts = name.split("+")
    if all(part in TEXTS for part in parts):
        return "\n\n".join(TEXTS[part]() for part in parts)
    path = Path(name).expanduser()
    known = f"a file, or one of {', '.join(TEXTS)} (joined by +)"
    need(path.is_file(), field, known, name, near(name, TEXTS).strip())
    return path.read_text(encoding="utf-8", errors="replace")


def windows(tokenizer, name: str, *, count: int, length: int) -> np.ndarray:
    """`[count, length]` token ids, windows spread evenly over each of the texts in `name`.

    Raises ValueError when the text is too short for windows that do not overlap.
    """
    parts = name.split("+") if all(part in TEXTS for part in name.split("+")) else [name]
    share = [count // len(parts) + (i < count % len(parts)) for i in range(len(parts))]
    out = []
    for part, n in zip(parts, share, strict=True):
        ids = np.asarray(tokenizer.encode(read(part)), np.int32)
        need(
            ids.size >= n * length,
            "text",
            f"at least {n * length} tokens in {part}, for {n} windows of {length}",
            ids.size,
            "Give a longer text, or fewer or shorter windows.",
        )
        starts = [int(i * (ids.size - length) / max(1, n - 1)) if n > 1 else 0 for i in range(n)]
        out += [ids[s : s + length] for s in starts]
    return np.stack(out)


def digest(tokens: np.ndarray) -> str:
    """Names the tokens, so that two runs can tell whether they read the same."""
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).hexdigest()[:12]
