"""Benchmark a pool that is full of cached conversations: the CPU time of an eviction, and decode throughput.

    python -m benchmarks.full_pool --measure eviction
    python -m benchmarks.full_pool --measure decode --resume [--conversations 5000,20000] [--servers ours,in-tree]

SGLang asks for one free page per request before each decode step, so with a full pool nearly every step evicts.

- eviction: needs no GPU. Trees of 100 to 100,000 conversations of 1,024 tokens, each one leaf. CPU time of the call
  with which SGLang's scheduler gets 256 free pages when it lacks those of one conversation.
- decode: decode tokens/s (as `benchmarks.serve` measures it) with an empty pool, then with the pool full. The pool has
  room for the given number of conversations of 256 tokens, a page of SGLang. Each part is one server and one number of
  conversations, and takes 2 to 5 minutes. `--resume` runs the missing parts.

SGLang's server has its best prefill graphs (`benchmarks.turns`). Options of models and sizes are those of
`benchmarks.serve`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks import report, serve, serve_plan, servers, turns
from benchmarks.servers import Server

LEAVES, QUICK_LEAVES, DRY_LEAVES, EVICTIONS = (100, 1_000, 10_000, 100_000), (100, 1_000), (100,), 200
# Tokens of a cached conversation, and conversations per request of the client.
FILL, BATCH, CLIENTS = 256, 32, 4
# Conversations that are sent per conversation that fits, so that the pool is full.
OVERFILL = 1.1


def evictions(kind: str, leaves: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield the CPU times of evictions of one kind of tree."""
    from benchmarks.full_pool_tree import FullTree, without_a_server

    with without_a_server():
        for count in leaves:
            yield {
                "measure": "eviction",
                "subject": kind,
                "leaves": count,
                **FullTree(kind, count).evictions(EVICTIONS),
            }


class Bench(serve.Bench):
    def full(self, subject: str, conversations: int) -> Iterator[dict[str, Any]]:
        """Yield the decode rates of one server with the pool empty and full."""
        server = self.server(subject, f"full-pool-{conversations}", self.args.memory)
        server.argv += ["--max-total-tokens", str(conversations * FILL)]
        server.argv += [] if subject == "ours" else turns.BEST_FLAGS.split()
        row = {"measure": "decode", "subject": subject, "conversations": conversations}
        with servers.running(server, self.args.start_timeout):
            tokens = servers.max_total_tokens(server.url)
            self.warm_up(server, ["decode"])
            server.flush()
            empty = {}
            for rate in self.decode(server):
                empty[rate["at"]] = rate["value"]
                yield {**rate, **row, "pool": "empty", "tokens": tokens}
            start = time.monotonic()
            self.fill(server, tokens)
            seconds = time.monotonic() - start
            for rate in self.decode(server):
                share = rate["value"] / empty[rate["at"]] if rate["value"] and empty[rate["at"]] else None
                yield {**rate, **row, "pool": "full", "tokens": tokens, "of empty": share, "fill s": seconds}

    def fill(self, server: Server, tokens: int) -> None:
        """Fill a pool of `tokens` tokens with conversations."""
        count = int(OVERFILL * tokens / FILL) + 1
        batches = [[self.prompt(FILL) for _ in range(min(BATCH, count - i))] for i in range(0, count, BATCH)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(partial(server.generate, tokens=1), batches))


def main(argv: list[str] | None = None) -> int:
    options = report.parser(__doc__)
    options.add_argument("--measure", default="eviction,decode", help="some of %(default)s")
    options.add_argument("--trees", default="ours,sglang-python,sglang-rust", help="trees of evictions (%(default)s)")
    options.add_argument("--servers", default="ours,in-tree", help="servers of decode (%(default)s)")
    options.add_argument("--conversations", default="5000,20000", help="sizes of the pool (%(default)s)")
    options.add_argument("--flags", default="", help="more flags for both servers")
    serve_plan.add_options(options)
    options.set_defaults(decode="64,256", prompt=256)
    args = options.parse_args(argv)
    measures, args.measure = args.measure.split(","), "decode"
    if unknown := set(measures) - {"eviction", "decode"}:
        options.error(f"--measure {min(unknown)}: expected eviction, decode or both")
    serve_plan.resolve(options, args)
    settings = {"model": args.model, "flags": args.flags, "best_flags": turns.BEST_FLAGS, "fill": FILL}
    result = report.Report("full_pool", args, settings)
    if "eviction" in measures:
        for tree in args.trees.split(","):
            leaves = DRY_LEAVES if args.dry_run else QUICK_LEAVES if args.quick else LEAVES
            result.part(f"eviction/{tree}", partial(evictions, tree, leaves))
    if "decode" in measures:
        bench = Bench(args)
        for count in args.conversations.split(","):
            for subject in ["ours"] if args.dry_run else args.servers.split(","):
                result.part(f"decode/{subject}/{count}", partial(bench.full, subject, int(count)))
    tables(result)
    return result.close()


def tables(result: report.Report) -> None:
    rows = {name: [row for row in result.rows if row["measure"] == name] for name in ("eviction", "decode")}
    if rows["eviction"]:
        result.table("CPU time of an eviction", ["subject", "leaves", "p50 ms", "p95 ms", "max ms"], rows["eviction"])
    if rows["decode"]:
        columns = ["subject", "conversations", "tokens", "pool", "at", "value", "low", "high", "of empty"]
        result.table("decode tokens/s", columns, rows["decode"])


if __name__ == "__main__":
    raise SystemExit(main())
