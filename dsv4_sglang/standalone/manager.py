"""`KVCacheManager`: the pools of all layers and the ownership of their slots and blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.formats import KeyFormat, KVFormat
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.layer_schedule import AttentionType, LayerSpec
from dsv4_sglang.standalone.allocator import BlockAllocator
from dsv4_sglang.standalone.handle import LayerCacheHandle
from dsv4_sglang.standalone.paged_cache import PagedKVPool
from dsv4_sglang.standalone.request_table import RequestTable
from dsv4_sglang.standalone.schema import BLOCK_SIZE_ORIGINAL_TOKENS, HcaState, build_schema
from dsv4_sglang.standalone.state_cache import StateCachePool
from dsv4_sglang.standalone.step import Step


class KVCacheManager:
    """A cache without a server: state slots and blocks for up to `max_concurrent_requests` requests.

    A block id stands for 128 tokens in all CSA and HCA layers (32 entries and keys in each CSA layer, 1 entry in each
    HCA layer), so one allocator serves all layers and a request has one list of blocks. If the two pool sizes differ,
    the smaller one is the number of usable blocks.

    A request lives from `admit_request` to `release_request`. It needs a block for every 128 tokens before they are
    appended (`allocate_block(slot)`). Release its blocks (`release_blocks(slot)`) before its slot. `allocate_block()`
    without a slot allocates a block that no request owns; release it with `release_block`.

    A step of a request must begin where its tokens end, otherwise ValueError is raised.

    Attributes:
        schemas: one schema per layer of `schedule`.
        state_pools: one per layer.
        paged_pools: one per layer, None for SWA layers.
        num_blocks: number of usable blocks.
    """

    def __init__(
        self,
        config: DSV4Config,
        schedule: Sequence[LayerSpec],
        max_concurrent_requests: int,
        num_blocks_per_csa_layer: int,
        num_blocks_per_hca_layer: int,
        *,
        kv_format: KVFormat | str = KVFormat.FP8,
        key_format: KeyFormat | str = KeyFormat.MXFP4,
        hca_state: HcaState | str = HcaState.RAW,
        device: torch.device | str | None = None,
    ) -> None:
        if max_concurrent_requests < 1:
            raise ValueError(f"max_concurrent_requests is {max_concurrent_requests}; expected at least 1")
        if not schedule:
            raise ValueError("no layers: a cache needs a schedule of at least one layer")
        self.config = config
        self.schedule = list(schedule)
        self.max_concurrent_requests = max_concurrent_requests
        self.device = resolve_device(device)
        self.schemas = [
            build_schema(config, spec, kv_format=kv_format, key_format=key_format, hca_state=hca_state)
            for spec in self.schedule
        ]
        self.state_pools = [StateCachePool(schema, max_concurrent_requests, self.device) for schema in self.schemas]
        sizes = {AttentionType.CSA: num_blocks_per_csa_layer, AttentionType.HCA: num_blocks_per_hca_layer}
        self.paged_pools = [
            PagedKVPool(schema, sizes[schema.attn], self.device) if schema.attn in sizes else None
            for schema in self.schemas
        ]
        self._paged = [pool for pool in self.paged_pools if pool is not None]
        self.num_blocks = min((pool.num_blocks for pool in self._paged), default=num_blocks_per_csa_layer)
        self._allocator = BlockAllocator(self.num_blocks, self.device)
        longest = math.ceil(config.max_position_embeddings / BLOCK_SIZE_ORIGINAL_TOKENS)
        width = max(1, min(self.num_blocks, longest))
        self._requests = RequestTable(len(self.schemas), max_concurrent_requests, width, self.device)
        # A stack whose top is the end: slot 0 is allocated first, a released slot before one that was never used.
        self._free_slots = list(range(max_concurrent_requests - 1, -1, -1))
        self._unowned: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        return self._allocator.num_free

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def block_tables(self) -> Tensor:
        """[max_concurrent_requests, blocks] int32 on the device, block ids of each slot's request, then -1."""
        return self._requests.block_tables

    def blocks_of(self, slot: int) -> list[int]:
        """Return the block ids of a request in the order of its tokens. Raise ValueError if no request holds `slot`."""
        return self._requests.blocks_of(slot)

    def length_of(self, slot: int) -> int:
        """Return the number of tokens of a request. Waits for the device.

        Raises:
            ValueError: no request holds `slot`.
            RuntimeError: only some layers have appended the last step.
        """
        self.blocks_of(slot)
        return self._requests.length_of(slot)

    def admit_request(self) -> int:
        """Return a state slot for a new request without tokens, the most recently released one.

        Raises:
            RuntimeError: `max_concurrent_requests` requests are running.
        """
        if not self._free_slots:
            raise RuntimeError(
                f"no free state slot: {self.max_concurrent_requests} concurrent requests, the maximum, are running; "
                "release one, or construct the cache with a larger max_concurrent_requests"
            )
        slot = self._free_slots.pop()
        self._requests.admit(slot)
        self._empty(slot)
        return slot

    def _empty(self, slot: int) -> None:
        for pool in self.state_pools:
            pool.reset_slot(slot)

    def release_request(self, slot: int) -> None:
        """Release a state slot. Other requests are not affected.

        Raises:
            ValueError: no request holds the slot (unknown, or already released).
            RuntimeError: the request still owns blocks, which would leak. Nothing changes.
        """
        blocks = self.blocks_of(slot)
        if blocks:
            raise RuntimeError(
                f"state slot {slot} still owns {len(blocks)} blocks {blocks[:8]}: release_blocks({slot}) before "
                "release_request, or they leak and no concurrent request can use them"
            )
        self._requests.release(slot)
        self._free_slots.append(slot)

    def allocate_block(self, slot: int | None = None) -> int:
        """Allocate a block of 128 tokens for the request in `slot`, or one that no request owns. Return its id.

        Raises:
            ValueError: no request holds `slot`.
            RuntimeError: "OOM", no block is free or the request already has the longest context.
        """
        if slot is None:
            block = self._allocator.acquire_ids(1)[0]
            self._unowned.add(block)
            return block
        count, most = len(self.blocks_of(slot)), self.block_tables.shape[1]
        if count == most:
            raise RuntimeError(
                f"OOM: state slot {slot} has {count} blocks, the maximum of a request (context length "
                f"{self.config.max_position_embeddings}, {self.num_blocks} blocks in the cache)"
            )
        block = self._allocator.acquire_ids(1)[0]
        self._requests.add_block(slot, block)
        return block

    def release_blocks(self, slot: int) -> None:
        """Release all blocks of the request in `slot`, which is then empty. Raise ValueError if no request holds it."""
        self._allocator.release(self.blocks_of(slot))
        self._requests.clear(slot)
        self._empty(slot)

    def release_block(self, block: int) -> None:
        """Release a block that no request owns. Raise ValueError for any other block."""
        if block not in self._unowned:
            raise ValueError(f"block {block} was not allocated without a request, or has been released")
        self._allocator.release([block])
        self._unowned.remove(block)

    def begin_step(
        self, request_slots: Tensor, positions: Tensor, request_ids: Tensor, *, decode: bool = False
    ) -> Step:
        """Return a step for the tokens of a forward pass; pass it to `layer` for every layer. Allocates nothing on the
        device.

        Args:
            request_slots, positions, request_ids, decode: as in `Step`.
        """
        return Step(request_slots, positions, request_ids, self._requests, decode=decode)

    def layer(self, layer_idx: int, step: Step) -> LayerCacheHandle:
        """Return the handle of one layer for a step. Allocates nothing on the device.

        Raises:
            IndexError: the layer does not exist.
            ValueError: the step is one of another cache, whose slots and blocks it names.
        """
        if step.requests is not self._requests:
            raise ValueError("the step belongs to another cache: begin it with begin_step of this one")
        if not 0 <= layer_idx < len(self.schedule):
            raise IndexError(f"layer {layer_idx} is not in 0..{len(self.schedule) - 1}")
        return LayerCacheHandle(layer_idx, self.state_pools[layer_idx], self.paged_pools[layer_idx], step)

    def acquire(
        self, layer_idx: int, request_slots: Tensor, positions: Tensor, request_ids: Tensor
    ) -> LayerCacheHandle:
        """Return `layer` of a new step. For several layers call `begin_step` once and `layer` for each, which does less
        work.

        Args:
            layer_idx: id of the layer.
            request_slots, positions, request_ids: as in `Step`.
        """
        return self.layer(layer_idx, self.begin_step(request_slots, positions, request_ids))

    def raise_if_skipped(self) -> None:
        """Raise ValueError if a step that was not read back (`Step`) has skipped a request since the last call.

        Waits for the device.
        """
        self._requests.raise_if_skipped()

    def memory_bytes(self) -> int:
        """Return the bytes of all pools, without block tables, positions and lengths."""
        state = sum(pool.memory_bytes() for pool in self.state_pools)
        return state + sum(pool.memory_bytes() for pool in self._paged)
