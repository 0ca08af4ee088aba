"""Results of a benchmark: parts that can fail independently, a table, and a JSON file that is valid after every row.

    python -m benchmarks.report turns.jsonl serve.json --servers ours,sglang-best

As a program, it merges the rows of several starts of `turns`, `serve`, `prefix_trace` or `full_pool` into a Markdown
table: the median over the starts with the lowest and highest, and the ratio of ours to the other server. A ratio is one
of a pair: the n-th starts of both servers on GPUs of one kind. `--starts` swaps the order within every second pair.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.environment import environment

_folders = contextlib.ExitStack()
atexit.register(_folders.close)


def scratch_folder(name: str) -> Path:
    """Return a new folder, which is removed when the program ends or restarts itself."""
    return Path(_folders.enter_context(tempfile.TemporaryDirectory(prefix=f"{name}_")))


def quantile(ascending: Sequence[float], share: float) -> float:
    """Return the value that a share of the others is below."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, p95, p99, minimum and maximum in milliseconds."""
    times = sorted(1e3 * value for value in seconds)
    figures = {"p50": statistics.median(times), "p95": quantile(times, 0.95), "p99": quantile(times, 0.99)}
    figures |= {"low": times[0], "high": times[-1]}
    return {name: round(value, 2) for name, value in figures.items()}


def exit_on_time_limit() -> None:
    """Exit through the context managers on SIGTERM, which a time limit sends, so that servers are stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class Report:
    """Rows and failures of one run.

    A part is a function that returns rows (dicts). An exception in a part is recorded as a failure; the run continues.
    If a failure leaves the CUDA device unusable, the program restarts itself and continues with the next part.
    """

    def __init__(self, name: str, args: argparse.Namespace, settings: dict[str, Any] | None = None) -> None:
        self.name, self.args = name, args
        self.path = Path(args.out) / f"{name}.json"
        self.wanted = [part for part in args.parts.split(",") if part]
        self.deadline = time.monotonic() + args.seconds
        self.console = Console(width=150 if not sys.stdout.isatty() else None)
        self.data: dict[str, Any] = {
            "benchmark": name,
            "environment": environment(),
            "settings": {"quick": args.quick, "dry_run": args.dry_run, **(settings or {})},
            "facts": {},
            "parts": {},
            "rows": [],
            "failures": [],
        }
        exit_on_time_limit()
        if args.resume and self.path.is_file():
            self.data = json.loads(self.path.read_text())

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.data["rows"]

    def part(self, name: str, function: Callable[[], Iterable[dict[str, Any]] | None], setup: bool = False) -> None:
        """Run a part and store its rows, unless it is not selected or already stored.

        Args:
            name: name of the part.
            function: returns or yields the rows.
            setup: later parts of the process need this part, so it always runs.
        """
        wanted = not self.wanted or any(word in name for word in self.wanted)
        if not setup and (name in self.data["parts"] or not wanted):
            return
        if not setup and time.monotonic() > self.deadline:
            self.console.print(f"--seconds {self.args.seconds:.0f} is over, skipped: {name}", highlight=False)
            return
        self.rows[:] = [row for row in self.rows if row.get("part") != name]  # left by a run that ended in this part
        start = time.perf_counter()
        rows: Any = ()
        try:
            for row in (rows := function() or ()):
                self.rows.append({"part": name, **row})
                self.save()
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            self.data["failures"].append({"part": name, "error": text, "traceback": traceback.format_exc()[-4000:]})
            self.console.print(f"[red]{name} failed:[/red] {text}", highlight=False)
        except SystemExit:
            self.save()
            raise
        finally:
            if hasattr(rows, "close"):
                rows.close()  # a signal can arrive while the generator is suspended with its server running
        _free_memory()
        self.data["parts"][name] = round(time.perf_counter() - start, 2)
        self.console.print(f"{name}: {self.data['parts'][name]} s", highlight=False)
        self.save()
        if _device_lost():
            self.console.print(f"[red]the device is unusable after {name}; restarting with the next part[/red]")
            _folders.close()
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "--resume"])

    def fact(self, name: str, value: Any) -> None:
        """Store a value that belongs to the whole run, such as a measured ceiling."""
        self.data["facts"][name] = value

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.replace(self.path)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[dict[str, Any]] | None = None) -> None:
        """Print a table. A dash marks a missing value.

        Args:
            title: title of the table.
            columns: keys of the rows.
            rows: rows to print (default: all rows of the report).
        """
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="left" if column == columns[0] else "right")
        for row in self.rows if rows is None else rows:
            table.add_row(*(_text(row.get(column)) for column in columns))
        self.console.print(table)

    def close(self) -> int:
        """Print the failures and the path of the file. Return the exit status: 0 if there are rows."""
        for failure in self.data["failures"]:
            self.console.print(f"[red]failed[/red] {failure['part']}: {failure['error']}", highlight=False)
        self.save()
        self.console.print(f"written: {self.path}", highlight=False)
        return 0 if self.rows else 1


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _free_memory() -> None:
    torch = sys.modules.get("torch")
    gc.collect()
    if torch is not None and torch.cuda.is_initialized() and not _device_lost():
        torch.cuda.empty_cache()


def _device_lost() -> bool:
    """Return True if the CUDA context is unusable. After an illegal access all later calls of the process fail."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).item()
    except Exception:
        return True
    return False


# Figures of a row by its measure; a dot leads to a part of a figure. Rows of a trace have no measure.
FIGURES = {
    "turn": ("first_token_ms.p50", "first_token_ms.p95", "turn_ms.p50"),
    "tokens in the cache": ("value",),
    "TTFT ms": ("value",),
    "decode tokens/s": ("value", "step_ms", "between_tokens_ms.p50", "between_tokens_ms.p95"),
    "decode": ("value", "between_tokens_ms.p50", "between_tokens_ms.p95"),
    "turnover tokens/s/GPU": ("value", "first_token_ms.p50", "later_token_ms.p50"),
    "GPU step us (profiled)": ("value", "idle_us"),
    "tokens per GB of host memory": ("value", "GB", "copies"),
    "first token after a restart": ("first_token_ms.p50", "first_token_ms.p95"),
    "trace": ("hit_of_ideal", "first_token_ms.p50", "first_token_ms.p95"),
    None: ("hit_of_ideal", "turn_s_p50"),
}
# Fields that tell the cases of a measure apart.
CASE = ("measure", "load", "at", "loop", "pool", "conversations", "scenario", "part", "tier")


class Figure(NamedTuple):
    """A figure of one start.

    Attributes:
        where: GPU, model, and number of GPUs if there are several.
        begun: date and number of the start, by which starts are ordered.
    """

    where: str
    commit: str
    subject: str
    flags: str
    begun: tuple[str, int]
    case: str
    value: float


def figures(file: Path) -> Iterator[Figure]:
    """Yield the figures of a file of either kind, JSON or JSON lines."""
    if file.suffix == ".jsonl":
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    else:
        data = json.loads(file.read_text())
        rows = [{"environment": data["environment"], "settings": data["settings"], **row} for row in data["rows"]]
    for row in rows:
        environment, server = row["environment"], row.get("server", {})
        settings = row.get("settings") or row.get("arguments") or {}
        gpus = f"{settings['tp']} GPUs" if settings.get("tp", 1) > 1 else ""
        where = filter(None, (environment["gpu"].get("name", "CPU"), settings.get("model"), gpus))
        # A part belongs to the case for traces only: in a report it names the server.
        case = " ".join(str(row[name]) for name in CASE if row.get(name) and (name != "part" or "scenario" in row))
        begun = environment["date"], row.get("start") or row.get("round") or 1
        of_start = ", ".join(where), environment["commit"]
        of_server = server.get("subject") or row.get("subject") or "", server.get("flags") or row.get("flags") or ""
        for name in FIGURES.get(row.get("measure"), ()):
            value: Any = row
            for key in name.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                yield Figure(*of_start, *of_server, begun, case + (f", {name}" if name != "value" else ""), value)


def merged(found: Iterable[Figure], servers: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table of the figures that each of `servers` has.

    Raises:
        ValueError: rows of a server differ in commit or flags, so that they are not starts of one thing.
    """
    wanted = [figure for figure in found if figure.subject in servers]
    for server in servers:
        for name in ("commit", "flags"):
            of_server = sorted({getattr(figure, name) for figure in wanted if figure.subject == server})
            if len(of_server) > 1:
                raise ValueError(f"rows of {server} have {name} {of_server}; expected one, in files of their own")
    ours, other = servers
    lines = [f"| | {ours} | {other} | {ours} / {other} | starts |", "|---|---|---|---|---|"]
    for where, case in dict.fromkeys((figure.where, figure.case) for figure in wanted):
        # The last row of a start counts.
        starts: list[dict[tuple[str, int], float]] = [
            {f.begun: f.value for f in wanted if (f.where, f.case, f.subject) == (where, case, server)}
            for server in servers
        ]
        first, second = ([values[begun] for begun in sorted(values)] for values in starts)
        if first and second:
            ratios = [a / b for a, b in zip(first, second) if b]
            cells = [f"{case} ({where})", *map(spread_text, (first, second, ratios)), f"{len(first)} and {len(second)}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def spread_text(values: Sequence[float]) -> str:
    """Return the median, and lowest and highest if there are several values."""
    if not values:
        return ""
    middle, low, high = map(_text, (float(statistics.median(values)), float(min(values)), float(max(values))))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("files", nargs="+", type=Path, help="JSON or JSON lines")
    options.add_argument("--servers", default="ours,sglang-best", help="two servers (%(default)s)")
    options.add_argument("--commit", default="", help="only rows of commits that begin so")
    args = options.parse_args(argv)
    servers = args.servers.split(",")
    if len(servers) != 2:
        options.error(f"--servers {args.servers}: expected two servers, separated by a comma")
    try:
        found = [figure for file in args.files for figure in figures(file)]
        lines = merged([figure for figure in found if figure.commit.startswith(args.commit)], servers)
        if len(lines) == 2:
            raise ValueError(f"no row of {servers[0]} has a row of {servers[1]} beside it, of the same model and GPU")
        print(*lines, sep="\n")
    except (OSError, ValueError) as error:
        options.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
