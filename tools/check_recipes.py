"""Resolve both recipes of `make setup` for a fresh machine, without installing anything.

    python tools/check_recipes.py [cpu|cuda ...]

Prints the versions, the download size and the time of resolving. Fails if a recipe cannot be resolved, or if its torch
or SGLang is not the expected version. Needs the network, Python 3.11 and pip 23.1 or newer. Takes some minutes, because
pip reads the metadata of every candidate.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SGLANG = "0.5.23"
# The CUDA recipe gets torch from SGLang's own pin, the CPU recipe the first of these that an index has as a CPU wheel.
EXPECTED_TORCH = {"cpu": ("2.14.1", "2.13.0"), "cuda": ("2.14.1",)}
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def resolve(*arguments: str) -> list[dict[str, Any]]:
    """Return what `pip install` with these arguments would install in an empty environment.

    Raises:
        CalledProcessError: pip failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        dry = ["--dry-run", "--ignore-installed", "--report", str(report)]
        subprocess.run([*pip, *dry, *arguments], check=True, cwd=ROOT)
        found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return found


def _first(*ways: list[str]) -> list[dict[str, Any]]:
    """Resolve torch in the first way that works."""
    for way in ways:
        with suppress(subprocess.CalledProcessError):
            return sorted(resolve(*way), key=lambda item: item["metadata"]["name"] != "torch")
    raise SystemExit("no index has a CPU wheel of torch")


def cpu_recipe() -> list[dict[str, Any]]:
    """Resolve the steps of tools/setup.sh, with its versions."""
    setup = (ROOT / "tools/setup.sh").read_text()
    versions = dict(re.findall(r"^(torch|older_torch|sglang|automodel)=(\S+)$", setup, re.M))
    newest, older = (f"torch=={versions[name]}+cpu" for name in ("torch", "older_torch"))
    torch = _first([newest], [newest, "--index-url", CPU_INDEX], [older])
    installed = torch[0]["metadata"]["version"].split("+")[0]
    beside = re.search(rf"^ *{re.escape(installed)}\) (.*) ;;$", setup, re.M)
    assert beside, f"tools/setup.sh has no line for torch {installed}"
    versions |= dict(part.split("=") for part in beside[1].split())
    others = resolve(f"triton=={versions['triton']}", "-r", "tools/requirements-cpu.txt")
    names = {"sglang": "sglang", "torchvision": "torchvision", "automodel": "nemo-automodel"}
    alone = resolve("--no-deps", *(f"{name}=={versions[key]}" for key, name in names.items()))
    return list({item["metadata"]["name"].lower(): item for item in [*others, *alone, *torch]}.values())


def cuda_recipe() -> list[dict[str, Any]]:
    return resolve("-e", f"{ROOT}[dev]", f"sglang=={SGLANG}")


def size(url: str) -> int:
    """Return the bytes to download, or the size of a local file."""
    if not url.startswith("http"):
        file = Path(url.removeprefix("file://"))
        return file.stat().st_size if file.is_file() else 0
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
        return int(answer.headers["Content-Length"] or 0)


def check(recipe: str) -> bool:
    start = time.monotonic()
    found = {"cpu": cpu_recipe, "cuda": cuda_recipe}[recipe]()
    seconds = time.monotonic() - start
    versions = {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in found}
    with ThreadPoolExecutor(8) as pool:
        total = sum(pool.map(size, (item["download_info"]["url"] for item in found)))
    print("\n".join(f"  {name} {version}" for name, version in sorted(versions.items())))
    print(f"{recipe}: {len(found)} packages, {total / 1e9:.2f} GB, resolved in {seconds:.0f} s")
    expected = {"torch": EXPECTED_TORCH[recipe], "sglang": (SGLANG,)}
    wrong = {
        name: versions.get(name) for name in expected if versions.get(name, "").split("+")[0] not in expected[name]
    }
    for name, version in wrong.items():
        print(f"{recipe}: {name} {version} would be installed, expected {' or '.join(expected[name])}", file=sys.stderr)
    return not wrong


def main() -> None:
    recipes = sys.argv[1:] or list(EXPECTED_TORCH)
    if unknown := set(recipes) - set(EXPECTED_TORCH):
        raise SystemExit(f"unknown recipe {sorted(unknown)}: give cpu, cuda or nothing for both")
    wrong = [recipe for recipe in recipes if not check(recipe)]
    if wrong:
        raise SystemExit(f"not as expected: {wrong}")


if __name__ == "__main__":
    main()
