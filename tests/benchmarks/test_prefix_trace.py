"""Tests of the trace generator, and of the replayer against a small HTTP server with a known cache."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.liveness import LONG

from benchmarks import prefix_trace, servers, turns
from benchmarks.agent_trace import Ideal, TraceConfig, Turn, rounds, trace
from benchmarks.bench import OutOfTime
from benchmarks.client import Client
from benchmarks.prefix_trace import live_tokens
from benchmarks.replay import Replay

pytestmark = pytest.mark.full

SMALL = TraceConfig(conversations=12, active=5, seed=3, tokens=(2_000, 9_000), turns=(4, 9), branching=0.3)


def test_turns_follow_and_stay_within_their_base() -> None:
    ends: dict[tuple[int, int], int] = {}
    turns = list(trace(SMALL))
    for turn in turns:
        if turn.base >= 0:
            assert 0 < turn.cut <= ends[turn.conversation, turn.base]
        ends[turn.key] = turn.end
    assert len({turn.conversation for turn in turns}) == SMALL.conversations
    assert turns == list(trace(SMALL))
    assert turns != list(trace(TraceConfig(conversations=12, active=5, seed=4, tokens=(2_000, 9_000))))
    assert any(turn.base >= 0 and turn.cut < ends[turn.conversation, turn.base] for turn in turns), "no branch"


def test_trace_can_start_in_the_middle() -> None:
    config = replace(SMALL, midway=True)
    turns = list(trace(config))
    ends: dict[tuple[int, int], int] = {}
    for turn in turns:
        assert turn.base < 0 or 0 < turn.cut <= ends[turn.conversation, turn.base]
        ends[turn.key] = turn.end
    first = {turn.conversation: turn for turn in reversed(turns)}
    assert any(turn.number for turn in first.values()), "all begin at their beginning"
    whole = {turn.key: turn for turn in trace(SMALL)}
    assert all(turn.prompt == whole[turn.key].prompt for turn in first.values())
    assert live_tokens(turns[: config.active], config.active) > 0


def test_ideal_hits_count_earlier_turns() -> None:
    ideal = Ideal()
    assert ideal.hit(Turn(0, 0, 1, -1, 1000, 50, 10)) == 0
    assert ideal.hit(Turn(1, 0, 1, -1, 1000, 50, 10)) == 1000, "the system prompt is known by now"
    assert ideal.hit(Turn(0, 1, 1, 0, 1060, 40, 5)) == 1059, "the last token of an answer is not in the cache"
    assert ideal.hit(Turn(0, 2, 1, 0, 500, 0, 5)) == 499, "one token of a prompt is always computed"


class FakeServer(ThreadingHTTPServer):
    """Fake server that answers /generate and caches all sequences."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.known: list[list[int]] = []
        # Tokens of the prompt and of the answer of each request.
        self.asked: list[tuple[int, int]] = []
        self.lock = threading.Lock()

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        with self.lock:
            self.asked.append((len(ids), count))
            cached = max((_common(ids[:-1], old) for old in self.known), default=0)
            out = [10 + (sum(ids) + i) % 50 for i in range(count)]
            self.known.append(ids + out[:-1])
        return {
            "output_ids": out,
            "meta_info": {
                "cached_tokens": cached,
                "cached_tokens_details": {"device": cached - cached // 4, "host": cached // 4},
            },
        }


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/server_info" else 404)
        self.end_headers()
        if self.path == "/server_info":
            self.wfile.write(json.dumps({"max_total_num_tokens": 1000}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/flush_cache":
            self.server.known.clear()
        self.send_response(200)
        self.end_headers()
        if self.path == "/flush_cache":
            return
        answer = self.server.generate(json.loads(body))
        partial = {**answer, "output_ids": answer["output_ids"][:1]}
        self.wfile.write(b"data: " + json.dumps(partial).encode() + b"\n\n")
        self.wfile.write(b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever)
    thread.start()
    yield fake
    fake.shutdown()
    thread.join()
    fake.server_close()


def _client(server: FakeServer) -> Client:
    return Client(f"http://127.0.0.1:{server.server_port}", timeout_s=LONG)


def test_an_infinite_cache_hits_the_ideal(server: FakeServer) -> None:
    """With one request at a time, the cached tokens equal those of `Ideal`."""
    replay = Replay(_client(server), concurrency=1, vocab=60_000)
    served = replay.run(list(trace(SMALL))[:40])
    assert [s.cached for s in served] == [s.ideal for s in served]
    assert all(s.prompt == s.turn.prompt for s in served)


def test_the_command_reports_each_round(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    prefix_trace.main(["revisit", "--url", url, "--conversations", "3", "--tokens", "200", "--rounds", "2"])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["cached_tokens"] == 0 and second["hit_of_ideal"] == 1
    assert first["host_tokens"] == 0 < second["host_tokens"] <= second["cached_tokens"] / 4
    assert (first["part"], second["part"], second["live_tokens"]) == ("round 1", "round 2", 3 * 2 * 216)
    prefix_trace.main(["trace", "--url", url, "--active", "2", "3", "--visits", "2", "1", "--longest", "3000"])
    two, three = map(json.loads, capsys.readouterr().out.splitlines())
    assert (two["turns"], three["turns"]) == (4, 3)


def test_agents_say_what_they_do_next_or_the_opposite(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of `right` agents continue after a retain and not after a demote, those of `wrong` agents the reverse."""
    bodies: list[dict[str, Any]] = []
    generate = server.generate
    monkeypatch.setattr(server, "generate", lambda body: bodies.append(body) or generate(body))
    load = ["--multiples", "2", "--agent-seconds", "3", "--most-agents", "4", "--speed", "4000", "--longest", "2500"]
    prefix_trace.main(["agents", "--url", f"http://127.0.0.1:{server.server_port}", *load])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["part"] for row in rows] == ["2 x, none", "2 x, right", "2 x, wrong"]
    assert all(row["turns"] > 10 and row["hit_of_ideal"] == 1 for row in rows), rows
    at = len(bodies) - sum(row["turns"] for row in rows)  # after those that warm up the server
    for row in rows:
        sent, at = bodies[at : at + row["turns"]], at + row["turns"]
        kinds = set[tuple[str, bool]]()
        for i, body in enumerate(sent):
            continued = any(
                later["input_ids"][: len(body["input_ids"])] == body["input_ids"] for later in sent[i + 1 :]
            )
            for action in body.get("kv_hints", {"actions": []})["actions"]:
                kinds.add((action["action_type"], continued))
        right = row["hints"] == "right"
        if row["hints"] == "none":
            assert not kinds
        else:
            assert {("retain", right), ("demote", not right)} <= kinds
            assert ("demote" if right else "retain", True) not in kinds


def conversations(server: FakeServer, device_tokens: int = 0) -> turns.Conversations:
    seeds = itertools.count()

    def fresh(tokens: int) -> list[int]:
        return servers.random_prompt(tokens, 60_000, next(seeds))

    tier = "host" if device_tokens else "device"
    return turns.Conversations(_client(server), fresh, tier, device_tokens, rounds=2, deadline=math.inf)


def test_turns_hit_exactly_the_prefix(server: FakeServer) -> None:
    """Eight conversations of 544 tokens run five rounds. Then four of them continue with more new tokens per turn."""
    held, asked, generate = conversations(server), server.asked, server.generate
    row = held.measure(turns.Load.parse("600+20x8"))
    assert (row["load"], row["turns"]) == ("600+20x8", 2 * 8)
    rounds_of_8 = row["warm_rounds"] + 2
    # A step with two to eight turns computes 32 old and 20 new tokens for each.
    steps = [(512 + 52 * count, 1) for count in range(2, 9)]
    assert asked == [(544, 1)] * 8 + steps + [(564, 16)] * 8 * rounds_of_8
    # The fake server has no pages, so it also finds the 32 tokens after the last whole page, and the row reports them.
    assert row["cached"] == {"expected": 512, "turns": 0, "low": 544, "high": 544}
    assert row["tier_share"] == 0.75
    assert row["first_token_ms"].keys() == row["turn_ms"].keys() == {"p50", "p95", "p99", "low", "high"}
    del asked[:]
    row = held.measure(turns.Load.parse("600+100x1"))
    assert row["turns"] == 3 * 2 and set(asked) == {(644, 16)}
    server.generate = lambda body: server.known.clear() or generate(body)  # type: ignore[method-assign, func-returns-value]
    assert held.measure(turns.Load.parse("600+20x1"))["cached"]["high"] == 0


def test_turns_go_to_the_rank_of_their_conversation(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict[str, Any]] = []
    generate = server.generate
    monkeypatch.setattr(server, "generate", lambda body: bodies.append(body) or generate(body))
    held = conversations(server)
    held.ranks = 2
    held.measure(turns.Load.parse("600+20x3"))
    begun, later = bodies[:3], bodies[3:]
    assert [body["routed_dp_rank"] for body in begun] == [0, 1, 0]
    ranks = {tuple(body["input_ids"]): body["routed_dp_rank"] for body in begun}
    assert len(ranks) == 3 and all(ranks[tuple(body["input_ids"][:544])] == body["routed_dp_rank"] for body in later)


def test_other_conversations_fill_the_device_before_each_round(server: FakeServer) -> None:
    asked = server.asked
    row = conversations(server, device_tokens=200_000).measure(turns.Load.parse("600+20x1"))
    filler = 100_000 - 512
    assert asked[:3] == [(filler, 1), (filler, 1), (544, 1)]
    assert asked[3:] == [(filler, 16), (filler, 16), (564, 16)] * (row["warm_rounds"] + 6)
    assert (row["tier"], row["tier_share"]) == ("host", 0.25)


def test_the_first_load_runs_once_more_unmeasured(server: FakeServer) -> None:
    held, asked = conversations(server), server.asked
    rows = list(held.measure_all([turns.Load.parse("600+20x2"), turns.Load.parse("600+30x1")]))
    assert [row["load"] for row in rows] == ["600+20x2", "600+30x1"]
    assert asked.count((564, 16)) >= 2 * 2 * (2 + 2) > 2 * (rows[0]["warm_rounds"] + 2)
    assert asked.count((574, 16)) == rows[1]["warm_rounds"] + 6


def test_loads_after_the_deadline_are_named(server: FakeServer) -> None:
    held = conversations(server)
    loads = [turns.Load.parse("600+20x1"), turns.Load.parse("600+30x1")]
    measured = held.measure_all(loads)
    assert next(measured)["load"] == "600+20x1"
    held.deadline = 0.0
    with pytest.raises(OutOfTime, match=r"^skipped: 600\+30x1$"):
        next(measured)


@pytest.mark.parametrize("loads", ["800+20x1", "800+20x2,900+20x1", "20000+200x8", "300000+20x1,20000+20x2"])
def test_a_device_of_the_largest_load_holds_each_prompt(loads: str) -> None:
    """SGLang rejects prompts beyond the context length, and a server whose pool holds less than that does not start."""
    args = turns.parsed(["--out", "rows", "--tier", "host", "--loads", loads])
    flags = turns.tier_flags(args)
    tokens, context = (int(flags[flags.index(name) + 1]) for name in ("--max-total-tokens", "--context-length"))
    filler = tokens // math.ceil(tokens / turns.FILLER_TOKENS) - 2 * turns.PAGE
    prompts = [load.hit + turns.REMAINDER + load.new for load in args.loads]
    assert max(filler, *prompts) + turns.ANSWER_TOKENS < context <= tokens - turns.PAGE


@pytest.mark.parametrize("load", ["20000", "20000+x1", "200+20x1", "20000+0x1", "20000+20x0", "20000+20x1.5"])
def test_malformed_loads_are_rejected(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        turns.main(["--loads", load, "--out", "rows"])
    assert f"load {load}: expected TOKENS+NEWxCOUNT with at least 288+1x1" in capsys.readouterr().err


def test_an_error_of_the_server_ends_the_replay(server: FakeServer) -> None:
    def reject(body: dict[str, Any]) -> dict[str, Any]:
        return {"error": {"message": "too long"}}

    server.generate = reject  # type: ignore[method-assign]
    with pytest.raises((RuntimeError, KeyError)):
        Replay(_client(server), concurrency=2, vocab=100).run(rounds(2, 20, 2))
