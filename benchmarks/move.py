"""Benchmark moves of cache contents: blocks between GPU and host, KV entries inside the GPU, ids of the allocator.

    python -m benchmarks.move [--quick] [--out DIR]

"swap" moves every block of all layers of Flash to the host and back. The ids are shuffled, but come in runs of a given
length that are contiguous on both sides. Subjects:

- "copy" is the ceiling: one cudaMemcpyAsync of the same bytes, to memory that CUDA allocated.
- "copy, our pages" is the same copy to memory as `HostBlockPool` pins it.
- "ours" is `HostBlockPool`, "in-tree" are SGLang's host pools.

Host memory is on the NUMA node near the GPU ("near"), on another node ("far"), or on the node of the process ("any") if
the system does not report the near node. "host us" is the time until the call returns.

"update_rows" is compared with index_copy_ of the same entries, as 8-byte words. "append_swa", which stores finished
entries, is compared with `append` on a window-only layer, which also normalises and applies RoPE. Both run in a CUDA
graph of 8 calls with separate memory. "cold us" flushes the L2 cache before each run. The floor is the larger of bytes
/ copy rate (`benchmarks.timing`) and an empty launch; data in the L2 cache can be faster than that floor.

"allocator" is host time. Its floor is the host time of one launch.

"bound by" names what limits a move: the link or memory (within 1.25 x of its floor), an empty launch, the host that
issues the work, or else the kernel, which has too few bytes in flight.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks import append, loads, report, timing, traffic
from benchmarks.append_ours import Ours, ops_for
from benchmarks.move_in_tree import InTree, compile_kernels, pieces_of
from dsv4_sglang.cache import HostBlockPool, PagedKVPool, build_schema
from dsv4_sglang.cache.host_pool import HostMemory, cpus_in, cpus_near, running_on
from dsv4_sglang.formats import KVBuffer, KVFormat
from dsv4_sglang.model import DSV4Config, build_schedule
from dsv4_sglang.model.geometry import WINDOW
from dsv4_sglang.standalone import BlockAllocator

RUNS = (1, 2, 8, 64)
DIRECTIONS = {"to host": True, "to device": False}
# SGLang's default layout first.
LAYOUTS = {"in-tree": "page_first", "in-tree, layer first": "layer_first"}
# (slices, entries per slice)
ROW_SLICES = ((16, 1), (256, 1), (16, 128), (256, 32), (256, 128))
BATCHES = (1, 16, 64, 256)
ACQUIRED = (1, 16, 256, 4096)
LAYERS = 8
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


def bound(us: float, host_us: float, floor_us: float, floor_of: str) -> str:
    """Return what limits a move.

    Args:
        us: time of the move.
        host_us: time until the call returns.
        floor_us: floor of the time.
        floor_of: name of what the floor is made of.
    """
    if us <= AT_THE_FLOOR * floor_us:
        return floor_of
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
                    yield row | {"host us": host_us} | self.rates(time, size, floor, host_us, "link")
                    if to_host:
                        for table in mover.tables:
                            table.zero_()
                if not all(torch.equal(table, kept) for table, kept in zip(mover.tables, saved)):
                    raise ValueError(f"{subject}, runs of {run}: the blocks changed on the way to the host and back")
        finally:
            mover.close()

    def rates(self, time: timing.Timing, size: float, floor: float, host_us: float, floor_of: str) -> dict[str, Any]:
        """Return the fields of a row that show its time, rate and limit.

        Args:
            time: time of the move.
            size: bytes moved.
            floor: floor of the time in us.
            host_us: microseconds until the call returns.
            floor_of: name of what the floor is made of.
        """
        row = {"us": time.us, "low": time.low, "high": time.high, "MB": size / 1e6, "GB/s": size / time.us / 1e3}
        row |= {"floor us": floor, "x floor": time.us / floor if floor else None}
        return row | {"bound": bound(time.us, host_us, floor, floor_of)}

    def copies(self, place: str, cpus: set[int]) -> Iterator[dict[str, Any]]:
        pinned = self.device.type == "cuda"
        with running_on(cpus):
            host = torch.zeros(self.bytes_moved, dtype=torch.uint8, pin_memory=pinned)
            pages = HostMemory(self.bytes_moved, self.device) if pinned else None
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

    def update_rows(self, slices: int, length: int) -> Iterator[dict[str, Any]]:
        """Measure `update_rows` and index_copy_, both on words of 8 bytes, which `update_rows` uses internally."""
        count = slices * length
        pool_rows = 2 * count
        generator = torch.Generator().manual_seed(1)
        new = torch.randint(-(2**62), 2**62, (count, traffic.ROW // 8), generator=generator).to(self.device)
        pools = [torch.zeros(pool_rows, traffic.ROW // 8, dtype=torch.int64, device=self.device) for _ in range(LAYERS)]
        starts = torch.randperm(2 * slices, generator=generator)[:slices] * length
        table = torch.stack([starts, torch.arange(slices) * length, torch.full_like(starts, length)]).to(self.device)
        valid = torch.tensor([slices], dtype=torch.int32, device=self.device)
        index = (starts[:, None] + torch.arange(length)).flatten().to(self.device)
        expected = torch.zeros_like(pools[0]).index_copy_(0, index, new)

        def ours() -> None:
            for pool in pools:
                torch.ops.dsv4_sglang.update_rows(pool, new, table, valid)

        def theirs() -> None:
            for pool in pools:
                pool.index_copy_(0, index, new)

        case = f"{slices} slices of {length}"
        for subject, step, ids in (("ours", ours, table), ("index_copy_", theirs, index)):
            for pool in pools:
                pool.zero_()
            yield from self.recorded("update_rows", case, subject, step, 2 * new.nbytes + ids.nbytes)
            if not all(torch.equal(pool, expected) for pool in pools):
                raise ValueError(f"update_rows, {case}: {subject} did not write the same entries as index_copy_")

    def append_swa(self, batch: int) -> Iterator[dict[str, Any]]:
        window_only = dataclasses.replace(
            self.config, num_hidden_layers=LAYERS, compress_ratios=(0,) * LAYERS, num_nextn_predict_layers=0
        )
        context = 256 if self.args.dry_run else append.CONTEXT
        load = loads.no_entry(batch, context)
        step = Ours(window_only, batch, context, self.device)
        step.set_lengths(load.prefix_lens)
        slots = batch + 1
        positions = step.prefix_lens.int()
        marks = [torch.full((slots, WINDOW), -1, dtype=torch.int32, device=self.device) for _ in range(LAYERS)]
        heads = [torch.zeros(slots, dtype=torch.int32, device=self.device) for _ in range(LAYERS)]
        views = [KVBuffer(layer.ring, KVFormat.FP8).views() for layer in step.layers]

        def finished_rows() -> None:
            for layer, view, mark, head in zip(step.layers, views, marks, heads):
                assert view is not None
                torch.ops.dsv4_sglang.append_swa(
                    layer.inputs.kv, step.slots, positions, view.fp8, view.rope, view.inv_scale, mark, head, 64
                )

        case = f"decode x {batch}"
        rows = traffic.decode_bytes(window_only, load, traffic.OURS_ONLINE) / LAYERS
        yield from self.recorded("append_swa", case, "append", step.step, rows)
        # Without the weights of the norm; slots and positions are read, positions and heads are written.
        rows += batch * 4 * 4 - traffic.ROW_PARAMETERS
        yield from self.recorded("append_swa", case, "ours", finished_rows, rows)

    def recorded(
        self, move: str, case: str, subject: str, step: Callable[[], object], size: float
    ) -> Iterator[dict[str, Any]]:
        """Yield the times of a recorded step.

        Args:
            move: name of the op.
            case: description of its inputs.
            subject: name of the implementation.
            step: makes LAYERS calls.
            size: bytes moved by each call.
        """
        recorded = timing.Recorded(step, self.device)
        time = recorded.time(self.samples, divide=LAYERS)
        cold = recorded.time_cold(max(5, self.samples // 2), divide=LAYERS)
        copy_gbs, launch_us = self.facts.get("copy_gbs", 0.0), self.facts.get("empty_launch_us", 0.0)
        floor = timing.floor_us(size, 1, copy_gbs, launch_us) if copy_gbs else 0.0
        row = {"move": move, "case": case, "subject": subject, "cold us": cold.us}
        yield row | self.rates(time, size, floor, 0.0, "launch" if floor <= launch_us else "memory")

    def allocator(self) -> Iterator[dict[str, Any]]:
        allocator = BlockAllocator(2 * max(ACQUIRED), self.device)
        synchronise = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        for count in ACQUIRED:
            ids, listed = allocator.acquire_with_host_ids(count)
            launch = timing.host_time(lambda ids=ids: ids.flip(0), samples=20)
            allocator.release(listed)
            taken: dict[str, list[float]] = {"acquire": [], "release": [], "release, ids on the host": []}
            for i in range(4 * self.samples + 1):
                synchronise()
                begin = time.perf_counter()
                ids, listed = allocator.acquire_with_host_ids(count)
                acquired = time.perf_counter()
                synchronise()
                before = time.perf_counter()
                allocator.release(listed if i % 2 else ids)
                after = time.perf_counter()
                if i > 1:  # the first iterations are slower
                    taken["acquire"].append((acquired - begin) * 1e6)
                    taken["release, ids on the host" if i % 2 else "release"].append((after - before) * 1e6)
            for what, samples in taken.items():
                spent = timing.summarise(samples)
                row = {
                    "move": "allocator",
                    "case": f"{count} block{'s' * (count > 1)}",
                    "subject": f"ours, {what}",
                    "host us": spent.us,
                }
                yield row | self.rates(spent, 4 * count, launch.us, spent.us, "launch")


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


def parts(bench: Bench, where: dict[str, set[int]]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (name, function) in execution order: subjects of one place follow each other."""
    for place, cpus in where.items():
        yield f"swap/{place}/ours", partial(bench.ours, place, cpus)
        for subject in () if bench.args.dry_run else LAYOUTS:
            yield f"swap/{place}/{subject}", partial(bench.in_tree, place, cpus, subject)
    for slices, length in ((3, 5),) if bench.args.dry_run else ROW_SLICES:
        yield f"update_rows/{slices}x{length}", partial(bench.update_rows, slices, length)
    for batch in (2,) if bench.args.dry_run else BATCHES:
        yield f"append_swa/{batch}", partial(bench.append_swa, batch)
    yield "allocator", bench.allocator


def compile_in_tree(bench: Bench) -> Iterator[dict[str, Any]]:
    """Import and build SGLang's kernels before anything is timed. A missing kernel is reported by its own part."""
    try:
        usable = compile_kernels(list(pieces_of(bench.block_bytes)))
    except ImportError as error:
        yield {"move": "swap", "subject": "in-tree", "not available": f"not available: {error}"}
        return
    bench.facts["in-tree gathers pieces of, bytes"] = [size for size, usable_here in usable.items() if usable_here]


def main(argv: list[str] | None = None) -> int:
    args = report.parser(__doc__).parse_args(argv)
    bench = Bench(args)
    settings = {"blocks": bench.blocks, "samples": bench.samples, "bytes of a block": bench.bytes_moved // bench.blocks}
    result = report.Report("move", args, settings)
    bench.facts = result.data["facts"]
    where, missing = {"any": set[int]()}, {"far": "dry run on the CPU"}
    if not args.dry_run:
        where, missing = places(cpus_near(bench.device), numa_nodes(), os.sched_getaffinity(0))
    result.fact("places", {place: sorted(cpus) for place, cpus in where.items()})
    result.fact("places not measured", missing)
    if "copy_gbs" not in bench.facts:
        result.part("ceilings", partial(timing.ceilings, bench.device, result.fact), setup=True)
    result.part("load ours", partial(ops_for, bench.device), setup=True)
    if not args.dry_run:
        result.part("compile in-tree", partial(compile_in_tree, bench), setup=True)
    for place, cpus in where.items():
        if f"swap/{place}/copy" not in result.data["parts"]:
            result.part(f"swap/{place}/copy", partial(bench.copies, place, cpus), setup=True)
    for name, function in parts(bench, where):
        result.part(name, function)
    for place, why in missing.items():
        result.part(f"swap/{place}", partial(list, [{"move": "swap", "place": place, "not available": why}]))
    lines = compare(result.rows)
    subjects = [s for s in ("ours", *LAYOUTS, "copy, our pages", "copy") if any(s in line for line in lines)]
    of_ours = ["MB", "us", "host us", "floor us", "x floor", "bound"]
    result.table("swap: GB/s, and details of ours", ["place", "direction", "run", *subjects, *of_ours], lines)
    for move, columns in {
        "update_rows": ["us", "cold us", "MB", "GB/s", "floor us", "x floor", "bound"],
        "append_swa": ["us", "cold us", "MB", "GB/s", "floor us", "x floor", "bound"],
        "allocator": ["host us", "low", "high", "floor us", "x floor", "bound"],
    }.items():
        rows = [row for row in result.rows if row.get("move") == move and "us" in row]
        result.table(move, ["case", "subject", *columns], rows)
    for row in result.rows:
        if "not available" in row:
            result.console.print(f"{row['part']}: {row['not available']}", highlight=False)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
