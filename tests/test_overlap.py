"""Work of a layer that overlaps on a GPU: `overlapping_layer.py`, inside SGLang."""

from pathlib import Path

import pytest
import server_forkserver


@pytest.mark.slow
def test_overlapping_layer(tmp_path: Path) -> None:
    server_forkserver.run_tests(tmp_path / "log", "overlapping_layer.py")
