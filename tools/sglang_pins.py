"""Print tools/requirements-cpu.txt with the versions that a wheel of SGLang pins.

    python tools/sglang_pins.py WHEEL

Runs in an environment that has pip only.
"""

from __future__ import annotations

import sys
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

RECIPE = Path(__file__).parent / "requirements-cpu.txt"


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


def main(wheel: str) -> None:
    pinned = pins(wheel)
    for line in RECIPE.read_text().splitlines():
        if line and not line.startswith("#"):
            name = canonicalize_name(Requirement(line).name)
            line = f"{name}{pinned[name]}" if pinned.get(name) else line
        print(line)


if __name__ == "__main__":
    main(*sys.argv[1:])
