"""How large the host cache of a process is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.integration.launch_error import LaunchError
from dsv4_sglang.srt.memory.sizing import SNAPSHOT_SHARE

GB = 10**9
MORE_SNAPSHOTS = 11 / 8
"""Times as many snapshots a block as the device has by its share: what is on the host has been given up once, and
ends of short conversations are most of it; figures in docs/benchmarks/results.md."""


@dataclass(frozen=True)
class HostDemand:
    """Blocks and snapshots on the host, with their bytes, which have no padding."""

    blocks: int
    snapshots: int
    block_bytes: int
    snapshot_bytes: int

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_bytes + self.snapshots * self.snapshot_bytes


def host_demand(
    *,
    device_blocks: int,
    device_snapshots: int,
    block_bytes: int,
    snapshot_bytes: int,
    ratio: float,
    size_gb: float,
    max_snapshots: int | None,
    host_snapshots: int | None,
) -> HostDemand:
    """As many bytes as `ratio` times what the device has, or `size_gb` GB (10^9 bytes, if not 0), with
    MORE_SNAPSHOTS times the snapshots a block that the device has by the option `max_snapshots` or by its share
    of the memory: a small pool may have more, for running requests, and not for what they leave. `host_snapshots`, if
    given, are as many, beside `ratio` times the device's blocks or, with `size_gb`, the blocks that the rest holds.

    Raises ValueError if that leaves no block or no snapshot.
    """
    flag = f"--hicache-size {size_gb}" if size_gb else f"--hicache-ratio {ratio}"
    of_blocks, of_snapshots = device_blocks * block_bytes, device_snapshots * snapshot_bytes
    size = int(size_gb * GB) if size_gb else int(ratio * (of_blocks + of_snapshots))
    more = of_blocks * SNAPSHOT_SHARE / (1 - SNAPSHOT_SHARE) if max_snapshots is None else of_snapshots
    more *= MORE_SNAPSHOTS
    share = more / (of_blocks + more)
    snapshots = int(size * share / snapshot_bytes) if host_snapshots is None else host_snapshots
    blocks = (size - snapshots * snapshot_bytes) // block_bytes
    if host_snapshots is not None and not size_gb:
        blocks = int(device_blocks * ratio)
    if blocks < 1 or snapshots < 1:
        raise LaunchError(
            f"the host cache would have {blocks} blocks and {snapshots} snapshots ({flag}, option host_snapshots "
            f"{host_snapshots}); expected at least one of each: raise --hicache-ratio or --hicache-size"
        )
    return HostDemand(blocks, snapshots, block_bytes, snapshot_bytes)


def host_table(demand: HostDemand, blocks: Tensor, snapshots: Tensor, policy: str) -> str:
    """For the log, beside the table of the device's pools."""
    pinned = "pinned" if blocks.is_pinned() else "not pinned"
    lines = [
        f"  {name:<18} {'x'.join(map(str, rows.shape)):>24} {'uint8':<9} {rows.nbytes / 2**30:9.3f} GiB"
        for name, rows in (("host blocks", blocks), ("host snapshots", snapshots))
    ]
    return "\n".join(
        [
            f"dsv4_sglang host cache of this process: {demand.blocks * BLOCK} tokens in {demand.blocks} blocks of "
            f"{demand.block_bytes} bytes, {demand.snapshots} snapshots of {demand.snapshot_bytes} bytes; "
            f"{demand.bytes / 2**30:.3f} GiB of host memory, {pinned}; policy {policy}",
            *lines,
        ]
    )
