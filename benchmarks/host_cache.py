"""Measure the host cache of a whole server: its memory, what it costs decode steps, and a restart; ours and SGLang's.

    python -m benchmarks.host_cache --tp 2 --servers ours,sglang --out OUT/host_cache.jsonl
    python -m benchmarks.host_cache --tp 2 --servers ours --measure restart --storages shm,file --out F
    python -m benchmarks.report F --servers ours,sglang

The copies alone, of all ranks at once, are those of `benchmarks.tier --ranks 2`. Measures:

- memory: tokens that the host cache holds per GB (10^9 bytes) of memory that it takes from the machine. The memory is
  the proportional set size (PSS) of all processes, with the host cache less without, so that shared pages count once.
  `copies` of ours is that memory over --size: 1 if all processes share one copy, N if each of N has its own. SGLang's
  size is `SGLANG_RATIO` of its pool on the GPU.
- decode: decode rates with the host cache and without, as in `benchmarks.serve`. Prompts are new, so all are saved.
- restart: time to the first token of conversations that a former server has stored, one after the other, and of new
  prompts of the same length ("cold"). The former server ends when its pages are stored. Files are written back and
  dropped from the page cache before the restart. SGLang has no storage `shm`.

In a dry run the server has two processes on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from array import array
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import command_line, servers
from benchmarks.bench import Bench, append_rows
from benchmarks.client import Answer, Client
from benchmarks.report import scratch_folder, spread
from dsv4_sglang.cli.client import samples
from dsv4_sglang.srt.host_cache.folder import FOLDERS
from dsv4_sglang.srt.host_cache.stored_segments import SHM, stored_segments

MEASURES = ("memory", "decode", "restart")
GB = 10**9
# Sizes of a dry run.
DRY = {"size": 1, "conversations": 3, "tokens": 800}
DEFAULTS = {"size": 20, "conversations": 8, "tokens": 20_000}
DRY_PROCESSES = 2
# SGLang's host cache over its pool on the GPU: 20 GB per process with the default memory of `flashshape`.
SGLANG_RATIO = 0.25
# Seconds without a new page after which a storage is taken to be complete.
SETTLED_SECONDS = 3.0


def proportional_bytes(process: int) -> int:
    """Return the proportional set size of a process and its descendants, in bytes."""
    own = psutil.Process(process)
    return sum(member.memory_full_info().pss for member in (own, *own.children(recursive=True)))


def host_tokens(url: str) -> int:
    """Return the tokens that the host cache of a server has room for, by SGLang's metric."""
    text = servers.Endpoint(url).request("/metrics", timeout=30)
    return int(max(sample.value for sample in samples(text, "sglang:hicache_host_total_tokens")))


def stored_pages(storage: str, folder: Path) -> int:
    """Return the number of pages in the folder of a storage."""
    if storage == SHM:
        return sum(segment.pages for segment in stored_segments(folder))
    return len(list(folder.glob("*.bin")))


def drop_from_page_cache(folder: Path) -> None:
    """Write the files of a folder back, and drop them from the page cache. Files in memory stay."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class HostBench(Bench):
    def host_flags(self, subject: str) -> list[str]:
        """Return the flags of the host cache of a server. SGLang rejects --hicache-size for DeepSeek-V4."""
        if command_line.is_ours(subject):
            return ["--enable-hierarchical-cache", "--hicache-size", str(self.args.size)]
        return ["--enable-hierarchical-cache", "--hicache-ratio", str(SGLANG_RATIO)]

    def with_and_without(self, subject: str, number: int) -> Iterator[dict[str, Any]]:
        """Yield the decode rates of a server without a host cache and of one with it, and then the memory."""
        used: dict[str, int] = {}
        for tier, flags in (("no host cache", []), ("host cache", self.host_flags(subject))):
            label = f"{tier.replace(' ', '-')}-{number}"
            base = [*self.base(), "--enable-metrics", *flags]
            with self.serving(subject, label, base) as (server, facts):
                assert server.process is not None
                self.warm_up(server, bursts=self.sizes.decode)
                if "decode" in self.args.measure:
                    yield from ({**row, "tier": tier, "server": facts} for row in self.decode(server))
                used[tier] = proportional_bytes(server.process.pid)
                if flags and "memory" in self.args.measure:
                    taken = used["host cache"] - used["no host cache"]
                    tokens = host_tokens(server.url)
                    row = {"value": tokens / taken * GB, "tokens": tokens, "GB": taken / GB}
                    if command_line.is_ours(subject):
                        row["copies"] = taken / (self.args.size * GB)
                    yield {"measure": "tokens per GB of host memory", **row, "server": facts}

    def restart(self, subject: str, number: int, storage: str) -> Iterator[dict[str, Any]]:
        """Yield the times to the first token after a restart, of stored conversations and of new prompts.

        Args:
            subject: key of `command_line.SERVERS`.
            number: number of the start.
            storage: value of --hicache-storage-backend.
        """
        conversations = [self.conversation() for _ in range(self.args.conversations)]
        # Random weights of the same seed, because names of pages depend on the weights.
        base = [*self.base(), *self.host_flags(subject), "--random-seed", "1", "--hicache-storage-backend", storage]
        base += ["--hicache-storage-prefetch-policy", "wait_complete", "--enable-cache-report"]
        with contextlib.ExitStack() as stack:
            folder = scratch_folder("host_cache")
            if storage == SHM:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="host_cache_", dir="/dev/shm")))
            serving = partial(self.serving, subject, base=base, **{FOLDERS[storage][0]: str(folder)})
            with serving(label=f"{storage}-{number}-first") as (server, _):
                for conversation in conversations:
                    Client(server.url).generate(conversation, 1)
                self.wait_until_stored(storage, folder)
            drop_from_page_cache(folder)
            with serving(label=f"{storage}-{number}-second") as (server, facts):
                client = Client(server.url)
                client.generate(self.conversation(), 1)  # compiles what both need
                for at, prompts in ((storage, conversations), ("cold", [self.conversation() for _ in conversations])):
                    answers = [client.generate(prompt, 1) for prompt in prompts]
                    yield {"at": at, **self.first_tokens(answers), "server": {**facts, "storage": storage}}

    def conversation(self) -> array[int]:
        """Return a new prompt of --tokens tokens."""
        return array("i", self.prompt(self.args.tokens))

    def first_tokens(self, answers: list[Answer]) -> dict[str, Any]:
        return {
            "measure": "first token after a restart",
            "tokens": self.args.tokens,
            "first_token_ms": spread([answer.first_token_s for answer in answers]),
            "cached": [answer.cached for answer in answers],
            "from_storage": [answer.of_tiers["storage"] for answer in answers],
        }

    def wait_until_stored(self, storage: str, folder: Path) -> None:
        """Wait until pages are stored, and no more have come for a while."""
        pages, since = 0, time.monotonic()
        while not pages or time.monotonic() - since < SETTLED_SECONDS:
            self.check_time()
            if (found := stored_pages(storage, folder)) != pages:
                pages, since = found, time.monotonic()
            time.sleep(0.2)


def measure(args: argparse.Namespace, subject: str, number: int) -> Generator[dict[str, Any], None, None]:
    """Yield the rows of one round of starts of a server.

    Args:
        args: the command line.
        subject: name of the server.
        number: number of the round.

    Raises:
        OutOfTime: the time limit is reached.
    """
    bench = HostBench(args, args.out.parent)
    if {"memory", "decode"} & {*args.measure}:
        yield from bench.with_and_without(subject, number)
    for storage in args.storages if "restart" in args.measure else ():
        if storage != SHM or command_line.is_ours(subject):
            yield from bench.restart(subject, number, storage)


def line(row: dict[str, Any]) -> str:
    """Return a row as text for the screen."""
    words = [row["server"]["subject"], row.get("tier", ""), row["measure"], str(row.get("at", ""))]
    words += [f"{name} {row[name]:.6g}" for name in ("value", "tokens", "GB", "copies", "step_ms") if row.get(name)]
    if times := row.get("first_token_ms"):
        words.append(f"{times['p50']} (p95 {times['p95']}) ms, {sum(row['from_storage'])} tokens from the storage")
    return " ".join(filter(None, words))


def parsed(argv: list[str] | None) -> argparse.Namespace:
    options = command_line.lines_parser(__doc__)
    options.add_argument("--measure", default=",".join(MEASURES), help="some of %(default)s")
    options.add_argument("--storages", default="shm,file", help="of restart, some of %(default)s")
    options.add_argument("--size", type=int, help=f"--hicache-size in GB ({DEFAULTS['size']})")
    options.add_argument("--conversations", type=int, help=f"of restart ({DEFAULTS['conversations']})")
    options.add_argument("--tokens", type=int, help=f"of a conversation ({DEFAULTS['tokens']})")
    command_line.add_servers(options, "ours,sglang")
    command_line.add_decode(options)
    args = options.parse_args(argv)
    command_line.resolve(options, args)
    args.measure, args.storages = args.measure.split(","), args.storages.split(",")
    for name, known in (("measure", MEASURES), ("storages", (SHM, "file"))):
        if unknown := {*getattr(args, name)} - {*known}:
            options.error(f"--{name} {min(unknown)}: expected some of {', '.join(known)}")
    for name, value in (DRY if args.dry_run else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        if getattr(args, name) < 1:
            options.error(f"--{name} {getattr(args, name)}: expected at least 1")
    if args.dry_run:
        args.tp = DRY_PROCESSES
    return args


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    names = ("model", "tp", "dp", "size", "conversations", "tokens", "dry_run")
    settings = {name: getattr(args, name) for name in names}
    return append_rows(args, partial(measure, args), lambda row, _: print(line(row), flush=True), settings=settings)


if __name__ == "__main__":
    raise SystemExit(main())
