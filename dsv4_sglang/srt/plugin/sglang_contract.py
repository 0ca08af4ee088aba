"""Comparison of the installed SGLang with what this package relies on. Each check returns the differences."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from inspect import Parameter
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookType

from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.plugin.flag_table import LIMITS
from dsv4_sglang.srt.sglang import release
from dsv4_sglang.srt.sglang.flags import flag_defaults

# Fields of SGLang's ServerArgs that this package reads, in addition to those of `flag_table.LIMITS`.
FLAGS_READ = (
    "attn_dp_size",
    "cuda_graph_config",
    "disable_radix_cache",
    "disaggregation_mode",
    "download_dir",
    "enable_dp_attention",
    "enable_hierarchical_cache",
    "enable_memory_saver",
    "hicache_storage_backend_extra_config",
    "hicache_write_policy",
    "json_model_override_args",
    "model_path",
    "nnodes",
    "node_rank",
    "random_seed",
    "revision",
    "speculative_draft_load_format",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "weight_version",
)


class Hook(NamedTuple):
    """A changed function of SGLang.

    Attributes:
        target: qualified name.
        function: the hook. It wraps the target if its first parameter is `original`, and replaces it otherwise.
        reason: why SGLang's function does not work with this cache.
    """

    target: str
    function: Callable[..., Any]
    reason: str

    @property
    def kind(self) -> HookType:
        """The kind of the hook in SGLang's registry."""
        first = next(iter(inspect.signature(self.function).parameters), None)
        return HookType.AROUND if first == "original" else HookType.REPLACE


class Override(NamedTuple):
    """A private method of SGLang's class `base` that this package's class `ours` overrides.

    Attributes:
        base: qualified name of SGLang's class.
        ours: qualified name of this package's class.
        method: name of the method.
        reason: why SGLang's method does not work with this cache.
    """

    base: str
    ours: str
    method: str
    reason: str


def hook_differences(hooks: Iterable[Hook]) -> list[str]:
    """Return a message for each hook whose target does not exist, or takes parameters that the hook does not."""
    found = []
    for hook in hooks:
        try:
            target = _original(hook.target)
        except (ImportError, AttributeError):
            found.append(f"{hook.target} does not exist in this SGLang: {hook.reason}")
            continue
        if differs := _difference(hook.function, target, skip=hook.kind is HookType.AROUND):
            found.append(f"{hook.target} {differs}: {hook.reason}")
    return found


def override_differences(overrides: Iterable[Override]) -> list[str]:
    """Return a message for each overridden private method that SGLang's class lacks or calls with other parameters."""
    found = []
    for override in overrides:
        base, ours = pkgutil.resolve_name(override.base), pkgutil.resolve_name(override.ours)
        theirs = getattr(base, override.method, None)
        if theirs is None:
            found.append(f"{override.base}.{override.method} does not exist in this SGLang: {override.reason}")
        elif differs := _difference(getattr(ours, override.method), theirs):
            found.append(f"{override.base}.{override.method} {differs}: {override.reason}")
    return found


def flag_differences() -> list[str]:
    """Return a message for each field of SGLang's ServerArgs that this package reads and SGLang lacks."""
    gone = sorted({*FLAGS_READ, *(limit.field for limit in LIMITS)} - flag_defaults().keys())
    return [f"ServerArgs.{name}, which this cache reads, does not exist in this SGLang" for name in gone]


def require(differences: Iterable[str]) -> None:
    """Raise LaunchError if there are differences."""
    if lines := [*differences]:
        raise LaunchError(f"this package does not fit the installed release: {release.version_note()}", *lines)


def _original(target: str) -> Callable[..., Any]:
    """Return a hook's target without the hooks that are applied to it, and the function of a class method."""
    found = inspect.unwrap(pkgutil.resolve_name(target))
    return inspect.unwrap(getattr(found, "__func__", found))


def _difference(ours: Callable[..., Any], theirs: Callable[..., Any], skip: bool = False) -> str | None:
    """Return why `ours` cannot take the calls of `theirs`, or None if it can.

    Each parameter is passed by position, then by name. Either way it must arrive under the same name.

    Args:
        ours: hook or overriding method.
        theirs: function of SGLang.
        skip: `ours` has a first parameter for the original function.
    """
    try:
        wanted = list(inspect.signature(theirs).parameters.values())
    except ValueError:  # functions written in C have no signature
        return None
    signature = inspect.signature(ours)
    placed = [p.name for p in wanted if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in wanted if p.kind is Parameter.KEYWORD_ONLY]
    receiver = placed[:1] if placed[:1] in (["self"], ["cls"]) else []
    first = [None] * (skip + len(receiver))
    placed = placed[len(receiver) :]
    try:
        by_place = signature.bind(*first, *placed, **{name: name for name in named}).arguments
        signature.bind(*first, **{name: name for name in (*placed, *named)})
    except TypeError:
        fits = False
    else:
        fits = all(by_place.get(name, name) == name for name in placed)
    if fits:
        return None
    expected = list(signature.parameters.values())[len(first) :]
    return f"takes ({', '.join(map(str, wanted[len(receiver) :]))}); expected ({', '.join(map(str, expected))})"
