"""Calls of a `KVCacheManager` in any order: no slot or block is lost, and no request sees another one."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.standalone import EXACT, LONGEST, ONLINE, Request, all_bytes, check, make_manager, run_step

SLOTS, BLOCKS = 3, 7


class Calls(RuleBasedStateMachine):
    """State machine whose model is a list of requests and of blocks without a request, with their tokens."""

    @initialize(options=st.sampled_from([EXACT, ONLINE]))
    def make(self, options: dict[str, str]) -> None:
        self.manager = make_manager(slots=SLOTS, blocks=BLOCKS, **options)
        self.requests: list[Request] = []
        self.ended: list[Request] = []
        self.unowned: list[int] = []
        self.seed = 0

    def drawn(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.requests))

    def owned(self) -> list[int]:
        return [block for r in self.requests for block in self.manager.blocks_of(r.slot)] + self.unowned

    @rule()
    def admit(self) -> None:
        if len(self.requests) == SLOTS:
            with pytest.raises(RuntimeError, match="no free state slot"):
                self.manager.admit_request()
            return
        self.seed += 1
        self.requests.append(Request.admit(self.manager, self.seed))

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        """Allocate a block in advance, or one that no request owns."""
        request = data.draw(st.sampled_from([*self.requests, None]))
        slot = None if request is None else request.slot
        owned = self.owned()
        if len(owned) == BLOCKS or (slot is not None and len(self.manager.blocks_of(slot)) == LONGEST // 128):
            with pytest.raises(RuntimeError, match="OOM"):
                self.manager.allocate_block(slot)
            return
        block = self.manager.allocate_block(slot)
        assert block not in owned
        if slot is None:
            self.unowned.append(block)

    @precondition(lambda self: self.unowned)
    @rule()
    def release_block(self) -> None:
        self.manager.release_block(self.unowned.pop(0))

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(),
        sizes=st.lists(st.sampled_from([1, 3, 60, 127, 128]), min_size=SLOTS, max_size=SLOTS),
        pads=st.integers(0, 2),
    )
    def append(self, data: st.DataObject, sizes: list[int], pads: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.requests), min_size=1, unique_by=id))
        steps = [(request, n) for request, n in zip(chosen, sizes) if request.length + n <= LONGEST]
        asked = sum(max(0, -(-(r.length + n) // 128) - len(self.manager.blocks_of(r.slot))) for r, n in steps)
        if steps and asked <= self.manager.num_free_blocks:
            run_step(self.manager, steps, pads=pads)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), off=st.sampled_from([-128, -1, 1, 5, 128]))
    def append_elsewhere(self, data: st.DataObject, off: int) -> None:
        """A step that begins at any other position is rejected and changes nothing."""
        request = self.drawn(data)
        position = request.length + off
        if not 0 <= position < 128 * len(self.manager.blocks_of(request.slot)):
            return
        before = all_bytes(self.manager)
        step = self.manager.begin_step(*(torch.tensor([x]) for x in (request.slot, position, 0)))
        layer = request.layers[0]
        with pytest.raises(ValueError, match=f"has {request.length} tokens in layer 0.*not at {position}"):
            self.manager.layer(0, step).append(layer.inputs["kv"][:1], layer.weights)
        assert all(torch.equal(a, b) for a, b in zip(before, all_bytes(self.manager)))

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

    @invariant()
    def counts(self) -> None:
        manager, owned = self.manager, self.owned()
        assert len(set(owned)) == len(owned) == BLOCKS - manager.num_free_blocks
        assert manager.num_free_slots == SLOTS - len(self.requests)
        for request in self.requests:
            blocks = manager.blocks_of(request.slot)
            table = manager.block_tables[request.slot].tolist()
            assert table == blocks + [-1] * (len(table) - len(blocks))
            assert manager.length_of(request.slot) == request.length

    def teardown(self) -> None:
        """Check that every request saw its own tokens alone, and that no slot or block is lost."""
        if not hasattr(self, "manager"):
            return
        for request in [*self.requests, *self.ended]:
            if request.length:
                check(request, **EXACT)
        for request in self.requests:
            request.finish(self.manager)
        for block in self.unowned:
            self.manager.release_block(block)
        assert (self.manager.num_free_slots, self.manager.num_free_blocks) == (SLOTS, BLOCKS)


TestCalls = Calls.TestCase
TestCalls.settings = hypothesis.settings(max_examples=15, stateful_step_count=30)
