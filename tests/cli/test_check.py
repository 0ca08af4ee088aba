"""Tests of `dsv4-sglang check` on a server that answers as SGLang does. tests/server runs it on real servers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from dsv4_sglang.cli import app
from dsv4_sglang.cli.check import ANSWER_TOKENS, PROMPT_TOKENS, Distance, too_far
from dsv4_sglang.cli.client import INTEGRITY_KEY, samples


def report(rank: int = 0, wrong: int = 0, findings: int = 0) -> dict[str, Any]:
    pool = {"of": "blocks", "size": 100, "free": 90, "cached": 8, "requests": 2, "copies": 0}
    found = [{"what": f"block {i}", "wrong": "has two owners"} for i in range(findings)]
    state = {"pools": [pool], "requests": 0, "idle": True, "seconds": 0.001}
    return {"dp_rank": rank, "tp_rank": 0, "findings": found, "wrong": wrong, **state}


@contextmanager
def serving(reports: list[dict[str, Any]], cached: int = 128, drift: float = 0.0) -> Iterator[tuple[str, list[dict]]]:
    """Run a server and yield its URL and the bodies that it receives.

    Args:
        reports: integrity reports of all processes.
        cached: tokens of a warm prompt that come from the cache.
        drift: difference of a warm answer from a cold one. A cold request has a name space of its own.
    """
    bodies: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, body: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self) -> None:
            self.answer({"internal_states": [{INTEGRITY_KEY: [one]} for one in reports]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            warm = "extra_key" not in body
            tokens = [[-1.0 - drift * warm, 5, None]] * body["sampling_params"]["max_new_tokens"]
            scored = [[-1.0, 5, None]] * (ANSWER_TOKENS + 1)
            meta = {"cached_tokens": cached if warm else 0, "output_token_logprobs": tokens}
            self.answer({"meta_info": {**meta, "input_token_logprobs": scored}})

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()


def check(url: str, prompts: int = 0) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", url, "--prompts", str(prompts)], env={"COLUMNS": "80"})
    return result.exit_code, result.output


def test_intact_cache_passes() -> None:
    with serving([report()]) as (url, bodies):
        code, output = check(url)
        assert code == 0 and output.splitlines()[-1] == "the cache is sound" and not bodies
        code, output = check(url, prompts=2)
    assert code == 0 and output.splitlines()[-1] == "the cache is sound, and 2 warm answers match cold answers"
    assert f"prompt 2: 128 of {PROMPT_TOKENS} tokens cached, log p differs by 0.0000 on average" in output


def test_prompts_alternate_between_ranks() -> None:
    with serving([report(0), report(1)]) as (url, bodies):
        assert check(url, prompts=4)[0] == 0
    ranks = [body["routed_dp_rank"] for body in bodies]
    each = len(bodies) // 4
    assert ranks == [rank for rank in (0, 1, 0, 1) for _ in range(each)]
    with serving([report()]) as (url, bodies):
        check(url, prompts=1)
    assert not any("routed_dp_rank" in body for body in bodies)


@pytest.mark.parametrize(
    ("served", "said", "last"),
    [
        ({"drift": 0.5}, "from an empty cache 0.0000: WRONG", "0 errors in the cache, 2 wrong answers"),
        ({"drift": 0.01}, ": right", "the cache is sound, and 2 warm answers match cold answers"),
        ({"drift": float("nan")}, ": WRONG", "0 errors in the cache, 2 wrong answers"),
        ({"cached": 0}, ": no prefix hit", "0 errors in the cache, 2 wrong answers"),
    ],
)
def test_wrong_answers_are_errors(served: dict[str, Any], said: str, last: str) -> None:
    with serving([report()], **served) as (url, _):
        code, output = check(url, prompts=2)
    assert said in output and output.splitlines()[-1] == last
    assert code == (0 if last.startswith("the cache is sound") else 1)


def test_findings_are_shown_and_counted() -> None:
    with serving([report(0), report(1, wrong=5, findings=3)]) as (url, _):
        code, output = check(url)
    lines = output.splitlines()
    assert code == 1 and lines[-1] == "5 errors in the cache"
    assert [line for line in lines if "two owners" in line] == [f"DP1 TP0  block {i}: has two owners" for i in range(3)]
    assert "DP1 TP0  and 2 more" in lines and not any(line.startswith("DP0 TP0  and") for line in lines)
    assert "DP1 TP0: idle, 5 wrong, 1 ms" in lines


def test_samples_leave_out_times_of_creation() -> None:
    page = "# TYPE dsv4_hits counter\ndsv4_hits_total 3.0\ndsv4_hits_created 1.7e9\n# TYPE other gauge\nother 1.0\n"
    assert [(one.name, one.value) for one in samples(page, "dsv4_")] == [("dsv4_hits_total", 3.0)]


@pytest.mark.parametrize(
    ("warm", "worst", "tolerance", "far"),
    [(0.1, 0.2, None, False), (0.2, 0.2, None, True), (0.1, 0.2, 0.1, True), (float("nan"), 0.0, None, True)],
)
def test_how_far_a_warm_answer_may_be(warm: float, worst: float, tolerance: float | None, far: bool) -> None:
    assert too_far(Distance(128, warm, worst, cold=0.0), noise=0.04, tolerance=tolerance) == far
