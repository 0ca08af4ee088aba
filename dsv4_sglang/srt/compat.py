"""What this package knows about SGLang versions: one place for every difference."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from dsv4_sglang.model.config import DSV4Config

# Versions on which the server tests have passed. Other versions are tried and refused if a hook target is missing.
VALIDATED = ("0.5.17",)


def sglang_version() -> str:
    return version("sglang")


def version_note() -> str:
    """One sentence for error messages."""
    return f"this is SGLang {sglang_version()}; validated: {', '.join(VALIDATED)}"


def model_config(hf_config: Any) -> DSV4Config:
    """The model's config from SGLang's config object, which holds the RoPE fields in the form of its transformers."""
    from sglang.srt.utils.hf_transformers_utils import get_rope_config

    theta, scaling = get_rope_config(hf_config)
    fields = {name: value for name, value in hf_config.to_dict().items() if name != "rope_parameters"}
    return DSV4Config.from_hf({**fields, "rope_theta": theta, "rope_scaling": scaling})
