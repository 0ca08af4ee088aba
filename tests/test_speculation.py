"""SGLang's scheduler with EAGLE, overlap scheduling and a host cache: all files on one scheduler."""

from pathlib import Path

import pytest
import server_forkserver


@pytest.mark.slow
def test_speculation(tmp_path: Path) -> None:
    files = ("speculation_of_sglang.py", "speculation_faults_of_sglang.py", "sleep_of_sglang.py")
    server_forkserver.run_tests(tmp_path / "log", *files, plugin="speculation_judge")
