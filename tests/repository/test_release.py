"""Tests that the version is the same everywhere, that pins agree, and that a pure wheel is complete and
reproducible."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import dsv4_sglang

ROOT = Path(__file__).parents[2]


def test_versions_agree() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    newest = re.search(r"^## (?:\[Unreleased\]: )?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert declared and newest
    assert declared[1] == newest[1] == dsv4_sglang.__version__


def test_hooks_use_the_versions_of_the_recipe() -> None:
    pins = set((ROOT / "tools" / "requirements-cpu.txt").read_text().splitlines())
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    used = {d for repo in config["repos"] for hook in repo["hooks"] for d in hook["additional_dependencies"]}
    assert used
    assert used <= pins


def build_wheel(out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.delenv("DSV4_SGLANG_PREBUILD", raising=False)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def test_pure_wheel_is_complete_and_reproducible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = [build_wheel(tmp_path / name, monkeypatch) for name in ("first", "second")]
    assert wheels[0].name == f"dsv4_sglang-{dsv4_sglang.__version__}-py3-none-any.whl"
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    names = zipfile.ZipFile(wheels[0]).namelist()
    sources = {str(Path("dsv4_sglang") / p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert sources <= set(names)
    assert not [name for name in names if name.endswith(".so")], "a library of this machine is in the pure wheel"


@pytest.mark.parametrize("recipe", ["cpu", "cuda"])
def test_setup_uses_the_named_python(recipe: str, tmp_path: Path) -> None:
    """An unsuitable PYTHON was skipped in silence."""
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    command, named = ["tools/setup.sh", str(tmp_path / "venv"), recipe], {**os.environ, "PYTHON": str(old)}
    done = subprocess.run(command, cwd=ROOT, env=named, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("setup: ") and str(old) in line
    assert not (tmp_path / "venv").exists()
