"""Makes `kernel_data` importable: with importlib's import mode a folder of tests is no package."""

import os
import sys
from pathlib import Path

import pytest

from pallas_kernels import aot

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def libtpu_environment():
    """libtpu ends the process on flags of XLA that it does not know, such as the CPU's; it reads
    them at its first compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        for name, value in aot.environment().items():
            os.environ.setdefault(name, value)
        yield
