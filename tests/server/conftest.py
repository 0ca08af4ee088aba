"""Checkpoints that the servers of these tests serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_sglang.testing.tiny import TinySpec, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoint folder of a seed and other fields of `TinySpec`, made once."""
    made: dict[Any, Path] = {}

    def make(**fields: Any) -> Path:
        key = tuple(sorted(fields.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny")
            make_tiny(made[key], TinySpec(**fields))
        return made[key]

    return make
