"""Options of a launch: the braces of `--json-model-override-args '{"dsv4_sglang": {...}}'`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK

KEY = "dsv4_sglang"


@dataclass(frozen=True)
class Options:
    """What a launch may choose beyond SGLang's own flags. `entry_format` "auto" follows `--kv-cache-dtype`."""

    entry_format: Literal["auto", "fp32"] = "auto"
    indexer_format: Literal["mxfp4", "nvfp4", "fp32"] = "mxfp4"
    hca_state: Literal["online", "raw"] = "online"
    checkpoint_interval: int = 4096
    max_checkpoints: int | None = None
    host_checkpoints: int | None = None
    host_load_timeout_seconds: int = 60
    integrity_check: bool = False

    def __post_init__(self) -> None:
        if self.checkpoint_interval <= 0 or self.checkpoint_interval % BLOCK:
            raise ValueError(
                f"dsv4_sglang option checkpoint_interval is {self.checkpoint_interval}; "
                f"expected a positive multiple of {BLOCK}, the tokens of a block"
            )
        if self.max_checkpoints is not None and self.max_checkpoints < 0:
            raise ValueError(f"dsv4_sglang option max_checkpoints is {self.max_checkpoints}; expected 0 or more")
        if self.host_checkpoints is not None and self.host_checkpoints < 1:
            raise ValueError(f"dsv4_sglang option host_checkpoints is {self.host_checkpoints}; expected 1 or more")
        if self.host_load_timeout_seconds < 1:
            raise ValueError(
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
    """Check the value of the `dsv4_sglang` key; every complaint names the option, what came and what is valid."""
    if not isinstance(values, Mapping):
        raise ValueError(
            f'"{KEY}" in --json-model-override-args is {json.dumps(values)}; expected an object of options'
        )
    hints = get_type_hints(Options)
    for name, value in values.items():
        if name not in hints:
            raise ValueError(f"unknown dsv4_sglang option {json.dumps(name)}; valid options: {_describe()}")
        choices = get_args(hints[name])
        if hints[name] is bool:
            valid = isinstance(value, bool)
        elif choices and all(isinstance(c, str) for c in choices):
            valid = value in choices if isinstance(value, str) else False
        else:
            number = isinstance(value, int) and not isinstance(value, bool)
            valid = number or (value is None and type(None) in choices)
        if not valid:
            raise ValueError(f"dsv4_sglang option {name} is {json.dumps(value)}; expected {_expected(hints[name])}")
    return Options(**values)


def from_override_args(text: str | None) -> Options | None:
    """The options in the value of `--json-model-override-args`, None if the launch does not opt in."""
    if not text or KEY not in text:
        return None
    overrides = json.loads(text)
    return parse(overrides[KEY]) if KEY in overrides else None


def model_overrides(text: str | None) -> dict[str, Any]:
    """What else stands in the value of `--json-model-override-args`: it overrides the model's config."""
    return {key: value for key, value in json.loads(text or "{}").items() if key != KEY}
