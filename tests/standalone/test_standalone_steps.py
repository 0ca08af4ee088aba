"""Tests of the start positions that a step of the cache accepts without a server, and of steps without device reads.

On a GPU the latter are recorded into a CUDA graph and replayed at other positions. On a CPU they are called again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.standalone import (
    EXACT,
    LONGEST,
    ONLINE,
    Layer,
    Request,
    all_bytes,
    attend,
    check,
    make_manager,
    run_step,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_sglang.standalone import KVCacheManager, LayerCacheHandle


def append_first_layer(manager: KVCacheManager, request: Request, positions: Sequence[int]) -> None:
    """Append tokens of one request to the layer without a compressor."""
    slots = torch.full((len(positions),), request.slot, device=manager.device)
    step = manager.begin_step(slots, torch.tensor(positions, device=manager.device), slots)
    layer = request.layers[0]
    manager.layer(0, step).append(layer.inputs["kv"][: len(positions)], layer.weights)


# --- start positions of a step ----------------------------------------------------------------------------------------


def test_layers_go_on_by_themselves() -> None:
    """Run a step of each layer, then two steps whose layers are interleaved."""
    manager = make_manager(**EXACT)
    request = Request.admit(manager, 0)
    manager.allocate_block(request.slot)

    def handles(position: int) -> list[LayerCacheHandle]:
        step = manager.begin_step(*(torch.tensor([x]) for x in (request.slot, position, 0)))
        return [manager.layer(i, step) for i in range(4)]

    def append(handle: LayerCacheHandle, position: int) -> None:
        layer = request.layers[handle.layer_idx]
        x = {name: inputs[position : position + 1] for name, inputs in layer.inputs.items()}
        handle.append(x["kv"], layer.weights, x.get("kv_score"), x.get("index_kv_score"))

    first, second = handles(0), handles(1)
    for one, other in zip(first, second):
        append(one, 0)
        append(other, 1)
        with pytest.raises(ValueError, match=f"has 2 tokens in layer {one.layer_idx}, so its next step begins at 2"):
            append(one, 0)
    assert manager.length_of(request.slot) == 2
    again = handles(1)
    with pytest.raises(ValueError, match="has 2 tokens in layer 3, so its next step begins at 2, not at 1"):
        append(again[3], 1)


def test_a_slot_without_a_request_takes_no_tokens() -> None:
    manager = make_manager(**EXACT)
    request = Request.admit(manager, 0)
    run_step(manager, [(request, 5)])
    block = manager.blocks_of(request.slot)[0]
    request.finish(manager)
    manager.block_tables[request.slot, 0] = block  # A stale block table entry.
    with pytest.raises(ValueError, match="state slot 0 holds no request: admit_request"):
        append_first_layer(manager, request, [5])


def test_a_request_without_its_blocks_is_empty() -> None:
    manager = make_manager(**EXACT)
    request = Request.admit(manager, 0)
    run_step(manager, [(request, 200)])
    manager.release_blocks(request.slot)
    assert manager.length_of(request.slot) == 0
    assert all(bool((state.swa_pos[request.slot] == -1).all()) for state in manager.state_pools)
    manager.allocate_block(request.slot)
    with pytest.raises(ValueError, match="begins at 0, not at 100"):
        append_first_layer(manager, request, [100])
    new = Request(request.slot, request.seed, request.layers, [[] for _ in request.layers])
    run_step(manager, [(new, 131)])
    check(new, **EXACT)


# --- steps without device reads ---------------------------------------------------------------------------------------


class NoReadBack(TorchDispatchMode):
    """Mode that fails where CUDA graph capture would: at an operation that reads a tensor value back, or whose output
    size depends on one."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        assert not by_mask and not any(name.strip("_").startswith(word.strip("_")) for word in self.FORBIDDEN), (
            f"{func} reads back"
        )
        return func(*args, **(kwargs or {}))


class NoList(TorchFunctionMode):
    """Mode that fails at a tensor whose values become a list, which `NoReadBack` does not see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ not in ("tolist", "numpy"), f"{func} reads back"
        return func(*args, **(kwargs or {}))


class Recorded:
    """Decode step of up to `size` requests over tensors with fixed addresses. All requests use the weights of
    `layers`."""

    def __init__(self, manager: KVCacheManager, layers: list[Layer], size: int) -> None:
        self.manager, self.layers, self.size = manager, layers, size
        device = manager.device
        self.slots = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.ids = torch.arange(size, device=device)
        self.inputs = [
            {name: torch.zeros(size, *x.shape[1:], device=device) for name, x in layer.inputs.items()}
            for layer in layers
        ]
        self.outputs: list[Tensor] = []
        self.replay: Callable[[], object] | None = None

    def forward(self, decode: bool) -> None:
        step = self.manager.begin_step(self.slots, self.positions, self.ids, decode=decode)
        self.outputs = []
        for i, (layer, x) in enumerate(zip(self.layers, self.inputs)):
            handle = self.manager.layer(i, step)
            handle.append(x["kv"], layer.weights, x.get("kv_score"), x.get("index_kv_score"))
            self.outputs.append(attend(handle, layer, x, most=LONGEST // 4))

    def _record(self) -> Callable[[], object]:
        if self.manager.device.type == "cpu":

            def run() -> None:
                with NoReadBack(), NoList():
                    self.forward(decode=True)

            return run
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward(decode=False)  # A captured step is not read back, as one with `decode`.
        return graph.replay

    def __call__(self, requests: Sequence[Request], order: Sequence[int], at: Sequence[int] | None = None) -> None:
        """Run one step. Request b is at place `order[b]` of the step, and the other places are padding. `at` overrides
        the positions at which the requests continue."""
        begins = [request.length for request in requests] if at is None else at
        self.slots.fill_(-1)
        self.positions.zero_()
        for i, values in enumerate(self.inputs):
            for name, x in values.items():
                x.fill_(7.0)
                for request, place in zip(requests, order):
                    x[place] = request.layers[i].inputs[name][request.length]
        for request, place, begin in zip(requests, order, begins):
            self.slots[place] = request.slot
            self.positions[place] = begin
            while 128 * len(self.manager.blocks_of(request.slot)) <= begin:
                self.manager.allocate_block(request.slot)
        self.replay = self.replay or self._record()
        self.replay()

    def take(self, requests: Sequence[Request], order: Sequence[int]) -> None:
        """Append the outputs of the step's last call to the requests."""
        for request, place in zip(requests, order):
            for i, out in enumerate(self.outputs):
                request.outputs[i].append(out[place : place + 1].clone())
            request.length += 1


@pytest.mark.parametrize("options", [EXACT, ONLINE], ids=["raw", "online"])
def test_a_recorded_step_at_other_positions(device: torch.device, options: dict[str, Any]) -> None:
    """Replays cross the ends of windows and blocks, in any order and with padding. A chunk runs between replays."""
    manager = make_manager(device, **options)
    requests = [Request.admit(manager, seed) for seed in range(2)]
    run_step(manager, [(requests[0], 123), (requests[1], 2)])
    run_step(manager, [(request, 1) for request in requests])  # Compiles the GPU kernels.
    recorded = Recorded(manager, requests[0].layers, size=3)

    def steps(count: int) -> None:
        for i in range(count):
            order = [(place + i) % 3 for place in range(len(requests))]
            recorded(requests, order)
            recorded.take(requests, order)
        manager.raise_if_skipped()

    steps(7)
    run_step(manager, [(requests[1], 120)])
    requests.append(Request.admit(manager, 2))
    run_step(manager, [(requests[2], 126)])
    steps(6)
    assert [manager.length_of(r.slot) for r in requests] == [137, 136, 132]
    for request in requests:
        check(request, **EXACT)


def test_recorded_step_skips_unwritable_tokens(device: torch.device) -> None:
    """A skipped token has no effect, like padding. One error reports it afterwards, and other requests are
    unaffected. Of two requests in one slot the second is skipped."""
    manager = make_manager(device, blocks=4, **EXACT)
    requests = [Request.admit(manager, seed) for seed in range(2)]
    run_step(manager, [(requests[0], 100), (requests[1], 30)])
    run_step(manager, [(request, 1) for request in requests])
    recorded = Recorded(manager, requests[0].layers, size=3)
    recorded(requests, [0, 1])
    recorded.take(requests, [0, 1])
    manager.raise_if_skipped()
    before = all_bytes(manager)

    def skipped(message: str) -> None:
        assert all(torch.equal(a, b) for a, b in zip(before, all_bytes(manager))), message
        with pytest.raises(ValueError, match=message):
            manager.raise_if_skipped()
        manager.raise_if_skipped()  # The error is raised once.

    recorded(requests[:1], [1], at=[103])
    skipped(
        "a step that was not read back skipped state slot 0 at position 103: its tokens do not end there, it has no "
        "block for the position, or it was in the step twice"
    )
    recorded.positions[0], recorded.slots[0] = 400, 0
    recorded.slots[1:] = -1
    assert recorded.replay is not None
    recorded.replay()
    skipped("skipped state slot 0 at position 400")
    recorded.positions[0] = -3
    recorded.replay()
    skipped("skipped state slot 0 at position -3")
    for slot in (3, 7, -2):
        recorded.slots[0], recorded.positions[0] = slot, 0
        recorded.replay()
        skipped(r"skipped a slot that is not in -1\.\.2 at position 0")
    recorded.slots[0] = 2
    recorded.replay()
    skipped("skipped state slot 2 at position 0")
    recorded(requests, [2, 0])
    recorded.take(requests, [2, 0])
    manager.raise_if_skipped()
    recorded(requests[:1] * 2, [0, 1])
    recorded.take(requests[:1], [0])
    with pytest.raises(ValueError, match="skipped state slot 0"):
        manager.raise_if_skipped()
    for request in requests:
        check(request, **EXACT)


def test_an_eager_step_reads_back() -> None:
    """Negative control: the check above fails for an eager step."""
    manager = make_manager(**EXACT)
    request = Request.admit(manager, 0)
    manager.allocate_block(request.slot)
    with pytest.raises(AssertionError, match="reads back"), NoReadBack(), NoList():
        append_first_layer(manager, request, [0])
