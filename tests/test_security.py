"""Tests of the statements of docs/reference/security.md on the whole package: imports, environment, processes and
files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
    "srt/host_cache/folder.py": "stored pages",
    "srt/host_cache/nixl.py": "stored pages",
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


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_data_is_never_code(module: Path) -> None:
    for node in ast.walk(ast.parse(module.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.split(".")[0] for name in names} & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for called, call in calls(module):
        assert called not in ("eval", "exec", "compile", "os.system", "os.popen", "torch.load", "yaml.load", "np.load")
        assert called not in ("torch.save", "np.save")
        assert not any(keyword.arg == "shell" for keyword in call.keywords), "a shell"
        if called in ("subprocess.run", "subprocess.Popen"):
            given = call.args[0]
            is_list = isinstance(given, ast.List) or ast.unparse(given) in ("command", "command.argv")
            assert is_list, f"{ast.unparse(given)} is no list of arguments"


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
    listed = PAGE[PAGE.index("## Environment variables") :]
    assert found == set(re.findall(r"`([A-Z][A-Z0-9_]+)`", listed))


def test_who_writes_files() -> None:
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
    binding = {name_of(m) for m in MODULES for called, _ in calls(m) if called.endswith((".bind", ".listen"))}
    assert binding == {"cli/client.py"}
    for module in MODULES:
        assert not re.search(r"\b(import|from) +(fastapi|uvicorn|http\.server|socketserver)\b", module.read_text()), (
            module
        )


def test_no_age_is_of_the_wall_clock() -> None:
    """The wall clock jumps. Ages of snapshots count uses, and durations use a monotonic clock. Only files that outlive
    a server have times of the file system."""
    wall = {"time.time", "time.time_ns", "time.localtime", "datetime.now", "datetime.datetime.now", "datetime.utcnow"}
    assert {name_of(m) for m in MODULES for called, _ in calls(m) if called in wall} == {
        "cli/storage.py",
        "srt/host_cache/folder.py",
    }


def test_the_page_names_tests_that_exist() -> None:
    named = set(re.findall(r"`((?:server/|gpu/)?test_\w+\.py)`", PAGE))
    assert len(named) > 4 and all((ROOT / "tests" / name).is_file() for name in named)
