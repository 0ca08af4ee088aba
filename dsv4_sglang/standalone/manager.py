"""`KVCacheManager`: the pools of all layers and the ownership of their slots and blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_sglang.cache.device import resolve_device
from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.cache.paged_cache import make_paged_pools
from dsv4_sglang.cache.schema import HcaState
from dsv4_sglang.formats import KeyFormat, KVFormat
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import BLOCK_TOKENS
from dsv4_sglang.model.layer_schedule import AttentionType, LayerSpec
from dsv4_sglang.standalone.allocator import BlockAllocator, ids_on
from dsv4_sglang.standalone.handle import LayerCacheHandle
from dsv4_sglang.standalone.lengths import RequestLengths
from dsv4_sglang.standalone.offload import HostSide, Offloaded
from dsv4_sglang.standalone.state_cache import SlotStorage, StateCachePool
from dsv4_sglang.standalone.step import NO_BLOCK, Step


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The first `length` tokens of a request, from `KVCacheManager.take_snapshot` until `release_snapshot`."""

    length: int
    # Number of its state in the `StateStorage`, from 1.
    _number: int
    _blocks: tuple[int, ...]


class KVCacheManager:
    """A cache without a server: state slots and blocks for up to `max_concurrent_requests` requests.

    A block id stands for 128 tokens in all CSA and HCA layers (32 entries and keys in each CSA layer, 1 entry in each
    HCA layer), so one allocator serves all layers and a request has one list of blocks. If the two pool sizes differ,
    the smaller one is the number of usable blocks.

    A request lives from `admit_request` to `release_request`. It needs a block for every 128 tokens before they are
    appended (`allocate_block(slot)`). Release its blocks (`release_blocks(slot)`) before its slot. `allocate_block()`
    without a slot allocates a block that no request owns; release it with `release_block`.

    A step of a request must begin where its tokens end, otherwise ValueError is raised.

    Requests can share blocks. `fork` makes a second request with the same tokens. `take_snapshot` keeps a prefix, and
    `admit_request(snapshot)` starts a request with its tokens. A block becomes free when its last owner releases it.
    Shared blocks are full and never written again; blocks that a request may still write are its own.

    With `host_requests` and `host_blocks` a request can be moved to host memory (`offload`, `restore`) while others use
    its slot and blocks. It is restored byte by byte, into blocks of its own.

    With `draft_tokens` d above 1 a step may have up to d tokens of each request, the same number for each, and the next
    step may roll back all but the first of them: its positions then begin where the request continues (`state_rows`).
    This needs `hca_state` "online".

    Attributes:
        layout: shapes and bytes of all layers.
        schemas: one schema per layer of `schedule`.
        state: state of all layers; `state_pools[i]` are views of it.
        state_pools: one per layer.
        paged_pools: one per layer, None for SWA layers.
        block_tables: [max_concurrent_requests, blocks] int32 on the device, block ids of each slot's request, then -1.
    """

    def __init__(
        self,
        config: DSV4Config,
        schedule: Sequence[LayerSpec],
        *,
        max_concurrent_requests: int,
        num_blocks_per_csa_layer: int,
        num_blocks_per_hca_layer: int,
        kv_format: KVFormat | str = KVFormat.FP8,
        key_format: KeyFormat | str = KeyFormat.MXFP4,
        hca_state: HcaState | str = HcaState.RAW,
        draft_tokens: int = 0,
        max_snapshots: int = 0,
        host_requests: int = 0,
        host_blocks: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value, least in (
            ("max_concurrent_requests", max_concurrent_requests, 1),
            ("max_snapshots", max_snapshots, 0),
            ("host_requests", host_requests, 0),
            ("host_blocks", host_blocks, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}")
        if host_blocks and not host_requests:
            raise ValueError(
                f"host_blocks is {host_blocks} and host_requests is 0; give host_requests too, because a request "
                "in host memory needs space for its state"
            )
        self.config = config
        self.schedule = list(schedule)
        self.max_concurrent_requests = max_concurrent_requests
        self.device = resolve_device(device)
        self.layout = CacheLayout.build(
            config,
            self.schedule,
            self.device,
            kv_format=kv_format,
            key_format=key_format,
            hca_state=hca_state,
            draft_tokens=draft_tokens,
        )
        self.schemas = list(self.layout.schemas)
        self.state = SlotStorage(self.layout, max_concurrent_requests, max_snapshots)
        self.state_pools = [StateCachePool(self.state, layer) for layer in range(len(self.schemas))]
        sizes = {AttentionType.CSA: num_blocks_per_csa_layer, AttentionType.HCA: num_blocks_per_hca_layer}
        self.paged_pools = make_paged_pools(self.layout, sizes)
        self._paged = [pool for pool in self.paged_pools if pool is not None]
        self.num_blocks = min((pool.num_blocks for pool in self._paged), default=num_blocks_per_csa_layer)
        self._allocator = BlockAllocator(self.num_blocks, self.device)
        self._host = HostSide(self.state, self._paged, host_requests, host_blocks) if host_requests else None

        longest = math.ceil(config.max_position_embeddings / BLOCK_TOKENS)
        shape = max_concurrent_requests, max(1, min(self.num_blocks, longest))
        self.block_tables: Tensor = torch.full(shape, NO_BLOCK, dtype=torch.int32, device=self.device)
        # Stacks whose top is the end: slot 0 is allocated first, a released slot before one that was never used.
        self._free_slots = list(range(max_concurrent_requests - 1, -1, -1))
        self._blocks: dict[int, list[int]] = {}
        self._unowned: set[int] = set()
        self._lengths = RequestLengths(len(self.schemas), max_concurrent_requests, self.device)
        self.max_snapshots = max_snapshots
        self._free_snapshots = list(range(max_snapshots, 0, -1))
        self._snapshots: set[Snapshot] = set()

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks, without those of requests that are still being copied to the host."""
        return self._allocator.num_free

    @property
    def num_free_slots(self) -> int:
        """Number of free slots, without those of requests that are still being copied to the host."""
        return len(self._free_slots)

    def blocks_of(self, slot: int) -> list[int]:
        """Return the block ids of a request in the order of its tokens."""
        return list(self._blocks_of_request(slot))

    def length_of(self, slot: int) -> int:
        """Return the number of tokens of a request, including draft tokens of the last step. Waits for the device.

        Raises:
            RuntimeError: only some layers have appended the last step.
        """
        self._blocks_of_request(slot)
        return self._lengths.read(slot)[1]

    def admit_request(self, snapshot: Snapshot | None = None) -> int:
        """Return a state slot for a new request, the most recently released one.

        Without `snapshot` the request is empty. Otherwise it has the tokens of `snapshot` and shares its blocks.

        Raises:
            RuntimeError: `max_concurrent_requests` requests are running.
            ValueError: the snapshot has been released, or is one of another cache.
        """
        if snapshot is None:
            return self._admit()
        self._check_snapshot(snapshot)
        slot = self._admit()
        self._own(slot, snapshot._blocks, 0)
        self.state.load(self._ids(snapshot._number), self._ids(slot))
        self.state.resume_slot(slot, snapshot.length)
        self._lengths.set(slot, snapshot.length, snapshot.length)
        return slot

    def _admit(self) -> int:
        self._settle(slots=1)
        if not self._free_slots:
            raise RuntimeError(
                f"no free state slot: {self.max_concurrent_requests} requests, the maximum, are running; release one, "
                "or construct the cache with a larger max_concurrent_requests"
            )
        slot = self._free_slots.pop()
        self._blocks[slot] = []
        self._empty(slot)
        return slot

    def _empty(self, slot: int) -> None:
        self.state.reset_slot(slot)
        self._lengths.set(slot, 0, 0)

    def _own(self, slot: int, shared: Sequence[int], new: int) -> list[int]:
        """Give the new request in `slot` the allocated blocks `shared` and `new` free blocks. Return the latter."""
        blocks = self._allocator.acquire_ids(new)
        self._allocator.share(shared)
        self._blocks[slot] = [*shared, *blocks]
        self.block_tables[slot, : len(shared) + new] = self._ids(*shared, *blocks)
        return blocks

    def _need_blocks(self, count: int, purpose: str) -> None:
        """Raise RuntimeError ("OOM") if fewer than `count` blocks are free."""
        self._settle(blocks=count)
        if count > self.num_free_blocks:
            raise RuntimeError(
                f"OOM: {count} blocks requested to {purpose}, {self.num_free_blocks} free of {self.num_blocks}"
            )

    def fork(self, slot: int) -> int:
        """Admit a second request with the tokens of the request in `slot`. Return its slot. Waits for the device.

        Both requests share the blocks that neither can write any more. The state and, if it is not full, the last block
        are copied now, so an append never needs a copy.

        Raises:
            RuntimeError: no slot or block is free, or only some layers have appended the last step. Nothing changes.
            ValueError: no request holds `slot`.
        """
        blocks = self._blocks_of_request(slot)
        first, length = self._lengths.read(slot)
        shared = blocks[: first // BLOCK_TOKENS]
        copied = blocks[len(shared) : math.ceil(length / BLOCK_TOKENS)]
        self._need_blocks(len(copied), "fork a request")
        new = self._admit()
        own = self._own(new, shared, len(copied))
        self.state.copy_slot(slot, new)
        if copied:
            views = [view[None] for pool in self._paged for view in pool.block_views()]
            torch.ops.dsv4_sglang.copy_state(self._ids(*copied), self._ids(*own), views)
        self._lengths.set(new, first, length)
        return new

    def take_snapshot(self, slot: int, length: int | None = None) -> Snapshot:
        """Keep the first `length` tokens of the request in `slot`, by default all, for requests with the same prefix.

        `length` must be a multiple of 128 at which the request's next step may begin, so that its state is that of
        `length` tokens. The request continues, but its tokens before `length` can no longer be rolled back. Waits for
        the device.

        Raises:
            ValueError: `length` is not such a multiple, or no request holds `slot`.
            RuntimeError: `max_snapshots` snapshots are kept, or only some layers have appended the last step.
        """
        blocks = self._blocks_of_request(slot)
        first, last = self._lengths.read(slot)
        length = last if length is None else length
        if length < BLOCK_TOKENS or length % BLOCK_TOKENS or not first <= length <= last:
            raise ValueError(
                f"a snapshot of {length} tokens of state slot {slot}, whose next step begins at {first}..{last}; "
                f"expected a multiple of {BLOCK_TOKENS} in this range"
            )
        if not self._free_snapshots:
            raise RuntimeError(
                f"all {self.max_snapshots} snapshots are in use: call release_snapshot, or construct the cache with a "
                "larger max_snapshots"
            )
        snapshot = Snapshot(length, self._free_snapshots.pop(), tuple(blocks[: length // BLOCK_TOKENS]))
        self._snapshots.add(snapshot)
        self._allocator.share(snapshot._blocks)
        self.state.store(self._ids(slot), self._ids(snapshot._number))
        self._lengths.set(slot, length, last)
        return snapshot

    def release_snapshot(self, snapshot: Snapshot) -> None:
        """Drop a snapshot. Requests that share its blocks keep them. Raise ValueError as `admit_request` does."""
        self._check_snapshot(snapshot)
        self._allocator.release(snapshot._blocks)
        self._snapshots.remove(snapshot)
        self._free_snapshots.append(snapshot._number)

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot not in self._snapshots:
            raise ValueError(f"the snapshot of {snapshot.length} tokens has been released, or is one of another cache")

    def _ids(self, *numbers: int) -> Tensor:
        return ids_on(self.device, numbers)

    def release_request(self, slot: int) -> None:
        """Release a state slot.

        Raises:
            ValueError: no request holds the slot (unknown, or already released).
            RuntimeError: the request still owns blocks, which would leak. Nothing changes.
        """
        blocks = self._blocks_of_request(slot)
        if blocks:
            raise RuntimeError(
                f"state slot {slot} still owns {len(blocks)} blocks {blocks[:8]}: release_blocks({slot}) before "
                "release_request, or they leak"
            )
        del self._blocks[slot]
        self._lengths.free(slot)
        self._free_slots.append(slot)

    def allocate_block(self, slot: int | None = None) -> int:
        """Allocate a block of 128 tokens for the request in `slot`, or one that no request owns. Return its id.

        Raises:
            ValueError: no request holds `slot`.
            RuntimeError: "OOM", no block is free or the request already has the longest context.
        """
        self._settle(blocks=1)
        if slot is None:
            block = self._allocator.acquire_ids(1)[0]
            self._unowned.add(block)
            return block
        blocks = self._blocks_of_request(slot)
        if len(blocks) == self.block_tables.shape[1]:
            raise RuntimeError(
                f"OOM: state slot {slot} has {len(blocks)} blocks, the maximum of a request (context length "
                f"{self.config.max_position_embeddings}, {self.num_blocks} blocks in the cache)"
            )
        block = self._allocator.acquire_ids(1)[0]
        self.block_tables[slot, len(blocks)] = block  # a fill, which does not wait for the device
        blocks.append(block)
        return block

    def release_blocks(self, slot: int) -> None:
        """Release all blocks of the request in `slot`, which is then empty. Other owners keep shared blocks."""
        blocks = self._blocks_of_request(slot)
        self._allocator.release(blocks)
        self.block_tables[slot].fill_(NO_BLOCK)
        blocks.clear()
        self._empty(slot)

    def release_block(self, block: int) -> None:
        """Release a block that no request owns. Raise ValueError for any other block."""
        if block not in self._unowned:
            raise ValueError(f"block {block} was not allocated without a request, or has been released")
        self._allocator.release([block])
        self._unowned.remove(block)

    def offload(self, slot: int, stream: torch.cuda.Stream | None = None) -> Offloaded:
        """Copy the request in `slot` to host memory, and free its slot and its unshared blocks when the copy is
        complete.

        The copy runs on `stream`, by default the current stream, after the work of the current stream.
        `Offloaded.event` is its end. Do not write to the request any more.

        Raises:
            ValueError: no request holds the slot.
            RuntimeError: "OOM", not enough host memory, or the cache has none. Nothing changes.
        """
        blocks = list(self._blocks_of_request(slot))
        offloaded = self._host_side().save(slot, blocks, self._lengths.save(slot), stream)
        del self._blocks[slot]
        self._lengths.free(slot)
        self.block_tables[slot].fill_(NO_BLOCK)

        def free() -> None:
            self._allocator.release(blocks)
            self._free_slots.append(slot)

        self._host_side().after(offloaded.event, free)
        return offloaded

    def restore(self, offloaded: Offloaded, stream: torch.cuda.Stream | None = None) -> int:
        """Copy a request back into a new slot and new blocks. Return the slot.

        The copy is ordered as that of `offload`. A step of the request on a stream other than `stream` must wait for
        `Offloaded.event`.

        Raises:
            ValueError: the request has been restored or discarded, or another cache offloaded it.
            RuntimeError: no free slot or not enough blocks. The request stays on the host.
        """
        host = self._host_side()
        host.rows_of(offloaded)
        self._need_blocks(offloaded.blocks, "restore a request")
        slot = self._admit()
        blocks = self._own(slot, [], offloaded.blocks)
        self._lengths.load(slot, offloaded._lengths)
        host.load(offloaded, slot, blocks, stream)
        return slot

    def discard(self, offloaded: Offloaded) -> None:
        """Drop a request on the host. Raise ValueError as `restore` does."""
        self._host_side().give_back(offloaded)

    def begin_step(
        self,
        request_slots: Tensor,
        positions: Tensor,
        request_ids: Tensor,
        *,
        tokens_per_request: int | None = None,
    ) -> Step:
        """Return a step for the tokens of a forward pass; pass it to `layer` for every layer. Allocates nothing on the
        device.

        Args:
            request_slots, positions, request_ids, tokens_per_request: as in `Step`.
        """
        return Step(
            request_slots,
            positions,
            request_ids,
            self.block_tables,
            self._lengths,
            draft_tokens=self.schemas[0].draft_tokens,
            tokens_per_request=tokens_per_request,
        )

    def layer(self, layer_idx: int, step: Step) -> LayerCacheHandle:
        """Return the handle of one layer for a step. Allocates nothing on the device.

        Raises:
            IndexError: the layer does not exist.
            ValueError: the step is one of another cache, whose slots and blocks it names.
        """
        if step.lengths is not self._lengths:
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
        self._lengths.raise_if_skipped()

    def memory_bytes(self) -> int:
        """Return the bytes of all pools and snapshots, without block tables, positions, lengths and free lists."""
        return self.state.memory_bytes() + sum(pool.memory_bytes() for pool in self._paged)

    def _host_side(self) -> HostSide:
        if self._host is None:
            raise RuntimeError("the cache has no host memory: construct it with host_requests and host_blocks")
        return self._host

    def _settle(self, slots: int = 0, blocks: int = 0) -> None:
        """Wait for copies to the host if fewer than `slots` slots or `blocks` blocks are free."""
        if self._host is not None:
            self._host.settle(lambda: len(self._free_slots) >= slots and self._allocator.num_free >= blocks)

    def _blocks_of_request(self, slot: int) -> list[int]:
        if slot not in self._blocks:
            raise ValueError(
                f"state slot {slot} holds no request: expected a slot from admit_request that has not been released"
            )
        return self._blocks[slot]
