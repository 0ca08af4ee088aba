"""Options of this package: the inner object of `--json-model-override-args '{"dsv4_sglang": {...}}'`.

This module imports neither torch nor SGLang, so that options are checked before these are imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import SequenceMatcher, get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.launch.error import LaunchError

FLAG = "--json-model-override-args"
KEY = "dsv4_sglang"
# Similarity from which a key counts as a misspelt KEY. Keys of model configs that SGLang and transformers read reach
# 0.53 at most.
ALIKE = 0.6
# Most of the device that pins may hold, in percent. The rest is for requests.
MOST_PINNED = 90


@dataclass(frozen=True)
class Options:
    """Options beyond SGLang's own flags. With `entry_format` "auto" the KV format follows `--kv-cache-dtype`."""

    entry_format: Literal["auto", "fp32"] = "auto"
    indexer_format: Literal["mxfp4", "nvfp4", "fp32"] = "mxfp4"
    snapshot_interval: int = 4096
    max_snapshots: int | None = None
    pin_percent: int = 25
    tenant_percent: int = 100
    host_snapshots: int | None = None
    host_load_timeout_seconds: int = 60
    integrity_check: bool = False

    def __post_init__(self) -> None:
        if self.snapshot_interval <= 0 or self.snapshot_interval % BLOCK:
            raise LaunchError(
                f"dsv4_sglang option snapshot_interval is {self.snapshot_interval}; "
                f"expected a positive multiple of {BLOCK}, the tokens of a block"
            )
        for name, least in (("max_snapshots", 0), ("host_snapshots", 1), ("host_load_timeout_seconds", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise LaunchError(f"dsv4_sglang option {name} is {value}; expected {least} or more")
        if not 1 <= self.tenant_percent <= 100:
            raise LaunchError(f"dsv4_sglang option tenant_percent is {self.tenant_percent}; expected 1 to 100")
        if not 0 <= self.pin_percent <= MOST_PINNED:
            raise LaunchError(f"dsv4_sglang option pin_percent is {self.pin_percent}; expected 0 to {MOST_PINNED}")


def _is_valid(hint: Any, value: object) -> bool:
    """Return True if an option may have a value: a choice of a `Literal`, or exactly one of the types of `hint`."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return type(value) in (get_args(hint) or (hint,))


def _describe() -> str:
    hints = get_type_hints(Options)
    return ", ".join(f"{f.name} ({_expected(hints[f.name])}, default {json.dumps(f.default)})" for f in fields(Options))


def _expected(hint: Any) -> str:
    if hint is bool:
        return "true | false"
    if get_origin(hint) is Literal:
        return " | ".join(map(json.dumps, get_args(hint)))
    return "whole number or null" if get_args(hint) else "whole number"


def parse(values: object) -> Options:
    """Check the value of the `dsv4_sglang` key, and return the options.

    Raises:
        LaunchError: an option is unknown or has an invalid value. The message states what is valid.
    """
    if not isinstance(values, Mapping):
        raise LaunchError(f'"{KEY}" in {FLAG} is {json.dumps(values)}; expected an object of options')
    hints = get_type_hints(Options)
    for name, value in values.items():
        if name not in hints:
            near = [f"did you mean {match}? " for match in get_close_matches(name, hints, 1)]
            said = f"unknown dsv4_sglang option {json.dumps(name)}; {''.join(near)}"
            raise LaunchError(f"{said}valid options: {_describe()}")
        if not _is_valid(hints[name], value):
            raise LaunchError(f"dsv4_sglang option {name} is {json.dumps(value)}; expected {_expected(hints[name])}")
    return Options(**values)


def _misplaced(key: str) -> str | None:
    """Return the error for a key beside KEY that was probably meant for this package, or None."""
    if key in get_type_hints(Options):
        example = json.dumps({KEY: {key: "..."}})
        return f'"{key}" in {FLAG} is an option of dsv4_sglang; expected it inside the inner braces: {example}'
    letters, ours = re.sub(r"[^a-z0-9]", "", key.lower()), KEY.replace("_", "")
    if not letters.startswith("dsv4") and SequenceMatcher(None, letters, ours).ratio() < ALIKE:
        return None
    return f'"{key}" in {FLAG} is not a known key; did you mean "{KEY}"?'


def overrides_of(text: str | None) -> dict[str, Any]:
    """Parse the value of `--json-model-override-args`.

    Raises:
        LaunchError: the value is not a JSON object, or has a key that was probably meant for this package.
    """
    try:
        overrides = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise LaunchError(f"{FLAG} {text!r} is not JSON: {error}") from None
    if not isinstance(overrides, dict):
        raise LaunchError(f"{FLAG} {text!r}: expected a JSON object")
    if wrong := [reason for key in overrides if key != KEY and (reason := _misplaced(key))]:
        raise LaunchError(*wrong)
    return overrides


def from_override_args(text: str | None) -> Options | None:
    """Return the options in the value of `--json-model-override-args`, or None without the opt-in.

    Raises:
        LaunchError: the value or an option in it is invalid.
    """
    overrides = overrides_of(text)
    return parse(overrides[KEY]) if KEY in overrides else None


def model_overrides(text: str | None) -> dict[str, Any]:
    """Return the other keys in the value of `--json-model-override-args`, which override the model's config."""
    return {key: value for key, value in overrides_of(text).items() if key != KEY}
