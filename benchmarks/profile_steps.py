"""Summarise the GPU kernels of a step from traces of torch's profiler, for one step or two side by side.

    python -m benchmarks.profile_steps TRACE [TRACE] [--whole] [--out DIR]
    python -m benchmarks.profile_steps OUT/serve.json [OTHER/serve.json] [--out DIR]

TRACE is a chrome trace (.json or .json.gz) of a server's decode steps, ours first, theirs second. --whole treats the
trace as one step, for a prefill. A serve.json has the summaries that `benchmarks.serve --measure profile` made of its
traces. One file with both servers compares these; two files compare ours of the first with theirs of the second.
Writes profile_steps.json and profile_steps.md.

A step begins with a replay of the decode step's CUDA graph and ends where the next step begins, so kernels between two
replays belong to the earlier step. The kernels of a replay share the correlation id of its cudaGraphLaunch. In a trace
without these ids, a replay begins where a graph node repeats. The table shows the step of median length. The profiler
makes steps longer, so compare profiled steps with each other only.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

MEASURE = "GPU step us (profiled)"
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = re.compile(r"graph_?launch", re.IGNORECASE)
TOTALS = ("period_us", "wall_us", "kernel_us", "busy_us", "idle_us", "overlap_us")
TOTAL_NAMES = {
    "period_us": "from the step's begin to the next step's",
    "wall_us": "first kernel's begin to last kernel's end",
    "kernel_us": "sum of the kernels' times",
    "busy_us": "time in which any kernel runs",
    "idle_us": "time between kernels",
    "overlap_us": "time of kernels that overlap a kernel of another stream",
}

GENERIC = re.compile(r"^(device_kernel|[Kk]ernel\d?|\w*elementwise_kernel\w*|reduce_kernel|vectorized_\w+)$")
HINT = re.compile(r"\b(?!ReduceOp\b)(?:\w*Functor\w*|\w+_kernel_cuda\w*|\w+Ops?)\b")
# Numbers in template arguments from here on count as sizes of a problem or tile, which distinguish two products.
SIZE = 128


class Kernel(NamedTuple):
    """A kernel on the GPU, `begin` and `end` in us. `correlation`, `graph` and `node` are 0 if the trace has none."""

    name: str
    begin: float
    end: float
    stream: int
    correlation: int
    graph: int
    node: int


@dataclass
class Summary:
    """The median step of a trace.

    Attributes:
        steps: number of steps in the trace, 0 for a trace without kernels.
        split: how the steps were separated.
        kernels: [launches, us] by short name.
        overlapping: us during which a kernel of another stream runs too, by short name.
        walls_us: wall time of each step of the trace.
    """

    steps: int
    split: str
    period_us: float
    wall_us: float
    kernel_us: float
    busy_us: float
    idle_us: float
    overlap_us: float
    kernels: dict[str, list[float]]
    overlapping: dict[str, float]
    walls_us: list[float]


def short(name: str) -> str:
    """Return a kernel's name without return type, namespaces and arguments. Of template arguments, keep only those
    that distinguish kernels."""
    if name.startswith(("Memcpy", "Memset")):
        return name
    text = re.sub(r"\(anonymous namespace\)::|<unnamed>::|^void ", "", name.strip())
    text = re.sub(r"^(?:std::)?enable_if<.*?>::type ", "", text)
    head = re.split(r"[<(]", text, maxsplit=1)[0]
    template = text[len(head) + 1 :] if text[len(head) :].startswith("<") else ""
    base = head.split("::")[-1].split(" ")[-1] or name[:60]
    hint = ""
    if GENERIC.match(base):
        # "Kernel<ns::Name<...>>", "elementwise_kernel<128, 4, ns::NameFunctor<...>>"
        found = re.match(r"(?:\w+::)*([A-Za-z_]\w*)", template) or HINT.search(template)
        hint = f"[{found.group(found.lastindex or 0)}]" if found else ""
    sizes = [n for n in re.findall(r"(?<![\w.])(\d+)u?l*(?![\w.])", template) if int(n) >= SIZE][:3]
    return (base + hint)[:80] + (f"<{','.join(sizes)}>" if sizes else "")


@dataclass
class Trace:
    """A parsed trace; times in us.

    Attributes:
        kernels: kernels in their order on the GPU.
        graph_launches: correlation ids of graph launches.
        launched: correlation id -> time of the launch on the host.
        decodes: begins of decode steps on the host, from SGLang's annotations.
    """

    kernels: list[Kernel]
    graph_launches: set[int]
    launched: dict[int, float]
    decodes: list[float]

    def before_decode(self) -> list[Kernel]:
        """Return the kernels of a prefill: SGLang launches one more decode step before it sees the request's end."""
        end = min(self.decodes, default=float("inf"))
        return [kernel for kernel in self.kernels if self.launched.get(kernel.correlation, kernel.begin) < end]


def read(path: Path) -> Trace:
    content = path.read_bytes()
    data = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    trace = Trace([], set(), {}, [])
    for event in data["traceEvents"] if isinstance(data, dict) else data:
        if event.get("ph") != "X":
            continue
        args = event.get("args") or {}
        category = str(event.get("cat", "")).lower()
        correlation = int(args.get("correlation") or 0)
        if category in CATEGORIES:
            begin = float(event["ts"])
            end = begin + float(event.get("dur") or 0)
            stream, graph, node = (int(args.get(key) or 0) for key in ("stream", "graph id", "graph node id"))
            trace.kernels.append(Kernel(short(event["name"]), begin, end, stream, correlation, graph, node))
        elif category in ("cuda_runtime", "cuda_driver") and correlation:
            trace.launched[correlation] = float(event["ts"])
            if LAUNCH.search(event["name"]):
                trace.graph_launches.add(correlation)
        elif category == "user_annotation" and event["name"].startswith("step[DECODE"):
            trace.decodes.append(float(event["ts"]))
    trace.kernels.sort(key=lambda kernel: kernel.begin)
    return trace


def replays(kernels: Sequence[Kernel], launches: set[int]) -> tuple[list[float], str]:
    """Return the begins of the replays of the largest graph, and how they were found.

    Graphs with less than half as many kernels are not steps.
    """
    found: list[list[Kernel]] = []
    by_launch: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        if kernel.correlation in launches:
            by_launch.setdefault(kernel.correlation, []).append(kernel)
    if by_launch:
        found, how = list(by_launch.values()), "graph launches"
    else:
        how = "graph nodes"
        seen: set[int] = set()
        for kernel in kernels:
            if not kernel.node:
                continue
            if not found or kernel.node in seen or kernel.graph != found[-1][0].graph:
                found.append([])
                seen = set()
            seen.add(kernel.node)
            found[-1].append(kernel)
    largest = max((len(replay) for replay in found), default=0)
    return sorted(replay[0].begin for replay in found if 2 * len(replay) >= largest), how


def steps_of(kernels: Sequence[Kernel], begins: Sequence[float]) -> list[list[Kernel]]:
    """Return the kernels of each whole step: those that begin between the begins of two consecutive replays."""
    found: list[list[Kernel]] = [[] for _ in begins[1:]]
    step = -1
    for kernel in kernels:
        while step + 1 < len(begins) and kernel.begin >= begins[step + 1]:
            step += 1
        if 0 <= step < len(found):
            found[step].append(kernel)
    return found


def overlapped(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Return the us during which a kernel of another stream runs too, by kernel name."""
    found: dict[str, float] = {}
    for i, kernel in enumerate(kernels):
        shared = [
            (max(kernel.begin, other.begin), min(kernel.end, other.end))
            for other in beside(kernels, i)
            if other.stream != kernel.stream
        ]
        if us := union(shared):
            found[kernel.name] = found.get(kernel.name, 0.0) + us
    return found


def beside(kernels: Sequence[Kernel], i: int) -> Iterable[Kernel]:
    """Yield the kernels that run at the same time as the i-th, looking back over 64 kernels.

    `kernels` are in order of their begins.
    """
    for other in kernels[max(0, i - 64) : i]:
        if other.end > kernels[i].begin:
            yield other
    for j in range(i + 1, len(kernels)):
        if kernels[j].begin >= kernels[i].end:
            return
        yield kernels[j]


def union(intervals: Iterable[tuple[float, float]]) -> float:
    total, last = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def summarise(path: Path, whole: bool = False) -> Summary:
    """Summarise the median step of a trace, or with `whole` all kernels before the first decode step (a prefill)."""
    trace = read(path)
    kernels = trace.before_decode() if whole else trace.kernels
    if not kernels:
        return Summary(0, "no GPU kernels in the trace", *(0.0,) * 6, {}, {}, [])
    begins, how = ([], "") if whole else replays(kernels, trace.graph_launches)
    steps = steps_of(kernels, begins)
    if steps:
        periods = [later - begin for begin, later in itertools.pairwise(begins)]
    else:
        how = "whole trace" if whole else "whole trace: fewer than two replays of a graph"
        steps, periods = [list(kernels)], [max(kernel.end for kernel in kernels) - kernels[0].begin]
    median = sorted(range(len(steps)), key=lambda i: periods[i])[len(steps) // 2]
    step = steps[median]
    times: dict[str, list[float]] = {}
    for kernel in step:
        entry = times.setdefault(kernel.name, [0, 0.0])
        entry[0] += 1
        entry[1] += kernel.end - kernel.begin
    walls = [max(kernel.end for kernel in of_step) - of_step[0].begin for of_step in steps]
    busy = union((kernel.begin, kernel.end) for kernel in step)
    beside_another = overlapped(step)
    return Summary(
        steps=len(steps),
        split=how,
        period_us=round(periods[median], 2),
        wall_us=round(walls[median], 2),
        kernel_us=round(sum(us for _, us in times.values()), 2),
        busy_us=round(busy, 2),
        idle_us=round(walls[median] - busy, 2),
        overlap_us=round(sum(beside_another.values()), 2),
        kernels={
            name: [count, round(us, 2)] for name, (count, us) in sorted(times.items(), key=lambda item: -item[1][1])
        },
        overlapping={name: round(us, 2) for name, us in beside_another.items()},
        walls_us=[round(wall, 1) for wall in walls],
    )


Columns = Sequence[str]
Rows = list[list[Any]]


def table(summary: Mapping[str, Any]) -> tuple[Columns, Rows]:
    """Return a table of one step by kernel, longest first."""
    total = summary["kernel_us"] or 1.0
    overlapping = summary["overlapping"]
    rows = [
        [name, int(count), us, round(100 * us / total, 1), overlapping.get(name)]
        for name, (count, us) in summary["kernels"].items()
    ]
    return ("kernel", "launches", "us", "%", "us overlapping another stream"), rows


def side_by_side(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[Columns, Rows]:
    """Return a table of two steps by kernel, the largest difference (ours - theirs) first."""
    rows = []
    for name in {**ours["kernels"], **theirs["kernels"]}:
        (our_count, our_us), (their_count, their_us) = (s["kernels"].get(name, (0, 0.0)) for s in (ours, theirs))
        rows.append([name, int(our_count), int(their_count), our_us, their_us, round(our_us - their_us, 2)])
    rows.sort(key=lambda row: -row[-1])
    return ("kernel", "launches ours", "theirs", "us ours", "us theirs", "difference"), rows


def totals(summaries: Sequence[Mapping[str, Any]]) -> tuple[Columns, Rows]:
    rows = []
    for field in TOTALS:
        values = [summary[field] for summary in summaries]
        more = [round(values[0] - values[1], 2)] if len(values) == 2 else []
        rows.append([TOTAL_NAMES[field], *values, *more])
    rows.append(["launches", *(int(sum(count for count, _ in s["kernels"].values())) for s in summaries)])
    rows.append(["steps in the trace", *(summary["steps"] for summary in summaries)])
    names = ("ours", "theirs", "difference") if len(summaries) == 2 else ("step",)
    return ("us", *names), rows


def markdown(columns: Columns, rows: Rows) -> str:
    def text(value: Any) -> str:
        return "" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value).replace("|", "\\|")

    lines = [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
    for row in rows:
        cells = [text(value) for value in row] + [""] * (len(columns) - len(row))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# Label of the measurement -> server -> summary.
Named = dict[str, dict[str, Mapping[str, Any]]]


def of_results(path: Path, data: Mapping[str, Any]) -> Named:
    """Return the summaries of a serve.json, those of the last round.

    Raises:
        ValueError: the file has no profiles.
    """
    found: Named = {}
    for row in data["rows"]:
        if row.get("measure") == MEASURE and "kernels" in row:
            found.setdefault(str(row["at"]), {})[row["subject"]] = row
    if not found:
        raise ValueError(f"{path} has no profiles: run `python -m benchmarks.serve --measure profile`")
    return found


def load(path: Path, whole: bool) -> Named:
    """Return the summary of a trace under its file name, or the summaries of a serve.json."""
    if path.suffix == ".json":
        data = json.loads(path.read_text())
        if isinstance(data, dict) and "rows" in data:
            return of_results(path, data)
    return {"step": {path.name: asdict(summarise(path, whole))}}


def pairs(loaded: Sequence[Named]) -> dict[str, list[Mapping[str, Any]]]:
    """Return one summary, or ours and theirs, for each measurement.

    Raises:
        ValueError: two files have no measurement in common.
    """
    if len(loaded) == 1:
        order = ("ours", "in-tree")
        return {
            at: [servers[name] for name in sorted(servers, key=lambda n: order.index(n) if n in order else -1)]
            for at, servers in loaded[0].items()
        }
    ours, theirs = loaded
    if not ours.keys() & theirs.keys():
        raise ValueError(f"the files have no measurement in common: {', '.join(ours)} and {', '.join(theirs)}")
    return {
        at: [
            ours[at].get("ours") or next(iter(ours[at].values())),
            theirs[at].get("in-tree") or [*theirs[at].values()][-1],
        ]
        for at in ours
        if at in theirs
    }


def report(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return all tables as markdown."""
    parts = []
    for at, summaries in measured.items():
        parts += [f"## {at}\n", markdown(*totals(summaries))]
        kernels = side_by_side(*summaries) if len(summaries) == 2 else table(summaries[0])
        parts.append(markdown(*kernels))
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="one or two traces or serve.json files")
    options.add_argument("--whole", action="store_true", help="treat a trace as one step")
    options.add_argument("--out", type=Path, default=Path("."), help="folder of the two output files (%(default)s)")
    args = options.parse_args(argv)
    if len(args.traces) > 2:
        options.error(f"{len(args.traces)} traces; expected one, or ours and theirs")
    measured = pairs([load(path, args.whole) for path in args.traces])
    text = report(measured)
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "profile_steps.json").write_text(json.dumps(measured, indent=1) + "\n")
    (args.out / "profile_steps.md").write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
