"""How large the host tier of a process is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.launch_error import LaunchError
from dsv4_sglang.srt.sizing import CHECKPOINT_SHARE

GB = 10**9
MORE_CHECKPOINTS = 11 / 8
"""Times as many checkpoints a block as the device has by its share: what is on the host has been given up once, and
ends of short conversations are most of it; figures in docs/host_tier.md."""


@dataclass(frozen=True)
class HostDemand:
    """Blocks and checkpoints on the host, with their bytes, which have no padding."""

    blocks: int
    checkpoints: int
    block_bytes: int
    checkpoint_bytes: int

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_bytes + self.checkpoints * self.checkpoint_bytes


def host_demand(
    *,
    device_blocks: int,
    device_checkpoints: int,
    block_bytes: int,
    checkpoint_bytes: int,
    ratio: float,
    size_gb: float,
    max_checkpoints: int | None,
    host_checkpoints: int | None,
) -> HostDemand:
    """As many bytes as `ratio` times what the device has, or `size_gb` GB (10^9 bytes, if not 0), with
    MORE_CHECKPOINTS times the checkpoints a block that the device has by the option `max_checkpoints` or by its share
    of the memory: a small pool may have more, for running requests, and not for what they leave. `host_checkpoints`, if
    given, are as many, beside `ratio` times the device's blocks or, with `size_gb`, the blocks that the rest holds.

    Raises ValueError if that leaves no block or no checkpoint.
    """
    flag = f"--hicache-size {size_gb}" if size_gb else f"--hicache-ratio {ratio}"
    of_blocks, of_checkpoints = device_blocks * block_bytes, device_checkpoints * checkpoint_bytes
    size = int(size_gb * GB) if size_gb else int(ratio * (of_blocks + of_checkpoints))
    more = of_blocks * CHECKPOINT_SHARE / (1 - CHECKPOINT_SHARE) if max_checkpoints is None else of_checkpoints
    more *= MORE_CHECKPOINTS
    share = more / (of_blocks + more)
    checkpoints = int(size * share / checkpoint_bytes) if host_checkpoints is None else host_checkpoints
    blocks = (size - checkpoints * checkpoint_bytes) // block_bytes
    if host_checkpoints is not None and not size_gb:
        blocks = int(device_blocks * ratio)
    if blocks < 1 or checkpoints < 1:
        raise LaunchError(
            f"the host tier would have {blocks} blocks and {checkpoints} checkpoints ({flag}, option host_checkpoints "
            f"{host_checkpoints}); expected at least one of each: raise --hicache-ratio or --hicache-size"
        )
    return HostDemand(blocks, checkpoints, block_bytes, checkpoint_bytes)


def host_table(demand: HostDemand, blocks: Tensor, checkpoints: Tensor, policy: str) -> str:
    """For the log, beside the table of the device's pools."""
    pinned = "pinned" if blocks.is_pinned() else "not pinned"
    lines = [
        f"  {name:<18} {'x'.join(map(str, rows.shape)):>24} {'uint8':<9} {rows.nbytes / 2**30:9.3f} GiB"
        for name, rows in (("host blocks", blocks), ("host checkpoints", checkpoints))
    ]
    return "\n".join(
        [
            f"dsv4_sglang host tier of this process: {demand.blocks * BLOCK} tokens in {demand.blocks} blocks of "
            f"{demand.block_bytes} bytes, {demand.checkpoints} checkpoints of {demand.checkpoint_bytes} bytes; "
            f"{demand.bytes / 2**30:.3f} GiB of host memory, {pinned}; policy {policy}",
            *lines,
        ]
    )
