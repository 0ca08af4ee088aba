"""Draw the main tables of benchmarks/results/ into docs/benchmarks/ as SVG: `python -m benchmarks.plots`.

All figures have one style: this package in blue, SGLang in orange, all else in grey, the legend outside the axes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import append, attend, index, move
from benchmarks.command_line import RESULTS, is_ours
from benchmarks.environment import ROOT

OURS, SGLANG, OTHER = "#1f6feb", "#e8743b", "#8c959f"
# Colour and legend of each series. A lighter tone is another setting of the same program.
SERIES = {
    "ours": (OURS, "this package"),
    "ours triton": ("#9ecbff", "this package, portable kernel"),
    "in-tree": (SGLANG, "SGLang"),
    "in-tree, tuned": ("#f8c9a8", "SGLang, window ratio 0.5"),
    "in-tree, layer first": ("#f8c9a8", "SGLang, layer first"),
    "flashmla": (OTHER, "FlashMLA alone"),
    "floor": (OTHER, "lower bound of the hardware"),
    "copy": (OTHER, "one contiguous copy"),
    "formats": (OTHER, "reference with rounded entries"),
    "LRU": (SGLANG, "LRU"),
}
DECODES = {f"decode x {count}" for count in (1, 64, 256)}
WIDTH, BAR, MARGIN = 8.0, 0.17, 1.2  # inches: width of a figure, height of a bar, height without bars
Row = dict[str, Any]
# Label and values of a group of bars, by series.
Group = tuple[str, dict[str, float | None]]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def bars(axis: Any, groups: Iterable[Group], unit: str) -> None:
    """Draw horizontal bars with their values, one group per label. Every bar and value has a line of its own."""
    ticks, labels, place = [], [], 0.0
    for label, values in groups:
        shown = {name: values[name] for name in SERIES if values.get(name) is not None}
        for i, (name, value) in enumerate(shown.items()):
            colour, legend = SERIES[name]
            drawn = axis.barh(place + i, value, 0.9, color=colour, label=legend)
            axis.bar_label(drawn, [number(value)], fontsize=7, padding=2)
        ticks.append(place + (len(shown) - 1) / 2)
        labels.append(label)
        place += len(shown) + 0.7
    axis.set_yticks(ticks, labels, fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(place - 1, -0.8)
    axis.margins(x=0.08)
    axis.set_xlabel(unit, fontsize=8)
    axis.figure.set_figheight(MARGIN + BAR * place)


def requests(work: str) -> str:
    count = work.removeprefix("decode x ")
    return "1 request" if count == "1" else f"{count} requests"


def pick(line: Row, names: Iterable[str]) -> dict[str, float | None]:
    return {name: line.get(name) for name in names}


def draw_append(axis: Any, rows: list[Row]) -> None:
    kinds = {"steady": "", "csa+hca": ", all entries due"}
    groups = [
        (
            requests(line["work"]) + kinds[line["load"]],
            pick(line | {"floor": line.get("floor us")}, ("ours", "in-tree", "floor")),
        )
        for line in append.compare(rows)
        if line["model"] == "flash" and line["load"] in kinds and line["work"] in DECODES
    ]
    bars(axis, groups, "us per decode step, 43 layers")


def draw_attend(axis: Any, rows: list[Row]) -> None:
    groups = []
    for line in attend.compare(rows):
        model, kind, context, work = line["case"].split("/")
        if (model, context) == ("flash", "128K") and work in DECODES:
            label = f"{kind.upper()}, {requests(work)}"
            groups.append((label, pick(line, ("flashmla", "ours", "ours triton", "in-tree"))))
    bars(axis, groups, "us per layer, decode at 128K tokens")


def draw_index(axis: Any, rows: list[Row]) -> None:
    groups = [
        (line["case"].removesuffix(", top 512"), pick(line, ("ours", "in-tree")))
        for line in index.compare(rows)
        if "top 512" in line["case"] and "chunk" not in line["case"]
    ]
    bars(axis, groups, "us per layer, decode, requests x context")


def draw_move(axis: Any, rows: list[Row]) -> None:
    runs = {"1": "scattered blocks", "all": "one run of blocks"}
    groups = [
        (f"{runs[line['run']]}, {line['direction']}", pick(line, ("ours", *move.LAYOUTS, "copy")))
        for line in sorted(move.compare(rows), key=lambda line: line["direction"], reverse=True)
        if line["place"] != "far" and line["run"] in runs
    ]
    bars(axis, groups, "GB/s, all layers")


def draw_capacity(axis: Any, rows: list[Row]) -> None:
    names = {
        "ours": "FP8 entries",
        "ours, bf16 rows": "bfloat16 entries",
        "in-tree, default": "default flags",
        "in-tree, windows for hits (0.5)": "window ratio 0.5",
        "in-tree, most tokens (0.01, online)": "ratio 0.01, no prefix hits",
    }
    tokens = {row["setting"]: row["tokens"] / 1e6 for row in rows if row["model"] == "flash" and not row["drafts"]}
    groups = [(names[name], {name.split(",")[0]: tokens[name]}) for name in names]
    bars(axis, groups, "million tokens of V4-Flash in 78.82 GiB")


def draw_oracle_distance(axis: Any, rows: list[Row]) -> None:
    names = {
        "fp8": ("FP8 entries", "ours"),
        "bf16": ("bfloat16 entries", "ours"),
        "in-tree": ("FP8 entries, FP8 index keys", "in-tree"),
        "oracle, fp8 rows": ("FP8 entries", "formats"),
        "oracle, bf16 rows": ("bfloat16 entries", "formats"),
    }
    groups = [
        (f"{label}, {prompts}", {series: row["mean"]})
        for kind, prompts in (("1 to 700", "up to 700 tokens"), ("long", "2,600 tokens"))
        for name, (label, series) in names.items()
        for row in rows
        if (row["server"], row["prompts"]) == (name, kind)
        and row["path"] == ("decode" if name.startswith("oracle") else "prefill")
    ]
    bars(axis, groups, "mean |difference of log-probability| to transformers in fp32")


def draw_prefix_trace(axis: Any, rows: list[Row]) -> None:
    """Draw the share of an infinite cache's hits, of the loads that both servers ran."""
    scenarios = {"trace": "agents", "revisit": "100 conversations in turn", "alternate": "two conversations in turn"}
    loads: dict[tuple[str, float], dict[str, float | None]] = {}
    for row in rows:
        if row["hit_of_ideal"] is None or row["scenario"] not in scenarios:
            continue  # the first round has nothing to hit; of later rounds the last one counts
        tuned = "--swa-full-tokens-ratio" in row["server"]["flags"]
        load = row["scenario"], float(f"{row['live_tokens'] / 1e6:.2g}")
        name = "ours" if is_ours(row["server"]["subject"]) else "in-tree, tuned" if tuned else "in-tree"
        loads.setdefault(load, {})[name] = 100 * row["hit_of_ideal"]
    groups = [
        (f"{scenarios[name]}, {millions:g} M live tokens", values)
        for (name, millions), values in sorted(
            loads.items(), key=lambda load: ([*scenarios].index(load[0][0]), load[0])
        )
        if {"ours", "in-tree"} <= values.keys()
    ]
    bars(axis, groups, "hits, % of an infinite cache's")


def draw_prefix_simulation(axes: Any, rows: list[Row]) -> None:
    """Draw the hit rate against memory, a pair of lines per number of active conversations, and against the number of
    conversations that alternate."""
    for axis, part, x in ((axes[0], "memory", "gigabytes"), (axes[1], "loop", "conversations")):
        lines: dict[tuple[str, int | None], list[tuple[float, float]]] = {}
        for row in (row for row in rows if row["part"] == part):
            name = "LRU" if row["policy"] == "lru" else "ours"
            lines.setdefault((name, row.get("active")), []).append((row[x], 100 * row["hit"]))
        for (name, active), points in lines.items():
            colour, legend = SERIES[name]
            axis.plot(*zip(*points), marker="o", markersize=3, color=colour, label=legend)
            if name == "ours" and active:
                axis.annotate(f"{active:,}", max(points), (0, 4), textcoords="offset points", fontsize=7, ha="center")
        axis.set_ylim(0, 108)
        axis.set_yticks(range(0, 101, 20))
        axis.set_ylabel("hits, % of an infinite cache's", fontsize=8)
    axes[0].set_xscale("log")
    axes[0].set_xlabel("GB for 10 to 10,000 active conversations", fontsize=8)
    axes[1].set_xlabel("conversations of 20,000 tokens in turn, 20 GB", fontsize=8)


def load_of(row: Row) -> str:
    """Return the name of a load of `benchmarks.trace`: its loop, and the host cache and schedule policy if set."""
    load = f"{row['load']:g} clients" if row["loop"] == "closed" else f"open loop, {1 / row['load']:g}x"
    flags = row["server"]["flags"]
    policy = re.findall(r"--schedule-policy (\S+)", flags)
    return ", ".join([load, *policy, *["host cache"] * ("--enable-hierarchical-cache" in flags)])


def draw_trace(axes: Any, rows: list[Row]) -> None:
    """Draw hits, requests per second and the time to the first token of each load of `benchmarks.trace`."""
    loads: dict[str, dict[str, Row]] = {}
    for row in rows:
        name = "ours" if is_ours(row["server"]["subject"]) else "in-tree"
        tuned = "--swa-full-tokens-ratio" in row["server"]["flags"]
        loads.setdefault(load_of(row), {})["in-tree, tuned" if tuned else name] = row
    units: tuple[tuple[str, Callable[[Row], float]], ...] = (
        ("hits, % of an infinite cache's", lambda row: 100 * row["hit_of_ideal"]),
        ("requests/s", lambda row: row["requests_per_s"]),
        ("seconds to the first token, p95", lambda row: row["first_token_ms"]["p95"] / 1e3),
    )
    for axis, (unit, value) in zip(axes, units):
        bars(axis, [(label, {name: value(row) for name, row in of.items()}) for label, of in loads.items()], unit)
    axes[2].set_xscale("log")
    for axis in axes[1:]:
        axis.set_yticks([])


DRAWN: dict[str, Callable[[Any, list[Row]], None]] = {
    "append": draw_append,
    "attend": draw_attend,
    "index": draw_index,
    "move": draw_move,
    "capacity": draw_capacity,
    "oracle_distance": draw_oracle_distance,
    "prefix_trace": draw_prefix_trace,
    "prefix_simulation": draw_prefix_simulation,
    "trace": draw_trace,
}
# Figures of several axes beside each other.
AXES = {"prefix_simulation": 2, "trace": 3}


def finish(figure: Any) -> None:
    """Apply the common style to all axes, and put one legend above them."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, fontsize=8, frameon=False)


def pyplot() -> Any:
    """Import matplotlib's pyplot, set to draw into files. Equal figures give identical files, without random ids."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "dsv4_sglang"
    from matplotlib import pyplot

    return pyplot


def load(results: Path, name: str) -> tuple[list[Row], Row] | None:
    """Return (rows, environment) of a benchmark's JSON or JSON lines file; None if there is no file.

    If the benchmark stored a summary, it replaces the rows.
    """
    file = results / f"{name}.json"
    if file.is_file():
        data = json.loads(file.read_text())
        return data.get("facts", {}).get("summary", data["rows"]), data["environment"]
    file = results / f"{name}.jsonl"
    if file.is_file():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return rows, rows[-1]["environment"]
    return None


def draw(results: Path, docs: Path) -> list[Path]:
    """Draw all available results and return the files written."""
    plt = pyplot()
    docs.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw_rows in DRAWN.items():
        loaded = load(results, name)
        if loaded is None:
            continue
        rows, environment = loaded
        figure, axes = plt.subplots(1, AXES.get(name, 1), figsize=(WIDTH, 3.2), layout="constrained")
        draw_rows(axes, rows)
        finish(figure)
        gpu = environment["gpu"].get("name", "computed")
        release = environment.get("versions", {}).get("sglang")
        figure.supxlabel(f"{gpu}, SGLang {release}" if release else gpu, fontsize=7, color="#666666")
        written.append(docs / f"{name}.svg")
        figure.savefig(written[-1], metadata={"Date": None})
        plt.close(figure)
    return written


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--docs", type=Path, default=ROOT / "docs" / "benchmarks")
    args = options.parse_args(argv)
    try:
        written = draw(args.results, args.docs)
    except ModuleNotFoundError as error:
        print(f"no plots: {error}; pip install matplotlib")
        return 1
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
