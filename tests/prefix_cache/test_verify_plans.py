"""Tests of snapshots of verify steps on SGLang's own tree. The host plans each a round before it knows the accept
lengths."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from support.prefix_tree import BLOCK, MAX_LENGTH, Request, TreeServer, without_a_server

from dsv4_sglang.srt.prefix_cache import snapshot_schedule
from dsv4_sglang.srt.prefix_cache.notes import BatchNote

NOT_WRITTEN = (-1,)
# Content of generated blocks. It differs from that of prompts (up to 3) and of the part after a prompt's last whole
# block (from 100).
ROLLING = 50
# Blocks between snapshots that are kept for branches. It exceeds the length of all requests here, so every snapshot is
# rolling or at the end of a prompt.
FAR = 30


@pytest.fixture(autouse=True, scope="module")
def _settings() -> object:
    with pytest.MonkeyPatch.context() as patch:
        without_a_server(patch)
        yield


class Verifying:
    """Requests whose verify steps have `draft_tokens` tokens. With `overlap`, a round is planned before the result of
    the previous round or the prefill is known."""

    def __init__(self, server: TreeServer, draft_tokens: int, overlap: bool) -> None:
        self.server, self.draft_tokens, self.overlap = server, draft_tokens, overlap
        self.results: dict[Request, list[int]] = {}
        self.launched: set[Request] = set()

    def admit(self, keys: list[int], tail: int) -> Request | None:
        request = self.server.admit(keys, tail)
        if request is None:
            return None
        while request.computed < request.prompt:
            self.server.launch_prefill(request)
            if self.overlap and request.computed == request.prompt:
                self.launched.add(request)
            else:
                self.server.process_prefill(request)
        request.kv_committed_len, self.results[request] = request.prompt, []
        return request

    def round(self, request: Request, accepted: int) -> None:
        """Run a speculative round, or do nothing if memory is short."""
        server, component = self.server, self.server.component
        before, after = request.computed, request.computed + min(accepted, self.draft_tokens)
        need = after + 2 * self.draft_tokens
        if need > MAX_LENGTH or not server._make_room(-(-need // BLOCK) - request.allocated // BLOCK):
            return
        if need > request.allocated:
            server._allocate(request, need)
        taken = component.metrics.total("snapshots_taken")
        slot = component.planner.plan_verify(request, self.draft_tokens)
        if component.metrics.total("snapshots_taken") > taken:
            server.state_content[slot] = NOT_WRITTEN
        request.output_ids.extend([ROLLING + 1] * (after + 1 - len(request.full_untruncated_fill_ids)))
        if slot and before // BLOCK != after // BLOCK:
            server.state_content[slot] = server.path(request, after)
        server._compute(request, after)
        self.results[request].append(after)
        if request in self.launched:
            self.launched.remove(request)
            server.process_prefill(request)
        elif not self.overlap or len(self.results[request]) > 1:
            request.kv_committed_len = self.results[request].pop(0)

    def finish(self, request: Request) -> None:
        """Finish the request with the known results. The work of an overlapping round is lost."""
        if request in self.launched:
            self.launched.remove(request)
            self.server.process_prefill(request)
        request.computed = request.kv_committed_len
        self.server.finish(request)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("accepted", [1, 9])
def test_an_answer_ends_with_a_snapshot(accepted: int, overlap: bool) -> None:
    """The boundary may lie anywhere in a step: tokens come one or nine at a time, starting two to three whole steps
    before the boundary."""
    for tail in range(BLOCK - 3 * 9, BLOCK - 2 * 9 + 1):
        verifying = Verifying(TreeServer(blocks=20, snapshots=20, interval=FAR), 9, overlap)
        request = verifying.admit([1, 2], tail)
        assert request is not None
        while request.kv_committed_len < 3 * BLOCK:
            verifying.round(request, accepted)
        verifying.finish(request)
        verifying.server.check()
        assert 3 * BLOCK in verifying.server.component.slots.registry.length, tail


def test_running_request_holds_two_snapshots() -> None:
    verifying = Verifying(TreeServer(blocks=64, snapshots=20, interval=FAR), 4, overlap=True)
    request = verifying.admit([1], tail=BLOCK - 8)  # Passes no boundary in the first rounds.
    assert request is not None
    verifying.round(request, 4)
    for _ in range(200):
        verifying.round(request, 3)
        assert len(request.pending) <= 2
        if request.kv_committed_len >= 2 * BLOCK:
            assert request.kv_committed_len // BLOCK * BLOCK in [length for length, _, _ in request.pending]
    verifying.finish(request)
    verifying.server.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_late_slot_is_not_taken(overlap: bool) -> None:
    """The pool is full in the round that passes a boundary, and has space in the next."""
    verifying = Verifying(TreeServer(blocks=64, snapshots=20, interval=FAR), 9, overlap)
    request = verifying.admit([1], tail=BLOCK - 7)  # Nine tokens pass the boundary by two.
    assert request is not None
    verifying.server.keep_back()
    verifying.round(request, 9)
    verifying.server.let_go()
    assert request.computed == 2 * BLOCK + 2 and request.kv_committed_len <= request.computed
    for _ in range(3):
        verifying.round(request, 2)
        verifying.server.check()
    verifying.finish(request)
    verifying.server.check()
    assert 2 * BLOCK not in verifying.server.component.slots.registry.length


ROUNDS = st.tuples(st.integers(0, 2), st.lists(st.integers(1, 9), min_size=1, max_size=30))
OTHERS = st.tuples(st.sampled_from(["finish", "admit", "press", "keep back", "let go"]), st.integers(0, 127))


@settings(max_examples=60)
@given(
    st.integers(2, 9),
    st.booleans(),
    st.integers(1, 8),
    st.lists(st.one_of(ROUNDS, ROUNDS, OTHERS), min_size=5, max_size=40),
)
def test_recorded_snapshots_hold_their_state(
    draft_tokens: int, overlap: bool, snapshots: int, steps: list[tuple[int | str, int | list[int]]]
) -> None:
    """Every state in the tree, and every state that a request holds at a length that it has passed, is the state of
    that length (`TreeServer.check`). No slot is lost, however few there are."""
    verifying = Verifying(TreeServer(blocks=40, snapshots=snapshots, interval=2), draft_tokens, overlap)
    running = verifying.server.running
    for what, value in [("admit", 100), ("admit", 127), *steps]:
        if isinstance(what, int) and isinstance(value, list):
            for accepted in value if running else []:
                verifying.round(running[what % len(running)], accepted)
            verifying.server.check()
        elif isinstance(value, int):
            if what == "admit" and len(running) < 3:
                verifying.admit([value % 3, value % 2], tail=value)
            elif what == "finish" and running:
                verifying.finish(running[value % len(running)])
            elif what == "press":
                verifying.server.press(value % 40, value % 3)
            elif what == "keep back":
                verifying.server.keep_back()
            elif what == "let go":
                verifying.server.let_go()
            verifying.server.check()
    for request in list(running):
        verifying.finish(request)
    verifying.server.check()


@pytest.mark.parametrize(
    ("mode", "gets_plan", "gets"),
    [
        (ForwardMode.EXTEND, True, True),
        (ForwardMode.DECODE, False, True),
        (ForwardMode.TARGET_VERIFY, False, False),
    ],
)
def test_verify_step_gets_no_prefill_plan(mode: ForwardMode, gets_plan: bool, gets: bool) -> None:
    """The batch still has the plan of the prefill that it was before. A decode step may become a prefill step."""
    backend, plan, rolling = snapshot_schedule.PrefillPlanTaker(), [[(BLOCK, 1)]], [0, 7]
    batch = SimpleNamespace(forward_mode=mode, dsv4=BatchNote(prefill_plan=plan, rolling_plan=rolling))
    backend.prefill_plan, backend.rolling_plan = plan, rolling
    snapshot_schedule.pass_plan_to_backend(lambda *arguments: None, None, batch, SimpleNamespace(attn_backend=backend))
    assert ((backend.prefill_plan is plan), (backend.rolling_plan is rolling)) == (gets_plan, gets)
    assert (backend.take_rolling_plan() is rolling) == gets and backend.take_rolling_plan() is None


@pytest.mark.parametrize("answer", [True, False])
def test_steps_vote_as_in_sglang(answer: bool) -> None:
    """Lengths of a verify step with overlap are known on the device only; the batch here has none."""
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    voted = snapshot_schedule.may_join_prefill(
        lambda **step: answer, local_batch=batch, spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE")
    )
    assert voted is answer
