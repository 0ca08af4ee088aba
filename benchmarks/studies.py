"""Programs that consist of studies: the option `--what`, and a JSON file with the rows of each study."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.report import RESULTS

Row = dict[str, Any]
Rows = list[Row]


def run_studies(
    name: str,
    description: str | None,
    studies: Mapping[str, Callable[[], Iterable[Row]]],
    plot: Callable[[Any, dict[str, Rows]], Any] | None = None,
) -> None:
    """Run the studies of the command line, and replace their rows in the JSON file after each study.

    Args:
        name: name of the JSON file and of the figure.
        description: help text.
        studies: functions that yield rows, by name.
        plot: draws the rows of all studies with pyplot and returns the figure.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*studies, "plot"] if plot else [*studies]
    parser.add_argument("--what", choices=choices, nargs="*", help="studies to repeat (default: all)")
    file = RESULTS / f"{name}.json"
    results: dict[str, Rows] = json.loads(file.read_text()) if file.is_file() else {}
    for study in parser.parse_args().what or studies:
        if study != "plot":
            results[study] = [*printed(studies[study]())]
            file.write_text("{\n" + ",\n".join(study_text(*item) for item in results.items()) + "\n}\n")
    if plot:
        figure = plot(pyplot(), results)
        figure.tight_layout()
        figure.savefig(ROOT / "docs" / "benchmarks" / f"{name}.svg", metadata={"Date": None})


def printed(rows: Iterable[Row]) -> Iterable[Row]:
    for row in rows:
        print(row, flush=True)
        yield row


def study_text(name: str, rows: Rows) -> str:
    return f'"{name}": [\n' + ",\n".join("  " + json.dumps(row) for row in rows) + "\n]"


def pyplot() -> Any:
    """Import matplotlib's pyplot, set to draw into files. Equal figures give identical files, without random ids."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "dsv4_sglang"
    from matplotlib import pyplot

    return pyplot
