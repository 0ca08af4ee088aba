"""Hooks applied with one scan of all modules change the same names as SGLang's own application."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from dsv4_sglang.srt.sglang import hook_application


def modules(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """Return a module with functions and a class, and one that has imported them, also under other names."""
    source, importer = ModuleType(f"{name}_source"), ModuleType(f"{name}_importer")

    class Kind:
        def method(self) -> str:
            return "method"

        @classmethod
        def of_class(cls) -> str:
            return "of class"

    vars(source).update(first=lambda: "first", second=lambda: "second", Kind=Kind)
    vars(source).update(same=source.first)
    vars(importer).update(first=source.first, other=source.first, second=source.second, method=Kind.method)
    for module in (source, importer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return source, importer


def said(modules: tuple[ModuleType, ModuleType]) -> dict[str, Any]:
    """Return the answers of all functions of the modules, by their names."""
    source, importer = modules
    found = {f"source.{name}": getattr(source, name)() for name in ("first", "same", "second")}
    found |= {f"importer.{name}": getattr(importer, name)() for name in ("first", "other", "second")}
    kind = source.Kind()
    return found | {"Kind.method": kind.method(), "importer.method": importer.method(kind), "class": kind.of_class()}


def test_same_names_as_sglangs_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Including a function that is hooked by two of its names, where the second hook wraps the first."""

    def mark(name: str) -> Any:
        return lambda original, *args: f"{name}({original(*args)})"

    found = []
    for name, apply in (("theirs", HookRegistry.apply_hooks), ("ours", hook_application.apply_hooks)):
        monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
        monkeypatch.setattr(HookRegistry, "_patched", set())
        both = modules(name, monkeypatch)
        targets = ("source.first", "source.Kind.method", "source.Kind.of_class", "importer.other", "source.same")
        for target in targets:
            HookRegistry.register(f"{name}_{target}", mark(target.rpartition(".")[2]), HookType.AROUND)
        apply()
        assert hook_application.applied_hooks() == {f"{name}_{target}" for target in targets}
        found.append(said(both))
    theirs, ours = found
    assert ours == theirs
    assert ours["importer.other"] == "first(other(first))" and ours["importer.second"] == "second"
