"""Programs of `infer/` and `train/`, which no package holds, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load(path: str) -> ModuleType:
    """The program at a path such as `infer/quality.py`."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_program", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
