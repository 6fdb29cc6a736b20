import programs
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
    return programs.load("infer/quality.py")
