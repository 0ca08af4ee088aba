"""Tests of snapshots on SGLang's own tree, through the calls of its scheduler, without a server."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from support.prefix_tree import BLOCK, LONGEST_ANSWER, TIMES, Request, TreeServer, without_a_server

from benchmarks.agent_trace import Turn
from benchmarks.simulated_server import Simulation
from dsv4_sglang.srt.prefix_cache import cache as cache_module
from dsv4_sglang.srt.prefix_cache import snapshot_schedule
from dsv4_sglang.srt.prefix_cache.notes import BatchNote, RequestNote
from dsv4_sglang.srt.prefix_cache.tenants import NO_LIMIT


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_server(monkeypatch)


def started(server: TreeServer, keys: list[int], tail: int = 1) -> Request:
    """Admit a request and compute its prompt."""
    request = server.admit(keys, tail)
    assert request is not None
    server.prefill_all(request)
    return request


def run(server: TreeServer, keys: list[int], tail: int = 1, decode: int = 0) -> int:
    """Serve one request and return the number of tokens that it resumed from."""
    request = server.admit(keys, tail)
    assert request is not None
    resumed = len(request.prefix_indices)
    server.prefill_all(request)
    for _ in range(decode):
        assert server.decode(request, 50)
    server.finish(request)
    server.check()
    return resumed


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_prompt_may_end_before_the_last_chunk(chunk: int) -> None:
    server = TreeServer(blocks=64, snapshots=20, interval=30, chunk=chunk)
    run(server, list(range(10)), tail=44)
    assert run(server, list(range(10)), tail=44) == 10 * BLOCK


@pytest.mark.parametrize("chunk", [1, 2, 4, 30])
def test_aligned_prompt_recomputes_its_last_block(chunk: int) -> None:
    """At least one token must be computed, so a second run of the same prompt resumes one block before its end. A
    longer prompt resumes at its end."""
    server = TreeServer(blocks=64, snapshots=20, interval=30, chunk=chunk)
    run(server, list(range(5)), tail=0)
    assert run(server, list(range(5)), tail=0) == 4 * BLOCK
    assert run(server, list(range(5)), tail=0) == 4 * BLOCK
    assert run(server, [*range(5), 7], tail=0) == 5 * BLOCK


def test_long_prompts_leave_several_snapshots_in_one_step() -> None:
    server = TreeServer(blocks=64, snapshots=20, interval=4, chunk=60)
    run(server, list(range(18)))
    assert sorted(int(n) for n in server.component.slots.registry.length if n) == [
        n * BLOCK for n in (4, 8, 12, 16, 18)
    ]
    assert run(server, [*range(9), 40]) == 8 * BLOCK, "the first branch already hits"


def test_branch_point_gets_a_snapshot() -> None:
    server = TreeServer(blocks=64, snapshots=20, interval=30, chunk=30)
    run(server, list(range(10)))
    assert run(server, [*range(6), 40, 41]) == 0
    assert run(server, [*range(6), 42]) == 6 * BLOCK


@pytest.mark.parametrize("tail", [127, 0, 1, 2, 3])
def test_branch_point_keeps_its_snapshot_with_overlap(tail: int) -> None:
    """The first decode step is planned before the result of the prefill is processed, which inserts its snapshots. That
    step must drop only snapshots of decode steps, wherever in a block the prompt ends."""
    server = TreeServer(blocks=64, snapshots=20, interval=30, chunk=30)
    run(server, list(range(10)))
    request = server.admit([*range(6), 40, 41], tail)
    assert request is not None
    server.launch_prefill(request)
    server.plan_decode(request, request.prompt + 1)
    server.process_prefill(request)
    server.finish(request)
    server.check()
    assert run(server, [*range(6), 42]) == 6 * BLOCK


def test_a_generation_ends_with_a_snapshot() -> None:
    server = TreeServer(blocks=64, snapshots=20, interval=30, chunk=30)
    run(server, [1, 2, 3], tail=0, decode=4)
    assert run(server, [1, 2, 3, 50, 50, 50, 50, 9]) == 7 * BLOCK
    assert run(server, [1, 2, 3, 50, 50, 8]) == 3 * BLOCK, "rolling snapshots that were replaced are gone"


def test_a_retracted_request_resumes_from_its_rolling_snapshot() -> None:
    server = TreeServer(blocks=64, snapshots=20, interval=30, chunk=30)
    request = started(server, [1, 2, 3], tail=0)
    for _ in range(3):
        server.decode(request, 50)
    server.retract(request)
    server.check()
    assert run(server, [1, 2, 3, 50, 50, 50], tail=5) == 6 * BLOCK


def test_retraction_frees_blocks() -> None:
    server = TreeServer(blocks=10, snapshots=20, interval=30, chunk=30)
    first, second = started(server, [1, 2, 3]), started(server, [4, 5, 6])
    assert server.decode(first, 7) and server.decode(second, 8)
    assert not server.decode(second, 8), "all blocks are held"
    server.retract(first)
    server.check()
    for _ in range(3):
        assert server.decode(second, 8)
        server.check()


@pytest.mark.parametrize(("blocks", "slots", "reason"), [(8, 0, "blocks"), (0, 20, "slots")])
def test_evicted_snapshots_are_counted_by_reason(blocks: int, slots: int, reason: str) -> None:
    server = TreeServer(blocks=8, snapshots=20, interval=2, chunk=30)
    run(server, list(range(5)), tail=44)
    metrics = server.component.metrics
    assert (metrics.used_slots, metrics.total("snapshots_evicted")) == (3, 0)
    server.press(blocks, slots)
    assert (metrics.used_slots, metrics.total("snapshots_evicted", reason), metrics.total("snapshots_evicted")) == (
        0,
        3,
        3,
    )


def test_only_retraction_for_memory_keeps_what_was_generated() -> None:
    """Test both hooks together: the first sets a flag that the second consumes."""
    from dsv4_sglang.srt.prefix_cache import snapshot_schedule

    inserted = []

    def release_kv_cache(req: object, tree_cache: object, is_insert: bool = True) -> None:
        inserted.extend(["released"] * is_insert)

    def release_req(batch: SimpleNamespace, index: int, left: int, args: object) -> None:
        snapshot_schedule.keep_on_retraction(release_kv_cache, batch.reqs[index], tree, is_insert=False)

    # Newer releases insert a retracted request's tokens in a separate call.
    tree = SimpleNamespace(checkpoint=lambda req, up_to: inserted.append("checkpoint"))
    req = SimpleNamespace(kv=SimpleNamespace(holds_kv=True), refresh_fill_ids=lambda: None, owned_kv_len=lambda: BLOCK)
    snapshot_schedule.retract_for_memory(release_req, SimpleNamespace(reqs=[None, req]), 1, 0, None)
    assert len(inserted) == 1
    release_req(SimpleNamespace(reqs=[req]), 0, 0, None)
    assert len(inserted) == 1


def test_the_step_past_the_end_leaves_nothing() -> None:
    """Overlap scheduling runs one step past the end of a request. The snapshot of that step is freed."""
    server = TreeServer(blocks=64, snapshots=20, interval=30)
    request = started(server, [1, 2, 3], tail=0)
    server.decode(request, 50)
    past = server.component.planner.plan_decode(request, 5 * BLOCK)
    server.state_content[past] = (1, 2, 3)
    server.finish(request)
    server.check()
    assert run(server, [1, 2, 3, 50, 4], tail=5) == 4 * BLOCK


def test_scarce_slots_prefer_the_prompts_end() -> None:
    server = TreeServer(blocks=64, snapshots=20, interval=2, chunk=30)
    request = server.admit(list(range(9)))
    assert request is not None
    request.extend_range.end = request.prompt
    assert [length for length, _ in server.component.planner.plan_prefill(request, room=1)] == [9 * BLOCK]


def test_scarce_slots_prefer_branch_points() -> None:
    server = TreeServer(blocks=64, snapshots=20, interval=2, chunk=30)
    run(server, [0, 1, 2, 3, 4, 20])
    server.press(0, 20)  # the blocks stay
    request = server.admit(list(range(9)))
    assert request is not None and request.mamba_branching_seqlen == 5 * BLOCK
    request.extend_range.end = request.prompt
    taken = server.component.planner.plan_prefill(request, room=3)
    assert [length for length, _ in taken] == [5 * BLOCK, 8 * BLOCK, 9 * BLOCK]


def test_the_requests_of_a_step_share_its_room() -> None:
    server = TreeServer(blocks=64, snapshots=20, interval=1, chunk=30)
    server.pool.mamba_pool = SimpleNamespace(staging=5)
    batch = SimpleNamespace(req_to_token_pool=server.pool, tree_cache=server.cache)
    for keys in ([1, 2, 3, 4], [5, 6, 7, 8], [9, 9]):
        request = server.admit(keys)
        assert request is not None
        request.extend_range.end = request.prompt
        snapshot_schedule.plan_request(batch, request)
    assert [len(taken) for taken in BatchNote.of(batch).prefill_plan] == [4, 1, 0]


def test_only_prefill_steps_get_the_plan() -> None:
    backend = snapshot_schedule.PrefillPlanTaker()
    runner, plan = SimpleNamespace(attn_backend=backend), [[], [(BLOCK, 1)]]
    prefill, decode = ForwardMode.EXTEND, ForwardMode.DECODE
    for mode, planned, expected in ((prefill, plan, plan), (prefill, [[], []], None), (decode, plan, None)):
        batch = SimpleNamespace(forward_mode=mode, dsv4=BatchNote(prefill_plan=planned))
        assert snapshot_schedule.pass_plan_to_backend(lambda *arguments: arguments, int, batch, runner)
        assert backend.prefill_plan is expected


def test_kept_snapshots_of_a_generation_stay() -> None:
    """A rolling snapshot at a multiple of the interval stays when the next one replaces the others."""
    server = TreeServer(blocks=64, snapshots=20, interval=2, chunk=30)
    run(server, [1], tail=5, decode=5)
    held = server.component.slots.registry
    assert sorted(held.length[held.in_registry].tolist()) == [n * BLOCK for n in (1, 2, 4, 6)]


def test_ghost_hits_stay_in_their_name_space() -> None:
    server = TreeServer(blocks=64, snapshots=20, interval=30, chunk=30)

    def visit(space: str) -> float:
        request = server.admit([1, 2, 3])
        assert request is not None
        request.extra_key = space
        before = server.component.slots.registry.reuse.mean_reuse_wait
        server.prefill_all(request)
        server.finish(request)
        return server.component.slots.registry.reuse.mean_reuse_wait - before

    visit("a")
    server.press(64, 0)
    for _ in range(9):
        server.component.slots.registry.tick()
    assert visit("b") == 0
    assert visit("a") > 0


def test_reasons_of_evictions_do_not_stay() -> None:
    server = TreeServer(blocks=8, snapshots=20, interval=2, chunk=30)
    run(server, list(range(5)), tail=44)
    server.press(0, 18)
    server.press(8, 0)
    count = server.component.metrics.total
    assert count("snapshots_evicted", "slots") > 0 < count("snapshots_evicted", "blocks")


def test_nothing_of_a_request_stays_after_its_end() -> None:
    server = TreeServer(blocks=64, snapshots=20, interval=1, chunk=2)
    request = started(server, [1, 2, 3])
    assert server.decode(request, 50)
    server.finish(request)
    note = RequestNote.of(request)
    assert note.pending is None and note.first_token_waits_in is None
    slots = server.component.slots
    assert slots.available_size() + len(slots.nodes) == slots.num_slots
    with pytest.raises(ValueError, match="1 is freed, but it is not allocated"):
        slots.give_back([1] * (21 - slots.available_size()))


def test_waiting_requests_hold_no_live_slot() -> None:
    server = TreeServer(blocks=64, snapshots=20, requests=1)
    run(server, [1, 2, 3])
    request = server.admit([1, 2, 3])
    assert request is not None
    assert server.pool.mamba_allocator.available_size() == 0
    assert server.admit([1, 2, 3]) is None
    server.finish(request)
    server.check()


def test_snapshots_run_out_without_an_error() -> None:
    server = TreeServer(blocks=64, snapshots=2, interval=2, chunk=8)
    first, second = started(server, [1, 2, 3]), started(server, [4, 5, 6])
    # Both prompts hold their snapshots, so the third request gets none but is served.
    assert run(server, [7, 8, 9]) == 0
    assert run(server, [7, 8, 9]) == 0
    assert server.component.metrics.total("snapshots_skipped") > 0
    server.finish(first)
    server.finish(second)
    server.check()
    assert run(server, [7, 8, 9]) == 0
    assert run(server, [7, 8, 9]) == 3 * BLOCK


def test_asking_for_live_slots_costs_no_snapshot() -> None:
    """SGLang asks the tree for three live slots per new request. Evicting a snapshot would not free a live slot."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    server = TreeServer(blocks=64, snapshots=20)
    run(server, [1, 2, 3])
    server.cache.evict(EvictParams(num_tokens=0, mamba_num=10))
    assert run(server, [1, 2, 3]) == 3 * BLOCK


def test_eviction_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing must not call `unique` on the slots to count blocks, because that synchronises with the device."""
    server = TreeServer(blocks=12, snapshots=20, interval=1, chunk=2)
    run(server, [1, 2, 3, 4])
    assert len(server.component.slots.nodes) > 1
    with monkeypatch.context() as patch:
        patch.setattr(torch, "unique", lambda *args, **kwargs: pytest.fail("the device is waited for"))
        assert server._make_room(12)
    server.check()


def test_blocks_without_snapshot_are_evicted_first() -> None:
    server = TreeServer(blocks=12, snapshots=20, interval=30, chunk=30)
    run(server, [1, 2, 3, 4])
    run(server, [5, 6, 7, 8])
    node = server.component.slots.nodes[int(server.component.slots.registry.length.argmax())]
    younger = next(n for n in server.component.slots.nodes.values() if n.last_access_time >= node.last_access_time)
    server.component._evict_snapshot(younger)
    server.check()
    kept = [1, 2, 3, 4] if younger.key.token_ids[0] == 6 else [5, 6, 7, 8]
    run(server, [10, 11, 12, 13])
    assert run(server, kept) == 4 * BLOCK


@pytest.mark.parametrize(("fewer", "count", "least"), [(0, 8, 12), (4, 12, 20)])
def test_oversized_loop_still_hits_partly(fewer: int, count: int, least: int) -> None:
    """LRU would miss every time. A loop over `fewer` conversations, all of which fit, comes first: the ones that return
    after their eviction count as ghost hits."""
    server = TreeServer(blocks=50, snapshots=40, interval=30, chunk=30)
    for c in [*range(fewer)] * 3:
        run(server, [10 * c + i for i in range(9)])
    hits = [run(server, [10 * c + i for i in range(9)]) for _ in range(8) for c in range(count)]
    assert sum(hit > 0 for hit in hits[2 * count :]) >= least


def test_a_flush_empties_the_orders_of_eviction() -> None:
    server = TreeServer(blocks=64, snapshots=20, interval=30, chunk=30)
    run(server, [1, 2])
    server.component._evict_snapshot(next(iter(server.component.slots.nodes.values())))
    run(server, [3, 4])
    server.check()
    server.flush()
    server.check()
    leaves = server.cache.tree_core.evictable_device_leaves
    assert not leaves and leaves.first() is None and not server.component.slots.registry.policy.leaves.entries
    run(server, [5, 6])
    assert [leaves.first()] == list(server.component.slots.nodes.values())


def test_idle_checks_of_the_tree_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check detects a broken tree. The next check runs after a hundred times the duration of the last one."""
    server, now = TreeServer(blocks=64, snapshots=20), 1000.0

    def clock() -> float:
        nonlocal now
        now += 0.5  # Duration of a check.
        return now

    monkeypatch.setattr(cache_module.time, "monotonic", clock)
    run(server, [1, 2, 3])
    server.cache.sanity_check()
    node = next(iter(server.component.slots.nodes.values()))
    node.parent, parent = None, node.parent
    server.cache.sanity_check()
    now += 48
    server.cache.sanity_check()
    now += 2
    with pytest.raises(AssertionError):
        server.cache.sanity_check()
    node.parent = parent
    server.cache.sanity_check()


def random_steps(server: TreeServer, rng: random.Random, steps: int) -> int:
    hits, tenants = 0, (None,) if server.component.slots.tenant_percent == NO_LIMIT else (None, "a", "b", "c")
    waiting: list[Request] = []
    for _ in range(steps):
        kind = rng.random()
        some = rng.choice(server.running) if server.running else None
        if some is None or (kind < 0.3 and len(server.running) < 6):
            lines = [list(keys) for keys in server.history] + [request.keys for request in server.running]
            base: list[int] = []
            if lines and rng.random() < 0.7:
                line = rng.choice(lines)
                base = line[: rng.randint(0, len(line))]
            keys = [*base, *(rng.randrange(3) for _ in range(rng.randint(1, 8)))]
            waiting.append(server.queue(keys, rng.choice((0, 1, 2, 64, 127)), rng.choice(tenants)))
            # A cache-aware schedule policy looks up every waiting request.
            for request in waiting:
                server._match(request)
            request = server.admit_queued(waiting.pop(rng.randrange(len(waiting)))) if rng.random() < 0.8 else None
            if request is not None and rng.random() < 0.4:
                server.give_hints(request, rng)
            hits += request is not None and len(request.prefix_indices) > 0
        elif kind < 0.5:
            server.prefill(some)
        elif kind < 0.75:
            server.prefill_all(some)
            if some.computed < some.prompt + LONGEST_ANSWER - 2 * BLOCK:
                server.decode(some, rng.randrange(3))
        elif kind < 0.88:
            server.finish(some)
        elif kind < 0.92:
            server.retract(some)
        elif kind < 0.98:
            server.press(rng.randint(0, 40), rng.randint(0, 3))
        else:
            for request in list(server.running):
                server.finish(request)
            server.flush()
        server.check()
    return hits


def test_hits_losses_and_copies_are_counted() -> None:
    server = TreeServer(blocks=64, snapshots=3, interval=30, chunk=30)
    server.component.slots.snapshot_bytes = 10
    run(server, [1, 2, 3])
    run(server, [1, 2, 4])
    metrics = server.component.metrics
    count = metrics.total
    assert (count("hit_tokens"), count("lost_tokens")) == (0, 2 * BLOCK), "no snapshot at the branch yet"
    # The ends of both prompts, and the branch.
    assert (count("snapshots_taken"), metrics.used_slots, count("snapshot_copied_bytes")) == (3, 3, 30)
    run(server, [1, 2, 5], decode=1)
    assert (count("hit_tokens", "device"), count("snapshots_resumed")) == (2 * BLOCK, 1)
    # The end of the prompt and a rolling snapshot each evicted a snapshot.
    assert (count("snapshots_taken"), count("snapshots_evicted", "slots"), count("snapshots_evicted")) == (5, 2, 2)
    # Decode copies inside its CUDA graph, where copies are not timed.
    assert (count("snapshot_copied_bytes"), count("snapshot_timed_bytes")) == (60, 50)
    assert "snapshots_evicted slots 2, " in str(metrics)


@pytest.mark.full
@pytest.mark.slow
def test_random_steps_lose_no_block_or_slot() -> None:
    hits = 0
    for seed in range(12 * TIMES):
        rng = random.Random(seed)
        server = TreeServer(
            blocks=rng.randint(20, 60),
            snapshots=rng.randint(1, 12),
            interval=rng.randint(1, 5),
            chunk=rng.randint(1, 6),
            tenant_percent=rng.choice((NO_LIMIT, NO_LIMIT, 10, 40)),
        )
        server.limit_pins()
        hits += random_steps(server, rng, 300)
    assert hits > 100


def hits_of_both_trees(blocks: int, snapshots: int) -> tuple[list[int], list[int]]:
    """Return the tokens resumed from, by request, on the simulation's tree and on SGLang's."""
    rng = random.Random(5)
    small = Simulation(blocks, snapshots, 4 * BLOCK, concurrency=1)
    real = TreeServer(blocks, snapshots, interval=4, chunk=50)
    lines: list[list[int]] = []
    hits: tuple[list[int], list[int]] = ([], [])
    for number in range(300):
        base = rng.choice(lines)[: rng.randint(1, 12)] if lines and rng.random() < 0.8 else []
        lines.append([*base, *(rng.randrange(4) for _ in range(rng.randint(1, 9)))])
        small.keys = lambda turn: np.array(lines[turn.conversation])  # type: ignore[method-assign]
        before = small.hit_tokens
        small.serve(Turn(number, 0, 0, -1, 0, len(lines[-1]) * BLOCK + 1, 0))
        hits[0].append(small.hit_tokens - before)
        hits[1].append(run(real, lines[-1]))
    return hits


@pytest.mark.full
def test_the_simulation_and_sglangs_tree_agree() -> None:
    small, real = hits_of_both_trees(blocks=2000, snapshots=1000)
    assert small == real
    # Under memory pressure, ties are broken by slot numbers, which differ.
    small, real = hits_of_both_trees(blocks=200, snapshots=60)
    assert abs(sum(small) - sum(real)) < 0.03 * sum(small)
