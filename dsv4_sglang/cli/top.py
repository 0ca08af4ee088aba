"""`dsv4-sglang top`: show the state of a running server's cache in the terminal."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4_sglang.cli.client import SGLANG_PREFIX, Server, errors_in_one_line, samples
from dsv4_sglang.srt.prefix_cache.metrics import EVICTED, HIT, MISS, PREFIX, RANK_LABEL, REASONS, SOURCES

if TYPE_CHECKING:
    from rich.console import Group

# Timeout of a request for /metrics, in seconds. After it the server counts as not running.
SECONDS = 10.0
NONE = "-"
BUILD_INFO = f"{PREFIX}build_info"


@dataclass(frozen=True)
class Page:
    """One sample of /metrics, without histogram buckets.

    Attributes:
        at: Time of the sample, in seconds (monotonic clock).
        values: Values by metric name, DP attention rank and label value.
        before: The previous sample, from which rates are computed; None for the first one.
    """

    at: float
    values: dict[tuple[str, str, str], float]
    before: Page | None = None

    @classmethod
    def read(cls, server: Server, before: Page | None = None) -> Page:
        """Read /metrics. Raises ValueError if it is not a Prometheus page, RuntimeError if this package's metrics are
        missing, and the errors of `Server.metrics`."""
        values: dict[tuple[str, str, str], float] = {}
        try:
            page = [*samples(server.metrics(SECONDS))]
        except ValueError as error:
            raise ValueError(f"{server.url} is not the address of a server: {error}") from None
        for sample in page:
            labels = dict(sample.labels)
            rank = labels.pop(RANK_LABEL, "0")
            if "le" not in labels:
                value = next(iter(labels.values()), "") if sample.name.startswith(PREFIX) else ""
                values[sample.name, rank, value] = sample.value
        if not any(name == BUILD_INFO for name, _, _ in values):
            raise RuntimeError(f"the server at {server.url} runs without this package")
        return cls(time.monotonic(), values, before and Page(before.at, before.values))

    @property
    def ranks(self) -> list[str]:
        return sorted({rank for name, rank, _ in self.values if name.startswith(PREFIX)}, key=int)

    @property
    def version(self) -> str:
        return next(value for name, _, value in self.values if name == BUILD_INFO)

    def get(self, name: str, rank: str, value: str | None = None) -> float | None:
        """Return the value of a metric on one rank; None if the server does not have it.

        Args:
            name: Full name of the metric.
            rank: DP attention rank.
            value: Value of the label; None: sum over all values.
        """
        found = [
            amount
            for (of, at, label), amount in self.values.items()
            if of == name and at == rank and value in (None, label)
        ]
        return sum(found) if found else None

    def change(self, name: str, rank: str, value: str | None = None) -> float:
        """Return the growth of a counter since the previous sample, or since the server's start if there is none."""
        now = self.get(name, rank, value) or 0.0
        return now if self.before is None else now - (self.before.get(name, rank, value) or 0.0)

    def rate(self, name: str, rank: str) -> float | None:
        """Return the growth of a counter per second; None for the first sample."""
        return None if self.before is None else self.change(name, rank) / (self.at - self.before.at)


# Label of a row, and a function that returns the text for a rank.
Row = tuple[str, Callable[[str], str]]


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else NONE


def _mean(page: Page, name: str, value: str | None = None) -> Callable[[str], str]:
    """Return a function that formats the mean of a histogram of seconds on a rank."""

    def text(rank: str) -> str:
        count, total = (page.get(f"{PREFIX}{name}_{part}", rank, value) or 0.0 for part in ("count", "sum"))
        return f"{1e3 * total / count:,.1f} ms" if count else NONE

    return text


def _rate(page: Page, name: str) -> Callable[[str], str]:
    return lambda rank: _number(page.rate(name, rank))


def _of(page: Page, used: str, capacity: str) -> Callable[[str], str]:
    return lambda rank: f"{_number(page.get(PREFIX + used, rank))} of {_number(page.get(PREFIX + capacity, rank))}"


def _plain(page: Page, name: str, value: str | None = None) -> Callable[[str], str]:
    return lambda rank: _number(page.get(name, rank, value))


def _sections(page: Page) -> Iterator[list[Row]]:
    """Yield the rows of a frame, group by group."""
    hits, prompts = f"{PREFIX}hit_tokens_total", f"{PREFIX}prompt_tokens_total"
    reuses = f"{PREFIX}reuse_interval_requests_count"
    tokens = {"live": "used", "kept for reuse": "evictable", "free": "available"}
    yield [
        ("requests running", _plain(page, f"{SGLANG_PREFIX}num_running_reqs")),
        ("requests waiting", _plain(page, f"{SGLANG_PREFIX}num_queue_reqs")),
        *((f"tokens {ours}", _plain(page, f"{SGLANG_PREFIX}kv_{name}_tokens")) for ours, name in tokens.items()),
        ("snapshots", _of(page, "snapshots", "snapshot_capacity")),
    ]
    yield [
        ("hit rate now", lambda rank: _hits_now(page, hits, prompts, rank)),
        ("hit rate since start", lambda rank: _share(page.get(hits, rank) or 0, page.get(prompts, rank) or 0)),
        *((f"tokens hit, {source}", _plain(page, hits, source)) for source in SOURCES),
        ("tokens lost", _plain(page, f"{PREFIX}lost_tokens_total")),
        *((f"first token, {kind}", _mean(page, "first_token_seconds", kind)) for kind in (HIT, MISS)),
        ("returned in time", _plain(page, reuses, HIT)),
        ("returned too late", _plain(page, reuses, EVICTED)),
    ]
    yield [*((f"evicted for {reason}", _plain(page, f"{PREFIX}snapshots_evicted_total", reason)) for reason in REASONS)]
    if any(page.get(f"{PREFIX}host_tokens", rank) is not None for rank in page.ranks):
        yield list(_host_rows(page))


def _hits_now(page: Page, hits: str, prompts: str, rank: str) -> str:
    return NONE if page.before is None else _share(page.change(hits, rank), page.change(prompts, rank))


def _host_rows(page: Page) -> Iterator[Row]:
    yield "host tokens", _of(page, "host_tokens", "host_capacity_tokens")
    yield "host snapshots", _of(page, "host_snapshots", "host_snapshot_capacity")
    for one, done in (("load", "loaded"), ("save", "saved")):
        yield f"host {one}s", _plain(page, f"{PREFIX}host_{one}_seconds_count")
        yield f"host {one}s, mean", _mean(page, f"host_{one}_seconds")
        yield f"host {one}s, bytes", _plain(page, f"{PREFIX}host_{done}_bytes_total")
        yield f"host {one}s, bytes/s now", _rate(page, f"{PREFIX}host_{done}_bytes_total")
    yield "host saves skipped", _plain(page, f"{PREFIX}host_saves_skipped_total")
    for reason in REASONS[:2]:
        yield f"evicted on host for {reason}", _plain(page, f"{PREFIX}host_snapshots_evicted_total", reason)


def frame(page: Page, url: str) -> Group:
    """Draw one frame, with a column for each rank."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column()
    for rank in page.ranks:
        table.add_column(f"rank {rank}", justify="right")
    for section in _sections(page):
        for name, text in section:
            table.add_row(name, *map(text, page.ranks))
        table.add_row()
    title = Text(f"{url}  dsv4-sglang {page.version}  {time.strftime('%H:%M:%S')}", style="bold")
    return Group(title, table)


def _frames(server: Server, interval: float) -> Iterator[Any]:
    page = Page.read(server)
    while True:
        yield frame(page, server.url)
        time.sleep(interval)
        page = Page.read(server, page)


def _show(frames: Iterable[Any], once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    for first in frames:
        if once:
            console.print(first)
            return
        with Live(first, console=console, screen=console.is_terminal, auto_refresh=False) as live:
            for after in frames:
                live.update(after, refresh=True)


def top(
    url: Annotated[str, typer.Argument(help="URL of the server, such as http://127.0.0.1:30000.")],
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between frames.")] = 2.0,
    api_key: Annotated[str | None, typer.Option(help="The server's --api-key.")] = None,
) -> None:
    """Show what the cache of a running server does: tokens, snapshots, hits, evictions, host cache, by rank.

    The server needs --enable-metrics. SGLang updates requests and tokens every --decode-log-interval steps, and every
    30 seconds while it is idle.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C gives the terminal back
    with suppress(KeyboardInterrupt), errors_in_one_line("top", url):
        _show(_frames(Server.at(url, api_key), interval), once)
