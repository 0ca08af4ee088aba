"""Does the SGLang that is installed still have what this package relies on? Each function returns what differs."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType

from dsv4_sglang.srt.integration import compat
from dsv4_sglang.srt.integration.flag_table import LIMITS
from dsv4_sglang.srt.integration.launch_error import LaunchError

if TYPE_CHECKING:
    from dsv4_sglang.srt.integration.hooks import Hook

FLAGS_READ = (
    "cuda_graph_config",
    "disable_radix_cache",
    "disaggregation_mode",
    "download_dir",
    "enable_dp_attention",
    "enable_hierarchical_cache",
    "enable_memory_saver",
    "hicache_write_policy",
    "json_model_override_args",
    "model_path",
    "random_seed",
    "revision",
    "speculative_draft_load_format",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "weight_version",
)
"""Fields of SGLang's ServerArgs that this package reads, besides those of `flag_table.LIMITS`."""


def hook_differences(hooks: Iterable[Hook]) -> list[str]:
    """Targets that are gone, and those whose parameters are not the ones that the hook has. A hook's own signature is
    what it relies on.
    """
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


def override_differences() -> list[str]:
    """Private methods that our classes override, and that SGLang's class no longer has or calls otherwise."""
    found = []
    for override in compat.OVERRIDES:
        base, ours = pkgutil.resolve_name(override.base), pkgutil.resolve_name(override.ours)
        theirs = getattr(base, override.method, None)
        if theirs is None:
            found.append(f"{override.base}.{override.method} does not exist in this SGLang: {override.reason}")
        elif differs := _difference(getattr(ours, override.method), theirs):
            found.append(f"{override.base}.{override.method} {differs}: {override.reason}")
    return found


def flag_differences() -> list[str]:
    """Fields that this package reads of SGLang's ServerArgs and that are not there."""
    gone = sorted({*FLAGS_READ, *(limit.field for limit in LIMITS)} - compat.flag_defaults().keys())
    return [f"ServerArgs.{name}, which this cache reads, does not exist in this SGLang" for name in gone]


def require(differences: Iterable[str]) -> None:
    """Raise LaunchError if there are any."""
    if lines := [*differences]:
        raise LaunchError(f"this package does not fit the installed release: {compat.version_note()}", *lines)


def _original(target: str) -> Callable[..., Any]:
    """What a hook's target was before hooks. A class method as the function of its class."""
    found = inspect.unwrap(pkgutil.resolve_name(target))
    return inspect.unwrap(getattr(found, "__func__", found))


def _difference(ours: Callable[..., Any], theirs: Callable[..., Any], skip: bool = False) -> str | None:
    """What keeps `ours`, less its first parameter if `skip`, from taking the calls of `theirs`; None if nothing."""
    mine = list(inspect.signature(ours).parameters.values())[skip:]
    try:
        wanted = list(inspect.signature(theirs).parameters.values())
    except ValueError:  # a function written in C says nothing
        return None
    if wanted and wanted[0].name in ("self", "cls"):
        wanted = wanted[1:]
        # `*args` take it along with the others.
        mine = mine[1:] if mine and mine[0].kind is not Parameter.VAR_POSITIONAL else mine
    rest = {p.kind for p in mine}
    order, order_wanted = (
        [p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD] for parameters in (mine, wanted)
    )
    keywords, keywords_wanted = (
        {p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY} for parameters in (mine, wanted)
    )
    fits = (
        order == order_wanted[: len(order)]
        # SGLang may give them by name as well.
        and (len(order) == len(order_wanted) or {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= rest)
        and keywords <= keywords_wanted
        and (keywords == keywords_wanted or Parameter.VAR_KEYWORD in rest)
    )
    return None if fits else f"takes ({', '.join(map(str, wanted))}); expected ({', '.join(map(str, mine))})"
