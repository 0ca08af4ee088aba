"""Tests of `dsv4-sglang top` on metrics pages of other programs. tests/server runs it on real servers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from dsv4_sglang.cli import app, client
from dsv4_sglang.cli.top import Page

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
    assert (first.change("hits", "0"), first.rate("hits", "0")) == (6.0, None)
    second = page_at(14.0, 13.0, first)
    assert (second.get("hits", "0"), second.get("hits", "0", ""), second.get("hits", "1")) == (14.0, 13.0, 7.0)
    assert (second.change("hits", "0"), second.rate("hits", "0")) == (8.0, 2.0)
    assert second.get("misses", "0") is None and second.change("misses", "0") == 0.0


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
