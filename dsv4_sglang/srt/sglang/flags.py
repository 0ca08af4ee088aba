"""SGLang's flags: their fields, their defaults, and what their resolution has derived."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec


def flag_defaults() -> dict[str, Any]:
    """Return the default of each field of SGLang's ServerArgs. It is None for the model path, which has no default."""
    from sglang.srt.server_args import ServerArgs

    fields: Iterable[Any] = msgspec.structs.fields(ServerArgs)
    missing = msgspec.NODEFAULT
    defaults: dict[str, Any] = {}
    for field in fields:
        if field.name.startswith("_"):  # SGLang's own notes
            continue
        if field.default_factory is not missing:
            defaults[field.name] = field.default_factory()
        else:
            defaults[field.name] = None if field.default is missing else field.default
    return defaults


def current_flags(server_args: Any) -> Any:
    """Return the flags as far as SGLang has resolved them. ServerArgs keep the given values."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def set_flags(server_args: Any, **values: Any) -> None:
    """Set flags while SGLang resolves them."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, "dsv4_sglang", **values)


def resolve_flags(server_args: Any) -> Any:
    """Derive all values from the given flags, and return them."""
    server_args.resolve_once()
    return current_flags(server_args)


def flags_are_resolved(server_args: Any) -> bool:
    """Return True if SGLang has derived all values from the given flags."""
    return bool(getattr(server_args, "_resolution_finished", False))


def given_graph_settings(server_args: Any) -> set[tuple[str, str]]:
    """Return the (phase, setting) pairs of CUDA graphs that were set by flags."""
    return set(server_args._cuda_graph_config_locked)


def note_given_graph_setting(server_args: Any, phase: str, setting: str) -> None:
    """Mark a setting of CUDA graphs as set by a flag. SGLang's later steps may change those that are not marked."""
    server_args._cuda_graph_config_locked.add((phase, setting))
