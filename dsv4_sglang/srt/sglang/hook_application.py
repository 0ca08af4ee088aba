"""Application of the registered hooks with one scan of all modules.

After each hook SGLang binds every name of the hooked function, in all modules that imported it, to the hooked one. It
scans all names of all modules for that, 20 ms a hook: 1.7 s for the hooks of a server, in the launcher and again in
each scheduler process.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import ModuleType

from sglang.srt.plugins import hook_registry

from dsv4_sglang.srt.sglang.models import replaced


class Bindings:
    """Names of all modules that are bound to callables. A module that is imported later is not included."""

    def __init__(self) -> None:
        # By the id of the callable. Names that have been bound to something else since are skipped when they are read.
        self._names: dict[int, list[tuple[ModuleType, str]]] = defaultdict(list)
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType):
                for name, value in list(vars(module).items()):
                    if callable(value):
                        self._names[id(value)].append((module, name))

    def replace(self, original: object, wrapped: object, source_module: object) -> int:
        """Bind all names of `original` to `wrapped`, like SGLang's `_propagate_patch`.

        Args:
            original: the callable before the hook.
            wrapped: the callable with the hook.
            source_module: module, or class, of the hook's target. The caller has bound the target's name.

        Returns:
            Number of names that were changed.
        """
        names = self._names[id(original)]
        stale = [
            (module, name)
            for module, name in names
            if module is not source_module and vars(module).get(name) is original
        ]
        for module, name in stale:
            setattr(module, name, wrapped)
        self._names[id(wrapped)] += names
        return len(stale)


def apply_hooks() -> None:
    """Apply the registered hooks. The modules of their targets must have been imported."""
    with replaced(hook_registry, _propagate_patch=Bindings().replace):
        hook_registry.HookRegistry.apply_hooks()


def applied_hooks() -> set[str]:
    """Return the targets that SGLang has hooked. It only logs a hook that fails."""
    return hook_registry.HookRegistry._patched
