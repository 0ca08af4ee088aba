"""Benchmark a pool that is full of cached conversations: the CPU time of an eviction, and decode throughput; and the
CPU time of lookups and insertions in long conversations.

    python -m benchmarks.full_pool --measure eviction,turn
    python -m benchmarks.full_pool --measure decode --resume [--conversations 5000,20000]

SGLang asks for one free page per request before each decode step, so with a full pool nearly every step evicts.

- eviction: needs no GPU. Trees of 100 to 100,000 conversations of 1,024 tokens, each one leaf. CPU time of the call
  with which SGLang's scheduler gets 256 free pages when it lacks those of one conversation.
- turn: needs no GPU. Trees with a conversation of 1 to 200 turns of 1,024 tokens. CPU times of the calls with which
  SGLang's scheduler looks up the prompt of the next turn, looks it up again (with a cache-aware `--schedule-policy`
  each waiting request before each prefill step), and inserts the end of a prompt or of an answer.
- decode: decode tokens/s (as `benchmarks.serve` measures it) with an empty pool, then with the pool full. The pool has
  room for the given number of conversations of 256 tokens, a page of SGLang. Each part is one server and one number of
  conversations, and takes 2 to 5 minutes. `--resume` runs the missing parts.

Options of models and sizes are those of `benchmarks.serve`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

from benchmarks import bench, command_line, report
from benchmarks.servers import Server

LEAVES, QUICK_LEAVES, DRY_LEAVES, EVICTIONS = (100, 1_000, 10_000, 100_000), (100, 1_000), (100,), 200
TURNS, DRY_TURNS, INSERTIONS = (1, 10, 50, 200), (10,), 20
# Tokens of a cached conversation, and conversations per request of the client.
FILL, BATCH, CLIENTS = 256, 32, 4
# This package's tree, and SGLang's with LRU on its two tree cores. Its servers use the one in Rust.
TREES = ("ours", "sglang-python", "sglang-rust")
MEASURES = ("eviction", "turn", "decode")
# Conversations that are sent per conversation that fits, so that the pool is full.
OVERFILL = 1.1


def evictions(kind: str, leaves: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield the CPU times of evictions of one kind of tree."""
    from benchmarks.full_pool_tree import FullTree, without_a_server

    with without_a_server(kind):
        for count in leaves:
            yield {
                "measure": "eviction",
                "subject": kind,
                "leaves": count,
                **FullTree(kind, count).evictions(EVICTIONS),
            }


def turns(kind: str, counts: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield the CPU times of lookups and insertions of one kind of tree."""
    from benchmarks.full_pool_tree import LongConversation, spread, without_a_server

    with without_a_server(kind):
        for count in counts:
            long = LongConversation(kind, count, INSERTIONS)
            row = {"measure": "turn", "subject": kind, "turns": count}
            waiting = SimpleNamespace(session=None)
            for call, request in (("lookup", None), ("lookup again", waiting)):
                long.look_up(long.end, request)
                times = [long.look_up(long.end, request)[0] for _ in range(10 * INSERTIONS)]
                yield {**row, "call": call, **spread(times)}
            yield {**row, "call": "insertion", **spread([long.extend() for _ in range(INSERTIONS)])}


class Bench(bench.Bench):
    def full(self, subject: str, conversations: int, number: int) -> Iterator[dict[str, Any]]:
        """Yield the decode rates of one server with the pool empty and full."""
        row = {"measure": "decode", "subject": subject, "conversations": conversations, "start": number}
        row["flags"] = self.added(subject)
        base = [*self.base(), "--max-total-tokens", str(conversations * FILL)]
        with self.serving(subject, f"full-pool-{conversations}-{number}", base) as (server, facts):
            row["tokens"] = tokens = facts["max_total_num_tokens"]
            self.warm_up(server, bursts=self.sizes.decode)
            server.flush()
            empty = {}
            for rate in self.decode(server):
                empty[rate["at"]] = rate["value"]
                yield {**rate, **row, "pool": "empty", "command": facts["command"]}
            start = time.monotonic()
            self.fill(server, tokens)
            seconds = time.monotonic() - start
            for rate in self.decode(server):
                share = rate["value"] / empty[rate["at"]] if rate["value"] and empty[rate["at"]] else None
                yield {**rate, **row, "pool": "full", "of empty": share, "fill s": seconds}

    def fill(self, server: Server, tokens: int) -> None:
        """Fill a pool of `tokens` tokens with conversations."""
        count = int(OVERFILL * tokens / FILL) + 1
        batches = [[self.prompt(FILL) for _ in range(min(BATCH, count - i))] for i in range(0, count, BATCH)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(partial(server.generate, tokens=1), batches))


def main(argv: list[str] | None = None) -> int:
    options = command_line.report_parser(__doc__)
    options.add_argument("--measure", default=",".join(MEASURES), help="some of %(default)s")
    options.add_argument("--trees", default=",".join(TREES), help="trees of evictions and turns (%(default)s)")
    options.add_argument("--conversations", default="5000,20000", help="sizes of the pool (%(default)s)")
    command_line.add_servers(options, "ours,sglang-best")
    command_line.add_decode(options)
    options.set_defaults(decode="64,256", prompt=256)
    args = options.parse_args(argv)
    command_line.resolve(options, args)
    measures, trees = args.measure.split(","), args.trees.split(",")
    if unknown := set(measures) - {*MEASURES}:
        options.error(f"--measure {min(unknown)}: expected some of {', '.join(MEASURES)}")
    if unknown := set(trees) - {*TREES}:
        options.error(f"--trees {min(unknown)}: expected some of {', '.join(TREES)}")
    pools = command_line.numbers(options, "conversations", args.conversations)
    settings = {"model": args.model, "flags": args.flags, "fill": FILL, "starts": args.starts}
    result = report.Report("full_pool", args, settings)
    if "eviction" in measures:
        for tree in trees:
            leaves = DRY_LEAVES if args.dry_run else QUICK_LEAVES if args.quick else LEAVES
            result.part(f"eviction/{tree}", partial(evictions, tree, leaves))
    if "turn" in measures:
        for tree in trees:
            result.part(f"turn/{tree}", partial(turns, tree, DRY_TURNS if args.dry_run else TURNS))
    if "decode" in measures:
        made = Bench(args, args.out)
        for count in pools:
            for number, subject in command_line.orders(args):
                name = f"decode/{subject}/{count}" + (f"/{number}" if args.starts > 1 else "")
                result.part(name, partial(made.full, subject, count, number))
    tables(result)
    return result.close()


def tables(result: report.Report) -> None:
    rows = {name: [row for row in result.rows if row["measure"] == name] for name in MEASURES}
    if rows["eviction"]:
        result.table("CPU time of an eviction", ["subject", "leaves", "p50 ms", "p95 ms", "max ms"], rows["eviction"])
    if rows["turn"]:
        columns = ["subject", "turns", "call", "p50 ms", "p95 ms", "max ms"]
        result.table("CPU times of a turn", columns, rows["turn"])
    if rows["decode"]:
        columns = ["subject", "conversations", "tokens", "pool", "at", "value", "low", "high", "of empty"]
        result.table("decode tokens/s", columns, rows["decode"])


if __name__ == "__main__":
    raise SystemExit(main())
