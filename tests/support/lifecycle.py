"""Seeded random lifecycles of requests on a real server, and the invariants that must hold after each burst.

One seed gives one list of bursts (`bursts`). A prompt that continues an answer contains the tokens of that answer, and
the interaction of concurrent requests depends on their timing. So a list of operations is reproducible, but a schedule
is not. `Driver.run` plays a burst, waits until the server is idle, runs its integrity check, and compares a sample of
answers from cached state with answers computed without it.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from dsv4_sglang.cli.check import ANSWER_TOKENS, TOKENS, Distance, distance_to_cold, too_far
from dsv4_sglang.cli.client import Server
from dsv4_sglang.cli.server import RequestError
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK

# Longest time without an answer, or until the server becomes idle.
STUCK_SECONDS = 600.0
# Answers of a burst that are compared.
COMPARED = 2
# Longest time in seconds until a client cancels the first attempt of a request that it then sends again.
CANCELLED_SECONDS = 0.02
# Tokens of the context that a prompt leaves free. SGLang rejects prompts of `max_req_input_len` (context - 6) or more.
SPARED = 7
# Modes of /pause_generation.
MODES = ("abort", "retract", "in_place")
STOPS = [" ", "e", "a", "0", "Q"]
# Share of bursts that begin with short prompts and long answers.
GROWING = 0.3


@dataclass(frozen=True)
class Shape:
    """Size of the load.

    Attributes:
        context: largest number of tokens of a prompt with its answer.
        burst: requests of a burst.
        together: concurrent requests.
        ranks: ranks of DP attention.
        text: the server has a tokenizer, which stop strings need.
        weights: checkpoints of weight updates, readable by the server.
        sleeps: release and resume the memory of the cache.
    """

    context: int = 1024
    burst: int = 24
    together: int = 6
    ranks: int = 1
    text: bool = True
    weights: tuple[str, ...] = ()
    sleeps: bool = False


@dataclass(frozen=True)
class Ask:
    """A request.

    The prompt is the leading share `kept` of the text of request `base`, then `fresh` new tokens. The text of a request
    of the previous burst is its prompt and answer; that of a request of the same burst is its prompt alone. `end` is
    how the request ends, after `after` tokens of the answer.

    The client cancels a first attempt after `cancelled` seconds, unless this is None. It aborts the attempt and repeats
    its request id, or it disconnects.
    """

    number: int
    base: int | None
    kept: float
    fresh: int
    count: int
    n: int
    end: str
    after: int
    stream: bool
    logprob: bool
    tenant: str | None
    rank: int
    cancelled: float | None = None
    disconnects: bool = False


@dataclass(frozen=True)
class Control:
    """An operator's action, done once `after` requests of the burst have begun. A pause lasts `seconds`."""

    what: str
    after: int
    seconds: float


@dataclass(frozen=True)
class Burst:
    number: int
    asks: list[Ask]
    controls: list[Control]
    flush: bool  # flush the cache after the burst


def bursts(seed: int, shape: Shape) -> Iterator[Burst]:
    """Yield bursts without end. They depend on the seed and the shape only."""
    rng, first = random.Random(seed), 0
    number = 0
    while True:
        asks = [_ask(rng, shape, first, first + i) for i in range(shape.burst)]
        growing = random.Random(f"growing {seed} {number}")
        if growing.random() < GROWING:
            asks[: shape.together] = [_growing(growing, shape, ask) for ask in asks[: shape.together]]
        controls = sorted(_controls(rng, shape), key=lambda control: control.after)
        yield Burst(number, asks, controls, flush=rng.random() < 0.3)
        first, number = first + shape.burst, number + 1


def _ask(rng: random.Random, shape: Shape, first: int, number: int) -> Ask:
    """Draw request `number`. `first` is the number of the first request of the burst."""
    ends = ["answer"] * 10 + ["abort", "abort", "gone", "stop token", "stop token"] + ["stop string"] * shape.text
    end = rng.choice(ends)
    kind = rng.random()
    base = rng.randrange(max(0, first - shape.burst), number) if number and kind < 0.7 else None
    whole = kind < 0.4
    near_block = rng.randrange(1, max(2, shape.context // BLOCK // 2)) * BLOCK + rng.randrange(-1, 2)
    fresh = rng.choice([rng.randrange(1, 20), near_block, rng.randrange(1, shape.context // 2)])
    return Ask(
        number=number,
        base=base,
        kept=1.0 if whole else rng.random(),
        fresh=min(fresh, 60) if base is not None and whole else fresh,
        count=rng.choice([1, rng.randrange(1, 60), *(rng.randrange(1, shape.context // 4) for _ in range(2))]),
        n=rng.choice([1, 1, 1, 2, 3]) if end in ("answer", "gone") else 1,
        end=end,
        after=rng.choice([0, 1, rng.randrange(1, 30)]),
        stream=rng.random() < 0.5,
        logprob=rng.random() < 0.2,
        tenant=rng.choice([None] * 9 + ["a"]),
        rank=rng.randrange(shape.ranks),
        cancelled=rng.choice([None] * 7 + [CANCELLED_SECONDS * rng.random()]),
        disconnects=rng.random() < 0.5,
    )


def _growing(rng: random.Random, shape: Shape, ask: Ask) -> Ask:
    """Make a request one of many that are admitted together and outgrow a small pool, so that some are retracted."""
    count = rng.randrange(shape.context // 4, shape.context // 2)
    return replace(ask, base=None, fresh=rng.randrange(1, 20), count=count, n=1, end="answer", cancelled=None)


def _hints(rng: random.Random) -> list[dict[str, Any]]:
    """Draw the hints of a request."""
    payloads: dict[str, dict[str, Any]] = {}
    if rng.random() < 0.2:
        payloads["pin"] = {"name": rng.choice("ab"), "seconds": rng.choice([0, 1, 5])}
    if rng.random() < 0.2:
        payloads |= rng.choice([{"retain": {"seconds": 5, "weight": 8}}, {"demote": {}}])
    return [
        {"action_id": kind, "action_type": kind, "action_version": "1", "payload": payload}
        for kind, payload in payloads.items()
    ]


def _controls(rng: random.Random, shape: Shape) -> Iterator[Control]:
    for what, chance in (("pause", 0.6), ("flush", 0.3), ("abort all", 0.15), ("check", 0.8), ("check", 0.8)):
        if rng.random() < chance:
            named = f"pause {rng.choice(MODES)}" if what == "pause" else what
            yield Control(named, rng.randrange(shape.burst), rng.choice([0.0, 0.05, 0.3]))
    if shape.weights and rng.random() < 0.25:
        yield Control(f"weights {rng.choice(shape.weights)}", rng.randrange(shape.burst), 0.0)
    if shape.sleeps and rng.random() < 0.15:
        yield Control("sleep", rng.randrange(shape.burst), rng.choice([0.0, 0.05, 0.3]))


class Wrong(Exception):
    """An invariant is violated."""


@dataclass
class Driver:
    """Plays the bursts of a seed.

    `tolerance` bounds the difference of log p between warm and cold answers on servers whose compute is exact; see
    `cli.check.too_far`.
    """

    url: str
    seed: int
    shape: Shape
    tolerance: float | None = None
    seen: Counter[str] = field(default_factory=Counter)  # event -> number of occurrences
    distances: list[Distance] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = Server.at(self.url)
        self.texts: dict[int, list[int]] = {}  # prompt and answer of each request of the previous burst
        self._begun, self._changed = 0, threading.Condition()

    def run(self, burst: Burst) -> None:
        """Play a burst and check the server.

        Raises:
            Wrong: an invariant is violated.
            OSError: the server is gone.
        """
        prompts = self.prompts(burst)
        self._begun = 0
        pool, operator = ThreadPoolExecutor(self.shape.together), ThreadPoolExecutor(1)
        try:
            controls = operator.submit(self._operate, burst)
            answers = list(pool.map(lambda ask: self._ask(ask, prompts[ask.number]), burst.asks))
            controls.result()
        finally:
            # After an error the remaining answers are not awaited; the owner of the server stops it.
            for threads in (pool, operator):
                threads.shutdown(wait=False, cancel_futures=True)
        self.texts = {ask.number: prompts[ask.number] + answer for ask, answer in zip(burst.asks, answers)}
        self._settle()
        self._compare(burst, prompts)
        if burst.flush:
            self.seen[f"flush when idle {self._post('/flush_cache')}"] += 1
            self.check()
        self.seen["bursts"] += 1

    # Requests

    def prompts(self, burst: Burst) -> dict[int, list[int]]:
        """Return the prompt tokens of each request, by number."""
        found: dict[int, list[int]] = {}
        for ask in burst.asks:
            rng = random.Random(self.seed * 1_000_003 + ask.number)
            fresh = rng.choices(TOKENS, k=ask.fresh)
            base: list[int] = []
            if ask.base is not None:
                base = found[ask.base] if ask.base in found else self.texts.get(ask.base, [])
            # The comparison sends prompt and answer together as one prompt, which has to fit too.
            room = self.shape.context - ANSWER_TOKENS - max(ask.count + 2, SPARED)
            kept = base[: min(round(ask.kept * len(base)), max(0, room - len(fresh)))]
            found[ask.number] = [*kept, *fresh][:room]
        return found

    def _ask(self, ask: Ask, prompt: list[int]) -> list[int]:
        """Send the request and end it as planned. Return the tokens of its answer, as far as they are known."""
        with self._changed:
            self._begun += 1
            self._changed.notify_all()
        sampling: dict[str, Any] = {"max_new_tokens": ask.count, "temperature": 0, "n": ask.n}
        # SGLang reserves all tokens of a request that ignores the end token, so that only the others are retracted.
        sampling["ignore_eos"] = ask.end in ("abort", "gone")
        rng = random.Random(self.seed * 1_000_003 + ask.number)
        if ask.end == "stop token":
            sampling["stop_token_ids"] = rng.sample(TOKENS, 60)
        if ask.end == "stop string":
            sampling["stop"] = STOPS
        cut = ask.end in ("abort", "gone")
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling, "stream": ask.stream or cut}
        if ask.logprob:
            body |= {"return_logprob": True, "logprob_start_len": rng.choice([-1, len(prompt) - 1, len(prompt) // 2])}
        if ask.tenant:
            body["extra_key"] = ask.tenant
        if actions := _hints(random.Random(f"hints {self.seed} {ask.number}")):
            body["kv_hints"] = {"protocol_version": "1", "message_id": "m", "actions": actions}
        if ask.end == "abort" or ask.cancelled is not None:
            body["rid"] = f"{ask.number}-{uuid.uuid4().hex}"
        if self.shape.ranks > 1:
            body["routed_dp_rank"] = ask.rank
        self.seen["requests"] += 1
        if ask.cancelled is not None:
            body = self._cancel(ask, ask.cancelled, body)
        with closing(self._begin(body)) as connection:
            if cut and not ask.after:
                if ask.end == "gone":
                    self.seen["gone"] += 1
                    return []
                self._post("/abort_request", {"rid": body["rid"]})
            response = connection.getresponse()
            if response.status != 200:
                return self._error(f"{response.status}: {response.read().decode(errors='replace')}")
            if body["stream"]:
                return self._streamed(ask, body.get("rid"), response)
            answers = json.loads(response.read())
        first = answers[0] if isinstance(answers, list) else answers
        return self._ended(first)

    def _begin(self, body: dict[str, Any]) -> http.client.HTTPConnection:
        """Send a request without waiting for its response, before which it may be cut off."""
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=STUCK_SECONDS)
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def _cancel(self, ask: Ask, seconds: float, body: dict[str, Any]) -> dict[str, Any]:
        """Send the request and cancel it after `seconds`. Return the body of the second attempt."""
        with closing(self._begin(body)) as connection:
            time.sleep(seconds)
            if ask.disconnects:
                self.seen["cancelled by disconnecting"] += 1
                return {**body, "rid": f"{body['rid']}-again"}  # the server notices after seconds that a client left
            self._post("/abort_request", {"rid": body["rid"]})
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        if response.status != 200:
            self._error(f"{response.status}: {text}")
        self.seen["cancelled by abort"] += 1
        return body

    def _streamed(self, ask: Ask, rid: str | None, response: http.client.HTTPResponse) -> list[int]:
        last: dict[str, Any] = {}
        aborted = not ask.after
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                return self._error(json.dumps(chunk["error"]))
            if chunk.get("index", 0) == 0:
                last = chunk
            reached = chunk["meta_info"]["completion_tokens"] >= ask.after
            if ask.end == "gone" and reached:
                self.seen["gone"] += 1
                return list(last.get("output_ids") or [])
            if ask.end == "abort" and reached and not aborted:
                aborted = True
                self._post("/abort_request", {"rid": rid})
        return self._ended(last)

    def _ended(self, answer: dict[str, Any]) -> list[int]:
        reason = (answer.get("meta_info") or {}).get("finish_reason") or {}
        self.seen[f"ended by {reason.get('type')}"] += 1
        if reason.get("type") not in ("length", "stop", "abort"):
            raise Wrong(f"an answer ended by {reason}: {json.dumps(answer)[:500]}")
        cached = answer["meta_info"].get("cached_tokens") or 0
        self.seen["hits"] += cached > 0
        self.seen["tokens hit"] += cached
        return list(answer.get("output_ids") or [])

    def _error(self, text: str) -> list[int]:
        """Accept the error answer of a request that was aborted before it began, or whose pin did not fit. Raise
        `Wrong` for any other."""
        if "kv_hints: the pin" in text:
            self.seen["pins rejected"] += 1
            return []
        if "abort" not in text.lower():
            raise Wrong(f"a request was answered {text[:500]}")
        self.seen["aborted before it began"] += 1
        return []

    def _post(self, path: str, body: Any = None) -> int:
        """Return the HTTP status."""
        try:
            self.server.request(path, body or {}, STUCK_SECONDS)
        except RequestError as error:
            return error.code
        return 200

    # The operator

    def _operate(self, burst: Burst) -> None:
        for control in burst.controls:
            with self._changed:
                self._changed.wait_for(lambda after=control.after: self._begun > after, timeout=STUCK_SECONDS)
            if control.what.startswith("pause"):
                self._pause(control)
            elif control.what == "flush":
                self.seen[f"flush {self._post('/flush_cache')}"] += 1  # 400 while requests run
            elif control.what == "abort all":
                self._post("/abort_request", {"abort_all": True})
                self.seen["abort all"] += 1
            elif control.what == "check":
                self.check()
            elif control.what.startswith("weights"):
                self.update_weights(control.what.removeprefix("weights "))
            elif control.what == "sleep":
                self._sleep(control.seconds)

    def update_weights(self, checkpoint: str) -> None:
        self.server.request("/update_weights_from_disk", {"model_path": checkpoint}, STUCK_SECONDS)
        self.seen["weight updates"] += 1

    def _sleep(self, seconds: float) -> None:
        body = {"tags": ["kv_cache"]}
        self.server.request("/release_memory_occupation", body, STUCK_SECONDS)
        time.sleep(seconds)
        self.server.request("/resume_memory_occupation", body, STUCK_SECONDS)
        self.seen["sleeps"] += 1

    def _pause(self, control: Control) -> None:
        mode = control.what.split()[1]
        try:
            self._post("/pause_generation", {"mode": mode})
            time.sleep(control.seconds)
            self.check()
            if mode == "retract":
                self.seen[f"flush while paused {self._post('/flush_cache')}"] += 1
        finally:
            self._post("/continue_generation")
        self.seen[control.what] += 1

    # What must hold

    def _settle(self) -> None:
        """Wait until the server is idle and sound. It takes seconds to notice clients that disconnected."""
        deadline = time.monotonic() + STUCK_SECONDS
        while True:
            reports = self.check()
            if all(report["idle"] for report in reports):
                return
            if time.monotonic() > deadline:
                raise Wrong(f"not idle in {STUCK_SECONDS:.0f} s: {json.dumps(reports)[:2000]}")
            time.sleep(0.05)

    def check(self) -> list[dict[str, Any]]:
        """Return the reports of the integrity check; raise `Wrong` if there are findings."""
        reports = self.server.integrity()
        if not reports:
            raise Wrong("the server was started without the option integrity_check")
        wrong = [
            f"DP{report['dp_rank']} TP{report['tp_rank']} {finding['what']}: {finding['wrong']}"
            for report in reports
            for finding in report["findings"]
        ]
        if wrong:
            states = ", ".join("idle" if report["idle"] else f"{report['requests']} requests" for report in reports)
            raise Wrong(f"{len(wrong)} findings ({states}):\n" + "\n".join(wrong))
        self.seen["checked busy" if any(report["requests"] for report in reports) else "checked idle"] += 1
        return reports

    def _compare(self, burst: Burst, prompts: dict[int, list[int]]) -> None:
        """Compare warm and cold answers to some of the last prompts, which are most likely still cached.

        A prompt without a hit is in the cache afterwards, so it is compared a second time.
        """
        rng = random.Random(self.seed * 7 + burst.number)
        last = [ask for ask in burst.asks if len(prompts[ask.number]) > BLOCK][-2 * self.shape.together :]
        for ask in rng.sample(last, min(COMPARED, len(last))):
            fields: dict[str, Any] = {"routed_dp_rank": ask.rank} if self.shape.ranks > 1 else {}
            ids, name = prompts[ask.number], f"request {ask.number}"
            if not self.compare(ids, name, **fields):
                self.compare(ids, name, **fields)

    def compare(self, ids: list[int], name: str, **fields: Any) -> int:
        """Compare a warm answer to a prompt with cold ones. Return the number of tokens that it hit.

        Args:
            ids: token ids of the prompt.
            name: name of the prompt in a message.
            **fields: fields of the requests.

        Raises:
            Wrong: the answers differ by more than rounding explains.
        """
        distance = distance_to_cold(self.server, ids, **fields)
        self.distances.append(distance)
        self.seen["compared warm"] += distance.cached > 0
        noise = sum(other.cold for other in self.distances) / len(self.distances)
        if too_far(distance, noise, self.tolerance):
            raise Wrong(f"{name} ({len(ids)} tokens): the warm answer differs from the cold answer: {distance}")
        return distance.cached


def play(driver: Driver, requests: int, limit: float, after_burst: Callable[[Burst], None] | None = None) -> None:
    """Play bursts until `requests` requests were sent, or until another burst would exceed the time limit.

    Args:
        driver: driver of the server.
        requests: number of requests after which to stop.
        limit: seconds in total. The next burst is assumed to take as long as the longest so far.
        after_burst: called after each burst. Its errors are reported like those of the burst.

    Raises:
        Wrong: an invariant is violated. The message has the seed and the number of the burst.
    """
    end, longest = time.monotonic() + limit, 0.0
    for burst in bursts(driver.seed, driver.shape):
        begin = time.monotonic()
        try:
            driver.run(burst)
            if after_burst is not None:
                after_burst(burst)
        except (Wrong, OSError, RuntimeError, http.client.HTTPException) as error:
            raise Wrong(f"seed {driver.seed}, burst {burst.number}: {type(error).__name__}: {error}") from error
        longest = max(longest, time.monotonic() - begin)
        if driver.seen["requests"] >= requests or time.monotonic() + longest > end:
            return
