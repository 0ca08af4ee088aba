"""Tests of requests of a `KVCacheManager` that share blocks: forks, prefix snapshots, and copies in host memory."""

from collections import Counter
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from standalone_harness import EXACT, LONGEST, ONLINE, Request, all_bytes, check, make_manager, run_step
from torch import Tensor

from dsv4_sglang.standalone import KVCacheManager, Offloaded, Snapshot


def resume(manager: KVCacheManager, snapshot: Snapshot, of: Request, seed: int) -> Request:
    return of.branch(manager.admit_request(snapshot), seed, snapshot.length)


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kv_format": "bf16", "key_format": "nvfp4", "hca_state": "online"}])
def test_fork_shares_full_blocks_and_copies_the_last(device: torch.device, options: dict[str, str]) -> None:
    manager = make_manager(device, **options)
    first = Request.admit(manager, 0)
    run_step(manager, [(first, 300)])
    manager.allocate_block(first.slot)  # Allocated in advance; the fork does not need it.
    second = first.fork(manager, 1)
    here, there = manager.blocks_of(first.slot), manager.blocks_of(second.slot)
    assert (len(here), len(there)) == (4, 3) and there[:2] == here[:2] and there[2] not in here
    assert manager.block_tables[second.slot].tolist() == [*there, -1]
    assert manager.num_free_blocks == 12 - 5
    before = all_bytes(manager, first.slot)
    assert all(torch.equal(a[:3] if a.dim() > 1 else a, b) for a, b in zip(before, all_bytes(manager, second.slot)))
    run_step(manager, [(second, 100)])
    assert all(torch.equal(a, b) for a, b in zip(before, all_bytes(manager, first.slot))), "the fork wrote to both"
    of_fork = all_bytes(manager, second.slot)
    run_step(manager, [(first, 84)])
    assert all(torch.equal(a, b) for a, b in zip(of_fork, all_bytes(manager, second.slot)))


def test_fork_and_snapshot_need_a_complete_step() -> None:
    manager = make_manager(max_snapshots=1, **EXACT)
    request = Request.admit(manager, 0)
    run_step(manager, [(request, 128)])
    manager.allocate_block(request.slot)
    handle = manager.acquire(0, *(torch.tensor([x]) for x in (request.slot, 128, 0)))
    layer = request.layers[0]
    handle.append(layer.inputs["kv"][128:129], layer.weights)
    for call in (manager.fork, manager.take_snapshot, manager.length_of):
        with pytest.raises(
            RuntimeError, match="state slot 0 have 128 to 129 tokens; append the last step to every layer"
        ):
            call(request.slot)
    assert manager.num_free_slots == 2


def test_forks_of_a_request_with_drafts(device: torch.device) -> None:
    """After a draft step over the end of a block, either request can continue from any of its tokens. The block before
    the end is then written again."""
    manager = make_manager(device, draft_tokens=4, **ONLINE)
    first = Request.admit(manager, 0)
    run_step(manager, [(first, 126)])
    run_step(manager, [(first, 4)])  # 126 .. 129
    copies = [first.branch(manager.fork(first.slot), seed, first.length) for seed in (1, 2)]
    assert not set(manager.blocks_of(first.slot)) & set(manager.blocks_of(copies[0].slot))
    copies = [copy.branch(copy.slot, seed, kept) for copy, seed, kept in zip(copies, (3, 4), (127, 129))]
    run_step(manager, [(request, 3) for request in (*copies, first)])
    for request in (first, *copies):
        run_step(manager, [(request, 40)])
        check(request, **ONLINE)


# --- snapshots --------------------------------------------------------------------------------------------------------


def test_a_resumed_slot_knows_its_positions(device: torch.device) -> None:
    """The positions equal those of the request at the time of the snapshot, whatever the slot held before."""
    manager = make_manager(device, max_snapshots=1, draft_tokens=3, **ONLINE)
    first, other = Request.admit(manager, 0), Request.admit(manager, 1)
    run_step(manager, [(first, 256), (other, 201)])
    snapshot = manager.take_snapshot(first.slot)
    other.finish(manager)
    slot, state = manager.admit_request(snapshot), manager.state
    assert slot == other.slot
    assert sorted(state.swa_pos[0, slot].tolist())[-128:] == list(range(128, 256))
    kept = state.swa_pos[0, slot] >= 0
    for positions in (state.swa_pos[..., kept], state.swa_head, state.tail_len):
        assert torch.equal(positions[:, slot], positions[:, first.slot])


def test_a_snapshot_of_a_step_that_may_be_rolled_back(device: torch.device) -> None:
    """The snapshot's tokens cannot be rolled back any more, because other requests may read them. Later tokens can."""
    manager = make_manager(device, max_snapshots=1, draft_tokens=4, **ONLINE)
    first = Request.admit(manager, 0)
    run_step(manager, [(first, 126)])
    run_step(manager, [(first, 4)])
    snapshot = manager.take_snapshot(first.slot, 128)
    second = resume(manager, snapshot, first, 1)
    for position in (127, 131):
        step = manager.begin_step(*(torch.tensor([x], device=device) for x in (first.slot, position, 0)))
        with pytest.raises(ValueError, match=rf"begins at one of 128\.\.130, not at {position}"):
            manager.layer(0, step).append(first.layers[0].inputs["kv"][:1], first.layers[0].weights)
    third = first.branch(first.slot, 2, 128)
    run_step(manager, [(third, 3), (second, 3)])
    for request in (second, third):
        run_step(manager, [(request, 30)])
        check(request, **ONLINE)


def test_snapshots_that_cannot_be() -> None:
    manager = make_manager(slots=2, blocks=6, max_snapshots=1, draft_tokens=2, **ONLINE)
    request = Request.admit(manager, 0)
    with pytest.raises(ValueError, match=r"a snapshot of 0 tokens of state slot 0, whose next step begins at 0\.\.0"):
        manager.take_snapshot(request.slot)
    run_step(manager, [(request, 130)])
    for length in (None, 128, 256):
        with pytest.raises(ValueError, match=r"whose next step begins at 130\.\.130.*a multiple of 128"):
            manager.take_snapshot(request.slot, length)
    run_step(manager, [(request, 126)])
    snapshot = manager.take_snapshot(request.slot)
    with pytest.raises(RuntimeError, match="all 1 snapshots are in use: call release_snapshot"):
        manager.take_snapshot(request.slot)
    request.finish(manager)
    assert manager.num_free_blocks == 4, "the snapshot keeps its blocks"
    manager.release_snapshot(snapshot)
    assert manager.num_free_blocks == 6
    for call in (manager.release_snapshot, manager.admit_request):
        with pytest.raises(ValueError, match="the snapshot of 256 tokens has been released"):
            call(snapshot)


# --- host memory ------------------------------------------------------------------------------------------------------


def test_a_request_with_drafts_is_rolled_back_after_the_host(device: torch.device) -> None:
    """The bounds of the next step are restored with the request."""
    manager = make_manager(device, draft_tokens=4, host_requests=1, host_blocks=3, **ONLINE)
    request = Request.admit(manager, 0)
    run_step(manager, [(request, 126)])
    run_step(manager, [(request, 4)])
    request.slot = manager.restore(manager.offload(request.slot))
    back = request.branch(request.slot, 1, 127)
    run_step(manager, [(back, 4)])
    check(back, **ONLINE)


# --- calls in any order -----------------------------------------------------------------------------------------------

SLOTS, BLOCKS, SNAPSHOTS, HOST_REQUESTS, HOST_BLOCKS = 3, 7, 2, 1, 4


class Sharing(RuleBasedStateMachine):
    """State machine that makes calls in any order. The model is a list of requests, snapshots, offloaded requests and
    blocks without a request, with their tokens."""

    @initialize(options=st.sampled_from([EXACT, ONLINE]))
    def make(self, options: dict[str, Any]) -> None:
        self.manager = make_manager(
            slots=SLOTS, blocks=BLOCKS, max_snapshots=SNAPSHOTS, host_requests=HOST_REQUESTS, host_blocks=HOST_BLOCKS,
            **options,
        )  # fmt: skip
        self.requests: list[Request] = []
        self.snapshots: list[tuple[Snapshot, Request]] = []
        self.waiting: list[tuple[Offloaded, Request, list[Tensor]]] = []
        self.ended: list[Request] = []
        self.unowned: list[int] = []
        self.seed = 0

    def new_seed(self) -> int:
        self.seed += 1
        return self.seed

    def drawn(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.requests))

    def owners(self) -> Counter:
        owned = Counter(block for r in self.requests for block in self.manager.blocks_of(r.slot))
        return (
            owned
            + Counter(self.unowned)
            + Counter(block for snapshot, _ in self.snapshots for block in snapshot._blocks)
        )

    def free(self) -> int:
        return BLOCKS - len(self.owners())

    @precondition(lambda self: len(self.requests) < SLOTS)
    @rule()
    def admit(self) -> None:
        self.requests.append(Request.admit(self.manager, self.new_seed()))

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        """Allocate a block in advance, or one that no request owns."""
        request = data.draw(st.sampled_from([*self.requests, None]))
        slot = None if request is None else request.slot
        if self.free() == 0 or (slot is not None and len(self.manager.blocks_of(slot)) == LONGEST // 128):
            with pytest.raises(RuntimeError, match="OOM"):
                self.manager.allocate_block(slot)
            return
        owners, block = self.owners(), self.manager.allocate_block(slot)
        assert block not in owners
        if slot is None:
            self.unowned.append(block)

    @precondition(lambda self: self.unowned)
    @rule()
    def release_block(self) -> None:
        self.manager.release_block(self.unowned.pop(0))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), sizes=st.lists(st.sampled_from([1, 3, 60, 127, 128]), min_size=SLOTS, max_size=SLOTS))
    def append(self, data: st.DataObject, sizes: list[int]) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.requests), min_size=1, unique_by=id))
        steps = [(request, n) for request, n in zip(chosen, sizes) if request.length + n <= LONGEST]
        asked = sum(max(0, -(-(r.length + n) // 128) - len(self.manager.blocks_of(r.slot))) for r, n in steps)
        if steps and asked <= self.free():
            run_step(self.manager, steps, pads=data.draw(st.integers(0, 2)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), off=st.sampled_from([-128, -1, 1, 5, 128]))
    def append_elsewhere(self, data: st.DataObject, off: int) -> None:
        """A step that begins at any other position is rejected and changes nothing."""
        request = self.drawn(data)
        position = request.length + off
        if not 0 <= position < 128 * len(self.manager.blocks_of(request.slot)):
            return
        before = all_bytes(self.manager, request.slot)
        step = self.manager.begin_step(*(torch.tensor([x]) for x in (request.slot, position, 0)))
        layer = request.layers[0]
        with pytest.raises(ValueError, match=f"has {request.length} tokens in layer 0.*not at {position}"):
            self.manager.layer(0, step).append(layer.inputs["kv"][:1], layer.weights)
        assert all(torch.equal(a, b) for a, b in zip(before, all_bytes(self.manager, request.slot)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        request, counts = self.drawn(data), (self.manager.num_free_slots, self.free())
        if counts[0] == 0 or (request.length % 128 and counts[1] == 0):
            with pytest.raises(RuntimeError, match=r"OOM|no free state slot"):
                self.manager.fork(request.slot)
            assert counts == (self.manager.num_free_slots, self.manager.num_free_blocks)
            return
        self.requests.append(request.fork(self.manager, self.new_seed()))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def take_snapshot(self, data: st.DataObject) -> None:
        request = self.drawn(data)
        if request.length % 128:
            with pytest.raises(ValueError, match="a multiple of 128"):
                self.manager.take_snapshot(request.slot)
            run_step(self.manager, [(request, 128 - request.length % 128)])
        if request.length == 0 or len(self.snapshots) == SNAPSHOTS:
            with pytest.raises((ValueError, RuntimeError), match=r"a multiple of 128|snapshots are in use"):
                self.manager.take_snapshot(request.slot)
            return
        # Copy of the request at this length; the request itself continues and may end.
        then = request.branch(request.slot, request.history[-1][0], request.length)
        self.snapshots.append((self.manager.take_snapshot(request.slot), then))

    @precondition(lambda self: self.snapshots and len(self.requests) < SLOTS)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        snapshot, of = data.draw(st.sampled_from(self.snapshots))
        self.requests.append(resume(self.manager, snapshot, of, self.new_seed()))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def release_snapshot(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from(self.snapshots))
        self.snapshots.remove(kept)
        self.manager.release_snapshot(kept[0])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = self.drawn(data)
        if blocks := self.manager.blocks_of(request.slot):
            with pytest.raises(RuntimeError, match=rf"still owns {len(blocks)} blocks .*release_blocks.* leak"):
                self.manager.release_request(request.slot)
        self.requests.remove(request)
        self.ended.append(request)
        request.finish(self.manager)
        assert bool((self.manager.block_tables[request.slot] == -1).all())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def offload(self, data: st.DataObject) -> None:
        request = self.drawn(data)
        if self.waiting or len(self.manager.blocks_of(request.slot)) > HOST_BLOCKS:
            with pytest.raises(RuntimeError, match="OOM"):
                self.manager.offload(request.slot)
            return
        self.requests.remove(request)
        contents = all_bytes(self.manager, request.slot)
        self.waiting.append((self.manager.offload(request.slot), request, contents))

    @precondition(lambda self: self.waiting)
    @rule()
    def restore(self) -> None:
        """The restored request has the same contents, in blocks of its own."""
        offloaded, request, contents = self.waiting[0]
        if offloaded.blocks > self.free() or len(self.requests) == SLOTS:
            with pytest.raises(RuntimeError, match=r"OOM|no free state slot"):
                self.manager.restore(offloaded)
            return
        self.waiting.clear()
        owners = self.owners()
        request.slot = self.manager.restore(offloaded)
        assert not owners.keys() & set(self.manager.blocks_of(request.slot))
        assert all(torch.equal(a, b) for a, b in zip(all_bytes(self.manager, request.slot), contents, strict=True))
        self.requests.append(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def discard(self) -> None:
        offloaded, request, _ = self.waiting.pop()
        self.manager.discard(offloaded)
        self.ended.append(request)

    @invariant()
    def counts(self) -> None:
        manager, owners = self.manager, self.owners()
        assert manager.num_free_slots == SLOTS - len(self.requests)
        assert manager.num_free_blocks == BLOCKS - len(owners)
        for block in range(BLOCKS):
            assert manager._allocator.owners(block) == owners[block]
        for request in self.requests:
            blocks = manager.blocks_of(request.slot)
            table = manager.block_tables[request.slot].tolist()
            assert table == blocks + [-1] * (len(table) - len(blocks))
            assert manager.length_of(request.slot) == request.length
            assert all(owners[block] == 1 for block in blocks[request.length // 128 :]), (
                "an append would write to others"
            )

    def teardown(self) -> None:
        """Check that every request saw its own tokens and that no slot or block is lost."""
        if not hasattr(self, "manager"):
            return
        for request in [*self.requests, *(request for _, request, _ in self.waiting), *self.ended]:
            if request.length:
                check(request, **EXACT)
        for request in self.requests:
            request.finish(self.manager)
        for snapshot, _ in self.snapshots:
            self.manager.release_snapshot(snapshot)
        for block in self.unowned:
            self.manager.release_block(block)
        assert (self.manager.num_free_slots, self.manager.num_free_blocks) == (SLOTS, BLOCKS)


TestSharing = Sharing.TestCase
TestSharing.settings = hypothesis.settings(max_examples=15, stateful_step_count=30)
