"""SGLang's scheduler with EAGLE, overlap scheduling and a host tier: all files on one scheduler."""

from pathlib import Path

import nursery
import pytest


@pytest.mark.slow
def test_speculation(tmp_path: Path) -> None:
    files = ("speculation_of_sglang.py", "speculation_faults_of_sglang.py", "sleep_of_sglang.py")
    nursery.run_tests(tmp_path / "log", *files, plugin="speculation_judge")
