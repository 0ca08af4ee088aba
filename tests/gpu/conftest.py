"""The extension with the CUDA ops for all tests of this folder."""

import pytest

from dsv4_sglang.ops import extension


@pytest.fixture(scope="session", autouse=True)
def _extension() -> None:
    """Load the extension, whose build needs a GPU."""
    extension.load()
