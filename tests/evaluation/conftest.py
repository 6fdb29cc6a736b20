import importlib.util
from pathlib import Path

import pytest


class Letters:
    """A tokenizer of one letter a token, for models without one; ids below 97."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 31 if 32 <= ord(c) < 127 else 0 for c in text]


@pytest.fixture
def letters():
    return Letters()


@pytest.fixture(scope="session")
def program():
    """infer/quality.py as a module."""
    path = Path(__file__).parents[2] / "infer/quality.py"
    spec = importlib.util.spec_from_file_location("quality_program", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
