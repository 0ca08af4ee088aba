"""What this package knows about SGLang versions: one place for every difference."""

from __future__ import annotations

from importlib.metadata import version

# Versions on which the server tests have passed. Other versions are tried and refused if a hook target is missing.
VALIDATED = ("0.5.17",)


def sglang_version() -> str:
    return version("sglang")


def version_note() -> str:
    """One sentence for error messages."""
    return f"this is SGLang {sglang_version()}; validated: {', '.join(VALIDATED)}"
