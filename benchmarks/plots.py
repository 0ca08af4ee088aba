"""Draw the main tables of benchmarks/results/ into docs/benchmarks/ as SVG: `python -m benchmarks.plots`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import append, attend, index, move
from benchmarks.command_line import RESULTS
from benchmarks.environment import ROOT

COLOURS = {
    "ours": "#1f77b4",
    "in-tree": "#d62728",
    "in-tree, tuned": "#ff9896",
    "ours triton": "#2ca02c",
    "flashmla": "#7f7f7f",
    "floor": "#999999",
    "ours, far": "#aec7e8",
    "in-tree, layer first": "#ff9896",
    "copy": "#999999",
}
SHOWN = {
    "in-tree, tuned": "SGLang, window ratio 0.5",
    "ours triton": "this package, portable kernel",
    "flashmla": "FlashMLA alone",
}
SERVERS = ("ours", "in-tree")
Row = dict[str, Any]


def shown(name: str) -> str:
    """Return the legend text of a series or setting."""
    return SHOWN.get(name, name.replace("in-tree", "SGLang").replace("ours", "this package").replace("rows", "entries"))


def grouped_bars(axis: Any, labels: list[str], values: dict[str, list[float | None]], unit: str) -> None:
    """Draw one group per label and one bar per series, with the values above the bars. A missing value leaves a gap."""
    width = 0.8 / max(1, len(values))
    for i, (name, series) in enumerate(values.items()):
        at = [j + (i - (len(values) - 1) / 2) * width for j in range(len(labels))]
        bars = axis.bar(at, [v or 0 for v in series], width, label=shown(name), color=COLOURS.get(name))
        axis.bar_label(bars, ["" if v is None else f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in series], fontsize=6)
    axis.set_xticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylabel(unit)
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def pick(lines: list[Row], keys: tuple[str, ...]) -> dict[str, list[float | None]]:
    return {key: [line.get(key) for line in lines] for key in keys if any(line.get(key) for line in lines)}


def draw_append(axis: Any, rows: list[Row]) -> None:
    lines = [
        line
        for line in append.compare(rows)
        if line["model"] == "flash" and line["load"] in ("steady", "csa+hca") and line["work"].startswith("decode")
    ]
    lines = [line | {"floor": line.get("floor us")} for line in lines]
    labels = [f"{line['work'].removeprefix('decode x ')}\n{line['load']}" for line in lines]
    grouped_bars(axis, labels, pick(lines, ("ours", "in-tree", "floor")), "us a step, 43 layers")
    axis.set_yscale("log")
    axis.set_title("Write path, decode: requests and kind of step")


def draw_attend(axis: Any, rows: list[Row]) -> None:
    lines = [line for line in attend.compare(rows) if "flash/" in line["case"] and "/128K/decode" in line["case"]]
    labels = [line["case"].removeprefix("flash/").replace("/128K/decode x ", "\n") for line in lines]
    grouped_bars(axis, labels, pick(lines, ("flashmla", "ours", "ours triton", "in-tree")), "us a layer")
    axis.set_title("Attention, decode at 128K: kind of layer and requests")


def draw_index(axis: Any, rows: list[Row]) -> None:
    lines = [line for line in index.compare(rows) if "top 512" in line["case"] and "chunk" not in line["case"]]
    labels = [line["case"].removesuffix(", top 512") for line in lines]
    grouped_bars(axis, labels, pick(lines, ("ours", "in-tree")), "us a layer")
    axis.set_title("Selection, decode: requests x context")


def draw_move(axis: Any, rows: list[Row]) -> None:
    lines = move.compare(rows)
    far = {(line["direction"], line["run"]): line.get("ours") for line in lines if line["place"] == "far"}
    lines = [line for line in lines if line["place"] != "far" and "ours" in line]
    lines = [line | {"ours, far": far.get((line["direction"], line["run"]))} for line in lines]
    lines.sort(key=lambda line: line["direction"], reverse=True)
    labels = [f"{line['run']}\n{line['direction']}" for line in lines]
    grouped_bars(axis, labels, pick(lines, ("ours", "ours, far", *move.LAYOUTS, "copy")), "GB/s")
    axis.margins(y=0.15)  # space for the legend above the bars
    axis.legend(fontsize=7, loc="upper center", ncols=5)
    axis.set_title("All blocks of all layers to the host and back: length of the runs of ids")


def draw_capacity(axis: Any, rows: list[Row]) -> None:
    lines = [row for row in rows if row.get("kind") == "computed" and row["model"] == "flash" and not row.get("drafts")]
    axis.barh([shown(line["setting"]) for line in lines], [line["tokens"] / 1e6 for line in lines])
    axis.invert_yaxis()
    axis.set_xlabel("million tokens")
    axis.set_title("Tokens in the memory of the cache (Flash)")


def draw_oracle_distance(axis: Any, rows: list[Row]) -> None:
    lines = [line for line in rows if line["path"] == "decode" and line["prompts"] != "long"]
    grouped_bars(axis, [shown(line["server"]) for line in lines], pick(lines, ("mean", "max")), "|d logprob|")
    axis.set_title("Distance to transformers in fp32")


def draw_prefix_trace(axis: Any, rows: list[Row]) -> None:
    """Draw the share of an infinite cache's hits: one group per load, one bar per server."""
    loads: dict[tuple[str, float], dict[str, float]] = {}
    for row in rows:
        if row["hit_of_ideal"] is None:
            continue  # this round has nothing to hit; of later rounds the last one counts
        tuned = "--swa-full-tokens-ratio" in row["server"]["flags"]
        load = row["scenario"], float(f"{row['live_tokens'] / 1e6:.2g}")
        loads.setdefault(load, {})["in-tree, tuned" if tuned else row["server"]["subject"]] = 100 * row["hit_of_ideal"]
    names = [name for name in COLOURS if any(name in found for found in loads.values())]
    order = sorted(loads)
    labels = [f"{scenario.replace('-', chr(10))}\n{millions:g} M" for scenario, millions in order]
    grouped_bars(axis, labels, {name: [loads[load].get(name) for load in order] for name in names}, "% of the ideal")
    axis.legend(fontsize=7, loc=(0.29, 0.72))  # above the lowest bars
    axis.set_title("Prefix hits by scenario and tokens in live conversations")


def draw_tier_sweep(axes: Any, rows: list[Row]) -> None:
    """Draw hits and seconds per turn against the working set. If a size was measured repeatedly, the last row
    counts."""
    for name in SERVERS:
        of_size = {row["part"]: row for row in rows if row["server"]["subject"] == name}
        lines = sorted(of_size.values(), key=lambda row: row["live_tokens"])
        times = [row["live_tokens"] / row["server"]["max_total_num_tokens"] for row in lines]
        style = {"marker": "o", "markersize": 3, "label": shown(name), "color": COLOURS[name]}
        axes[0].plot(times, [100 * row["hit_of_ideal"] for row in lines], **style)
        axes[1].plot(times, [row["turn_s_p50"] for row in lines], **style)
    axes[0].set_ylabel("% of the ideal")
    axes[0].set_title("Prefix hits")
    axes[1].set_ylabel("seconds a conversation turn, p50")
    axes[1].set_title(f"Conversation turns, {rows[-1]['arguments']['concurrency']} at a time")
    for axis in axes:
        axis.set_xscale("log")
        axis.set_xticks(ticks := (0.1, 0.5, 1, 2, 4, 8, 20), [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_xlabel("live tokens / tokens on the device")
        axis.legend(fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)


def draw_prefix_simulation(axes: Any, rows: list[Row]) -> None:
    """Draw the hit rate of each study, except that of the loads, with one line per setting and policy."""
    studies = (
        ("memory", "gigabytes", "Hit rate against memory, by active conversations", "memory for the cache, GB"),
        ("loop", "conversations", "20,000-token conversations visited in turn, 20 GB", "conversations"),
        ("interval", "interval", "Snapshot interval, 20 GB", "tokens between snapshots of long prefills"),
        ("share", "share", "Share of memory in snapshots, 20 GB", "share"),
    )
    for axis, (name, x, title, label) in zip(axes.flat, studies):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in (row for row in rows if row["part"] == name):
            setting = {
                "memory": f"{row.get('active')}",
                "loop": "",
                "interval": f"{row.get('active')} active, share {row['share']}",
                "share": f"{row.get('tokens')} tokens",
            }[name]
            key = f"{setting} {'LRU' if row['policy'] == 'lru' else ''}".strip() or "this package"
            lines.setdefault(key, []).append((row[x], row["hit"]))
        for key, points in lines.items():
            axis.plot(*zip(*points), marker="o", markersize=3, linestyle=":" if "LRU" in key else "-", label=key)
        if name in ("memory", "interval"):
            axis.set_xscale("log")
        axis.set_title(title, fontsize=9)
        axis.set(xlabel=label, ylabel="hit tokens / infinite cache's")
        axis.set_ylim(0.75 if name in ("interval", "share") else 0, 1.01)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)


DRAWN: dict[str, Callable[[Any, list[Row]], None]] = {
    "append": draw_append,
    "attend": draw_attend,
    "index": draw_index,
    "move": draw_move,
    "capacity": draw_capacity,
    "oracle_distance": draw_oracle_distance,
    "prefix_trace": draw_prefix_trace,
    "tier_sweep": draw_tier_sweep,
    "prefix_simulation": draw_prefix_simulation,
}
# Rows and columns of axes of a figure; one axis if not listed.
PANELS = {"tier_sweep": (1, 2), "prefix_simulation": (2, 2)}


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
        lines, columns = PANELS.get(name, (1, 1))
        figure, axes = plt.subplots(lines, columns, figsize=(8, 4 * lines), layout="constrained")
        draw_rows(axes, rows)
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
