"""Benchmark the copies of the host cache alone: blocks and a snapshot to pinned host memory and back.

    python -m benchmarks.tier [--quick] [--ranks 2] [--out DIR]

The copies are those of a server: blocks of all layers of Flash and one snapshot. 157 blocks are a conversation of
20,000 tokens. Orders:

- "scattered": ids in random order on both sides,
- "in a row": contiguous ids, as the host pool allocates them.

"save" is a gather on the GPU and copies of contiguous host rows. "load" copies the snapshot and then the layers;
"snapshot us" is the time until the snapshot alone is loaded. The floor, "copy", is one cudaMemcpyAsync of the same
bytes to or from memory that CUDA allocated.

"us" is the time from an idle device until the work is done. "host us" is the time until the calls return. "device us"
is the time of the device alone, behind a full queue; GB/s are computed from it.

With --ranks N also copies of N processes at once, each with a GPU, that share one host cache ("N ranks"): each saves
its part of the rows, and all load all rows. "us" is the time until the last one is done, GB/s are those of all ranks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from benchmarks import append, command_line, report, timing
from benchmarks.append_ours import ops_for
from benchmarks.move import from_idle
from dsv4_sglang.cache import CacheLayout, v4_specs
from dsv4_sglang.cache.host_rows import HostBlockPool, HostSnapshotPool
from dsv4_sglang.cache.host_sharing import HostSharing
from dsv4_sglang.cache.paged_cache import make_paged_pools
from dsv4_sglang.cache.state_cache import StateStorage
from dsv4_sglang.model import DSV4Config, build_schedule
from dsv4_sglang.model.layer_schedule import AttentionType

BLOCKS = (1, 16, 157, 3125)
# About 10 ms on a GPU, long enough to enqueue all launches of a load.
BUSY_CYCLES = 20_000_000
DIRECTIONS = ("save", "load")
ORDERS = ("scattered", "in a row")


def behind_a_queue(function: Callable[[], object], device: torch.device, samples: int) -> timing.Timing:
    """Return the device time in us. The device is kept busy until all work is enqueued.

    Args:
        function: enqueues the work.
        device: device of the work.
        samples: number of samples.
    """
    if device.type != "cuda":
        return from_idle(function, device, samples)[0]
    times = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return timing.summarise(times)


class Tier:
    """Pools of both sides. Snapshot 1 is saved to host row 0 and loaded back."""

    def __init__(
        self, config: DSV4Config, blocks: int, device: torch.device, sharing: HostSharing | None = None
    ) -> None:
        """`sharing`: processes that share the host memory, None: only this one."""
        layout = CacheLayout(v4_specs(config, build_schedule(config), hca_state="online"), device)
        pools = make_paged_pools(layout, {AttentionType.CSA: blocks, AttentionType.HCA: blocks})
        self.pools = [pool for pool in pools if pool is not None]
        self.storage = StateStorage(layout, 1, snapshots=1)
        self.host = HostBlockPool(self.pools, blocks, sharing=sharing)
        self.host_snapshots = HostSnapshotPool(self.storage, 1, sharing=sharing)
        self.device = device
        for tensor in self.tensors():
            tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device=device))

    def tensors(self) -> list[Tensor]:
        """Return all device tensors that are copied."""
        snapshot = [table[0] for table in self.storage.snapshot_tables()]
        return [*(view for pool in self.pools for view in pool.block_views()), *snapshot]

    def bytes_of(self, blocks: int) -> int:
        return blocks * self.host.block_bytes + self.host_snapshots.snapshot_bytes

    def save(self, blocks: Tensor, rows: Tensor) -> None:
        self.host.save(blocks, rows)
        self.host_snapshots.save(1, 0)

    def load_snapshot(self) -> None:
        self.host_snapshots.load(1, 0)

    def load(self, blocks: Tensor, rows: Tensor) -> None:
        self.load_snapshot()
        for layer in range(len(self.pools)):
            self.host.load(blocks, rows, layer)


def copies_of_rank(
    rank: int, ranks: int, config: DSV4Config, blocks: int, samples: int, cpu: bool, folder: str
) -> None:
    """Copy in one of `ranks` processes at once, and write the seconds of each sample to a file, in the first process.

    Raises:
        ValueError: the loaded data differ from the saved data.
    """
    device = torch.device("cpu") if cpu else torch.device("cuda", rank)
    torch.set_num_threads(1)
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    ops_for(device)
    torch.manual_seed(0)  # all ranks hold the same
    sharing = HostSharing(dist.group.WORLD)
    tier = Tier(config, blocks, device, sharing)
    kept = [tensor.clone() for tensor in tier.tensors()]
    part = torch.tensor(sharing.part(blocks, 0))
    rows = torch.arange(blocks)
    copies = {
        "save": partial(tier.save if sharing.leads else tier.host.save, part.to(device), part),
        "load": partial(tier.load, rows.to(device), rows),
    }
    seconds: dict[str, list[float]] = {}
    for direction, copy in copies.items():
        times = []
        for _ in range(samples):
            sharing.wait()
            begin = time.perf_counter()
            copy()
            if not cpu:
                torch.cuda.synchronize()
            times.append(max(sharing.gather(time.perf_counter() - begin)))
        seconds[direction] = times
        for tensor in tier.tensors() if direction == "save" else ():
            tensor.zero_()
    if not all(torch.equal(tensor, before) for tensor, before in zip(tier.tensors(), kept)):
        raise ValueError(f"{blocks} blocks of {ranks} ranks: the loaded data differ from the saved data")
    if sharing.leads:
        torch.save(seconds, Path(folder, "seconds"))
    dist.destroy_process_group()


class Bench:
    def __init__(self, args: Any) -> None:
        self.device = torch.device("cpu") if args.dry_run else torch.device("cuda", 0)
        self.ranks = args.ranks
        self.samples = 2 if args.dry_run else 10 if args.quick else 20
        self.blocks = (3,) if args.dry_run else (157,) if args.quick else BLOCKS
        config = DSV4Config.flash()
        self.config = append.first_layers(config, 4) if args.dry_run else config
        self.tier = Tier(self.config, 2 * max(self.blocks), self.device)

    def ids(self, blocks: int, order: str) -> tuple[Tensor, Tensor]:
        """Return device ids and host rows, contiguous from 0 or drawn at random from both pools."""
        if order == "in a row":
            both = torch.arange(blocks), torch.arange(blocks)
        else:
            generator = torch.Generator().manual_seed(blocks)
            both = tuple(torch.randperm(2 * max(self.blocks), generator=generator)[:blocks] for _ in range(2))
        return both[0].to(self.device), both[1]

    def copy(self, blocks: int) -> Iterator[dict[str, Any]]:
        """Time copies of the same number of bytes in one piece."""
        size = self.tier.bytes_of(blocks)
        here = torch.zeros(size, dtype=torch.uint8, device=self.device)
        there = torch.zeros(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for direction in DIRECTIONS:
            source, target = (here, there) if direction == "save" else (there, here)
            yield self.row(direction, blocks, "copy", partial(target.copy_, source, non_blocking=True))

    def ours(self, blocks: int, order: str, floors: dict[str, float]) -> Iterator[dict[str, Any]]:
        """Time a save and a load, and check the contents.

        Args:
            blocks: number of blocks.
            order: one of ORDERS.
            floors: time of a single copy in us, by direction.

        Raises:
            ValueError: the loaded data differ from the saved data.
        """
        ids, rows = self.ids(blocks, order)
        kept = [tensor.clone() for tensor in self.tier.tensors()]
        for direction in DIRECTIONS:
            row = self.row(direction, blocks, "ours", partial(getattr(self.tier, direction), ids, rows))
            floor = floors[direction]
            row |= {"order": order, "floor us": floor, "x floor": row["device us"] / floor}
            if direction == "load":
                row["snapshot us"] = from_idle(self.tier.load_snapshot, self.device, self.samples)[0].us
            else:
                for tensor in self.tier.tensors():
                    tensor.zero_()
            yield row
        block_views = sum(len(pool.block_views()) for pool in self.tier.pools)
        for i, (tensor, before) in enumerate(zip(self.tier.tensors(), kept)):
            which = ids if i < block_views else slice(None)
            if not torch.equal(tensor[which], before[which]):
                raise ValueError(f"{blocks} blocks {order}: the loaded data differ from the saved data")
            tensor.copy_(before)

    def of_ranks(self, blocks: int) -> Iterator[dict[str, Any]]:
        """Time copies of all ranks at once. Every rank has a process of its own."""
        cpu = self.device.type == "cpu"
        with tempfile.TemporaryDirectory() as folder:
            given = (self.ranks, self.config, blocks, self.samples, cpu, folder)
            # A forked process cannot use a GPU, and a spawned one imports everything again.
            method = "fork" if cpu else "spawn"
            torch.multiprocessing.start_processes(copies_of_rank, given, self.ranks, start_method=method)
            seconds = torch.load(Path(folder, "seconds"))
        for direction, times in seconds.items():
            taken = timing.summarise([1e6 * spent for spent in times])
            size = self.tier.bytes_of(blocks) * (self.ranks if direction == "load" else 1)
            row = {"move": direction, "blocks": blocks, "subject": f"{self.ranks} ranks", "MB": size / 1e6}
            yield row | {"GB/s": size / taken.us / 1e3, "us": taken.us, "low": taken.low, "high": taken.high}

    def row(self, direction: str, blocks: int, subject: str, function: Callable[[], object]) -> dict[str, Any]:
        """Time one direction of a copy and return its row.

        Args:
            direction: one of DIRECTIONS.
            blocks: number of blocks.
            subject: name of the implementation.
            function: makes the copy.
        """
        whole, host_us = from_idle(function, self.device, self.samples)
        alone = behind_a_queue(function, self.device, self.samples)
        size = self.tier.bytes_of(blocks)
        row = {"move": direction, "blocks": blocks, "subject": subject, "MB": size / 1e6, "GB/s": size / alone.us / 1e3}
        row |= {"device us": alone.us, "low": alone.low, "high": alone.high, "us": whole.us, "host us": host_us}
        return row


def main(argv: list[str] | None = None) -> int:
    options = command_line.report_parser(__doc__)
    options.add_argument(
        "--ranks", type=int, default=1, help="processes that share a host cache, one a GPU (%(default)s)"
    )
    args = options.parse_args(argv)
    if args.ranks < 1:
        options.error(f"--ranks {args.ranks}: expected at least 1")
    result = report.Report("tier", args)
    ops_for(torch.device("cpu") if args.dry_run else torch.device("cuda", 0))
    bench = Bench(args)
    for blocks in bench.blocks:
        result.part(f"copy/{blocks}", partial(bench.copy, blocks), setup=True)
        floors = {r["move"]: r["device us"] for r in result.rows if r["subject"] == "copy" and r["blocks"] == blocks}
        for order in ORDERS:
            result.part(f"ours/{blocks}/{order}", partial(bench.ours, blocks, order, floors))
        if args.ranks > 1:
            result.part(f"ranks/{blocks}", partial(bench.of_ranks, blocks))
    columns = ["move", "blocks", "subject", "order", "MB", "GB/s", "device us", "us", "host us", "snapshot us"]
    result.table("host cache, copies alone", [*columns, "floor us", "x floor"])
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
