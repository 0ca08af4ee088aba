"""Tests of the statements of docs/reference/security.md on the whole package: environment, files and ports.

Ruff checks the statements on code and clocks (`banned-api` in pyproject.toml)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dsv4_sglang"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGE = (ROOT / "docs" / "reference" / "security.md").read_text()

ENVIRONMENT = re.compile(r"^(?:os\.)?environ(?:\.get|\.setdefault)?$|^os\.getenv$")
# Names of functions that create, change or remove files.
WRITES = {
    *("write_text", "write_bytes", "mkdir", "makedirs", "chmod", "unlink", "rename", "replace", "rmdir", "rmtree"),
    *("symlink_to", "touch", "tofile", "save_file", "dump", "mkdtemp", "TemporaryDirectory"),
}
WRITING = {
    "ops/extension.py": "the compiled extension",
    "planner/ask_sglang.py": "dsv4-sglang plan",
    "srt/host_cache/files.py": "stored pages",
    "srt/host_cache/folder.py": "stored pages",
    "srt/host_cache/locks.py": "stored pages",
    "srt/host_cache/nixl.py": "stored pages",
    "srt/host_cache/segment.py": "stored pages",
    "srt/host_cache/storage.py": "stored pages",
    "testing/tiny.py": "dsv4-sglang make-tiny",
    "testing/tokenizer.py": "dsv4-sglang make-tiny",
}


def calls(module: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield (name of the called function as written, call) for each call in a module."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def name_of(module: Path) -> str:
    return str(module.relative_to(PACKAGE))


def test_the_environment_is_what_the_page_lists() -> None:
    """The page lists every variable that is read or set with a default. Passing on the whole environment does not
    count."""
    found: set[str] = set()
    for module in MODULES:
        for called, call in calls(module):
            if ENVIRONMENT.match(called) and call.args and isinstance(call.args[0], ast.Constant):
                found.add(call.args[0].value)
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "envs":
                found.add(node.attr)
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                found.add(ast.literal_eval(node.slice))
            # Tables name variables too. `launch.command` sets those of a CPU for the server that it starts.
            if isinstance(node, ast.Constant) and module.name != "command.py":
                found.update(re.findall(r"^SGLANG_[A-Z0-9_]+$", str(node.value)))
    listed = PAGE[PAGE.index("## Environment variables") :]
    assert found == set(re.findall(r"`([A-Z][A-Z0-9_]+)`", listed))


def test_only_listed_modules_write_files() -> None:
    found = set()
    for module in MODULES:
        for called, call in calls(module):
            function, modes = called.rsplit(".", 1)[-1], [a.value for a in call.args if isinstance(a, ast.Constant)]
            opens = function == "open" and any(isinstance(m, str) and set(m) & set("wax+") for m in modes)
            paths = function != "replace" or called == "os.replace"
            if opens or (function in WRITES and paths and not called.startswith(("json.", "yaml."))):
                found.add(name_of(module))
    assert found == set(WRITING)


def test_nothing_listens() -> None:
    """Only a command binds a port, for a moment, to check that it is free."""
    called = {(name_of(m), name) for m in MODULES for name, _ in calls(m) if name != "signature.bind"}
    binding = {module for module, name in called if name.endswith((".bind", ".listen"))}
    assert binding == {"cli/client.py"}


def test_the_page_names_tests_that_exist() -> None:
    named = set(re.findall(r"`((?:\w+/)?test_\w+\.py)`", PAGE))
    assert len(named) > 4 and all((ROOT / "tests" / name).is_file() for name in named)
