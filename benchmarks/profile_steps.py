"""Profile a running server with SGLang's own profiler, and summarise the GPU kernels of a step.

    python -m benchmarks.serve --measure profile
    python -m benchmarks.profile_steps OUT/serve.json

The second command prints the kernels of each profiled step, ours beside SGLang's.

A step begins with a replay of the decode step's CUDA graph and ends where the next step begins, so kernels between two
replays belong to the earlier step. The kernels of a replay share the correlation id of its cudaGraphLaunch. In a trace
without these ids, a replay begins where a graph node repeats. A summary is that of the step of median length. The
profiler makes steps longer, so compare profiled steps with each other only.

The profiler's mode by stage is not used: ranks synchronise at the end of a stage, which a rank without requests never
reaches.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import servers
from benchmarks.servers import Server

MEASURE = "GPU step us (profiled)"
# Decode steps of a profile. The first and the last are incomplete.
STEPS = 10
RUNNING_SECONDS = 120.0
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = re.compile(r"graph_?launch", re.IGNORECASE)

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
        period_us: from the step's begin to the next step's.
        wall_us: from the first kernel's begin to the last kernel's end.
        kernel_us: sum of the kernels' times.
        busy_us: time in which any kernel runs.
        idle_us: time between kernels.
        kernels: [launches, us] by short name.
    """

    steps: int
    split: str
    period_us: float
    wall_us: float
    kernel_us: float
    busy_us: float
    idle_us: float
    kernels: dict[str, list[float]]


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
        return Summary(0, "no GPU kernels in the trace", *(0.0,) * 5, {})
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
    wall = max(kernel.end for kernel in step) - step[0].begin
    busy = union((kernel.begin, kernel.end) for kernel in step)
    return Summary(
        steps=len(steps),
        split=how,
        period_us=round(periods[median], 2),
        wall_us=round(wall, 2),
        kernel_us=round(sum(us for _, us in times.values()), 2),
        busy_us=round(busy, 2),
        idle_us=round(wall - busy, 2),
        kernels={
            name: [count, round(us, 2)] for name, (count, us) in sorted(times.items(), key=lambda item: -item[1][1])
        },
    )


def decode(server: Server, prompts: Sequence[list[int]], tokens: int) -> Summary:
    """Profile a decode step in which all of `prompts` run.

    Args:
        server: server that is profiled.
        prompts: one per request.
        tokens: tokens per request; enough for the wait until all run, and STEPS steps.

    Raises:
        RuntimeError: the requests ended too early.
    """
    with tempfile.TemporaryDirectory(prefix="profile_") as folder:
        mark, burst = server.mark(), _sent(server, prompts, tokens)
        deadline = time.monotonic() + RUNNING_SECONDS
        while servers.running_now(server.lines(mark)) != len(prompts):
            if burst.done() or time.monotonic() > deadline:
                burst.result()
                raise RuntimeError(f"{len(prompts)} requests never decoded together")
            time.sleep(0.01)
        _start(server, folder, num_steps=STEPS)
        burst.result()
        if not _traces(folder):  # fewer steps ran than were requested
            server.request("/stop_profile", {})
        return _read(folder, whole=False)


def prefill(server: Server, prompts: Sequence[list[int]]) -> Summary:
    """Profile everything that runs for prompts that are sent at once, and for their first tokens."""
    with tempfile.TemporaryDirectory(prefix="profile_") as folder:
        _start(server, folder)
        server.generate(prompts, 1, **on_first_rank(server, len(prompts)))
        server.request("/stop_profile", {})
        return _read(folder, whole=True)


def on_first_rank(server: Server, requests: int) -> dict[str, Any]:
    """Return the field that routes a single request to the rank whose trace is read."""
    return {"routed_dp_rank": 0} if requests == 1 and "--dp-size" in server.argv else {}


def _sent(server: Server, prompts: Sequence[list[int]], tokens: int) -> Future[Any]:
    """Send the prompts as one request from a thread."""
    pool = ThreadPoolExecutor(1)
    ids = prompts[0] if len(prompts) == 1 else prompts
    burst = pool.submit(server.generate, ids, tokens, **on_first_rank(server, len(prompts)))
    pool.shutdown(wait=False)
    return burst


def _start(server: Server, folder: str, **more: Any) -> None:
    asked = {"output_dir": folder, "activities": ["CPU", "GPU"], "with_stack": False, "record_shapes": False, **more}
    server.request("/start_profile", asked)


def _traces(folder: str) -> list[Path]:
    """Return the traces of the first rank: "ID-TP-0.trace.json.gz", with DP, PP or EP ranks after TP-0."""
    return sorted(Path(folder).glob("*-TP-0*.trace.json.gz"))


def _read(folder: str, whole: bool) -> Summary:
    if not (found := _traces(folder)):
        raise RuntimeError(f"the server wrote no trace; {folder} has {[path.name for path in Path(folder).iterdir()]}")
    return summarise(found[0], whole)


def tables(rows: Iterable[dict[str, Any]]) -> Iterable[Table]:
    """Yield a table for each profiled step of a serve.json: us of each kernel and totals, one column per server."""
    profiled = [row for row in rows if row.get("measure") == MEASURE and "kernels" in row]
    for at in dict.fromkeys(row["at"] for row in profiled):
        of_server = {row["subject"]: row for row in profiled if row["at"] == at}  # of the last round
        table = Table("us", *of_server, title=at)
        names = {name: us for row in of_server.values() for name, (_, us) in row["kernels"].items()}
        for name in sorted(names, key=lambda name: -names[name]):
            cells = [row["kernels"].get(name) for row in of_server.values()]
            table.add_row(name, *("" if cell is None else f"{cell[0]:.0f} x, {cell[1]:,.1f}" for cell in cells))
        table.add_section()
        for field in ("period_us", "wall_us", "kernel_us", "busy_us", "idle_us"):
            table.add_row(field, *(f"{row[field]:,.1f}" for row in of_server.values()))
        yield table


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("results", type=Path, help="serve.json of `python -m benchmarks.serve --measure profile`")
    found = list(tables(json.loads(options.parse_args(argv).results.read_text())["rows"]))
    for table in found:
        Console().print(table)
    return 0 if found else 1


if __name__ == "__main__":
    raise SystemExit(main())
