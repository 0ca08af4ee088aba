"""`dsv4-sglang top`: show the state of a running server's cache in the terminal."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4_sglang.cli.client import SGLANG_PREFIX, Server, errors_in_one_line, samples
from dsv4_sglang.srt.prefix_cache.metrics import BLOCKS, EVICTED, HIT, MISS, PREFIX, RANK_LABEL, REASONS, SLOTS, SOURCES

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

# Timeout of a request for /metrics, in seconds. After it the server counts as not running.
SECONDS = 10.0
NONE = "-"
BUILD_INFO = f"{PREFIX}build_info"
HITS, PROMPTS = f"{PREFIX}hit_tokens_total", f"{PREFIX}prompt_tokens_total"


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

    def has(self, name: str) -> bool:
        return any(of == name for of, _, _ in self.values)

    def get(self, name: str, value: str | None = None, rank: str | None = None) -> float:
        """Return the value of a metric; 0 if the server does not have it.

        Args:
            name: Full name of the metric.
            value: Value of the label; None: sum over all values.
            rank: DP attention rank; None: sum over all ranks.
        """
        return sum(
            amount
            for (of, at, label), amount in self.values.items()
            if of == name and rank in (None, at) and value in (None, label)
        )

    def change(self, name: str, rank: str | None = None) -> float | None:
        """Return the growth of a counter since the previous sample; None for the first sample."""
        return None if self.before is None else self.get(name, rank=rank) - self.before.get(name, rank=rank)

    def rate(self, name: str) -> float | None:
        """Return the growth of a counter per second; None for the first sample."""
        change = self.change(name)
        return None if change is None or self.before is None else change / (self.at - self.before.at)


def scaled(value: float, unit: str = "") -> str:
    """Format an amount with a decimal prefix and three digits: 1,234, 21.6 M, 5.24 GB."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor and (unit or value >= 1e4):  # 999,999 is 1.00 M
            amount = value / factor
            return f"{amount:.{max(0, 3 - len(f'{amount:.0f}'))}f} {prefix}{unit}"
    return f"{value:,.0f} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Format a time: 0.35 ms, 29.4 ms, 1.6 s."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.{1 if seconds >= 1e-3 else 2}f} ms"


def share(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.1f} %" if part is not None and whole else NONE


def bar(*parts: tuple[float, str], whole: float, width: int = 20) -> Text:
    """Draw parts of a whole as a bar. Each part has its own character too, for terminals without colours.

    Args:
        parts: Amount and style of each part, at most two.
        whole: Amount of the full bar; 0: an empty bar.
        width: Characters.
    """
    from rich.text import Text

    text, total = Text(), 0.0
    for (amount, style), character in zip(parts, "█▓"):
        total += amount
        text.append(character * (round(width * min(total / whole, 1)) - len(text) if whole else 0), style)
    return text.append("░" * (width - len(text)), "bright_black")


def _line(*parts: Text | str) -> Text:
    """Join bars and texts with markup."""
    from rich.text import Text

    return Text("  ").join(part if isinstance(part, Text) else Text.from_markup(part) for part in parts)


def _counted(amount: float, words: str) -> str:
    """Return a number of faults, coloured if there are any."""
    text = f"{scaled(amount)} {words}"
    return f"[yellow]{text}[/]" if amount else text


def _by(page: Page, name: str, values: Iterable[str], word: str = "") -> str:
    return ", ".join(f"{scaled(page.get(PREFIX + name, value))} {word}{value}" for value in values)


def _mean(page: Page, name: str, value: str | None = None) -> str:
    """Return the mean of a histogram of seconds."""
    count, total = (page.get(f"{PREFIX}{name}_{part}", value) for part in ("count", "sum"))
    return duration(total / count) if count else NONE


def _used(page: Page, used: str, capacity: str) -> Text:
    amount, whole = page.get(PREFIX + used), page.get(PREFIX + capacity)
    return _line(bar((amount, "magenta"), whole=whole), f"{scaled(amount)} of {scaled(whole)}")


def _tokens(page: Page) -> Text:
    live, cached, free = (page.get(f"{SGLANG_PREFIX}kv_{name}_tokens") for name in ("used", "evictable", "available"))
    drawn = bar((live, "cyan"), (cached, "green"), whole=live + cached + free)
    return _line(drawn, f"[cyan]{scaled(live)} live[/], [green]{scaled(cached)} cached[/], {scaled(free)} free")


def _gpu(page: Page) -> Iterator[tuple[str, Text]]:
    """Yield label and text of the lines of every server."""
    running, waiting = (page.get(f"{SGLANG_PREFIX}num_{name}_reqs") for name in ("running", "queue"))
    yield "requests", _line(f"{scaled(running)} running, {_counted(waiting, 'waiting')}")
    yield "tokens", _tokens(page) if page.has(f"{SGLANG_PREFIX}kv_available_tokens") else _line(NONE)
    yield "snapshots", _used(page, "snapshots", "snapshot_capacity")
    yield "evicted", _line(_by(page, "snapshots_evicted_total", REASONS, "for "))
    hit, prompts = page.get(HITS), page.get(PROMPTS)
    now = share(page.change(HITS), page.change(PROMPTS))
    yield "hit rate", _line(bar((hit, "green"), whole=prompts), f"{share(hit, prompts)} since start, {now} now")
    lost = _counted(page.get(f"{PREFIX}lost_tokens_total"), "lost")
    yield "tokens hit", _line(f"{_by(page, 'hit_tokens_total', SOURCES)}, {lost}")
    times = (f"{_mean(page, 'first_token_seconds', kind)} {kind}" for kind in (HIT, MISS))
    yield "first token", _line(", ".join(times))
    early, late = (page.get(f"{PREFIX}reuse_interval_requests_count", outcome) for outcome in (HIT, EVICTED))
    drawn = bar((early, "green"), (late, "yellow"), whole=early + late)
    yield "returned", _line(drawn, f"{scaled(early)} in time, {_counted(late, 'too late')}")


def _host(page: Page) -> Iterator[tuple[str, Text]]:
    """Yield label and text of the lines of a server with a host cache."""
    yield "host tokens", _used(page, "host_tokens", "host_capacity_tokens")
    yield "host snapshots", _used(page, "host_snapshots", "host_snapshot_capacity")
    for one, done, fault in (("load", "loaded", "loads_failed"), ("save", "saved", "saves_skipped")):
        name = f"{PREFIX}host_{done}_bytes_total"
        rate, faults = page.rate(name), page.get(f"{PREFIX}host_{fault}_total")
        count = f"{scaled(page.get(f'{PREFIX}host_{one}_seconds_count'))}, mean {_mean(page, f'host_{one}_seconds')}"
        now = NONE if rate is None else f"{scaled(rate, 'B')}/s"
        failed = _counted(faults, fault.rpartition("_")[2])
        yield f"host {one}s", _line(f"{count}, {scaled(page.get(name), 'B')}, {now} now, {failed}")
    yield "host evicted", _line(_by(page, "host_snapshots_evicted_total", (SLOTS, BLOCKS), "for "))


def _ranks(page: Page) -> Iterator[Text]:
    """Yield the part of the prompts' tokens that each DP attention rank found, and its running requests."""
    for rank in page.ranks:
        hit, prompts = page.get(HITS, rank=rank), page.get(PROMPTS, rank=rank)
        running = scaled(page.get(f"{SGLANG_PREFIX}num_running_reqs", rank=rank))
        drawn = bar((hit, "green"), whole=prompts, width=6)
        yield _line(f"[bold]rank {rank}[/]", drawn, f"{share(hit, prompts)}, {running} running")


def frame(page: Page, url: str) -> Group:
    """Draw one frame: sums over all ranks and, if there are several, the hit rate of each, two ranks a line.

    A frame with up to eight ranks fits into 80 columns and 20 lines.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    title = Text(f"{time.strftime('%H:%M:%S')}  dsv4-sglang {page.version}  {url}", "bold")
    title.no_wrap, title.overflow = True, "ellipsis"
    lines, ranks = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(no_wrap=True)
    for label, text in (*_gpu(page), *(_host(page) if page.has(f"{PREFIX}host_tokens") else ())):
        lines.add_row(label, text)
    if len(page.ranks) == 1:
        return Group(title, lines)
    found = [*_ranks(page)]
    for first in range(0, len(found), 2):
        ranks.add_row(*found[first : first + 2])
    return Group(title, lines, Text("hit rate since start, by rank", "bold"), ranks)


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
    """Show what the cache of a running server does: tokens, snapshots, hits, evictions, host cache.

    The server needs --enable-metrics. SGLang updates requests and tokens every --decode-log-interval steps, and every
    30 seconds while it is idle.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C gives the terminal back
    with suppress(KeyboardInterrupt), errors_in_one_line("top", url):
        _show(_frames(Server.at(url, api_key), interval), once)
