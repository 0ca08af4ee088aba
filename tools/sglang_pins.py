"""What the SGLang that is installed pins of the packages of the CPU recipe.

    python tools/sglang_pins.py torch               its version
    python tools/sglang_pins.py requirements.txt    the file, with SGLang's versions where it names some

Packages that only newer releases need are added where SGLang wants them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

NEWER = ("deepseek-recipe",)
"""Packages without CUDA parts that newer releases import."""


def pins() -> dict[str, str]:
    """Version specifiers by package, of SGLang's requirements that hold here."""
    wanted = (Requirement(line) for line in requires("sglang") or ())
    return {
        canonicalize_name(requirement.name): str(requirement.specifier)
        for requirement in wanted
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def repinned(lines: list[str]) -> Iterator[str]:
    pinned = pins()
    for line in lines:
        if line and not line.startswith("#"):
            name = canonicalize_name(Requirement(line).name)
            line = f"{name}{pinned[name]}" if pinned.get(name) else line
        yield line
    yield from (name + pinned[name] for name in NEWER if name in pinned)


def main(what: str) -> None:
    if what == "torch":
        print(pins()["torch"].removeprefix("=="))
    else:
        print("\n".join(repinned(Path(what).read_text().splitlines())))


if __name__ == "__main__":
    main(sys.argv[1])
