"""Plot the memory of one GPU, one bar per choice."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from dsv4_sglang.planner.plan import Plan

COLOURS = {
    "weights": "#7f7f7f",
    "state slots": "#ff7f0e",
    "snapshots": "#2ca02c",
    "blocks": "#1f77b4",
    "graphs": "#9467bd",
    "reserve": "#dddddd",
}


def check_file(file: Path) -> None:
    """Check, before anything is computed, that a plot can be written to `file`.

    Raises:
        ValueError: The folder does not exist, or matplotlib is missing or does not write such files.
    """
    if not file.parent.is_dir():
        raise ValueError(f"--plot {file}: there is no folder {file.parent}; create it first")
    if file.is_dir():
        raise ValueError(f"--plot {file}: this is a folder; expected a file such as {file / 'memory.png'}")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(f"--plot {file}: {error}; pip install 'dsv4-sglang[plot]'") from None
    if (suffix := file.suffix.removeprefix(".")) not in (known := Figure().canvas.get_supported_filetypes()):
        raise ValueError(f"--plot {file}: {suffix!r} is not supported; expected one of {', '.join(sorted(known))}")


def draw(file: Path, bars: dict[str, Plan]) -> None:
    """Draw stacked bars of one GPU's memory into a file that `check_file` has accepted.

    Raises:
        ValueError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.45 * len(bars)), layout="constrained")
    axis = figure.subplots()
    for row, made in enumerate(bars.values()):
        start = 0.0
        for group, parts in groupby(made.parts, key=lambda part: part.group):
            width = sum(part.bytes for part in parts) / 2**30
            axis.barh(row, width, left=start, color=COLOURS[group], label=None if row else group)
            start += width
        axis.text(start, row, f" {made.total_tokens / 1e6:.1f} M tokens", va="center", fontsize=7)
    first = next(iter(bars.values())).choice
    axis.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.14)
    axis.set_xlabel("GiB of one GPU")
    axis.set_title(f"{first.model.name}, {first.count} x {first.gpu.name}", fontsize=10)
    figure.legend(fontsize=7, ncols=len(COLOURS), loc="outside lower center")
    axis.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(file, dpi=160)
    except OSError as error:
        raise ValueError(f"--plot {file}: {error.strerror}") from None
