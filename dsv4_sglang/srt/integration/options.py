"""Options of a launch: the braces of `--json-model-override-args '{"dsv4_sglang": {...}}'`.

Importing it imports neither torch nor SGLang, so that options are checked before either is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import SequenceMatcher, get_close_matches
from typing import Any, Literal, get_args, get_type_hints

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.integration.launch_error import LaunchError

FLAG = "--json-model-override-args"
KEY = "dsv4_sglang"
ALIKE = 0.6
"""Similarity from which a key is taken for a misspelt KEY. Keys of the model configs that SGLang and transformers read
reach 0.53."""


@dataclass(frozen=True)
class Options:
    """What a launch may choose beyond SGLang's own flags. `entry_format` "auto" follows `--kv-cache-dtype`."""

    entry_format: Literal["auto", "fp32"] = "auto"
    indexer_format: Literal["mxfp4", "nvfp4", "fp32"] = "mxfp4"
    hca_state: Literal["online", "raw"] = "online"
    snapshot_interval: int = 4096
    max_snapshots: int | None = None
    host_snapshots: int | None = None
    host_load_timeout_seconds: int = 60
    integrity_check: bool = False

    def __post_init__(self) -> None:
        if self.snapshot_interval <= 0 or self.snapshot_interval % BLOCK:
            raise LaunchError(
                f"dsv4_sglang option snapshot_interval is {self.snapshot_interval}; "
                f"expected a positive multiple of {BLOCK}, the tokens of a block"
            )
        if self.max_snapshots is not None and self.max_snapshots < 0:
            raise LaunchError(f"dsv4_sglang option max_snapshots is {self.max_snapshots}; expected 0 or more")
        if self.host_snapshots is not None and self.host_snapshots < 1:
            raise LaunchError(f"dsv4_sglang option host_snapshots is {self.host_snapshots}; expected 1 or more")
        if self.host_load_timeout_seconds < 1:
            raise LaunchError(
                f"dsv4_sglang option host_load_timeout_seconds is {self.host_load_timeout_seconds}; expected 1 or more"
            )


def _describe() -> str:
    hints = get_type_hints(Options)
    return ", ".join(f"{f.name} ({_expected(hints[f.name])}, default {json.dumps(f.default)})" for f in fields(Options))


def _expected(hint: Any) -> str:
    if hint is bool:
        return "true | false"
    choices = get_args(hint)
    if choices and all(isinstance(c, str) for c in choices):
        return " | ".join(json.dumps(c) for c in choices)
    return "whole number or null" if type(None) in choices else "whole number"


def parse(values: object) -> Options:
    """Check the value of the `dsv4_sglang` key.

    Raises:
        LaunchError: It names the option, the value and what is valid.
    """
    if not isinstance(values, Mapping):
        raise LaunchError(f'"{KEY}" in {FLAG} is {json.dumps(values)}; expected an object of options')
    hints = get_type_hints(Options)
    for name, value in values.items():
        if name not in hints:
            near = [f"did you mean {match}? " for match in get_close_matches(name, hints, 1)]
            said = f"unknown dsv4_sglang option {json.dumps(name)}; {''.join(near)}"
            raise LaunchError(f"{said}valid options: {_describe()}")
        choices = get_args(hints[name])
        if hints[name] is bool:
            valid = isinstance(value, bool)
        elif choices and all(isinstance(c, str) for c in choices):
            valid = value in choices if isinstance(value, str) else False
        else:
            number = isinstance(value, int) and not isinstance(value, bool)
            valid = number or (value is None and type(None) in choices)
        if not valid:
            raise LaunchError(f"dsv4_sglang option {name} is {json.dumps(value)}; expected {_expected(hints[name])}")
    return Options(**values)


def _misplaced(key: str) -> str | None:
    """What is wrong with a key beside KEY that can only be meant for this package; None for any other."""
    if key in get_type_hints(Options):
        example = json.dumps({KEY: {key: "..."}})
        return f'"{key}" in {FLAG} is an option of dsv4_sglang; expected it inside the inner braces: {example}'
    letters, ours = re.sub(r"[^a-z0-9]", "", key.lower()), KEY.replace("_", "")
    if not letters.startswith("dsv4") and SequenceMatcher(None, letters, ours).ratio() < ALIKE:
        return None
    return f'"{key}" in {FLAG} is no key that this launch knows; did you mean "{KEY}"?'


def overrides_of(text: str | None) -> dict[str, Any]:
    """Parse the value of `--json-model-override-args`.

    Raises:
        LaunchError: It is not a JSON object, or has a key that looks like KEY and is not.
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
    """The options in the value of `--json-model-override-args`, None if the launch does not opt in.

    Raises:
        LaunchError: The value or an option in it is invalid.
    """
    overrides = overrides_of(text)
    return parse(overrides[KEY]) if KEY in overrides else None


def model_overrides(text: str | None) -> dict[str, Any]:
    """What else stands in the value of `--json-model-override-args`: it overrides the model's config."""
    return {key: value for key, value in overrides_of(text).items() if key != KEY}
