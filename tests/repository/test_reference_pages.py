"""Tests that the reference pages list exactly the commands, options and flags of the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from dsv4_sglang.cli import app
from dsv4_sglang.srt.launch.options import Options

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each command with its words, such as "storage ls"."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{path} {name}".strip())
    if not hasattr(command, "commands"):
        yield path, command


COMMANDS = dict(commands(typer.main.get_command(app)))
SECTIONS = dict(re.findall(r"^## ([\w -]+)\n(.*?)(?=^## |\Z)", (REFERENCE / "cli.md").read_text(), re.M | re.S))


def test_cli_page_has_a_section_for_each_command() -> None:
    assert list(SECTIONS) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_cli_page_lists_each_option(name: str) -> None:
    """The page lists exactly the command's options. An option is the first word of a bullet."""
    options = [parameter for parameter in COMMANDS[name].params if parameter.param_type_name == "option"]
    expected = {word for option in options for word in option.opts} - {"--help"}
    listed = {
        word for line in re.findall(r"^- (`--.*?`):", SECTIONS[name], re.M) for word in re.findall(r"--[\w-]+", line)
    }
    assert listed == expected


@pytest.mark.parametrize("field", fields(Options), ids=lambda field: field.name)
def test_options_page_has_each_option_with_its_default(field) -> None:
    page = (REFERENCE / "options.md").read_text()
    assert re.search(rf"^- `{field.name}` \(.*default `{re.escape(json.dumps(field.default))}`\): ", page, re.M)


def test_options_page_has_no_other_options() -> None:
    listed = re.findall(r"^- `(\w+)` \(", (REFERENCE / "options.md").read_text(), re.M)
    assert listed == [field.name for field in fields(Options)]


@pytest.mark.full
def test_flags_page_equals_the_flag_table() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "flags_page.py", "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
