"""Print what a wheel of SGLang pins among the packages of the CPU recipe.

    python tools/sglang_pins.py WHEEL torch               the version of torch
    python tools/sglang_pins.py WHEEL requirements.txt    the file, with SGLang's version for each package that it pins

Packages that only newer releases need are added if SGLang requires them. Runs in an environment that has pip only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

# Packages without CUDA parts that newer releases import.
NEWER = ("deepseek-recipe",)


def pins(wheel: str) -> dict[str, str]:
    """Return the version specifiers by package, of the requirements whose markers apply to this environment."""
    with ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        lines = HeaderParser().parsestr(files.read(name).decode()).get_all("Requires-Dist", [])
    return {
        canonicalize_name(wanted.name): str(wanted.specifier)
        for wanted in map(Requirement, lines)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    }


def repinned(lines: list[str], pinned: dict[str, str]) -> Iterator[str]:
    for line in lines:
        if line and not line.startswith("#"):
            name = canonicalize_name(Requirement(line).name)
            line = f"{name}{pinned[name]}" if pinned.get(name) else line
        yield line
    yield from (name + pinned[name] for name in NEWER if name in pinned)


def main(wheel: str, what: str) -> None:
    pinned = pins(wheel)
    if what == "torch":
        print(pinned["torch"].removeprefix("=="))
    else:
        print("\n".join(repinned(Path(what).read_text().splitlines(), pinned)))


if __name__ == "__main__":
    main(*sys.argv[1:])
