"""Tests of `dsv4-sglang top` on metrics pages of other programs. tests/server runs it on real servers."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dsv4_sglang.cli import app, client
from dsv4_sglang.cli.top import Page, bar, duration, frame, scaled
from dsv4_sglang.srt.prefix_cache.metrics import HOST_METRICS, METRICS, PREFIX

# /metrics of a server with a tiny model, a host cache and SGLang 0.5.23, without SGLang's other metrics.
RECORDED = (Path(__file__).parent / "data" / "metrics.txt").read_text()
SGLANG_ALONE = '# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{engine_type="unified"} 1.0\n'


@contextmanager
def answering(status: int, page: str, *later: str) -> Iterator[str]:
    """Run a server that returns `page` for every path, and then the pages of `later`, the last one again and again."""
    pages = [page, *later]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write((pages.pop(0) if len(pages) > 1 else pages[0]).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "page", "words"),
    [
        (200, SGLANG_ALONE, "runs without this package"),
        (404, '{"detail":"Not Found"}', "is the server started with --enable-metrics?"),
        (200, "<html>a router</html>", "is not the address of a server"),
        (200, '{"status": "ok"}', "is not the address of a server"),
    ],
)
def test_one_line_says_why_nothing_is_shown(status: int, page: str, words: str) -> None:
    with answering(status, page) as url:
        assert_fails_with_one_line(url, words)


def page_at(seconds: float, hits: float, before: Page | None = None) -> Page:
    return Page(seconds, {("hits", "0", ""): hits, ("hits", "0", "host"): 1.0, ("hits", "1", ""): 7.0}, before)


def test_rates_cover_the_last_frame() -> None:
    first = page_at(10.0, 5.0)
    assert (first.change("hits"), first.rate("hits")) == (None, None)
    second = page_at(14.0, 13.0, first)
    assert (second.get("hits", rank="0"), second.get("hits", ""), second.get("hits")) == (14.0, 20.0, 21.0)
    assert (second.change("hits", "0"), second.change("hits", "1"), second.rate("hits")) == (8.0, 0.0, 2.0)
    assert second.get("misses") == 0.0 and second.has("hits") and not second.has("misses")


@pytest.mark.parametrize(
    ("amount", "unit", "text"),
    [
        (0, "", "0"),
        (9_999, "", "9,999"),
        (10_000, "", "10.0 k"),
        (999_999, "", "1.00 M"),
        (21_641_856, "", "21.6 M"),
        (999, "B", "999 B"),
        (1_234, "B", "1.23 kB"),
        (5.24e9, "B", "5.24 GB"),
        (348e9, "B", "348 GB"),
    ],
)
def test_amounts_have_three_digits(amount: float, unit: str, text: str) -> None:
    assert scaled(amount, unit) == text


def test_durations_have_the_unit_that_fits() -> None:
    assert [duration(seconds) for seconds in (0.00035, 0.0294, 1.63)] == ["0.35 ms", "29.4 ms", "1.6 s"]


def test_a_bar_shows_its_parts_without_colours() -> None:
    assert bar((1, "cyan"), (2, "green"), whole=4, width=8).plain == "██▓▓▓▓░░"
    assert bar((5, "cyan"), whole=4, width=4).plain == "████"
    assert bar((0, "cyan"), whole=0, width=4).plain == "░░░░"


def recorded(text: str = RECORDED, before: Page | None = None) -> Page:
    """Return the recorded page, read over HTTP."""
    with answering(200, text) as url:
        return Page.read(client.Server.at(url), before)


def drawn(page: Page, **terminal: Any) -> list[str]:
    """Return the lines of a frame in a terminal of 80 columns."""
    console = Console(width=80, height=20, **terminal)
    with console.capture() as capture:
        console.print(frame(page, "http://127.0.0.1:30000"))
    return [line.rstrip() for line in capture.get().splitlines()]


def of_ranks(text: str, ranks: int) -> str:
    """Return a page in which every rank of DP attention has the samples of the recorded one."""
    lines = []
    for line in text.splitlines():
        label = 'dp_rank="{}"' if "dp_rank=" in line else 'dp_rank="{}",'
        plain = re.sub(r'dp_rank="0"', label, line) if "dp_rank=" in line else line.replace("{", "{" + label, 1)
        lines += [line] if line.startswith("#") else [plain.replace("{}", str(rank)) for rank in range(ranks)]
    return "\n".join(lines) + "\n"


def test_the_recorded_page_has_every_metric() -> None:
    names = {name for name, _, _ in recorded().values}
    for metric in (*METRICS, *HOST_METRICS):
        assert {metric.exposed, f"{metric.exposed}_sum"} & names, (
            f"{metric.exposed}: record tests/cli/data/metrics.txt again"
        )


def test_a_frame_shows_the_recorded_values() -> None:
    first, *lines = drawn(recorded())
    assert re.fullmatch(r"\d\d:\d\d:\d\d  dsv4-sglang 0\.2\.0  http://127\.0\.0\.1:30000", first)
    assert dict(re.split("  +", line, maxsplit=1) for line in lines) == {
        "requests": "0 running, 0 waiting",
        "tokens": "▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓░░░░░  0 live, 1,536 cached, 512 free",
        "snapshots": "█████████████░░░░░░░  4 of 6",
        "evicted": "0 for slots, 2 for blocks, 0 for sleep",
        "hit rate": "█████░░░░░░░░░░░░░░░  23.2 % since start, - now",
        "tokens hit": "768 device, 0 host, 0 storage, 0 lost",
        "first token": "18.8 s hit, 77.7 s miss",
        "returned": "████████████████████  2 in time, 0 too late",
        "host tokens": "███████████████░░░░░  2,304 of 3,072",
        "host snapshots": "█████████████░░░░░░░  6 of 9",
        "host loads": "0, mean -, 0 B, - now, 0 failed",
        "host saves": "6, mean 545.4 ms, 6.35 MB, - now, 0 skipped",
        "host evicted": "0 for slots, 0 for blocks",
    }


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_frame_fits_into_80_columns_and_20_lines(ranks: int) -> None:
    """Times are as recorded. All other values are those of a large server."""
    first = recorded(of_ranks(RECORDED, ranks))
    large = {key: value if "seconds" in key[0] else 54_321 * (value + 1) for key, value in first.values.items()}
    lines = drawn(Page(first.at + 2.0, large, first))
    assert len(lines) == 14 + (1 + (ranks + 1) // 2 if ranks > 1 else 0) <= 20
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    assert re.findall(r"rank (\d)  ", "".join(lines)) == [str(rank) for rank in range(ranks) if ranks > 1]


def test_sums_over_ranks() -> None:
    one, three = recorded(), recorded(of_ranks(RECORDED, 3))
    for name in (f"{PREFIX}snapshots", f"{PREFIX}prompt_tokens_total", "sglang:kv_evictable_tokens"):
        assert three.get(name) == 3 * one.get(name) > 0


def test_colours_are_only_in_a_terminal() -> None:
    page = recorded()
    page.values[f"{PREFIX}host_saves_skipped_total", "0", ""] = 3.0
    page.values["sglang:kv_used_tokens", "0", ""] = 512.0
    plain, coloured = drawn(page), drawn(page, force_terminal=True, color_system="standard")
    assert "\x1b" not in "".join(plain)
    assert "\x1b[33m3 skipped" in "".join(coloured), "faults are yellow"
    assert "\x1b[36m█" in "".join(coloured) and "\x1b[32m▓" in "".join(coloured), "live is cyan, cached is green"
    # The two frames may be drawn in different seconds, which the first line shows.
    uncoloured = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in coloured]
    assert uncoloured[1:] == plain[1:] and uncoloured[0][len("00:00:00") :] == plain[0][len("00:00:00") :]


@pytest.mark.parametrize("command", [("top", "--once"), ("check",)], ids=" ".join)
def test_one_line_says_that_there_is_no_server(command: tuple[str, ...]) -> None:
    with answering(200, "") as url:
        pass
    assert_fails_with_one_line(url, f"no server answers at {url}", *command)


@pytest.mark.parametrize("command", [("top", "--once"), ("check",)], ids=" ".join)
@pytest.mark.parametrize(
    "url",
    [
        "http://me:secret@127.0.0.1:{port}",
        "http://secret@127.0.0.1:{port}",
        "htp://me:secret@host",
        "http://me:secret@host:99999",
        "http://me:p/secret@x@host",
    ],
)
def test_a_password_is_not_printed(url: str, command: tuple[str, ...]) -> None:
    with answering(200, "") as server:
        pass
    given = url.format(port=server.rpartition(":")[2])
    result = CliRunner().invoke(app, [command[0], given, *command[1:]])
    assert result.exit_code == 1 and len(result.output.splitlines()) == 1
    assert "secret" not in result.output and "me" not in result.output.partition("//")[2].partition("@")[0]
    assert "127.0.0.1" not in given or "has a user name or a password, which SGLang does not take; " in result.output


@pytest.mark.parametrize("command", [("top", "--once"), ("check",)], ids=" ".join)
@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "localhost:99999",
        "ftp://host",
        "http://",
        "http://:80",
        "http://host:99999",
        "http://host:port",
        "http://[::1",
        "http://bad host",
        "http://host/bad path",
        "http://host..name",
    ],
)
def test_one_line_says_what_an_address_looks_like(url: str, command: tuple[str, ...]) -> None:
    said = f"{url!r} is not the address of a server; expected one such as http://127.0.0.1:30000"
    assert_fails_with_one_line(url, said, *command)


def assert_fails_with_one_line(url: str, words: str, *command: str) -> None:
    shown = CliRunner().invoke(app, [*(command or ("top", "--once")), url])
    assert shown.exit_code == 1 and not shown.stdout
    assert words in shown.stderr and len(shown.stderr.splitlines()) == 1, shown.stderr


def test_check_waits_for_a_later_audit() -> None:
    """The server repeats old reports until the next audit is due. Every process must have a new one."""

    def page(*ages: float) -> str:
        reports = [{"age_seconds": age, "audit": age} for age in ages]
        return json.dumps({"internal_states": [{client.INTEGRITY_KEY: [report]} for report in reports]})

    with answering(200, page(1000, 2000), page(1000, 0), page(-1, 0), page(-2, -2)) as url:
        assert [report["audit"] for report in client.Server.at(url).integrity()] == [-1, 0]
