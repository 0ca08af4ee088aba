"""Requirements of this package: installed packages, none of which is imported here, and SGLang's entry point for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec

DISTRIBUTION = "dsv4-sglang"
PLUGIN_GROUP, PLUGIN = "sglang.srt.plugins", "dsv4_sglang"  # of the entry point
# Module of each required distribution.
MODULES = {"torch": "torch", "sglang": "sglang", "packaging": "packaging", "pyyaml": "yaml", "typer": "typer"}

# Those of SGLang that this package imports, too.
MODULES_OF_SGLANG = {
    "transformers": "transformers",
    "triton": "triton",
    "safetensors": "safetensors",
    "prometheus-client": "prometheus_client",
}


def missing() -> list[str]:
    """Return the names of the required distributions that are not installed."""
    return [name for name, module in MODULES.items() if find_spec(module) is None]


def advice(names: Iterable[str]) -> str:
    """Return one line that says which packages are not installed and how to install them."""
    names = list(names)
    versions = _requirements()
    wanted = " ".join(f'"{versions.get(name, name)}"' for name in names)
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names)} {verb} not installed; run `pip install {wanted}`, or `make setup` in a clone"


def advice_after(error: ModuleNotFoundError) -> str | None:
    """Return `advice` for a failed import, or None if the error has another cause: the package is installed and lacks
    a module."""
    if names := missing():
        return advice(names)
    package = (error.name or "").partition(".")[0]
    return advice([package]) if package and find_spec(package) is None else None


def has_entry_point() -> bool:
    """Return True if this package is installed, so that SGLang finds its plugin."""
    return PLUGIN in metadata.entry_points(group=PLUGIN_GROUP).names


def plugin_fault() -> str | None:
    """Return one line with the reason why SGLang would not load this package's plugin, or None if it would.

    A server without the plugin ignores the opt-in and uses SGLang's own cache.
    """
    if not has_entry_point():
        return f"SGLang finds no entry point {PLUGIN!r}; install the package (pip install -e .)"
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and PLUGIN not in {name.strip() for name in allowed.split(",")}:
        return f"SGLANG_PLUGINS={allowed} leaves out {PLUGIN}; add it, separated by a comma, or unset the variable"
    return None


def _requirements() -> dict[str, str]:
    """Return the requirement of each distribution, such as "torch<3,>=2.11", by its name. Empty if this package runs
    from a folder without being installed."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    texts = [line for line in lines if ";" not in line]
    return {name: text for name in MODULES for text in texts if text.startswith(name)}
