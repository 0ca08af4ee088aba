"""The names of SGLang on which this package relies exist, and only one package uses SGLang's private names."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dsv4_sglang
from dsv4_sglang.cli import doctor
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.launch.options import Options
from dsv4_sglang.srt.plugin import activate, sglang_contract
from dsv4_sglang.srt.plugin.hooks import hooks_of
from dsv4_sglang.srt.plugin.overrides import OVERRIDES
from dsv4_sglang.srt.plugin.server_context import ServerContext
from dsv4_sglang.srt.plugin.sglang_contract import Hook
from dsv4_sglang.srt.prefix_cache.component import SnapshotComponent
from dsv4_sglang.srt.sglang import release

PACKAGE = Path(dsv4_sglang.__file__).parent
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
# Modules that cannot be imported here. All can be imported if NIXL's wheel is installed.
WITHOUT_NIXL = () if importlib.util.find_spec("nixl") else ("dsv4_sglang.srt.host_cache.nixl",)


def subclasses() -> Iterator[type]:
    """Yield this package's subclasses of SGLang's classes."""
    for path in (PACKAGE / "srt").rglob("*.py"):
        module = ".".join(("dsv4_sglang", *path.relative_to(PACKAGE).with_suffix("").parts))
        if "cpu_shim" in module or path.stem == "__init__" or module in WITHOUT_NIXL:
            continue
        for made in vars(pkgutil.resolve_name(module)).values():
            if isinstance(made, type) and made.__module__ == module and any(map(is_sglangs, made.__mro__)):
                yield made


def is_sglangs(kind: type) -> bool:
    return kind.__module__.startswith("sglang.")


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module reads: attributes, imports and the parts of dotted strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
            yield from [name.name for name in node.names]
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            yield from node.value.split(".")


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def foreign_private_names(sources: dict[str, str]) -> set[tuple[str, str]]:
    """Return (module, name) of private names that a module uses and none of the modules defines."""
    trees = {module: ast.parse(source) for module, source in sources.items()}
    own = {name for tree in trees.values() for name in own_names(tree)}
    return {
        (module, name)
        for module, tree in trees.items()
        for name in private_uses(tree)
        if PRIVATE.fullmatch(name) and name not in own and name != "_exit"  # os._exit is documented
    }


def test_only_one_package_uses_private_names() -> None:
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    sources = {
        name: text
        for name, text in files.items()
        if not name.startswith("srt/sglang/") and (name.startswith("srt/") or re.search(r"\bsglang\.", text))
    }
    assert foreign_private_names(sources) == set()
    for line in (
        "from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry",
        "from sglang.srt import deepseek\ndeepseek._FP8_WO_A_GEMM",
        "def f(tree): tree._evict_component_and_detach_lru(1)",
        'TARGET = "sglang.srt.server_args.ServerArgs._validate"',
    ):
        assert len(foreign_private_names({"a.py": line})) == 1, line


def test_private_methods_that_are_overridden_are_listed() -> None:
    found = {
        (ours, name)
        for ours in subclasses()
        for base in filter(is_sglangs, ours.__mro__)
        for name in vars(ours)
        if PRIVATE.fullmatch(name) and name in vars(base) and name not in ("_abc_impl", "_is_protocol")
    }
    assert found == {(pkgutil.resolve_name(override.ours), override.method) for override in OVERRIDES}
    assert all(override.reason for override in OVERRIDES)
    assert sglang_contract.override_differences(OVERRIDES) == []


@pytest.mark.parametrize("on_cpu", [False, True])
def test_hooks_fit(on_cpu: bool) -> None:
    hooks = hooks_of(ServerContext(Options()), on_cpu)
    assert sglang_contract.hook_differences(hooks) == []
    assert len({hook.target for hook in hooks}) == len(hooks) and all(hook.reason for hook in hooks)


TARGETS = "sglang.srt.mem_cache.common."


@pytest.mark.parametrize(
    "function",
    [
        lambda original, req, tree_cache: None,
        lambda original, tree_cache, req, is_insert=True: None,
        lambda original, req, tree_cache, is_insert=True, *, force: None,
        lambda original, req, tree, is_insert=True: None,
    ],
)
def test_a_hook_with_other_parameters_is_named(function: Callable[..., Any]) -> None:
    hook = Hook(TARGETS + "release_kv_cache", function, "to be tried")
    anything = Hook(TARGETS + "release_kv_cache", lambda original, *args, **kwargs: None, "")
    (line,) = sglang_contract.hook_differences([hook, anything])
    assert line.startswith(TARGETS + "release_kv_cache takes (req") and line.endswith(": to be tried")
    with pytest.raises(LaunchError, match=r"does not fit the installed release: .*supported: 0\.5\.23\n.*takes "):
        sglang_contract.require([line])


@pytest.mark.parametrize(
    ("version", "text", "state"),
    [
        ("0.5.23", "0.5.23, the supported release", "ok"),
        ("0.5.99", "0.5.99, not tested; supported: 0.5.23", "note"),
    ],
)
def test_the_state_of_a_release(
    version: str, text: str, state: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The doctor names it, and a server of another release starts with one warning."""
    monkeypatch.setattr(release, "sglang_version", lambda: version)
    monkeypatch.setattr(doctor, "_version", lambda _distribution: version)
    (finding,) = doctor.sglang_version(gpu=False)
    assert finding.found.startswith(text) and finding.state == state
    activate.warn_of_release()
    said = f"dsv4_sglang: this is SGLang {version}; supported: 0.5.23; its hooks are as expected, but flags"
    assert len(caplog.messages) == (state == "note") and all(message.startswith(said) for message in caplog.messages)


@pytest.mark.parametrize("version", ["0.5.23", "0.5.20"])
def test_unfit_release_is_rejected_in_one_line(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "sglang_version", lambda: version)
    with (
        pytest.raises(LaunchError if version == "0.5.20" else ImportError) as error,
        release.rejecting_other_releases(),
    ):
        raise ImportError("no module")
    said = "this package does not fit the installed release: this is SGLang 0.5.20; supported: 0.5.23; "
    assert version == "0.5.23" or str(error.value) == said + "ImportError('no module')"


def test_missing_target_is_named() -> None:
    (line,) = sglang_contract.hook_differences([Hook(TARGETS + "gone", print, "to be missed")])
    assert line == TARGETS + "gone does not exist in this SGLang: to be missed"


def test_changed_override_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = next(override for override in OVERRIDES if "Mamba" in override.base)
    gone = tree._replace(method="_gone")
    (line,) = sglang_contract.override_differences([gone])
    assert line == f"{tree.base}._gone does not exist in this SGLang: {tree.reason}"
    monkeypatch.setattr(SnapshotComponent, tree.method, lambda self, tracker, device_frees: None)
    (line,) = sglang_contract.override_differences([tree])
    assert line.startswith(f"{tree.base}.{tree.method} takes (tracker")
