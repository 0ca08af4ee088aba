"""Seeded traces of agent conversations: the order of the prompts, and the hits of an infinite cache.

A conversation starts from one of a few system prompts and grows by conversation turns: a message or tool output is
appended and the model answers. Some conversations are abandoned and some branch: a message is rewritten, or a sub-agent
starts from a turn and the main branch continues later from the same turn. A trace interleaves the turns of many
conversations; each conversation pauses between its turns.

    python -m benchmarks.agent_trace --agents 32 --seed 0 --out agents.jsonl

This command writes a trace file for `benchmarks.trace`. The load is coding agents that share long system prompts and
tool definitions, with sub-agents that branch and return and with pauses for tool calls. The command prints the hit
rate of an unbounded cache.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count as counter
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.trace_file import HASH_BLOCK, live_tokens, perfect_hits
from benchmarks.trace_file import load as read

# Divisors of the lengths of agents. System prompts stay whole hash blocks.
SHORTER = (1, 2, 4, 8)


@dataclass(frozen=True)
class Turn:
    """One conversation turn: a prompt and its answer.

    The prompt is the first `cut` tokens of turn `base` of the same conversation (prompt and answer), followed by
    `append` new tokens. With `base` -1 the first `cut` tokens are the system prompt. The answer has `generate` tokens.
    `number` counts the turns of the conversation.
    """

    conversation: int
    number: int
    system: int
    base: int
    cut: int
    append: int
    generate: int

    @property
    def prompt(self) -> int:
        return self.cut + self.append

    @property
    def end(self) -> int:
        """Length of prompt and answer in tokens."""
        return self.prompt + self.generate

    @property
    def key(self) -> tuple[int, int]:
        return self.conversation, self.number


@dataclass(frozen=True)
class TraceConfig:
    """Parameters of a trace.

    Attributes:
        conversations: number of conversations in the trace.
        active: conversations alive at a time. One that ends is replaced until all `conversations` have started.
        systems: lengths of the system prompts in tokens.
        turns: smallest and largest number of turns per conversation.
        tokens: smallest and largest length of a conversation.
        generate: smallest and largest length of an answer in tokens.
        abandoned: share of conversations that stop before their last turn.
        branching: probability that a turn branches.
        branches: cumulative shares of rewritten messages and of sub-agents among the branches. The remaining branches
            return to an earlier turn.
        midway: start the first conversations at random turns, like a server that has been running for a long time.
            The full load is then present from the start.
    """

    conversations: int
    active: int
    seed: int = 0
    systems: tuple[int, ...] = (1024, 2048, 6144)
    turns: tuple[int, int] = (10, 40)
    tokens: tuple[int, int] = (2_000, 200_000)
    generate: tuple[int, int] = (32, 1024)
    abandoned: float = 0.2
    branching: float = 0.08
    branches: tuple[float, float] = (0.5, 0.8)
    midway: bool = False


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def script(config: TraceConfig, conversation: int) -> list[Turn]:
    """Return the turns of one conversation, in order."""
    rng = random.Random(config.seed * 1_000_003 + conversation)
    system = rng.randrange(len(config.systems))
    count = rng.randint(*config.turns)
    total = max(_log_uniform(rng, *config.tokens), config.systems[system] + 16 * count)
    stop = rng.randint(1, count) if rng.random() < config.abandoned else count
    weights = [rng.lognormvariate(0.0, 1.2) for _ in range(count)]
    budget = (total - config.systems[system]) / sum(weights)
    turns: list[Turn] = []
    base, resume = -1, []
    for number, weight in enumerate(weights[:stop]):
        size = max(16, int(budget * weight))
        generate = min(max(config.generate[0], int(size * rng.uniform(0.05, 0.4))), config.generate[1])
        append = max(8, size - generate)
        cut = config.systems[system] if base < 0 else turns[base].end
        if base >= 0 and rng.random() < config.branching:
            kind = rng.random()
            last = turns[base]
            if kind < config.branches[0]:  # rewrite the last message from a random token on
                cut = last.cut + rng.randint(0, last.append)
            elif kind < config.branches[1]:  # a sub-agent: the main branch continues from this turn later
                resume.append((number + rng.randint(2, 4), base))
            else:  # return to an earlier turn
                base = rng.randrange(number)
                cut = turns[base].end
        turns.append(Turn(conversation, number, system, base, cut, append, generate))
        base = number
        if resume and resume[0][0] <= number:
            base = resume.pop(0)[1]
    return turns


def _from(turns: list[Turn], first: int, config: TraceConfig) -> list[Turn]:
    """Return the turns from number `first` on, none of which depends on an earlier turn.

    Turn `first` brings the whole prompt as new tokens; later turns that branch before it branch from it instead.
    """
    begin = turns[first]
    system = config.systems[begin.system]
    rest = [replace(begin, base=-1, cut=system, append=begin.prompt - system)]
    for turn in turns[first + 1 :]:
        if turn.base < first:
            turn = replace(turn, base=first, cut=min(turn.cut, begin.end))
        rest.append(turn)
    return rest


def trace(config: TraceConfig) -> Iterator[Turn]:
    """Yield all turns in the order of arrival. A turn never precedes its base."""
    return (turn for _, turn in timed(config))


def timed(config: TraceConfig) -> Iterator[tuple[float, Turn]]:
    """Yield the turns of `trace` with their arrival times. The unit is the median pause."""
    rng = random.Random(config.seed)
    started = min(config.active, config.conversations)
    queue = [(rng.random(), c, 0) for c in range(started)]
    heapq.heapify(queue)
    scripts = {c: script(config, c) for c in range(started)}
    if config.midway:
        scripts = {c: _from(turns, rng.randrange(len(turns)), config) for c, turns in scripts.items()}
        queue = [(when, c, scripts[c][0].number) for when, c, _ in queue]
    while queue:
        now, conversation, number = heapq.heappop(queue)
        turns = scripts[conversation]
        yield now, turns[number - turns[0].number]
        if number < turns[-1].number:
            heapq.heappush(queue, (now + rng.lognormvariate(0.0, 0.7), conversation, number + 1))
            continue
        del scripts[conversation]
        if started < config.conversations:
            scripts[started] = script(config, started)
            heapq.heappush(queue, (now + rng.lognormvariate(0.0, 0.7), started, 0))
            started += 1


def load(active: int, visits: int, **fields: Any) -> list[Turn]:
    """Return an average of `visits` turns for each of `active` conversations that start midway.

    Args:
        active: conversations alive at a time.
        visits: average number of turns per conversation.
        **fields: further fields of `TraceConfig`.
    """
    return list(islice(trace(TraceConfig(2 * active, active, midway=True, **fields)), visits * active))


def rounds(conversations: int, tokens: int, count: int, append: int = 200, generate: int = 16) -> Iterator[Turn]:
    """Yield the turns of conversations that share nothing, in round-robin order: the worst case for LRU.

    Args:
        conversations: number of conversations.
        tokens: length of the first prompt of each.
        count: turns of each conversation.
        append: new prompt tokens of each later turn.
        generate: answer tokens of each turn.
    """
    for _, turns in growing([(conversations, count - 1)], tokens, append, generate, first=generate):
        yield from turns


def growing(
    stages: Iterable[tuple[int, int]], tokens: int, append: int = 200, generate: int = 16, first: int = 16
) -> Iterator[tuple[int, list[Turn]]]:
    """Yield round-robin turns of a growing number of conversations that share nothing.

    A stage is (conversations, rounds). Each stage yields (0, first turns of its new conversations), then (1, turns),
    (2, turns), ... with one turn of every conversation each.

    Args:
        stages: pairs of the number of conversations and the number of rounds.
        tokens: length of the first prompt of a conversation.
        append: new prompt tokens of each later turn.
        generate: answer tokens of each later turn.
        first: answer tokens of a first turn.
    """
    last: list[Turn] = []
    for count, times in stages:
        new = [Turn(c, 0, 0, -1, 0, tokens, first) for c in range(len(last), count)]
        yield 0, new
        last = [*last, *new]
        for number in range(1, times + 1):
            last = [
                Turn(turn.conversation, turn.number + 1, 0, turn.number, turn.end, append, generate) for turn in last
            ]
            yield number, last


def without_reasoning(turns: Iterable[Turn], edited: int = 0) -> Iterator[Turn]:
    """Yield the turns of chats whose next prompt leaves out the reasoning of the last answer, two thirds of it.

    Args:
        turns: turns of conversations that repeat their answers.
        edited: tokens at the end of the last prompt that the next one replaces, too.
    """
    before: dict[tuple[int, int], Turn] = {}
    for turn in turns:
        last = before.get((turn.conversation, turn.base))
        if last is not None:
            cut = min(turn.cut, last.prompt - edited)
            turn = replace(turn, cut=cut, append=turn.append + edited + last.generate // 3)
        before[turn.key] = turn
        yield turn


class Ideal:
    """Hits of an infinite cache, in tokens.

    The last token of an answer has no KV entry until the next turn continues from it, so it does not count.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}
        self._systems: set[int] = set()

    def hit(self, turn: Turn) -> int:
        if turn.base >= 0:
            base = turn.conversation, turn.base
            known = self._known[base]
            self._known[base] = max(known, turn.cut)
        else:
            known = turn.cut if turn.system in self._systems else 0
        self._systems.add(turn.system)
        self._known[turn.key] = turn.end - 1
        return min(turn.cut, known, turn.prompt - 1)


def agents(count: int, sessions: int, seed: int = 0, shorter: int = 1, *, midway: bool = False) -> TraceConfig:
    """Return the load of `count` concurrent coding agents, `sessions` sessions in total.

    Args:
        count: concurrent sessions.
        sessions: sessions in total.
        seed: seed of the load.
        shorter: factor by which prompts and answers are shorter than those of real agents, one of SHORTER.
        midway: as in `TraceConfig`.
    """
    return TraceConfig(
        conversations=sessions,
        active=count,
        seed=seed,
        systems=tuple(tokens // shorter for tokens in (16_384, 20_480, 24_576, 32_768)),
        turns=(30, 90),
        tokens=(60_000 // shorter, 180_000 // shorter),
        generate=(32 // shorter, 600 // shorter),
        branching=0.1,
        branches=(0.1, 0.95),
        midway=midway,
    )


def requests(config: TraceConfig, pause_s: float) -> Iterator[dict[str, Any]]:
    """Yield the turns as lines of Mooncake's trace format, with AIPerf's fields for sessions.

    Each line has `session_id`. All lines of a session but the first have `delay`: milliseconds from the end of the
    session's previous answer to this request. The first turn that continues from the end of another turn fills the
    last block of that turn; other branches share whole blocks only.

    Args:
        config: parameters of the trace.
        pause_s: median pause for a tool call, in seconds.
    """
    fresh = counter()
    systems = [[next(fresh) for _ in range(tokens // HASH_BLOCK)] for tokens in config.systems]
    paths: dict[tuple[int, int], list[int]] = {}
    ends: dict[tuple[int, int], int] = {}
    before: dict[int, float] = {}
    for now, turn in timed(config):
        past = paths[turn.conversation, turn.base] if turn.base >= 0 else systems[turn.system]
        base = turn.conversation, turn.base
        kept = past[: turn.cut // HASH_BLOCK]
        if turn.cut == ends.get(base):  # the first continuation of `base` fills its last block
            kept = past
            del ends[base]
        path = kept + [next(fresh) for _ in range(-(-turn.end // HASH_BLOCK) - len(kept))]
        paths[turn.key], ends[turn.key] = path, turn.end
        delay = {"delay": round(1e3 * pause_s * (now - last))} if (last := before.get(turn.conversation)) else {}
        before[turn.conversation] = now
        yield {
            "timestamp": round(1e3 * pause_s * now),
            "input_length": turn.prompt,
            "output_length": turn.generate,
            "hash_ids": path[: -(-turn.prompt // HASH_BLOCK)],
            "session_id": turn.conversation,
            **delay,
        }


def main(argv: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--agents", type=int, default=32, help="concurrent sessions (%(default)s)")
    options.add_argument("--sessions", type=int, help="sessions in total (default: two per agent)")
    options.add_argument("--pause", type=float, default=3.0, help="median pause for a tool, in seconds (%(default)s)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--shorter", type=int, default=1, choices=SHORTER, help="divisor of all lengths (%(default)s)")
    options.add_argument("--midway", action="store_true", help="sessions start midway: all tokens live from the start")
    options.add_argument("--out", type=Path, required=True, help="JSON lines")
    args = options.parse_args(argv)
    config = agents(args.agents, args.sessions or 2 * args.agents, args.seed, args.shorter, midway=args.midway)
    args.out.write_text("".join(json.dumps(line) + "\n" for line in requests(config, args.pause)))
    made = read(args.out)
    prompts = sum(one.tokens for one in made)
    hits = f"{sum(perfect_hits(made)) / prompts:.1%} ideal hits"
    print(f"{len(made)} requests, {prompts} prompt tokens, {hits}, {live_tokens(made)} live tokens")


if __name__ == "__main__":
    main()
