"""The environment of a measurement: GPU, driver, package versions, commit, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMMIT_VARIABLE = "DSV4_COMMIT"
PACKAGES = (
    "torch",
    "triton",
    "sglang",
    "sglang-kernel",
    "sgl-flash-mla",
    "deep-gemm",
    "flashinfer-python",
    "transformers",
)
GPU_FIELDS = ("name", "driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit")


def commit() -> str:
    """Return the commit: the variable DSV4_COMMIT if it is set, else that of the git tree, else "unknown"."""
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given
    head = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if head is None:
        return "unknown"
    changed = _output(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return head + ("-changed" if changed else "")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def gpu() -> dict[str, Any]:
    """Return facts about the current CUDA device, or an empty dictionary without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts: dict[str, Any] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }
    listed = _output(["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"])
    if listed:
        facts.update(zip(GPU_FIELDS, (field.strip() for field in listed.splitlines()[0].split(","))))
    return facts


def used_memory() -> int | None:
    """Return the bytes of the first visible GPU that all processes use, or None without one."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    listed = _output(["nvidia-smi", "-i", index, "--query-gpu=memory.used", "--format=csv,noheader,nounits"])
    return int(listed) << 20 if listed and listed.isdigit() else None


def environment() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "gpu": gpu(),
        "versions": versions(),
        "host": {"cpus": os.cpu_count(), "machine": platform.machine()},
    }


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
