"""Run a server for hours with everything that happens to it in production, and append one line per piece of the run.

    python tests/soak.py --folder /var/tmp/soak --seconds 7200                # a piece of two hours
    python tests/soak.py --folder /var/tmp/soak --seconds 600 --seed 5        # again from seed 5, after a fault

A piece consists of lives of a server, one seed each. All lives share one folder of stored pages that is kept full by a
small limit, and the host cache is full as well. In a life, the lifecycle fuzzer (`tests/support/lifecycle.py`) plays
bursts of requests with clients that leave, cancel within 20 ms and retry, and with flushes, pauses, sleep and, for even
seeds, weight updates. A life ends by SIGTERM or, with answers under way, by SIGKILL.

- After each burst, which takes less than a minute: the integrity audit of the idle server, answers compared with cold
  ones, and the memory, descriptors and threads of all processes.
- At the start of a life: prompts that the last life stored hit the folder, unless its weights were updated.

A clean piece appends its line to --out, and the next piece goes on from there: with the next seed, the sums of the
counters, and the usage of the first fresh server as the baseline. A fault ends the piece with one line and exit code 1.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import torch
from fuzz import HOST, ON_CPU, ON_GPU, TOLERANCE, Configuration, checkpoint, server
from support.lifecycle import STUCK_SECONDS, Burst, Driver, Shape, Wrong, play
from support.server_plugin import plugged

from benchmarks import command_line, report, servers
from benchmarks.environment import environment
from dsv4_sglang.cli.check import TOKENS
from dsv4_sglang.cli.server import stop
from dsv4_sglang.model.geometry import BLOCK_TOKENS
from dsv4_sglang.srt.host_cache.folder import FOLDERS, stored_files

# Bytes of the folder of stored pages, which the load fills in a minute or two.
CPU_LIMIT, GPU_LIMIT = 48 * 10**6, 512 * 10**6
# A server may exceed the limit by a sixteenth (docs/guides/host_cache.md).
EXCESS = 1 / 16
# A server fills its pools and caches of its allocators before its usage is a baseline.
WARM_SECONDS = 300.0
# Seeds of the checkpoint that a life starts with, and of the one of weight updates.
WEIGHTS = (0, 9)
# Tenants of the prompts that a life stores for the next one, and tokens of these prompts: three blocks and a snapshot.
TENANTS, STORED_TOKENS = ("a tenant", "another tenant", "a third tenant"), 400
# The storage writes after the answer. It is done if it has written nothing for this time.
QUIET_SECONDS = 2.0
# A server ends after the process that failed.
ENDING_SECONDS = 10.0
# Requests that SIGKILL interrupts.
INTERRUPTED = 3


class Usage(NamedTuple):
    """Resources of all processes of a server."""

    rss_mb: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, processes: Sequence[psutil.Process]) -> Usage:
        found = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                found.append((process.memory_info().rss / 1e6, process.num_fds(), process.num_threads()))
        rss, descriptors, threads = (sum(values) for values in zip(*found))
        return cls(round(rss, 1), int(descriptors), int(threads))

    def require_near(self, base: Usage, since: str) -> None:
        """Raise `Wrong` if a resource has grown by more than GROWTH over `base`."""
        for name, now, before, growth in zip(self._fields, self, base, GROWTH):
            if now > before + growth:
                raise Wrong(f"{name} grew from {before} {since} to {now}; expected at most {growth} more")


# What may come and go: buffers of allocators, connections and their threads.
GROWTH = Usage(256.0, 64, 64)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Raise the errors inside as `Wrong`, with the name of the phase."""
    try:
        yield
    except (Wrong, OSError, RuntimeError) as error:
        raise Wrong(f"{name}: {'' if isinstance(error, Wrong) else f'{type(error).__name__}: '}{error}") from error


def end_of(started: servers.Server) -> str:
    """Return the end of the log if the server has ended or ends now; empty if it goes on."""
    assert started.process is not None
    try:
        started.process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        return ""
    return f"; the server has ended: {started.tail()}"


def processes_of(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def slope_per_hour(samples: Sequence[tuple[float, float]]) -> float | None:
    """Return the slope of the least-squares line through (seconds, value), in units per hour; None without a line."""
    if len(samples) < 3:
        return None
    return round(3600 * statistics.linear_regression(*zip(*samples)).slope, 1)


class Stored(NamedTuple):
    """A life whose prompts are stored.

    Attributes:
        seed: seed of the life.
        date: date of its piece. A life that runs again, after a fault, has other prompts.
    """

    seed: int
    date: str

    def prompt(self, name: str) -> list[int]:
        """Return the prompt of a tenant, or one with another name."""
        return random.Random(f"{self.date} {self.seed} {name}").choices(TOKENS, k=STORED_TOKENS)


class Life:
    """One server from its start to its end.

    Args:
        own: seed and date of this life.
        driver: driver of the server.
        started: the server's processes.
        pages: folder of the stored pages.
        limit: bytes of this folder.
        fresh: usage of the first fresh server of all pieces; None: this is the first.
    """

    def __init__(
        self,
        own: Stored,
        driver: Driver,
        started: servers.Server,
        pages: Path,
        limit: int,
        fresh: Usage | None,
    ) -> None:
        self.own, self.driver, self.pages, self.limit = own, driver, pages, limit
        assert started.process is not None
        self.started, self.process = started, started.process
        self.processes = processes_of(self.process.pid)
        self.fresh = Usage.of(self.processes)
        self.fresh.require_near(fresh or self.fresh, "of the first fresh server")
        self.begin = time.monotonic()
        self.samples: list[tuple[float, Usage]] = []
        self.maxima: dict[str, float] = {}

    def find_stored(self, last: Stored) -> None:
        """Ask for the prompts that the last life stored.

        Their pages are found by their tenants alone, and not at all if the weights were updated in that life.
        """
        expected = 0 if is_updated(last.seed) else STORED_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
        for tenant in TENANTS:
            ids = last.prompt(tenant)
            if cached := self.driver.server.answer(ids, 1, cache_salt="no tenant").cached:
                raise Wrong(f"a tenant found {cached} tokens of a different one")
            self._compare(ids, expected, f"a prompt of the life of seed {last.seed}", cache_salt=tenant)
            self.driver.seen["prompts of the last life"] += 1

    def _compare(self, ids: list[int], expected: int, name: str, **fields: Any) -> None:
        """Raise `Wrong` unless a prompt hits `expected` tokens and its answer is as near to cold as others are."""
        if (cached := self.driver.compare(ids, name, **fields)) != expected:
            raise Wrong(f"{name} ({len(ids)} tokens) found {cached} tokens; expected {expected}")

    def after_burst(self, burst: Burst) -> None:
        if burst.number % 4 == 3:
            self._replace_weights()
        self.sample()

    def _replace_weights(self) -> None:
        """Update the weights of an idle server, in lives with updates.

        A prompt that hits before must not hit afterwards, even if the weights are the same.
        """
        checkpoints, number = self.driver.shape.weights, self.driver.seen["prompts of old weights"]
        if not checkpoints:
            return
        ids = self.own.prompt(f"update {number}")
        for cached in (0, STORED_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS):
            if (found := self.driver.server.answer(ids, 1).cached) != cached:
                raise Wrong(f"a prompt before a weight update found {found} tokens; expected {cached}")
        self.driver.update_weights(checkpoints[(self.own.seed // 2 + number) % len(checkpoints)])
        self._compare(ids, 0, "a prompt of old weights")
        self.driver.seen["prompts of old weights"] += 1

    def sample(self) -> None:
        """Audit the server and record the usage of its processes and how full its tiers are."""
        self.driver.check()
        self.processes = processes_of(self.process.pid)
        now, usage = time.monotonic() - self.begin, Usage.of(self.processes)
        warm = next((used for at, used in self.samples if at >= WARM_SECONDS), usage)
        usage.require_near(warm, f"{WARM_SECONDS:.0f} s after the start")
        last = self.samples[-1][0] if self.samples else 0.0
        self.samples.append((now, usage))
        stored = sum(file.bytes for file in stored_files(self.pages))
        if stored > (1 + EXCESS) * self.limit:
            raise Wrong(f"the folder has {stored} bytes of pages; expected at most {self.limit} and a sixteenth")
        pools = servers.metrics(self.driver.url)
        self._record(usage._asdict())
        self._record({"seconds between audits": round(now - last, 1), "storage of its limit": stored / self.limit})
        self._record({"host tokens of capacity": pools["host_tokens"] / pools["host_capacity_tokens"]})
        self._record({"host snapshots of capacity": pools["host_snapshots"] / pools["host_snapshot_capacity"]})

    def _record(self, values: dict[str, float]) -> None:
        self.maxima |= {name: round(max(value, self.maxima.get(name, value)), 3) for name, value in values.items()}

    def counters(self) -> Counter[str]:
        """Return the driver's counters and the server's."""
        found = servers.metrics(self.driver.url)
        hits = {f"hit tokens, {tier}": found.get(f"hit_tokens_{tier}", 0) for tier in ("device", "host", "storage")}
        evicted = {"snapshots evicted": found["snapshots_evicted"]}
        evicted["host snapshots evicted"] = found["host_snapshots_evicted"]
        counted: Counter[str] = Counter({name: int(value) for name, value in {**hits, **evicted}.items()})
        return counted + self.driver.seen + Counter({"lives": 1, "samples": len(self.samples)})

    def finish(self) -> None:
        """Update the weights, in lives with updates, store the prompts for the next life and audit the server."""
        self._replace_weights()
        self._store()
        self.sample()

    def _store(self) -> None:
        """Send the prompts for the next life and wait until the storage has written them.

        The cache is flushed before, because a full host does not save new snapshots that are worth less than the old
        ones.
        """
        self.started.flush()
        before = self._pages()
        for tenant in TENANTS:
            self.driver.server.answer(self.own.prompt(tenant), 1, cache_salt=tenant)
        pages = len(TENANTS) * (STORED_TOKENS // BLOCK_TOKENS + 1)
        deadline = time.monotonic() + STUCK_SECONDS
        now, quiet = self._pages(), time.monotonic()
        while len(now - before) < pages or time.monotonic() - quiet < QUIET_SECONDS:
            if time.monotonic() > deadline:
                raise Wrong(f"the storage has {len(now - before)} new pages of {pages} after {STUCK_SECONDS:.0f} s")
            time.sleep(0.2)
            if (found := self._pages()) != now:
                now, quiet = found, time.monotonic()

    def _pages(self) -> set[str]:
        return {path.name for path in self.pages.glob("*.bin")}

    def kill(self) -> None:
        """Send SIGKILL to the server while it answers requests."""
        with ExitStack() as answers:
            for number in range(INTERRUPTED):
                body: dict[str, Any] = {"input_ids": self.own.prompt(f"interrupted {number}")[:100]}
                body |= {"sampling_params": {"max_new_tokens": 300, "ignore_eos": True}, "stream": True}
                answers.enter_context(self.driver.server.send("/generate", body)).readline()
            stop(self.process, grace_seconds=0)

    def require_ended(self) -> None:
        _, alive = psutil.wait_procs(self.processes, timeout=60)
        if alive := [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]:
            raise Wrong(f"processes are left after the end of the server: {alive}")

    def row(self) -> dict[str, Any]:
        warm = [(at, usage.rss_mb) for at, usage in self.samples if at >= WARM_SECONDS]
        return {
            "seed": self.own.seed,
            "seconds": round(time.monotonic() - self.begin),
            "ended by": "SIGKILL" if is_killed(self.own.seed) else "SIGTERM",
            "rss_mb": [self.fresh.rss_mb, *(usage.rss_mb for _, usage in (self.samples[0], self.samples[-1]))],
            "rss_mb_per_hour": slope_per_hour(warm),
        }


def is_killed(seed: int) -> bool:
    """Return True if the life of this seed ends by SIGKILL: half of those with weight updates, and of the others."""
    return seed % 4 in (1, 2)


def is_updated(seed: int) -> bool:
    """Return True if weights are updated in the life of this seed."""
    return seed % 2 == 0


class Piece:
    """A piece of the run: lives of servers until the time is over.

    Args:
        args: command line.
        last: line of the last piece on this kind of device; None: this is the first.
    """

    def __init__(self, args: Any, last: dict[str, Any] | None) -> None:
        self.args, self.cpu = args, is_cpu(args)
        self.last, self.first_seed = last, args.seed or (last["seeds"][1] + 1 if last else 1)
        self.seed, self.environment = self.first_seed, environment()
        self.fresh = Usage(**last["fresh"]) if last else None
        self.pages, self.logs = args.folder / "pages", args.folder / "logs"
        self.limit = CPU_LIMIT if self.cpu else GPU_LIMIT
        self.counters: Counter[str] = Counter()
        self.maxima: dict[str, float] = {}
        self.lives: list[dict[str, Any]] = []

    def play(self) -> dict[str, Any]:
        """Play lives until the time is over. Return the line of this piece.

        Raises:
            Wrong: an invariant is violated. The message names the seed.
        """
        begin = time.monotonic()
        models = [checkpoint(self.args.folder / f"weights-{seed}", self.cpu, seed=seed) for seed in WEIGHTS]
        variable, _ = FOLDERS["file"]
        # The plugin lets a CPU server sleep.
        plugin = plugged(self.args.folder / "plugin") if self.cpu else nullcontext()
        with plugin, patch.dict(os.environ, {variable: str(self.pages)}):
            stored = self._stored()
            while (left := begin + self.args.seconds - time.monotonic()) > 0 or not self.lives:
                self._live(models, min(left, self.args.life), stored)
                stored, self.seed = Stored(self.seed, self.environment["date"]), self.seed + 1
        return self._line(time.monotonic() - begin)

    def _stored(self) -> Stored | None:
        """Return the last life of the last piece; None if its pages may have other names.

        Names depend on the versions and on the model.
        """
        if self.last is None or self.last["seeds"][1] + 1 != self.seed or not self.pages.exists():
            return None
        known = self.last["environment"]
        same = all(known[name] == self.environment[name] for name in ("commit", "versions"))
        return Stored(self.seed - 1, known["date"]) if same else None

    def _live(self, models: list[Path], seconds: float, stored: Stored | None) -> None:
        """Run one server on the first of the checkpoints for a number of seconds, and for at least one burst."""
        end, log = time.monotonic() + seconds, self.logs / f"soak-{self.seed}.log"
        with ExitStack() as running:
            with phase(f"seed {self.seed}, start"):
                started = running.enter_context(self._running(models[0], log))
            driver = self._driver(started.url, models)
            own = Stored(self.seed, self.environment["date"])
            try:
                with phase(f"seed {self.seed}, start"):
                    life = Life(own, driver, started, self.pages, self.limit, self.fresh)
                    self.fresh = self.fresh or life.fresh
                    if stored is not None:
                        life.find_stored(stored)
                play(driver, sys.maxsize, end - time.monotonic(), life.after_burst)
                with phase(f"seed {self.seed}, end"):
                    life.finish()
                    self.counters += life.counters()
                    self.counters["retractions"] += started.lines().count("Retract requests")
                    if is_killed(self.seed):
                        life.kill()
            except Wrong as error:
                raise Wrong(f"{error}{end_of(started)}") from error
        with phase(f"seed {self.seed}, stopped"):
            life.require_ended()
        self.lives.append(life.row())
        log.unlink()
        worst = max((distance.worst for distance in driver.distances), default=0.0)
        for name, value in {**life.maxima, "log p from cold": worst}.items():
            self.maxima[name] = max(value, self.maxima.get(name, value))

    def _driver(self, url: str, models: list[Path]) -> Driver:
        given, weights = ON_CPU if self.cpu else ON_GPU, tuple(map(str, models)) if is_updated(self.seed) else ()
        # Short bursts, because the server is examined between them.
        shape = Shape(given.context, given.burst // 2, given.together, weights=weights, sleeps=True)
        return Driver(url, self.seed, shape, TOLERANCE if self.cpu else None)

    @contextmanager
    def _running(self, model: Path, log: Path) -> Iterator[servers.Server]:
        bound = json.dumps({"max_size": str(self.limit)})
        flags = (*HOST, "--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", bound)
        # Otherwise a lookup ends early on a busy machine, and the number of tokens found depends on the time.
        flags += ("--hicache-storage-prefetch-policy", "wait_complete")
        flags += () if self.cpu else ("--enable-memory-saver",)
        with servers.running(server("soak", Configuration(flags), model, log, self.cpu), timeout=900) as started:
            yield started

    def _line(self, seconds: float) -> dict[str, Any]:
        last = self.last or {"piece": 0, "seconds_in_sum": 0, "counters_in_sum": {}}
        return {
            "piece": last["piece"] + 1,
            "device": device(self.cpu),
            "seconds": round(seconds),
            "seconds_in_sum": last["seconds_in_sum"] + round(seconds),
            "seeds": [self.first_seed, self.seed - 1],
            "counters": dict(sorted(self.counters.items())),
            "counters_in_sum": dict(sorted((self.counters + Counter(last["counters_in_sum"])).items())),
            "maxima": self.maxima,
            "fresh": (self.fresh or Usage(0.0, 0, 0))._asdict(),
            "lives": self.lives,
            "environment": self.environment,
        }


def is_cpu(args: Any) -> bool:
    return args.dry_run or not torch.cuda.is_available()


def device(cpu: bool) -> str:
    return "cpu" if cpu else torch.cuda.get_device_name()


def last_line(out: Path, of_device: str) -> dict[str, Any] | None:
    """Return the last line of a device in the file; None if there is none."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return next((line for line in reversed(lines) if line["device"] == of_device), None)


def main(argv: list[str] | None = None) -> int:
    options = command_line.parser(__doc__)
    options.add_argument("--folder", type=Path, required=True, help="pages, checkpoints and logs, kept between pieces")
    options.add_argument("--out", type=Path, default=command_line.RESULTS / "soak.jsonl", help="file (%(default)s)")
    options.add_argument("--seed", type=int, help="first seed (default: the one after the last line of --out)")
    options.add_argument("--life", type=float, default=1200.0, help="seconds of a server (%(default)s)")
    options.set_defaults(seconds=7200.0)
    args = options.parse_args(argv)
    report.exit_on_time_limit()
    piece = Piece(args, last_line(args.out, device(is_cpu(args))))
    try:
        line = piece.play()
    except Wrong as error:
        again = ["python", "tests/soak.py", "--folder", str(args.folder), "--seed", str(piece.seed)]
        print(f"{' | '.join(str(error).splitlines())}; again: {shlex.join(again)}; logs: {piece.logs}", flush=True)
        return 1
    with args.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"piece {line['piece']} is clean: {line['seconds']} s, {line['counters'].get('requests', 0)} requests")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
