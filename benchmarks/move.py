"""Benchmark moves of blocks between GPU and host.

    python -m benchmarks.move [--quick] [--out DIR]

Every block of all layers of Flash moves to the host and back. The ids are shuffled, but come in runs of a given length
that are contiguous on both sides. Subjects:

- "copy" is the ceiling: one cudaMemcpyAsync of the same bytes, to memory that CUDA allocated.
- "copy, our pages" is the same copy to memory as `HostBlockPool` pins it.
- "ours" is `HostBlockPool`, "in-tree" are SGLang's host pools.

Host memory is on the NUMA node near the GPU ("near"), on another node ("far"), or on the node of the process ("any") if
the system does not report the near node. "host us" is the time until the call returns.

"bound" names what limits a move: the link (within 1.25 x of its floor), the host that issues the work, or else the
kernel, which has too few bytes in flight.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks import append, command_line, report, timing
from benchmarks.append_ours import ops_for
from benchmarks.move_in_tree import InTree, compile_kernels, pieces_of
from dsv4_sglang.cache import HostBlockPool, PagedKVPool, build_schema
from dsv4_sglang.cache.host_memory import HostMemory, cpus_in, cpus_near, running_on
from dsv4_sglang.model import DSV4Config, build_schedule

RUNS = (1, 2, 8, 64)
DIRECTIONS = {"to host": True, "to device": False}
# SGLang's default layout first.
LAYOUTS = {"in-tree": "page_first", "in-tree, layer first": "layer_first"}
AT_THE_FLOOR = 1.25
NODES = Path("/sys/devices/system/node")


def run_ids(blocks: int, run: int, seed: int = 0) -> Tensor:
    """Return every block once on both sides, in shuffled runs that both sides share.

    Args:
        blocks: number of blocks.
        run: exact length of a run.
        seed: seed of the order.

    Returns:
        int64 [2, blocks].

    Raises:
        ValueError: the number of blocks is not a multiple of the run length.
    """
    if blocks % run:
        raise ValueError(f"{blocks} blocks are not a multiple of the run length {run}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.stack([torch.randperm(blocks // run, generator=generator) for _ in range(2)])
        if not (order.diff(dim=1) == 1).all(0).any():  # two runs contiguous on both sides would be one longer run
            return (order[:, :, None] * run + torch.arange(run)).flatten(1)


def bound(us: float, host_us: float, floor_us: float) -> str:
    """Return what limits a move of `us`, whose call returned after `host_us`."""
    if us <= AT_THE_FLOOR * floor_us:
        return "link"
    return "host" if host_us >= 0.8 * us else "kernel"


def numa_nodes(folder: Path = NODES) -> dict[int, set[int]]:
    """Return the CPUs of each NUMA node, empty if the system does not report them."""
    lists = sorted(folder.glob("node[0-9]*/cpulist"))
    return {int(path.parent.name.removeprefix("node")): cpus_in(path.read_text()) for path in lists}


def places(
    near: set[int], nodes: Mapping[int, set[int]], allowed: set[int]
) -> tuple[dict[str, set[int]], dict[str, str]]:
    """Return the CPUs of each place to measure, and the reason for each place that is missing.

    Without a known near node, the place "any" replaces "near" and "far".

    Args:
        near: CPUs near the GPU.
        nodes: CPUs of each NUMA node.
        allowed: CPUs that this process may use.
    """
    if not near:
        why = "the system does not say which CPUs are near the GPU, or this process may not use them"
        return {"any": set()}, {"near": why, "far": why}
    far = {node: cpus for node, cpus in nodes.items() if cpus and not cpus & near}
    if not far:
        return {"near": near}, {"far": f"this machine shows {len(nodes)} NUMA node{'s' if len(nodes) != 1 else ''}"}
    usable = [cpus & allowed for cpus in far.values() if cpus & allowed]
    if not usable:
        return {"near": near}, {"far": f"this process may not use the CPUs of the other nodes ({sorted(far)})"}
    return {"near": near, "far": usable[0]}, {}


def from_idle(function: Callable[[], object], device: torch.device, samples: int) -> tuple[timing.Timing, float]:
    """Time a function whose work starts on an idle device.

    Args:
        function: enqueues the work.
        device: device of the work.
        samples: number of samples.

    Returns:
        The time until the work is done, and the microseconds until the call returns.
    """
    function()
    whole, host = [], []
    for _ in range(samples):
        if device.type == "cuda":
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            begin = time.perf_counter()
            function()
            host.append((time.perf_counter() - begin) * 1e6)
            end.record()
            end.synchronize()
            whole.append(start.elapsed_time(end) * 1e3)
        else:
            begin = time.perf_counter()
            function()
            whole.append((time.perf_counter() - begin) * 1e6)
            host.append(whole[-1])
    return timing.summarise(whole), timing.summarise(host).us


class Mover(Protocol):
    """Moves the blocks of `tables` [blocks, ...] to the host and back."""

    tables: list[Tensor]

    def prepare(self, ids: Tensor) -> None: ...
    def move(self, to_host: bool) -> None: ...
    def close(self) -> None: ...


class Copy:
    """One contiguous copy of `host`, independent of the ids."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host = host
        self.tables = [torch.empty(host.shape, dtype=torch.uint8, device=device).random_(0, 256)]

    def prepare(self, ids: Tensor) -> None:
        pass

    def move(self, to_host: bool) -> None:
        to, source = (self.host, self.tables[0]) if to_host else (self.tables[0], self.host)
        to.copy_(source, non_blocking=True)

    def close(self) -> None:
        pass


class OurPools:
    """`HostBlockPool` of all layers."""

    def __init__(self, pools: list[PagedKVPool], blocks: int, cpus: set[int]) -> None:
        self.tables = [view for pool in pools for view in pool.block_views()]
        for table in self.tables:
            table.random_(0, 256)
        self.host, self.layers = HostBlockPool(pools, blocks, cpus), len(pools)
        self.stream = torch.cuda.current_stream() if self.host.device.type == "cuda" else None

    def prepare(self, ids: Tensor) -> None:
        self.there, self.here = ids

    def move(self, to_host: bool) -> None:
        with torch.cuda.stream(self.stream):
            there = self.there.to(self.host.device)
            if to_host:
                self.host.save(there, self.here)
                return
            for layer in range(self.layers):
                self.host.load(there, self.here, layer)

    def close(self) -> None:
        pass


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cpu") if args.dry_run else torch.device("cuda", 0)
        self.samples = 2 if args.dry_run else 5 if args.quick else 10
        self.blocks = 16 if args.dry_run else 512 if args.quick else 2048
        config = DSV4Config.flash()
        self.config = append.first_layers(config, 4) if args.dry_run else config
        self.facts: dict[str, Any] = {}
        self.held: list[Tensor] = []

        # Bytes of each view, for each layer that has blocks.
        self.block_bytes = [[view.nbytes for view in p.block_views()] for p in self.pools(1, torch.device("cpu"))]
        self.bytes_moved = self.blocks * sum(map(sum, self.block_bytes))

    def pools(self, blocks: int, device: torch.device) -> list[PagedKVPool]:
        schemas = [build_schema(self.config, spec) for spec in build_schedule(self.config)]
        return [PagedKVPool(schema, blocks, device) for schema in schemas if schema.entries_per_block]

    def swap(self, place: str, subject: str, mover: Mover) -> Iterator[dict[str, Any]]:
        """Yield a row per run length and direction, and check that the blocks survive the round trip.

        Args:
            place: NUMA place of the host memory.
            subject: name of the subject.
            mover: moves the blocks.

        Raises:
            ValueError: the blocks changed on the way.
        """
        saved = [table.clone() for table in mover.tables]
        size = sum(table.nbytes for table in mover.tables)
        one = subject.startswith("copy")
        runs = [self.blocks] if one else [*(run for run in RUNS if run < self.blocks), self.blocks]
        try:
            for run in runs:
                mover.prepare(run_ids(self.blocks, run))
                for table, kept in zip(mover.tables, saved):
                    table.copy_(kept)
                for direction, to_host in DIRECTIONS.items():
                    time, host_us = from_idle(partial(mover.move, to_host), self.device, self.samples)
                    if subject == "copy":
                        self.facts[f"{direction}, {place}, GB/s"] = size / time.us / 1e3
                    row = {"move": "swap", "place": place, "subject": subject, "direction": direction}
                    row |= {"run": "one copy" if one else "all" if run == self.blocks else run}
                    ceiling = self.facts.get(f"{direction}, {place}, GB/s", 0.0)
                    floor = size / ceiling / 1e3 if ceiling else 0.0
                    row |= {"us": time.us, "low": time.low, "high": time.high, "MB": size / 1e6, "host us": host_us}
                    row |= {"GB/s": size / time.us / 1e3, "floor us": floor}
                    row |= {"x floor": time.us / floor if floor else None}
                    yield row | {"bound": bound(time.us, host_us, floor)}
                    if to_host:
                        for table in mover.tables:
                            table.zero_()
                if not all(torch.equal(table, kept) for table, kept in zip(mover.tables, saved)):
                    raise ValueError(f"{subject}, runs of {run}: the blocks changed on the way to the host and back")
        finally:
            mover.close()

    def copies(self, place: str, cpus: set[int]) -> Iterator[dict[str, Any]]:
        pinned = self.device.type == "cuda"
        with running_on(cpus):
            host = torch.zeros(self.bytes_moved, dtype=torch.uint8, pin_memory=pinned)
            pages = HostMemory(self.bytes_moved, self.device, cpus) if pinned else None
        # Keep a reference: torch would reuse freed pinned memory whatever its NUMA node.
        self.held.append(host)
        yield from self.swap(place, "copy", Copy(host, self.device))
        if pages is not None:
            yield from self.swap(place, "copy, our pages", Copy(pages.bytes[: self.bytes_moved], self.device))

    def ours(self, place: str, cpus: set[int]) -> Iterator[dict[str, Any]]:
        yield from self.swap(place, "ours", OurPools(self.pools(self.blocks, self.device), self.blocks, cpus))

    def in_tree(self, place: str, cpus: set[int], subject: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of SGLang's host pools, or a row that says why they are not available.

        Args:
            place: NUMA place of the host memory.
            cpus: CPUs of that place.
            subject: key of LAYOUTS.
        """
        try:
            with running_on(cpus):
                mover = InTree(pieces_of(self.block_bytes), self.blocks, self.device, LAYOUTS[subject])
        except ImportError as error:
            yield {"move": "swap", "place": place, "subject": subject, "not available": f"not available: {error}"}
            return
        yield from self.swap(place, subject, mover)


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one line per place, direction and run length: GB/s of the subjects, and what limits ours."""
    ceilings = {(row["place"], row["direction"]): row["GB/s"] for row in rows if row.get("subject") == "copy"}
    lines: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        if row.get("move") != "swap" or "us" not in row or row["subject"] == "copy":
            continue
        place, direction, run = row["place"], row["direction"], str(row["run"])
        new = {"place": place, "direction": direction, "run": run, "copy": ceilings.get((place, direction))}
        line = lines.setdefault((place, direction, run), new)
        line[row["subject"]] = row["GB/s"]
        if row["subject"].startswith(("ours", "copy")):
            line |= {name: row[name] for name in ("MB", "us", "host us", "floor us", "x floor", "bound")}
    return list(lines.values())


def compile_in_tree(bench: Bench) -> Iterator[dict[str, Any]]:
    """Import and build SGLang's kernels before anything is timed. A missing kernel is reported by its own part."""
    try:
        usable = compile_kernels(list(pieces_of(bench.block_bytes)))
    except ImportError as error:
        yield {"move": "swap", "subject": "in-tree", "not available": f"not available: {error}"}
        return
    bench.facts["in-tree gathers pieces of, bytes"] = [size for size, usable_here in usable.items() if usable_here]


def main(argv: list[str] | None = None) -> int:
    args = command_line.report_parser(__doc__).parse_args(argv)
    bench = Bench(args)
    settings = {"blocks": bench.blocks, "samples": bench.samples, "bytes of a block": bench.bytes_moved // bench.blocks}
    result = report.Report("move", args, settings)
    bench.facts = result.data["facts"]
    where, missing = {"any": set[int]()}, {"far": "dry run on the CPU"}
    if not args.dry_run:
        where, missing = places(cpus_near(bench.device), numa_nodes(), os.sched_getaffinity(0))
    result.fact("places", {place: sorted(cpus) for place, cpus in where.items()})
    result.fact("places not measured", missing)
    result.part("load ours", partial(ops_for, bench.device), setup=True)
    if not args.dry_run:
        result.part("compile in-tree", partial(compile_in_tree, bench), setup=True)
    for place, cpus in where.items():
        if f"swap/{place}/copy" not in result.data["parts"]:
            result.part(f"swap/{place}/copy", partial(bench.copies, place, cpus), setup=True)
    for place, cpus in where.items():
        result.part(f"swap/{place}/ours", partial(bench.ours, place, cpus))
        for subject in () if args.dry_run else LAYOUTS:
            result.part(f"swap/{place}/{subject}", partial(bench.in_tree, place, cpus, subject))
    for place, why in missing.items():
        result.part(f"swap/{place}", partial(list, [{"move": "swap", "place": place, "not available": why}]))
    lines = compare(result.rows)
    subjects = [s for s in ("ours", *LAYOUTS, "copy, our pages", "copy") if any(s in line for line in lines)]
    of_ours = ["MB", "us", "host us", "floor us", "x floor", "bound"]
    result.table("swap: GB/s, and details of ours", ["place", "direction", "run", *subjects, *of_ours], lines)
    for row in result.rows:
        if "not available" in row:
            result.console.print(f"{row['part']}: {row['not available']}", highlight=False)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
