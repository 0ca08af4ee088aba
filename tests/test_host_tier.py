"""The host tier on SGLang's own tree and controller, with streams that run late and in random order."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prefix_model import TIMES
from prefix_tree_server import BLOCK, without_a_server
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_params import SamplingParams
from streams import Stream
from tiered_server import TieredServer

from dsv4_sglang.cache.host_pool import FreeRows
from dsv4_sglang.srt import compat
from dsv4_sglang.srt.host.pools import HostBlocks, HostCheckpoints, HostRows
from dsv4_sglang.srt.host.sizing import host_demand
from dsv4_sglang.srt.host.transfers import TransferController
from dsv4_sglang.srt.prefix import schedule
from dsv4_sglang.srt.prefix.policy import CheckpointRegistry

POLICIES = ("write_through", "write_through_selective", "write_back")


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On one thread: copies are small, and threads that wait for each other take most of the time."""
    without_a_server(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_sglangs_order(monkeypatch: pytest.MonkeyPatch, server: TieredServer, method: str) -> None:
    """Its copies to the host ("start_writing") or from it ("start_loading") do not wait for the steps."""
    original, nothing = getattr(TransferController, method), Stream(server.streams)

    def without_the_wait(self: TransferController) -> object:
        self.forward_stream = nothing
        try:
            return original(self)
        finally:
            self.forward_stream = server.forward

    monkeypatch.setattr(TransferController, method, without_the_wait)


def with_bad_transfers(monkeypatch: pytest.MonkeyPatch, server: TieredServer) -> Callable[[], None]:
    """One copy of six does not begin, each way, and streams of copies stall; call what is returned before a turn."""
    rng = random.Random(0)
    for method in ("write", "load"):
        original = getattr(TransferController, method)

        def sometimes(self: TransferController, *args: Any, original: Any = original, **named: Any) -> Any:
            return None if rng.random() < 1 / 6 else original(self, *args, **named)

        monkeypatch.setattr(TransferController, method, sometimes)

    def stall() -> None:
        if rng.random() < 1 / 20:
            server.streams.stalled = rng.choice(compat.copy_streams(server.controller))

    return stall


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad_transfers", [False, True])
def test_steps_read_what_they_should(monkeypatch: pytest.MonkeyPatch, policy: str, bad_transfers: bool) -> None:
    """Also where transfers fail and take long: requests compute instead, or wait, and nobody holds what they held."""
    server = TieredServer(monkeypatch, seed=1, policy=policy)
    stall = with_bad_transfers(monkeypatch, server) if bad_transfers else lambda: None
    for turn in range(200):
        stall()
        server.turn()
        assert not server.wrong, (turn, server.wrong)
        if turn % 4 == 0:
            server.check()
    server.settle()
    server.check()
    server.check_contents()
    assert server.from_host > 0, "nothing came from the host"
    counters = server.component.host_counters
    assert counters.loads_failed > 1 or not bad_transfers
    assert server.flush(), "something is locked or on its way"
    server.check()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_hundred_thousand_operations_with_late_copies(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """36,000 turns of a scheduler, a third of them with each policy, TIMES as many; small hosts and large ones; in a
    third transfers fail and stall. Nothing is read before it is there, leaked, or owned twice."""
    for seed in range(40 * TIMES):
        with monkeypatch.context() as patch:
            sizes = {"host_blocks": 20 + 15 * (seed % 8), "host_checkpoints": 4 + 7 * (seed % 8)}
            server = TieredServer(patch, seed, policy=policy, **sizes)
            stall = with_bad_transfers(patch, server) if seed % 3 == 0 else lambda: None
            for turn in range(300):
                stall()
                server.turn()
                assert not server.wrong, (seed, turn, server.wrong)
                if turn % 10 == 0:
                    server.check()
            server.settle()
            server.check()
            server.check_contents()
            if seed % 2:
                assert server.flush()
                server.check()


@pytest.mark.parametrize("pool", [HostBlocks, HostCheckpoints])
def test_a_copy_that_cannot_be_launched_is_an_error(monkeypatch: pytest.MonkeyPatch, pool: type[HostRows]) -> None:
    """Of the scheduler, like a step that cannot be: it is not taken for one that was made."""
    server = TieredServer(monkeypatch, seed=0, blocks=20)
    server.serve(prompt(0))
    server._make_room(20)

    def fails(*args: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(pool, "load", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        server.start(prompt(0))
    monkeypatch.setattr(pool, "save", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        server.serve(prompt(1))


@pytest.mark.parametrize("method", ["start_writing", "start_loading"])
def test_copies_in_sglangs_order_bring_wrong_bytes(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Without either wait a step reads something else within few seeds: what docs/host_tier.md says of the order."""
    for seed in range(20):
        with monkeypatch.context() as patch:
            server = TieredServer(patch, seed)
            in_sglangs_order(patch, server, method)
            for _ in range(400):
                server.turn()
                if server.wrong:
                    return
    pytest.fail("the order of copies makes no difference here: the test does not test")


def prompt(line: int, blocks: int = 6) -> list[int]:
    """Blocks of one line, and a few tokens behind them."""
    return [100 * line + at // BLOCK + 1 for at in range(blocks * BLOCK + 20)]


@pytest.mark.parametrize("policy", POLICIES)
def test_lines_beyond_the_device_come_back(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Ten lines of six blocks in a device of 20: every later visit finds all of it."""
    server = TieredServer(monkeypatch, seed=0, policy=policy, blocks=20)
    for visit in range(3):
        for line in range(10):
            assert server.serve(prompt(line)) == (6 * BLOCK if visit else 0), (visit, line)
            server.check()
    server.check_contents()
    assert not server.wrong
    assert server.component.host_counters.saves_refused == 0


def test_all_checkpoints_of_a_prompt_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are attached behind the insertion, too: a branch resumes from the host in the middle."""
    server = TieredServer(monkeypatch, seed=0, blocks=20)
    server.serve(prompt(0, blocks=10))  # the interval is four blocks
    server._make_room(20)
    assert server.serve(prompt(0, blocks=10)[: 8 * BLOCK] + [7] * 200) == 8 * BLOCK
    assert server.from_host > 0 and not server.wrong


def test_the_end_of_a_line_gets_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three checkpoints the host has room for one, and keeps the one that the next turn comes for."""
    server, tokens = TieredServer(monkeypatch, seed=0, blocks=20, host_checkpoints=1), prompt(0, blocks=10)
    server.serve(tokens)
    server._make_room(20)
    assert server.serve(tokens) == 10 * BLOCK
    server.check()
    assert server.component.host_counters.saves_refused == 2
    assert not server.wrong


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_a_host_smaller_than_the_device_has_what_the_device_gives_up_next(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """It does not fill up with copies of what came first: of five lines it holds the last two."""
    server = TieredServer(monkeypatch, seed=0, policy=policy, blocks=40, host_blocks=14, host_checkpoints=5)
    for line in range(5):
        assert server.serve(prompt(line)) == 0
        server.check()
    server.check_contents()
    server._make_room(40)
    assert server.cache.full_kv_pool_host.held == 12
    assert [server.serve(prompt(line)) for line in (4, 3, 0)] == [6 * BLOCK, 6 * BLOCK, 0]
    assert not server.wrong


def test_a_loop_over_more_than_both_hold_keeps_hitting_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 lines of six blocks, 3 of which fit the device and 10 the host; by age alone none would be found."""
    server = TieredServer(monkeypatch, seed=0, blocks=20, host_blocks=60)
    hits = [sum(server.serve(prompt(line)) > 0 for line in range(24)) for _ in range(5)]
    server.check()
    assert hits[-1] >= 6, hits


def test_a_retracted_request_is_on_the_host_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is evicted then: it resumes from its last checkpoint."""
    server = TieredServer(monkeypatch, seed=0)
    step = server.start(prompt(0, blocks=7))
    server.retract(step["request"])
    saved = {place for place in server.component.slots.nodes if server.component.slots.registry.copied[place]}
    assert saved, "nothing was saved"
    assert server.cache.full_kv_pool_host.held == 7
    server._make_room(40)
    assert server.allocator.available_size() == 40 * BLOCK
    assert server.serve(prompt(0, blocks=7)) == 7 * BLOCK
    assert not server.wrong
    server.check_contents()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retracted_request_with_log_probabilities(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """SGLang matches it up to the end of its prompt only, where its checkpoint may have been wanted by nobody yet."""
    server = TieredServer(monkeypatch, seed=0, policy=policy)
    request = server.start(prompt(0, blocks=7))["request"]
    while request.computed <= 9 * BLOCK:
        step = server._decode(request)
        assert step is not None
        server.launch([step], -1).synchronize()
    request.return_logprob, request.logprob_start_len = True, request.prompt - 1
    tokens = list(request.full_untruncated_fill_ids)
    server.retract(request)
    server.check()
    server._make_room(40)
    assert server.serve(tokens[: request.prompt]) == 7 * BLOCK
    server._make_room(40)
    assert server.serve(tokens) == 9 * BLOCK
    assert not server.wrong
    server.check_contents()


@pytest.mark.parametrize("full", ["blocks", "slots"])
@pytest.mark.parametrize("room, kept", [(20, 0), (12, 8)])
def test_a_load_without_room_computes_again(monkeypatch: pytest.MonkeyPatch, full: str, room: int, kept: int) -> None:
    """The request resumes from the deepest state that the device has, or from none. Checkpoints at 4, 8, 10 blocks."""
    server, tokens = TieredServer(monkeypatch, seed=0, blocks=20), prompt(0, blocks=10)
    server.serve(tokens)
    server._make_room(room)
    with monkeypatch.context() as patch:
        if full == "blocks":
            patch.setattr(server.allocator, "alloc", lambda count: None)
        else:
            patch.setattr(server.component, "free_slot", lambda needed: 0)
        request = server.arrive(tokens)
    assert request.host_hit_length == 0 and len(request.prefix_indices) == kept * BLOCK
    if kept:
        slot = server.component.slots.id_of(server.cache.tree_core.node_by_id(request.last_node))
        assert int(request.mamba_cow_src_index) == slot <= 14
    else:
        assert request.mamba_cow_src_index is None
    assert server.component.host_counters.loads_failed == 1
    server.check()
    assert server.serve(tokens) == 10 * BLOCK
    assert not server.wrong


def being_saved(monkeypatch: pytest.MonkeyPatch) -> TieredServer:
    """A device of 20 blocks, of which 16 are being saved."""
    server = TieredServer(monkeypatch, seed=0, blocks=20)
    server.finish(server.start(prompt(0, blocks=16))["request"])
    server.cache.check_hicache_events()
    assert server.cache.ongoing_write_through
    assert server.cache.full_evictable_size() == 0
    return server


def test_who_needs_room_waits_for_what_is_being_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would retract a request instead."""
    server = being_saved(monkeypatch)
    assert server._make_room(10)
    server.check()
    server.settle()
    assert server.serve(prompt(0, blocks=16)) == 16 * BLOCK and not server.wrong
    server.check_contents()


@pytest.mark.parametrize("waited_for", [False, True])
def test_a_request_is_looked_at_again_when_a_save_is_over(monkeypatch: pytest.MonkeyPatch, waited_for: bool) -> None:
    """SGLang's own PrefillAdder refuses it, since what is being saved is locked; the batch is full until a running
    request ends, or that is saved."""
    server = being_saved(monkeypatch)
    of_settings = ("is_dsa_prefill_cp_in_seq_split", "is_prefill_context_parallel_enabled", "_use_exact_chunk_fill")
    for name in (*of_settings, "mamba_prefill_chunk_grid"):
        monkeypatch.setattr(schedule_policy, name, lambda: False, raising=False)
    features = SimpleNamespace(features=SimpleNamespace(enable_encoder_swa_bounded_replay=False))
    monkeypatch.setattr(schedule_policy, "get_exec", lambda: features, raising=False)
    request = Req("waiting", "", array("q", prompt(1, blocks=10)), SamplingParams(max_new_tokens=10))
    scheduler, refused = SimpleNamespace(tree_cache=server.cache), schedule_policy.AddReqResult.NO_TOKEN

    def look(scheduler: Any, batch: ScheduleBatch) -> object:
        """As Scheduler.get_new_batch_prefill."""
        scheduler.tree_cache.check_hicache_events()
        if batch.batch_is_full:
            return None
        request.init_next_round_input(server.cache)
        adder = schedule_policy.PrefillAdder(BLOCK, server.cache, server.allocator, None, 1.0, 1 << 20, None)
        result = adder.add_one_req(request, has_chunked_req=False, truncation_align_size=None)
        batch.batch_is_full = result is refused
        return result

    batch = ScheduleBatch(reqs=[])
    assert [schedule.look_again(look, scheduler, batch) for _ in range(2)] == [refused, None]
    results = []
    for _ in range(3):  # checkpoints whose blocks were under way are saved behind them
        (server.cache.finish_saves if waited_for else server.streams.run_all)()
        results.append(schedule.look_again(look, scheduler, batch))
    assert schedule_policy.AddReqResult.CONTINUE in results
    server.check()


def test_a_load_of_a_request_that_was_not_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded all the same, and whoever comes next may read it."""
    server = TieredServer(monkeypatch, seed=0, blocks=20)
    server.serve(prompt(0))
    server._make_room(20)
    server.arrive(prompt(0))  # and goes
    assert server.controller.load_queue
    server.cache.check_hicache_events()
    assert not server.controller.load_queue
    assert server.serve(prompt(0)) == 6 * BLOCK
    assert not server.wrong
    server.check_contents()
    assert server.flush()


def test_rows_are_handed_out_side_by_side() -> None:
    rows = FreeRows(10)
    assert rows.take(3).tolist() == [0, 1, 2] and rows.take(4).tolist() == [3, 4, 5, 6]
    rows.give_back(np.array([1, 2]))
    assert rows.take(4).tolist() == [7, 8, 9, 1], "behind those before, and round"
    assert rows.take(2) is None and rows.available == 1
    assert rows.take(1).tolist() == [2] and rows.take(0).tolist() == []
    rows.give_back(np.array([4]))
    for wrong in ([4], [5, 5]):
        with pytest.raises(ValueError, match="not all of them are out"):
            rows.give_back(np.array(wrong))


def test_sizes() -> None:
    device = {"device_blocks": 100, "device_checkpoints": 10, "block_bytes": 400_000, "checkpoint_bytes": 4_000_000}
    by_ratio = host_demand(**device, ratio=2.5, size_gb=0, host_checkpoints=None)
    assert (by_ratio.blocks, by_ratio.checkpoints, by_ratio.bytes) == (250, 25, 200_000_000)
    by_size = host_demand(**device, ratio=2.0, size_gb=1, host_checkpoints=None)
    assert (by_size.blocks, by_size.checkpoints) == (1250, 125)
    given = host_demand(**device, ratio=2.0, size_gb=1, host_checkpoints=50)
    assert (given.blocks, given.checkpoints) == (2000, 50)
    with pytest.raises(ValueError, match=r"0 blocks and 0 checkpoints \(--hicache-ratio 0.001"):
        host_demand(**device, ratio=0.001, size_gb=0, host_checkpoints=None)


def test_a_checkpoint_keeps_its_history_when_it_moves() -> None:
    """A line of three and a branch, of which the one in the middle goes to the host and comes back to another slot."""
    registry = CheckpointRegistry(4, host_rows=3)
    registry.add(1, 100, 0)
    registry.add(2, 300, 1)
    registry.add(3, 600, 2)
    for _ in range(5):
        registry.tick()
    registry.use(2)
    row = registry.host_id(1)
    before = registry.length[2], registry.worth[2], registry.last[2], registry.interval[2]
    for place, to in ((2, row), (row, 4)):
        registry.move(place, to)
        assert (registry.length[to], registry.worth[to], registry.last[to], registry.interval[to]) == before
        assert registry.previous[to] == 1 and registry.previous[3] == to
        assert registry.held[to] and not registry.held[place]
    registry.remove(4)
    assert registry.previous[3] == 1 and len(registry) == 2
    with pytest.raises(ValueError, match="cannot move"):
        registry.move(1, 3)


def test_what_the_host_has_goes_first_on_the_device() -> None:
    registry = CheckpointRegistry(4, host_rows=4)
    for slot, length in ((1, 4000), (2, 2000), (3, 1000)):
        registry.add(slot, length, 0)
        registry.wanted[slot] = True
    registry.tick()
    assert registry.least_worth(needed=True, saves=0) == 3
    assert registry.to_copy() == [1, 2, 3], "those worth most first"
    registry.copied[1] = True
    assert registry.to_copy() == [2, 3]
    assert registry.least_worth(needed=True, saves=0) == 1
    registry.copied[1] = False
    registry.move(1, registry.host_id(2))
    assert registry.least_worth(needed=True, saves=0) == 3, "what only the host has frees no slot"
    registry.copied[3] = True
    assert registry.on_host() == [3, registry.host_id(2)], "those worth least first"
