"""Faults that server_plugin.py injects into a server under test, by component:

- prefix cache: "the state at the end of the step", "previous rows dropped", "indexer compressor state dropped",
  "a slot reused without its state"
- draft model: "snapshots without the draft model's ring"
- prefill graphs: "padding tokens write", "the lengths of the step before"
- DP attention: "experts see tokens of one rank", "padding owns a request's slot"
- host cache: "the row behind each", "a snapshot of somebody else", "a load does not end". With "loads come late" each
  load is delayed until a step waits for it, which is not a fault: loads on a CPU are synchronous otherwise, so a step
  without the wait would still read correct data. "layer N is not waited for" and "the snapshot is not waited for"
  include this delay. In the last process of a TP group only: "a process saves slowly", "a process is killed in a
  save", "a process is killed in a load". While "a storage writes slowly" each write takes a second, while "a storage
  hangs" none ends.
- transfers between servers: "the last block stays behind", "the slot stays behind". With "the end of a prompt is held"
  a prefill server sends all but the last chunk, writes HOLDING to the file and waits until the file is deleted.
- DeepSeek-V4.1: "snapshots with empty rings", "candidates of nobody"
- snapshot registry: "a snapshot stays locked"
- kernel launch, in the last process of a TP group only: "a kernel fails"
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from support.server_plugin import fault, folder

# The first words are those of a real error of an op on a GPU (tests/gpu/test_failing_kernel.py).
LAUNCH_ERROR = "append: the launch for 1 tokens of 1 requests, ratio 4, decode failed: an illegal memory access"
HOLDING = "one is held"
# Columns of the compressor state that a fault clears in snapshots.
DROPPED = {"previous rows dropped": slice(0, 512), "indexer compressor state dropped": slice(512, 640)}


def _is_last_process() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().tp_rank == get_parallel().tp_size - 1)


def _forward(
    original: Callable[..., Any], backend: Any, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **kw: Any
) -> Any:
    if layer.layer_id != backend.last_layer:
        return original(backend, q, k, v, layer, *rest, **kw)
    if fault() == "a kernel fails" and _is_last_process():
        raise RuntimeError(LAUNCH_ERROR)
    if (staged := backend.snapshots.staged) is not None and fault() == "the state at the end of the step":
        # Use the live slot instead of the staging slots; tests of this fault run one request per step.
        backend.snapshots.staged = staged._replace(src=backend.metadata.slots[:1].expand_as(staged.src).contiguous())
    out = original(backend, q, k, v, layer, *rest, **kw)
    _finish_loads()
    return out


def _store(original: Callable[..., None], state: Any, slots: Any, snapshots: Any) -> None:
    original(state, slots, snapshots)
    columns = DROPPED.get(fault())
    if columns is not None:
        kept = state._compressor_state_units[:, state.num_slots * state._units_per_slot :]
        kept = kept.unflatten(1, (-1, len(state._kept)))
        for snapshot in snapshots[snapshots > 0].tolist():
            kept[:, snapshot - 1, :, :, columns] = 0


def _candidates(original: Callable[..., Any], ops: Any, layer: int, tokens: int) -> Any:
    size, kept, within = original(ops, layer, tokens)
    if within is not None and fault() == "candidates of nobody":
        within = within.clamp(max=0)
    return size, kept, within


def _load_to_active(original: Callable[..., None], slots: Any, pool: Any, snapshots: Any, live: Any) -> None:
    if fault() == "a slot reused without its state":
        return
    counter = slots.layer_transfer_counter
    if fault() == "the snapshot is not waited for":
        slots.layer_transfer_counter = None
    original(slots, pool, snapshots, live)
    slots.layer_transfer_counter = counter
    if fault() == "snapshots without the draft model's ring":
        pool.storage.rings[-1].index_fill_(0, live.long(), 0)
    if fault() == "snapshots with empty rings":  # not at the end of a step, which may be a graph and run no Python
        pool.storage.rings.index_fill_(1, live.long(), 0)


def _unlock(original: Callable[..., None], registry: Any, slot: int) -> None:
    if fault() != "a snapshot stays locked":
        original(registry, slot)


def _gather(original: Callable[..., None], gather: Callable[..., None], everyones: Any, own: Any, batch: Any) -> None:
    original(gather, everyones, own, batch)
    if everyones.is_floating_point() and fault() == "experts see tokens of one rank":
        everyones[: everyones.shape[0] // 2] = 0


def _build_prefill(original: Callable[..., Any], **arguments: Any) -> Any:
    step = original(**arguments)
    if arguments["padding"] and fault() == "padding owns a request's slot":
        step.slots[-1] = step.slots[0]
    return step


def _fill(original: Callable[..., None], buffers: Any, **batch: Any) -> None:
    before = buffers.prefix_lens.clone()
    original(buffers, **batch)
    if fault() == "padding tokens write":
        buffers.state_slots[-1] = buffers.state_slots[0]
    if fault() == "the lengths of the step before":
        buffers.prefix_lens.copy_(before)


def _record_load(load: str) -> None:
    if (loads := folder() / "loads").exists():
        with (loads / str(os.getpid())).open("a") as file:
            file.write(load + "\n")


# Delayed loads in submission order, as on a stream. The (event, layer) entry follows the loads of that layer.
_delayed: deque[Any] = deque()


def _is_late() -> bool:
    return fault() == "loads come late" or fault().endswith("is not waited for")


def _finish_loads(layer: tuple[Any, int] | None = None) -> None:
    """Execute delayed loads up to those of `layer`, unless they are done.

    Without a layer, execute all: the step is over, so loads that it did not wait for come too late.
    """
    while _delayed and (layer is None or layer in _delayed):
        first = _delayed.popleft()
        if callable(first):
            first()


def _layer_loads(original: Callable[..., None], event: Any, layer: int) -> None:
    original(event, layer)
    if _is_late():
        _delayed.append((event, layer))


def _layer_is_waited_for(original: Callable[..., None], event: Any, layer: int) -> None:
    original(event, layer)
    _finish_loads((event, layer))


def _wait_for_layer(original: Callable[..., None], pool: Any, layer: int) -> None:
    if fault() != f"layer {layer} is not waited for":
        original(pool, layer)


def _load(copy: Callable[[], None]) -> None:
    """Copy immediately, or when a step waits for it."""
    if _is_late():
        _delayed.append(copy)
    else:
        copy()


def _save_blocks(original: Callable[..., None], pool: Any, blocks: Any, rows: Any) -> None:
    if fault() == "a process saves slowly" and _is_last_process():
        time.sleep(1)
    if fault() == "a process is killed in a save" and _is_last_process():
        half = len(rows) // 2
        original(pool, blocks[:half], rows[:half])
        os.kill(os.getpid(), signal.SIGKILL)
    original(pool, blocks, rows)


def _load_blocks(original: Callable[..., None], pool: Any, blocks: Any, rows: Any, layer: int) -> None:
    _record_load(f"layer {layer}: {rows.tolist()} to {blocks.tolist()}")
    # Hang after the first layer with entries, in the scheduler process, which does the copies on a CPU.
    while fault() == "a load does not end" and layer > 0:
        time.sleep(0.1)
    if fault() == "a process is killed in a load" and layer > 0 and _is_last_process():
        os.kill(os.getpid(), signal.SIGKILL)
    # Use the next row, which has different content. A permutation of the rows of one prompt would go unnoticed, because
    # attention reads all entries.
    others = fault() == "the row behind each"
    _load(partial(original, pool, blocks, (rows + 1) % pool.num_blocks if others else rows, layer))


def _load_snapshot(original: Callable[..., None], pool: Any, snapshot: int, row: int) -> None:
    _record_load(f"snapshot {row} to {snapshot}")
    others = fault() == "a snapshot of somebody else"
    _load(partial(original, pool, snapshot, (row + 1) % pool.num_snapshots if others else row))


def _store_page(original: Callable[..., None], controller: Any, operation: Any) -> None:
    if fault() == "a storage writes slowly":
        time.sleep(1)
    while fault() == "a storage hangs":
        time.sleep(0.01)
    original(controller, operation)


def _send(original: Callable[..., Any], sender: Any, blocks: Any, states: Any = None) -> Any:
    """Replace blocks or slots that must not be sent by SGLang's dummy 0."""
    if states is not None:  # the last chunk
        if fault() == "the end of a prompt is held":
            (folder() / "fault").write_text(HOLDING)
            while (folder() / "fault").exists():
                time.sleep(0.01)
        if len(blocks) and fault() == "the last block stays behind":
            blocks[-1] = 0
        if fault() == "the slot stays behind":
            states[0] = [0 * slot for slot in states[0]]
    return original(sender, blocks, states)


HOOKS: dict[str, Callable[..., Any]] = {
    "dsv4_sglang.srt.attention.backend.HybridCacheBackend.forward": _forward,
    "dsv4_sglang.cache.state_cache.StateStorage.store": _store,
    "dsv4_sglang.srt.attention.layer_ops.LayerOps._candidates": _candidates,
    "dsv4_sglang.srt.prefix_cache.slots.SnapshotSlots.load_to_active": _load_to_active,
    "dsv4_sglang.srt.prefix_cache.registry.SnapshotRegistry.unlock": _unlock,
    "dsv4_sglang.srt.attention.collectives.gather_from_copy": _gather,
    "dsv4_sglang.attention.metadata.build_prefill": _build_prefill,
    "dsv4_sglang.attention.step_buffers.PrefillBuffers.fill": _fill,
    "dsv4_sglang.cache.host_rows.HostBlockPool.save": _save_blocks,
    "dsv4_sglang.cache.host_rows.HostBlockPool.load": _load_blocks,
    "dsv4_sglang.cache.host_rows.HostSnapshotPool.load": _load_snapshot,
    "dsv4_sglang.srt.host_cache.transfers.TransferController._page_backup": _store_page,
    "dsv4_sglang.srt.memory.pools.CacheKVPool.wait_for_layer": _wait_for_layer,
    "sglang.srt.managers.cache_controller.LayerLoadingEvent.complete": _layer_loads,
    "sglang.srt.managers.cache_controller.LayerLoadingEvent.wait": _layer_is_waited_for,
    "sglang.srt.disaggregation.common.conn.CommonKVSender._prepare_send_indices": _send,
}
