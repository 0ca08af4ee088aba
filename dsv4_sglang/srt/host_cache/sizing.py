"""Size of the host cache of a process."""

from __future__ import annotations

from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.memory.sizing import SNAPSHOT_SHARE

GB = 10**9
# Snapshots per block on the host, relative to the device's default. The host holds conversations that the device has
# evicted, and many of them are short; see docs/benchmarks/load.md.
MORE_SNAPSHOTS = 11 / 8


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
) -> tuple[int, int]:
    """Return the number of blocks and snapshots of the host cache.

    The total is `size_gb`, or `ratio` times the memory of the device's blocks and snapshots. It is divided so that the
    host has MORE_SNAPSHOTS times as many snapshots per block as the device. For this, the device's snapshots are
    SNAPSHOT_SHARE of its memory, or its actual snapshots if the option `max_snapshots` is set. Without the option a
    small pool has extra snapshots for running requests, which the host does not need.

    Args:
        device_blocks: blocks on the device.
        device_snapshots: snapshots on the device.
        block_bytes: bytes of a block on the host, a row with its padding.
        snapshot_bytes: bytes of a snapshot on the host.
        ratio: --hicache-ratio, used if `size_gb` is 0.
        size_gb: --hicache-size in GB (10^9 bytes).
        max_snapshots: the option of this name.
        host_snapshots: the option of this name. If set, it is the number of snapshots. Blocks are then `ratio` times
            the device's, or fill the rest of `size_gb`.

    Raises:
        LaunchError: no block or no snapshot fits.
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
    return blocks, snapshots
