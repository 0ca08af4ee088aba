"""Tests of trace files, the hits of perfect caches, and trace replay against a server."""

from __future__ import annotations

import itertools
import json
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support import server_forkserver
from support.server_forkserver import QUICK

from benchmarks import agent_trace, prefix_simulation, simulated_server, trace
from benchmarks.agent_trace import TraceConfig
from benchmarks.client import TIERS, Answer
from benchmarks.trace_file import HASH_BLOCK, Request, computed_hits, live_tokens, load, perfect_hits

pytestmark = pytest.mark.full

TINY = TraceConfig(
    conversations=4, active=2, systems=(512, 1024), turns=(3, 5), tokens=(1_800, 3_000), generate=(4, 8), branching=0.3
)


def one(*ids: int, tokens: int | None = None, session: int = 0) -> Request:
    return Request(0.0, tokens or HASH_BLOCK * len(ids), 1, ids, session)


def written(path: Path, config: TraceConfig) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in agent_trace.requests(config, pause_s=0.01)))
    return path


def test_equal_hash_ids_are_equal_tokens() -> None:
    whole, part = one(3, 7).prompt(60_000, 0), one(3, 7, tokens=700).prompt(60_000, 0)
    assert len(whole) == 1024 and part == whole[:700]
    assert one(9, 7).prompt(60_000, 0)[512:] == whole[512:] and one(9).prompt(60_000, 0) != whole[:512]
    assert one(3, 7).prompt(60_000, 1) != whole
    assert min(whole) >= trace.servers.random_prompt(1, 4, 0)[0] and max(whole) < 60_000


def test_an_unbounded_cache_finds_the_longest_common_prefix() -> None:
    """The result equals a comparison of the tokens, for a trace with branches and partial blocks."""
    config = replace(TINY, turns=(6, 10), tokens=(8_000, 16_000), generate=(300, 900))
    made = [
        Request(0.0, line["input_length"], 1, tuple(line["hash_ids"]), 0)
        for line in agent_trace.requests(config, pause_s=1.0)
    ]
    prompts = [request.prompt(60_000, 0) for request in made]
    expected = [
        max((_common(prompt[:-1], old) for old in prompts[:number]), default=0) for number, prompt in enumerate(prompts)
    ]
    assert perfect_hits(made) == expected and sum(expected) > 0
    assert any(hit % HASH_BLOCK for hit in expected), "no partial block was hit"


def test_last_prompt_token_is_always_computed() -> None:
    assert perfect_hits([one(1, 2), one(1, 2), one(1, tokens=300)]) == [0, 1023, 299]


def _common(a: object, b: object) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))  # type: ignore[call-overload]


def _best(requests: list[Request], room: int, number: int = 0, held: frozenset[int] = frozenset()) -> int:
    """Return the maximum number of blocks that a cache of `room` blocks can hit, by trying all choices of what to
    keep."""
    if number == len(requests):
        return 0
    ids = requests[number].ids
    hit = sum(1 for _ in itertools.takewhile(held.__contains__, ids))
    candidates = held | set(ids)
    choices = itertools.combinations(sorted(candidates), min(room, len(candidates)))
    return hit + max(_best(requests, room, number + 1, frozenset(kept)) for kept in choices)


@pytest.mark.parametrize("seed", range(8))
def test_bounded_perfect_cache_equals_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    paths = [(1, 2), (1, 3), (4,), (1, 2, 5)]
    # Each prompt ends with a unique id, because its last token is always computed.
    requests = [one(*rng.choice(paths), 100 + number, session=number) for number in range(6)]
    for room in (1, 2, 3):
        assert sum(perfect_hits(requests, room * HASH_BLOCK)) == HASH_BLOCK * _best(requests, room)
    assert perfect_hits(requests, 10**6) == perfect_hits(requests)


def test_computed_tokens_count_after_the_first_token() -> None:
    same = [one(1, 2, number) for number in (10, 11, 12)]
    assert perfect_hits(same) == [0, 1024, 1024]
    assert computed_hits(same, begins=[0.0, 0.5, 1.0], computed=[1.0, 1.5, 2.0]) == [0, 0, 1024]


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "nothing"]
)
def test_malformed_line_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n' + text + "\n")
    with pytest.raises(ValueError, match=r"trace.jsonl, line 2: .*expected timestamp"):
        load(file)


def test_agent_trace_has_the_hit_rate_of_agentx(tmp_path: Path) -> None:
    """The hit rate is AgentX's, 96.8 %, and the same seed gives the same file."""
    file = written(tmp_path / "agents.jsonl", agent_trace.agents(8, 16, seed=1))
    made = load(file)
    assert 0.96 < sum(perfect_hits(made)) / sum(request.tokens for request in made) < 0.985
    assert file.read_text() == written(tmp_path / "again.jsonl", agent_trace.agents(8, 16, seed=1)).read_text()
    firsts = [session[0] for session in trace.sessions(made)]
    assert all(request.delay > 0 for request in made if request not in firsts)


def test_shorter_agents_hit_and_live_as_much(tmp_path: Path) -> None:
    """A fourth of the lengths gives about a fourth of the tokens, the same number of turns, and the same hit rate."""
    long, short = (
        load(written(tmp_path / f"{shorter}.jsonl", agent_trace.agents(8, 16, 1, shorter))) for shorter in (1, 4)
    )
    assert len(long) == len(short)
    assert 3.5 < live_tokens(long) / live_tokens(short) < 4.5
    rates = [sum(perfect_hits(made)) / sum(request.tokens for request in made) for made in (long, short)]
    assert abs(rates[0] - rates[1]) < 0.02


def test_agents_that_start_midway_are_all_live_from_the_start(tmp_path: Path) -> None:
    """The first 100 requests of 20 agents leave three times as many live tokens, and later requests hit as before."""
    made = [
        load(written(tmp_path / f"{midway}.jsonl", agent_trace.agents(20, 40, 1, 8, midway=midway)))
        for midway in (False, True)
    ]
    first, midway = (live_tokens(requests[:100]) for requests in made)
    assert midway > 2 * first
    assert sum(perfect_hits(made[1])[200:]) / sum(request.tokens for request in made[1][200:]) > 0.9


class Told:
    """Client whose requests take 20 ms and which records when each begins and ends."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def prepared(self, prompt: array[int], count: int) -> Callable[[], Answer]:
        def send() -> Answer:
            begin = time.perf_counter()
            time.sleep(0.02)
            self.spans.append((begin, time.perf_counter()))
            return Answer([0] * count, 0, dict.fromkeys(TIERS, 0), 0.01, 0.02)

        return send


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_a_session_waits_for_its_answers_and_pauses(loop: str) -> None:
    client = Told()
    requests = [replace(one(number, session=number % 3), delay=0.03 * (number > 2), output=5) for number in range(9)]
    replayer = trace.Replayer(client, 4_000, cap=2)  # type: ignore[arg-type]
    pairs = replayer.closed(requests, 2) if loop == "closed" else replayer.open(requests, 2.0)
    assert len(pairs) == 9 and all(done.output == 2 and done.late >= 0 for _, done in pairs)
    pause = 0.03 if loop == "closed" else 0.06
    for session in range(3):
        begins = [(request.ids[0], done.begin) for request, done in pairs if request.session == session]
        assert [number for number, _ in begins] == [session, session + 3, session + 6]
        assert all(b - a >= 0.02 + pause for (_, a), (_, b) in itertools.pairwise(begins))
    if loop == "closed":
        starts, ends = [span[0] for span in client.spans], [span[1] for span in client.spans]
        assert all(sum(a <= t < b for a, b in zip(starts, ends)) <= 2 for t in starts)


def test_deadline_stops_requests_and_errors_are_raised() -> None:
    client = Told()
    assert trace.Replayer(client, 4_000, deadline=0.0).closed([one(1)], 2) == []  # type: ignore[arg-type]
    client.prepared = lambda *_: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        trace.Replayer(client, 4_000).open([one(1), one(2, session=1)], 1.0)  # type: ignore[arg-type]


def test_misses_are_counted_by_cause() -> None:
    """Two concurrent requests share a new prefix. A third one misses 512 tokens for want of a snapshot."""

    def done(begin: float, cached: int) -> trace.Done:
        return trace.Done(begin, 0.0, 1536, 1, cached, {"device": cached}, 1.0, 1.0, 0.0)

    spans = [done(0.0, 0), done(0.5, 0), done(3.0, 256)]
    pairs = list(zip([one(1, 2, last) for last in (3, 4, 5)], spans))
    row = trace.summary(pairs, [512], lost=512.0)
    assert (row["ideal_tokens"], row["cached_tokens"], row["bounded_ideal_tokens"]) == (2048, 256, {"512": 1024})
    assert row["missed"]["tokens"] == 1792 and row["missed"]["in_flight"] == 1024
    assert (row["missed"]["no_snapshot"], row["missed"]["other"]) == (512, 256)
    assert row["live_tokens"] == 1024 and row["first_token_ms"]["p99"] == 1000
    assert "no_snapshot" not in trace.summary(pairs, [], lost=None)["missed"]


def test_requests_that_fill_the_cache_are_in_no_figure() -> None:
    """Four requests of one prefix, 2 s apart, each answered after 1 s. The first two fill the caches until 3 s; the
    last is answered after the end of the sending."""
    spans = [trace.Done(at, 0.0, 1536, 7, hit, {"device": hit}, 0.5, 1.0, 0.1) for at, hit in ((0, 0), (2, 0))]
    spans += [trace.Done(at, 0.0, 1536, 7, 768, {"device": 768}, first, 1.0, 0.1) for at, first in ((4, 0.2), (6, 0.4))]
    pairs = list(zip([one(1, 2, last) for last in (3, 4, 5, 6)], spans))
    row = trace.summary(pairs, [10**6], lost=256.0, fill=2.5, until=6.5)
    assert (row["requests"], row["fill_seconds"], row["seconds"]) == (2, 2.5, 4.0)
    assert (row["requests_per_s"], row["output_tokens_per_s"], row["prompt_tokens_per_s"]) == (0.5, 3.5, 768.0)
    assert (row["ideal_tokens"], row["cached_tokens"]) == (2048, 1536)
    assert row["hit_of_ideal"] == row["hit_of_bounded"]["1000000"] == 0.75
    assert (row["missed"]["tokens"], row["missed"]["no_snapshot"], row["missed"]["other"]) == (512, 256, 256)
    assert (row["first_token_ms"]["low"], row["first_token_ms"]["high"]) == (200.0, 400.0)
    whole = trace.summary(pairs, [], lost=0.0)
    assert (whole["requests"], whole["seconds"], whole["cached_tokens"]) == (4, 7.0, 1536)
    assert whole["requests_per_s"] == round(4 / 7, 4)


def test_the_end_that_fills_no_block_is_a_miss_of_its_own() -> None:
    """There are 1,535 ideal tokens, and the last 127 do not fill a block. A request that hits all others has no other
    misses."""
    spans = [
        trace.Done(at, 0.0, 1536, 1, hit, {"device": hit}, 1.0, 1.0, 0.0) for at, hit in ((0, 0), (2, 1408), (4, 0))
    ]
    row = trace.summary([(one(1, 2, 3), done) for done in spans], [], lost=0.0)
    assert row["ideal_tokens"] == 2 * 1535
    assert row["missed"]["partial_block"] == 2 * 127 and row["missed"]["other"] == 1408


def test_live_tokens_are_those_that_return() -> None:
    requests = [one(1, 2), one(3), one(1, 4), one(3), one(1), one(5)]
    assert live_tokens(requests) == 2 * HASH_BLOCK
    assert live_tokens(requests[:1]) == 0


def test_simulated_hits_are_the_whole_blocks_of_the_ideal(tmp_path: Path) -> None:
    """With a snapshot at each block, one request at a time and memory without end, nothing else is computed again."""
    made = load(written(tmp_path / "agents.jsonl", replace(TINY, turns=(6, 10), generate=(300, 900))))
    simulation = simulated_server.Simulation(10_000, 10_000, 128, concurrency=1)
    simulation.replay(made)
    assert simulation.hit_tokens == sum(hit // 128 * 128 for hit in perfect_hits(made)) > 0
    assert simulation.lost_tokens == 0


def test_study_of_a_trace_file(tmp_path: Path) -> None:
    """Less memory hits less, and no policy more than the optimum plus what unlimited slots add."""
    file = written(tmp_path / "agents.jsonl", replace(TINY, conversations=12, active=6))
    given = ["--parts", "trace", "--trace", str(file), "--out", str(tmp_path)]
    assert prefix_simulation.main(given) == 0
    made = json.loads((tmp_path / "prefix_simulation.json").read_text())
    assert not made["failures"]
    rows = {(row["live"], row["share"], row["learns"]): row for row in made["rows"]}
    assert len(rows) == 4 * 4
    hits = [rows[live, None, True]["hit"] for live in prefix_simulation.LIVE]
    assert hits == sorted(hits, reverse=True) and hits[0] > 0.8
    assert all(row["hit"] <= row["optimal"] for row in made["rows"])


@pytest.mark.parametrize(
    ("flags", "host"),
    [("", None), ("--enable-hierarchical-cache", 2000), ("--enable-hierarchical-cache --hicache-ratio 4", 4000)],
)
def test_tokens_of_device_and_host(flags: str, host: int | None) -> None:
    facts = {"max_total_num_tokens": 1000, "bytes_a_token": 4000.0, "command": f"-m sglang {flags}"}
    assert trace.held_tokens(facts) == ([1000] if host is None else [1000, 1000 + host])
    sized = facts | {"command": "--enable-hierarchical-cache --hicache-ratio 4 --hicache-size 2"}
    assert trace.held_tokens(sized) == [1000, 1000 + 500_000]
    assert trace.held_tokens({name: fact for name, fact in facts.items() if name != "bytes_a_token"}) == (
        [1000] if host is None else [1000, 1000 + host]
    )
    assert trace.held_tokens({"max_total_num_tokens": 1000, "command": sized["command"]}) == [1000]


def test_clients_that_the_server_runs_warm_it_up() -> None:
    assert trace.warm_clients({"command": "-m sglang --max-running-requests 256 --max-running-requests 32"}, 375) == 32
    assert trace.warm_clients({"command": "-m sglang --max-running-requests 256"}, 64) == 64
    assert trace.warm_clients({}, 64) == 64


@pytest.mark.parametrize(
    ("each", "of_loads"), [("90", [90.0] * 3), ("90,100,300", [90.0, 100.0, 300.0]), (None, [float("inf")] * 3)]
)
def test_the_time_of_each_load(tmp_path: Path, each: str | None, of_loads: list[float]) -> None:
    given = [str(written(tmp_path / "agents.jsonl", TINY)), "--closed", "2,8", "--open", "1"]
    given += ["--out", str(tmp_path / "out.jsonl")]
    assert trace.parsed(given + (["--each", each] if each else [])).each == of_loads
    assert trace.parsed([*given, "--fill", "5"]).fill == [5.0] * 3
    assert trace.parsed([*given, "--fill", "5,6,0"]).fill == [5.0, 6.0, 0.0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--each 90,100", "--each 90,100: expected one number of seconds, or one for each of 3 loads"),
        ("--each x", "--each x: could not convert string to float: 'x'; expected numbers, separated by commas"),
        ("--each 0", "--fill 0: expected seconds from 0 on, fewer than --each 0"),
        ("--fill 1,2", "--fill 1,2: expected one number of seconds, or one for each of 3 loads"),
        ("--each 90 --fill 9,90,9", "--fill 9,90,9: expected seconds from 0 on, fewer than --each 90"),
        ("--fill=-1", "--fill -1: expected seconds from 0 on, fewer than --each inf"),
    ],
)
def test_bad_times_of_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    given = [str(written(tmp_path / "agents.jsonl", TINY)), "--closed", "2,8", "--open", "1"]
    with pytest.raises(SystemExit):
        trace.parsed([*given, "--out", str(tmp_path / "out.jsonl"), *flags.split()])
    assert message in capsys.readouterr().err


@pytest.mark.server
def test_a_trace_on_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both loops serve every agent request on a real server and hit at most the ideal."""
    server_forkserver.fork_benchmarks(monkeypatch)
    config = replace(TINY, conversations=2, systems=(512,), turns=(3, 3), tokens=(700, 900))
    file, out = written(tmp_path / "agents.jsonl", config), tmp_path / "out.jsonl"
    given = [str(file), "--dry-run", "--closed", "2", "--open", "0.5", "--cap", "2", "--out", str(out)]
    assert trace.main([*given, QUICK, "--start-timeout", "400"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["loop"], row["requests"]) for row in rows] == [("closed", len(load(file))), ("open", len(load(file)))]
    for row in rows:
        assert 0.7 < row["hit_of_ideal"] <= 1.0  # Up to 127 of 500 tokens lie behind a snapshot.
        missed = row["missed"]
        kinds = ("in_flight", "partial_block", "no_snapshot", "other")
        assert missed["tokens"] == sum(missed[kind] for kind in kinds) and missed["partial_block"] > 0
        assert row["environment"]["versions"]["sglang"]
    lines = [json.loads(line) for line in out.with_suffix(".requests.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * len(load(file))
    # The server may compute the later of two concurrent requests first, so one may hit more than its ideal.
    assert all(line["total"] >= line["first_token"] > 0 for line in lines)
