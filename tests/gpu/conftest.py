"""The CUDA ops for all tests of this folder."""

import pytest

import dsv4_sglang.attention.cuda_ops  # noqa: F401  registers the ops
from dsv4_sglang.ops import extension


@pytest.fixture(scope="session", autouse=True)
def _extension() -> None:
    """Load the extension, whose build needs a GPU."""
    extension.load()
