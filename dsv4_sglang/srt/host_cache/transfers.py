"""Host pools of this cache, and a controller that orders copies after the running steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import StackBuildResult, StackStrategy, build_pool_entry
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_memory
from torch import Tensor

from dsv4_sglang.cache.host_rows import HostBlockPool, HostSnapshotPool, host_block_bytes, host_row_bytes
from dsv4_sglang.cache.host_sharing import HostSharing
from dsv4_sglang.srt.host_cache.folder import CHECKSUM_BYTES
from dsv4_sglang.srt.host_cache.page_names import draws_weights, page_name, weight_facts
from dsv4_sglang.srt.host_cache.pools import SNAPSHOTS, HostBlocks, HostSnapshots
from dsv4_sglang.srt.host_cache.segment import BLOCKS
from dsv4_sglang.srt.host_cache.segment import SNAPSHOTS as SNAPSHOT_ROWS
from dsv4_sglang.srt.host_cache.segment_index import PoolSize
from dsv4_sglang.srt.host_cache.shared_memory import SharedMemoryStorage, SharedSegment
from dsv4_sglang.srt.host_cache.sharing import StorageReadByAnother, count_pages_read, sharing_of
from dsv4_sglang.srt.host_cache.sizing import host_demand
from dsv4_sglang.srt.host_cache.storage import StorageFull
from dsv4_sglang.srt.host_cache.stored_segments import SHM
from dsv4_sglang.srt.host_cache.used_folder import describe_weights
from dsv4_sglang.srt.host_cache.watch import LoadWatch
from dsv4_sglang.srt.launch.error import LaunchError, ending_with_the_reason
from dsv4_sglang.srt.launch.options import model_overrides
from dsv4_sglang.srt.memory.pools import CacheKVPool
from dsv4_sglang.srt.prefix_cache.copy_timer import CopyTimer
from dsv4_sglang.srt.sglang.flags import current_flags

log = logging.getLogger(__name__)


class TransferController(HybridCacheController):
    """SGLang's controller with copies that wait for running steps.

    SGLang's copies start after the work that its scheduler has processed. With overlap scheduling a decode step may
    still run then. It writes memory that a save reads (the last entry of a block and the snapshot at its end), and it
    uses memory that a load overwrites (blocks and slots that were freed while it ran). Copies therefore wait for the
    stream of the steps.
    """

    # CUDA stream of the steps.
    forward_stream: Any = None
    storage_backend: Any
    _together = False
    watch: LoadWatch
    saves: CopyTimer
    loads: CopyTimer
    # Cancelled fetches from a storage. SGLang frees their remaining rows when their thread has ended.
    cancelled_fetches: Sequence[Any] = ()
    # Key of the last page of the fetch for which rows are allocated.
    fetched_key = ""

    def __init__(self, *arguments: Any, sharing: HostSharing, **named: Any) -> None:
        """`sharing`: processes that share the host rows. `arguments`, `named`: as for SGLang's controller."""
        self.sharing = sharing
        super().__init__(*arguments, **named)

    @contextmanager
    def batch_backups(self) -> Iterator[None]:
        """Context manager: backups that start inside are copied together at the end."""
        self._together = True
        try:
            yield
        finally:
            self._together = False
            self.start_writing()

    def start_writing(self) -> None:
        if self._together or not self.write_queue:
            return
        to_host = self.l2_transfer_engine.device_to_host_stream
        to_host.wait_stream(self.forward_stream)
        with self.saves.measure(to_host):
            super().start_writing()

    def start_loading(self) -> int:
        if not self.load_queue:
            return -1
        from_host = self.l2_transfer_engine.host_to_device_stream
        from_host.wait_stream(self.forward_stream)
        load = self.watch.begin(self.load_queue)
        with self.loads.measure(from_host):
            consumer = super().start_loading()
        load.ack = self.ack_load_queue[-1]
        return consumer

    def start_unclaimed_loads(self) -> None:
        """Start the loads of requests that were not admitted. No step waits for these loads, so all steps do."""
        if self.load_queue:
            self.start_loading()
            from_host = self.l2_transfer_engine.host_to_device_stream
            self.forward_stream.wait_stream(from_host)

    def finish_saves(self) -> None:
        """Wait until all processes have saved their parts of the rows of all running saves."""
        self.start_writing()
        for ack in self.ack_write_queue:
            ack.finish_event.synchronize()
        self.sharing.wait()

    def terminate_prefetch(self, operation: Any) -> Any:
        if operation.host_indices is not None:
            self.cancelled_fetches = [*self.cancelled_fetches, operation]
        return super().terminate_prefetch(operation)

    def append_host_mem_release(self, host_indices: Tensor | None = None, extra_pools: Any = None) -> None:
        """Free host rows, among others the remaining rows of a cancelled fetch."""
        self.cancelled_fetches = [
            operation
            for operation in self.cancelled_fetches
            if extra_pools is not operation.pool_transfers
            and (host_indices is None or not is_rest_of(operation, host_indices))
        ]
        super().append_host_mem_release(host_indices, extra_pools)

    def reset(self) -> None:
        super().reset()
        self.cancelled_fetches = ()

    def alloc_prefetch_host_buffers(self, operation: Any, need_size: int) -> Tensor | None:
        keys = operation.hash_value[: need_size // self.page_size]
        self.fetched_key = keys[-1]
        found: Tensor | None = self.storage_host_pool.alloc_for(keys)
        return found

    def write_storage(
        self, host_indices: Tensor, token_ids: Any, hash_value: Any, prefix_keys: Any = None, extra_pools: Any = None
    ) -> Any:
        """Name the rows here and not in the thread that stores them, so that all processes do so at the same time."""
        self.storage_host_pool.name(host_indices, hash_value)
        for transfer in extra_pools or ():
            self.mem_pool_host.get_pool(transfer.name).name(transfer.host_indices, transfer.keys)
        return super().write_storage(host_indices, token_ids, hash_value, prefix_keys, extra_pools)

    def attach_storage_backend(self, *arguments: Any, **named: Any) -> None:
        compile_page_hash()
        super().attach_storage_backend(*arguments, **named)
        if isinstance(self.storage_backend, SharedMemoryStorage):
            self.page_get_func = self.storage_backend.read_blocks
            self.page_set_func = self.storage_backend.publish_blocks
        if not self.sharing.leads:
            self.storage_backend = StorageReadByAnother(self.storage_backend)
            self.page_get_func = count_pages_read

    def _generate_storage_config(
        self, model_name: str | None = None, storage_backend_extra_config: dict[str, Any] | None = None
    ) -> Any:
        config = super()._generate_storage_config(model_name, storage_backend_extra_config)
        config.is_mla_model = True
        return config

    def _page_backup(self, operation: Any) -> None:
        if self.storage_backend.available():
            with suppress(StorageFull):  # the storage logs it
                super()._page_backup(operation)

    def move_indices(self, host_indices: Tensor, device_indices: Tensor) -> tuple[Tensor, Tensor]:
        """Keep host indices on the CPU, which launches the copies."""
        return host_indices, device_indices


def compile_page_hash() -> None:
    """Compile SGLang's hash of stored pages, unless it is compiled. Otherwise a thread of the storage would do so at
    its first use, and a flush, which waits for the thread for 10 s, would fail and leave the storage without threads.

    Raises:
        LaunchError: it cannot be compiled.
    """
    try:
        get_hash_str([0])
    except RuntimeError as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise LaunchError(
            f"SGLang's hash of stored pages cannot be compiled ({reason}). Install g++, ninja and OpenSSL's headers "
            f"(Debian, Ubuntu: apt install g++ ninja-build libssl-dev), or leave out --hicache-storage-backend"
        ) from error


def remaining_blocks(operation: Any) -> Tensor:
    """Return the host indices of the blocks that a cancelled fetch has not loaded. Its thread may still write them."""
    rest: Tensor = operation.host_indices[operation.completed_tokens :]
    return rest


def is_rest_of(operation: Any, host_indices: Tensor) -> bool:
    """Return True if these are the remaining blocks of a cancelled fetch. Those of another one may be none, too."""
    rest = remaining_blocks(operation)
    same = host_indices.untyped_storage().data_ptr() == rest.untyped_storage().data_ptr()
    return same and torch.equal(host_indices, rest)


class HostStack(StackStrategy):
    """Builder of the host pools and controller. SGLang tries the strategy that was registered last first: this one."""

    def __init__(self, max_snapshots: int | None, host_snapshots: int | None) -> None:
        """`max_snapshots`, `host_snapshots`: the options of these names."""
        self.max_snapshots, self.host_snapshots = max_snapshots, host_snapshots

    def matches(self, kvcache: Any, components: set[ComponentType]) -> bool:
        return isinstance(kvcache, CacheKVPool) and components == {ComponentType.FULL, ComponentType.MAMBA}

    @ending_with_the_reason()
    def build(
        self,
        *,
        cache: Any,
        kvcache: CacheKVPool,
        params: Any,
        server_args: Any,
        storage_backend: str | None = None,
        model_name: str | None = None,
        **of_controller: Any,
    ) -> Any:
        """Build the pools and the controller. `of_controller`: arguments of SGLang's controller."""
        sharing = sharing_of(params, server_args)
        spare = 0 if storage_backend is None else CHECKSUM_BYTES
        sizes = self._sizes(kvcache, params.page_size, spare)
        if storage_backend is not None:
            model_name = _name_of_pages(model_name, kvcache.full_kv_pool.layout, sizes, server_args)
            log.info("dsv4_sglang host cache: page names in the storage %s: %s", storage_backend, model_name)
        blocks, snapshots = _allocate(kvcache, sizes, spare, sharing, model_name if storage_backend == SHM else None)
        slots = cache.components[ComponentType.MAMBA].slots
        slots.add_host_cache(snapshots.page_num)
        layers = len(kvcache.full_kv_pool.layout.schemas)
        memory, device = get_memory(), kvcache.mamba_pool.storage.device
        controller = TransferController(
            params.token_to_kv_pool_allocator,
            HostPoolGroup(_pool_entries(cache, kvcache, blocks, snapshots, layers)),
            params.page_size,
            params.tp_cache_group,
            attn_cp_group=params.attn_cp_cache_group,
            attn_tp_group=params.attn_tp_cache_group,
            pp_group=params.pp_cache_group,
            write_policy=memory.hicache_write_policy,
            io_backend=memory.hicache_io_backend,
            storage_backend=storage_backend,
            model_name=model_name,
            transfer_layer_id_max=layers,
            sharing=sharing,
            **of_controller,
        )
        controller.forward_stream = cache.forward_stream
        controller.watch = LoadWatch()
        controller.saves, controller.loads = CopyTimer(device), CopyTimer(device)
        log.info(
            "dsv4_sglang host cache of %s: %d tokens in %d blocks of %d bytes, %d snapshots of %d bytes; "
            "%.3f GiB of host memory, %s; policy %s",
            "this process" if sharing.size == 1 else f"{sharing.size} processes",
            *(blocks.size, blocks.page_num, blocks.row_bytes, snapshots.page_num, snapshots.row_bytes),
            (blocks.kv_buffer.nbytes + snapshots.kv_buffer.nbytes) / 2**30,
            "pinned" if blocks.pin_memory else "not pinned",
            memory.hicache_write_policy,
        )
        return StackBuildResult(
            host_pool_group=controller.mem_pool_host,
            cache_controller=controller,
            component_host_pools={ComponentType.FULL: blocks, ComponentType.MAMBA: snapshots},
            register_req_to_token_counter=True,
            pools_desc="blocks and snapshots",
            pool_declarations=(),
        )

    def _sizes(self, kvcache: CacheKVPool, page_size: int, spare: int) -> dict[str, PoolSize]:
        """Return the sizes of the host pools. `spare`: bytes of a row beside its data."""
        device_blocks, storage = kvcache.full_kv_pool, kvcache.mamba_pool.storage
        block_bytes = host_block_bytes(_pools_of(kvcache), spare)
        snapshot_bytes = host_row_bytes(storage.layout.snapshot_bytes, spare)
        # Resolved settings: ServerArgs lack the default of --hicache-ratio.
        memory = get_memory()
        blocks, snapshots = host_demand(
            device_blocks=device_blocks.size // page_size,
            device_snapshots=storage.snapshots,
            block_bytes=block_bytes,
            snapshot_bytes=snapshot_bytes,
            ratio=memory.hicache_ratio,
            size_gb=memory.hicache_size,
            max_snapshots=self.max_snapshots,
            host_snapshots=self.host_snapshots,
        )
        return {BLOCKS: PoolSize(blocks, block_bytes), SNAPSHOT_ROWS: PoolSize(snapshots, snapshot_bytes)}


def _pools_of(kvcache: CacheKVPool) -> list[Any]:
    return [pool for pool in kvcache.full_kv_pool.pools if pool]


def _allocate(
    kvcache: CacheKVPool, sizes: dict[str, PoolSize], spare: int, sharing: HostSharing, name: str | None
) -> tuple[HostBlocks, HostSnapshots]:
    """Allocate the host memory.

    The host cache's device memory (33 MB on Flash) is not released while a server sleeps: part of it is state.

    Args:
        sizes: sizes of the pools.
        spare: bytes of a row beside its data.
        sharing: processes that share the memory.
        name: page name of a segment that has the memory, or None.
    """
    blocks, snapshots = sizes[BLOCKS], sizes[SNAPSHOT_ROWS]
    shared = None
    try:
        shared = None if name is None else SharedSegment(sharing, name, sizes)
        files = {pool: None if shared is None else shared.file(pool) for pool in sizes}
        block_pool = HostBlockPool(_pools_of(kvcache), blocks.rows, spare=spare, sharing=sharing, file=files[BLOCKS])
        snapshot_pool = HostSnapshotPool(
            kvcache.mamba_pool.storage, snapshots.rows, spare=spare, sharing=sharing, file=files[SNAPSHOT_ROWS]
        )
    except RuntimeError as error:
        if shared is not None:
            shared.remove_unless_resumed()
        raise LaunchError(
            f"the host cache does not fit: {blocks.rows} blocks and {snapshots.rows} snapshots; lower "
            f"--hicache-ratio or --hicache-size. {error}"
        ) from None
    return HostBlocks(block_pool, shared), HostSnapshots(snapshot_pool, shared)


def _pool_entries(
    cache: Any, kvcache: CacheKVPool, blocks: HostBlocks, snapshots: HostSnapshots, layers: int
) -> list[Any]:
    """Describe both host pools to SGLang: their device pools, and how an entry is freed or allocated for a copy."""
    slots = cache.components[ComponentType.MAMBA].slots
    return [
        build_pool_entry(
            name=PoolName.KV,
            host_pool=blocks,
            device_pool=kvcache.full_kv_pool,
            layer_mapping={layer: i for i, layer in enumerate(kvcache.full_kv_pool.compressed_layers)},
            transfer_layer_id_max=layers,
            is_anchor=True,
        ),
        build_pool_entry(
            name=SNAPSHOTS,
            host_pool=snapshots,
            device_pool=kvcache.mamba_pool,
            layer_mapping={0: 0},
            transfer_layer_id_max=layers,
            host_evict_fn=lambda count: cache.evict_host(count, ComponentType.MAMBA),
            device_alloc_fn=cache.components[ComponentType.MAMBA].slots_for_load,
            device_free_fn=slots.free,
        ),
    ]


def _name_of_pages(model_name: str | None, layout: Any, sizes: dict[str, PoolSize], server_args: Any) -> str:
    """Return the name of this model's pages in a storage, and record what it stands for."""
    name = page_name(
        model_name,
        layout,
        [size.row_bytes for size in sizes.values()],
        overrides=model_overrides(server_args.json_model_override_args),
        **weight_facts(current_flags(server_args)),
    )
    weights = Path(server_args.model_path).absolute()
    describe_weights(name, f"{weights}, random" if draws_weights(server_args) else str(weights))
    return name
