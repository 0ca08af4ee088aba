"""SGLang's own swap of blocks with the host: `DeepSeekV4PagedHostPool`, as its cache controller calls it.

There is one pool for each kind of buffer, with as many bytes per block as ours. Host layouts:

- Page first (the default) keeps all layers of a block together in host memory. To the host, a kernel gathers 64 blocks
  in device memory, and one copy moves each block. To the device, one kernel per layer reads host memory.
- Layer first uses one kernel for all layers to the host and one kernel per layer to the device.

Kernels that access host memory use two thread blocks, to leave the GPU to the model.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# SGLang's gathering kernel needs pieces that are a multiple of this many bytes.
PIECE = 16


def pieces_of(block_bytes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Count the pieces of a block by their size in bytes.

    A CSA layer has entries and keys. An HCA layer's entry and its exponents are one piece in SGLang's pages,
    rounded up.

    Args:
        block_bytes: bytes of each view, for each layer.
    """
    counted: Counter[int] = Counter()
    for views in block_bytes:
        whole = all(size % PIECE == 0 for size in views)
        counted.update(views if whole else [math.ceil(sum(views) / PIECE) * PIECE])
    return dict(counted)


def compile_kernels(pieces: Sequence[int]) -> dict[int, bool]:
    """Build the gathering kernels of all sizes in parallel. False: not available, SGLang uses its plain kernel."""
    import sglang.srt.mem_cache.memory_pool_host  # noqa: F401  a slow import, which must not happen while timing
    from sglang.kernels.ops.kvcache.hicache import can_use_write_back_jit_kernel

    with concurrent.futures.ThreadPoolExecutor(len(pieces)) as pool:
        usable = pool.map(lambda size: can_use_write_back_jit_kernel(element_size=size), pieces)
        return dict(zip(pieces, usable))


class InTree:
    """`blocks` blocks on both sides. The host memory is on the NUMA node of the thread that constructs this."""

    def __init__(self, pieces: dict[int, int], blocks: int, device: torch.device, layout: str) -> None:
        from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

        self.device = device
        self.pools: list[Any] = []
        self.tables: list[Tensor] = []
        for size, layers in pieces.items():
            tables = [
                torch.empty(blocks, size, dtype=torch.uint8, device=device).random_(0, 256) for _ in range(layers)
            ]
            self.tables += tables
            # A page is a block here: with a page size of 1 its indices are block ids.
            self.pools.append(
                DeepSeekV4PagedHostPool(
                    pool_name=f"{layers} x {size} B",
                    device_buffers=tables,
                    item_bytes=size,
                    num_host_pages=blocks,
                    slot_page_size=1,
                    layout=layout,
                )
            )

    def prepare(self, ids: Tensor) -> None:
        """Set the block ids, int64 [2, n] on the CPU: device ids, then host ids."""
        self.host_ids = ids[1].contiguous()
        self.there, self.here = ids.to(self.device)

    def move(self, to_host: bool) -> None:
        for pool in self.pools:
            if to_host:
                here = self.host_ids if pool.can_use_write_back_jit else self.here
                pool.backup_from_device_all_layer(None, here, self.there, "kernel")
                continue
            for layer in range(pool.layer_num):
                pool.load_to_device_per_layer(None, self.here, self.there, layer, "kernel")

    def close(self) -> None:
        """Unpin the host memory, which SGLang never does. Memory mapped at these addresses later could not be
        pinned."""
        torch.cuda.synchronize(self.device)
        for pool in self.pools:
            for buffer in pool.get_hybrid_pool_buffer():
                status = torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
                if int(status) != 0:
                    raise RuntimeError(f"cudaHostUnregister of SGLang's pool {pool.pool_name}: error {int(status)}")
