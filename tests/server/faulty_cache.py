"""SGLang plugin that injects one fault at a time into a server under test.

`plugged` sets the environment in which servers find the plugin. The plugin has no effect while the
file named by FAULT_FILE is empty or missing. A test writes the name of a fault to that file; the fault then affects all
following steps. The faults by component:

- FAULTS: prefix cache
- RANK_FAULTS: DP attention
- HOST_FAULTS, STUCK, LATE, LATE_FAULTS: host cache
- TRANSFER_FAULTS: transfers between servers
- V41_FAULTS: DeepSeek-V4.1
- DRAFT_FAULT: draft model
- LOCK_FAULT: snapshot registry
- LAUNCH_FAULT: kernel launch
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

FAULT_FILE = "DSV4_SGLANG_TEST_FAULT"
FAULTS = (
    "the state at the end of the step",
    "previous rows dropped",
    "indexer compressor state dropped",
    "a slot reused without its state",
    "a snapshot shared without a copy",
)
RANK_FAULTS = (
    "a rank's processes are added up",
    "experts see tokens of one rank",
    "padding owns a request's slot",
)
HOST_FAULTS = (
    "the row behind each",
    "a layer that does not come back",
    "a snapshot of zeros",
    "a snapshot of somebody else",
)
# The load hangs after the first layer with entries, in the scheduler process, which does the copies on a CPU.
STUCK = "a load does not end"
# Not a fault: delay each load until a step waits for it. Loads on a CPU are synchronous otherwise, so a step without
# the wait would still read correct data.
LATE = "loads come when they are waited for"
# These faults include the delay of LATE. Layer 1 is a CSA layer and layer 2 an HCA layer.
LATE_FAULTS = (
    "layer 1 is not waited for",
    "layer 2 is not waited for",
    "the snapshot is not waited for",
)
TRANSFER_FAULTS = (
    "the last block stays behind",
    "the slot stays behind",
)
V41_FAULTS = (
    "snapshots with empty rings",
    "the entries of the next source",
    "candidates of nobody",
)
DRAFT_FAULT = "snapshots without the draft model's ring"
LOCK_FAULT = "a snapshot stays locked"
# Raised only in the last process of a TP group.
LAUNCH_FAULT = "a kernel fails"
# The first words are those of a real error of an op on a GPU (tests/gpu/test_failing_kernel.py).
LAUNCH_ERROR = "append: the launch for 1 tokens of 1 requests, ratio 4, decode failed: an illegal memory access"
# Transfers between servers: a prefill server with HELD sends all but the last chunk, writes HOLDING to the file and
# waits until the file is deleted.
HELD, HOLDING = "the end of a prompt is held", "one is held"
KEPT_MAIN, KEPT_INDEX = slice(0, 512), slice(512, 640)
PACKAGE, SGLANG = "dsv4_sglang.", "sglang.srt."
# Environment variable with a folder in which each process records its loads from the host.
LOADS = "DSV4_SGLANG_TEST_LOADS"


@contextmanager
def broken(file: Path, kind: str) -> Iterator[None]:
    """Context manager: inject the fault `kind` into the servers that read `file`."""
    file.write_text(kind)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def entry_point(folder: Path, module: str) -> list[str]:
    """Register a module of this folder as an installed distribution in `folder`.

    Returns:
        The entries that PYTHONPATH needs.
    """
    described = folder / f"{module}-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
    (described / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{module} = {module}:register\n")
    return [str(folder), str(Path(__file__).parent)]


@contextmanager
def plugged(folder: Path, module: str, **environment: str) -> Iterator[None]:
    """Context manager: servers that start inside load the plugin `module` of this folder and have the given variables.

    `folder` is empty.
    """
    path = [*entry_point(folder, module), os.environ.get("PYTHONPATH", "")]
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(path), **environment}):
        yield


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in (
        (PACKAGE + "srt.attention.backend.HybridCacheBackend.forward", _forward),
        (PACKAGE + "cache.state_cache.StateStorage.store", _store),
        (PACKAGE + "cache.v41_step.V41Step.select", _select),
        (PACKAGE + "cache.v41_step.V41Step.attend", _attend),
        (PACKAGE + "srt.prefix_cache.slots.SnapshotSlots.load_to_active", _load_to_active),
        (PACKAGE + "srt.prefix_cache.policy.SnapshotRegistry.unlock", _unlock),
        (PACKAGE + "srt.features.collectives.gather_from_copy", _gather),
        (PACKAGE + "attention.metadata.build_prefill", _build_prefill),
        (PACKAGE + "cache.host_pool.HostBlockPool.load", _load_blocks),
        (PACKAGE + "cache.host_pool.HostSnapshotPool.load", _load_snapshot),
        (PACKAGE + "srt.memory.pools.CacheKVPool.wait_for_layer", _wait_for_layer),
        (SGLANG + "managers.cache_controller.LayerLoadingEvent.complete", _layer_loads),
        (SGLANG + "managers.cache_controller.LayerLoadingEvent.wait", _layer_is_waited_for),
        (SGLANG + "disaggregation.common.conn.CommonKVSender._prepare_send_indices", _send),
    ):
        HookRegistry.register(target, function, HookType.AROUND)


def _fault() -> str:
    """Return the current fault; empty if there is none or the module injects no faults."""
    file = Path(os.environ.get(FAULT_FILE, os.devnull))
    return file.read_text() if file.exists() else ""


# (snapshots, live slots) of the requests that resumed in this step, for the fault that makes them share a snapshot.
_shared: list[tuple[Any, Any]] = []


def _forward(
    original: Callable[..., Any], backend: Any, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **kw: Any
) -> Any:
    last = layer.layer_id == backend.last_layer
    if last and _fault() == LAUNCH_FAULT:
        from sglang.srt.runtime_context import get_parallel

        if get_parallel().tp_rank == get_parallel().tp_size - 1:
            raise RuntimeError(LAUNCH_ERROR)
    if last and backend._staged is not None and _fault() == FAULTS[0]:
        staged, snapshots = backend._staged
        # Use the live slot instead of the staging slots; tests of this fault run one request per step.
        backend._staged = backend.metadata.slots[:1].expand_as(staged).contiguous(), snapshots
    out = original(backend, q, k, v, layer, *rest, **kw)
    if last and _fault() == FAULTS[4]:
        for snapshots, live in _shared:
            backend.state.store(live, snapshots)
        _shared.clear()
    if last:
        _come()
    return out


def _store(original: Callable[..., None], state: Any, slots: Any, snapshots: Any) -> None:
    original(state, slots, snapshots)
    columns = {FAULTS[1]: KEPT_MAIN, FAULTS[2]: KEPT_INDEX}.get(_fault())
    if columns is not None:
        kept = state._compressor_state_units[:, state.num_slots * state._units_per_slot :]
        kept = kept.unflatten(1, (-1, len(state._kept)))
        for snapshot in snapshots[snapshots > 0].tolist():
            kept[:, snapshot - 1, :, :, columns] = 0

    if _fault() == V41_FAULTS[0]:
        for snapshot in snapshots[snapshots > 0].tolist():
            state._all_rings[:, state.num_slots + snapshot - 1] = 0


def _select(original: Callable[..., None], step: Any, layer: int, *arguments: Any) -> None:
    if step.schedule[layer].within_candidates and _fault() == V41_FAULTS[2]:
        step._candidates = step._candidates.clamp(max=0)
    original(step, layer, *arguments)


def _attend(original: Callable[..., Any], step: Any, layer: int, *arguments: Any) -> Any:
    sources = [i for i, spec in enumerate(step.schedule) if spec.kv_source == i]
    if step.schedule[layer].kv_source != sources[0] or _fault() != V41_FAULTS[1]:
        return original(step, layer, *arguments)
    pools = step.pools
    step.pools = [pools[sources[1]] if i == sources[0] else pool for i, pool in enumerate(pools)]
    try:
        return original(step, layer, *arguments)
    finally:
        step.pools = pools


def _load_to_active(original: Callable[..., None], slots: Any, pool: Any, snapshots: Any, live: Any) -> None:
    if _fault() == FAULTS[3]:
        return
    counter = slots.layer_transfer_counter
    if _fault() == LATE_FAULTS[2]:
        slots.layer_transfer_counter = None
    original(slots, pool, snapshots, live)
    slots.layer_transfer_counter = counter
    if _fault() == DRAFT_FAULT:
        pool.storage.rings[-1].index_fill_(0, live.long(), 0)
    if _fault() == FAULTS[4]:
        import torch

        _shared.append((snapshots.to(torch.int32), live.to(torch.int32)))


def _unlock(original: Callable[..., None], registry: Any, slot: int) -> None:
    if _fault() != LOCK_FAULT:
        original(registry, slot)


def _gather(original: Callable[..., None], gather: Callable[..., None], everyones: Any, own: Any, batch: Any) -> None:
    original(gather, everyones, own, batch)
    if everyones.is_floating_point() and _fault() == RANK_FAULTS[0]:
        from sglang.srt.runtime_context import get_parallel

        everyones *= get_parallel().attn_tp_size
    if everyones.is_floating_point() and _fault() == RANK_FAULTS[1]:
        everyones[: everyones.shape[0] // 2] = 0


def _build_prefill(original: Callable[..., Any], **arguments: Any) -> Any:
    step = original(**arguments)
    if arguments["padding"] and _fault() == RANK_FAULTS[2]:
        step.slots[-1] = step.slots[0]
    return step


def _note(load: str) -> None:
    if folder := os.environ.get(LOADS):
        with (Path(folder) / str(os.getpid())).open("a") as file:
            file.write(load + "\n")


# Delayed loads in submission order, as on a stream. The (event, layer) entry follows the loads of that layer.
_on_their_way: deque[Any] = deque()


def _come(layer: tuple[Any, int] | None = None) -> None:
    """Execute delayed loads up to those of `layer`, unless they are done.

    Without a layer, execute all: the step is over, so loads that it did not wait for come too late.
    """
    while _on_their_way and (layer is None or layer in _on_their_way):
        first = _on_their_way.popleft()
        if callable(first):
            first()


def _layer_loads(original: Callable[..., None], event: Any, layer: int) -> None:
    original(event, layer)
    if _fault() in (LATE, *LATE_FAULTS):
        _on_their_way.append((event, layer))


def _layer_is_waited_for(original: Callable[..., None], event: Any, layer: int) -> None:
    original(event, layer)
    _come((event, layer))


def _wait_for_layer(original: Callable[..., None], pool: Any, layer: int) -> None:
    if _fault() != f"layer {layer} is not waited for":
        original(pool, layer)


def _load(copy: Callable[[], None]) -> None:
    """Copy immediately, or when a step waits for it."""
    if _fault() in (LATE, *LATE_FAULTS):
        _on_their_way.append(copy)
    else:
        copy()


def _load_blocks(original: Callable[..., None], pool: Any, blocks: Any, rows: Any, layer: int) -> None:
    _note(f"layer {layer}: {rows.tolist()} to {blocks.tolist()}")
    if _fault() == HOST_FAULTS[1] and layer == 0:
        return
    while _fault() == STUCK and layer > 0:
        time.sleep(0.1)
    # Use the next row, which has different content. A permutation of the rows of one prompt would go unnoticed, because
    # attention reads all entries.
    others = _fault() == HOST_FAULTS[0]
    _load(partial(original, pool, blocks, (rows + 1) % pool.num_blocks if others else rows, layer))


def _load_snapshot(original: Callable[..., None], pool: Any, snapshot: int, row: int) -> None:
    _note(f"snapshot {row} to {snapshot}")
    others = _fault() == HOST_FAULTS[3]
    _load(partial(original, pool, snapshot, (row + 1) % pool.num_snapshots if others else row))
    if _fault() == HOST_FAULTS[2]:
        for table in pool._tables:
            table[snapshot - 1] = 0


def _send(original: Callable[..., Any], sender: Any, blocks: Any, states: Any = None) -> Any:
    """Replace blocks or slots that must not be sent by SGLang's dummy 0."""
    last = states is not None
    if last and _fault() == HELD:
        file = Path(os.environ[FAULT_FILE])
        file.write_text(HOLDING)
        while file.exists():
            time.sleep(0.01)
    if last and len(blocks) and _fault() == TRANSFER_FAULTS[0]:
        blocks[-1] = 0
    if last and _fault() == TRANSFER_FAULTS[1]:
        states[0] = [0 * slot for slot in states[0]]
    return original(sender, blocks, states)
