"""Tests of EAGLE in SGLang's own scheduler on a CPU, with a chosen acceptance rate of the drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from support.scheduler import Answer, Asked, Child, InProcess, child
from support.speculation_judge import CONTEXT, FLAGS, Judge, hold_states, least_steps, prompt, serve

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def written(judge: Judge, server: Child, texts: dict[int, Asked]) -> dict[int, Answer]:
    """Serve a batch of requests with different accept lengths over boundaries of 4 and 128: no draft of the first is
    right, many of the second, and all of the third."""
    asked = [replace(text, right=right, space="batch") for text, right in zip(texts.values(), (0.0, 0.8, 1.0))]
    answers = server.do(serve, asked)
    none, many, every = (answer.verified for answer in answers)
    assert none == asked[0].count - 1 and every == least_steps(asked[2].count)
    assert least_steps(asked[1].count) < many < (asked[1].count - 1) / 2
    judge.hold_all(asked, answers)
    hold_states(server, answers)
    return dict(zip(texts, answers))


def test_hits_branches_and_host_hits(judge: Judge, server: Child, written: dict[int, Answer]) -> None:
    """Resume from a snapshot that a verify step wrote, on the device and then on the host only. Then run without it;
    the second request resumes after the first one's first chunk."""
    text = written[126].text
    asked = [Asked(text[:end] + prompt(20, seed=end), 6, space="batch") for end in (270, 258)]
    for cached, leave in (
        ([256, 256], InProcess.evict),
        ([256, 256], InProcess.flush),
        ([0, 256], InProcess.evict),
    ):
        answers = server.do(serve, asked)
        assert [answer.cached for answer in answers] == cached
        judge.hold_all(asked, answers)
        hold_states(server, answers)
        server.do(leave)


def most_running(server: InProcess, asked: Sequence[Asked]) -> int:
    server.serve(asked)
    return server.most_running


def hold_all_slots_are_used(server: Child) -> None:
    """All slots are used, including the last one, while a prompt is prefilled in chunks."""
    lengths = (40, 40, 40, 40, 300, 40)
    assert len(lengths) == FLAGS["max_running_requests"]
    asked = [Asked(prompt(length, seed=i), 24) for i, length in enumerate(lengths)]
    assert server.do(most_running, asked) == len(lengths)


def retracting(server: InProcess, asked: Sequence[Asked]) -> tuple[list[Answer], list[int]]:
    """Return the answers and the lengths of the cut bursts: steps whose results arrived after their request was
    retracted."""
    verify, reset = EAGLEWorkerV2.verify, Req.reset_for_retract
    bursts: dict[str, list[int]] = {str(i): [] for i in range(len(asked))}
    cut: list[int] = []

    def verified(worker: Any, batch: Any, **arguments: Any) -> Any:
        made = verify(worker, batch, **arguments)
        for req, tokens in zip(batch.reqs, made.accept_lens.tolist(), strict=True):
            bursts[req.rid].append(tokens)
        return made

    def retracted(req: Req) -> None:
        cut.extend(bursts[req.rid][req.spec_verify_ct :])
        del bursts[req.rid][req.spec_verify_ct :]
        reset(req)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "TEST_RETRACT", True)
        patch.setattr(scheduler_module, "TEST_RETRACT_INTERVAL", 4)
        patch.setattr(EAGLEWorkerV2, "verify", verified)
        patch.setattr(Req, "reset_for_retract", retracted)
        return server.serve(asked), cut


def test_retraction(judge: Judge, server: Child, texts: dict[int, Asked]) -> None:
    """Every fourth step retracts a request, at any point of a burst, and resumes it. Where all drafts are right, the
    step in flight has accepted four tokens, which must be generated again. It depends on the number of steps so far
    which request that is, so there are several attempts."""
    each = ((1, 24, 0.4), (126, 20, 1.0), (300, 16, 1.0))
    retracted, every = 0, set()
    for attempt in range(16):
        space = f"retracted {attempt}"
        asked = [replace(texts[length], count=count, right=right, space=space) for length, count, right in each]
        answers, cut = server.do(retracting, asked)
        judge.hold_all(asked, answers)
        retracted += sum(answer.retracted for answer in answers)
        every |= set(cut)
        if retracted >= 4 and 4 in every:
            break
    else:
        pytest.fail(f"{retracted} retractions, which cut {every} accepted tokens")


def aborting(server: InProcess, asked: Sequence[Asked]) -> list[Answer]:
    """Abort the second request just before the third verify step."""
    verify, steps = EAGLEWorkerV2.verify, 0

    def verified(worker: Any, batch: Any, **arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            server.scheduler.abort_request(AbortReq(rid="1"))
        return verify(worker, batch, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EAGLEWorkerV2, "verify", verified)
        return server.serve(asked)


def test_abort_between_draft_and_verify(judge: Judge, server: Child, texts: dict[int, Asked]) -> None:
    each = ((1, 16), (126, 100))
    asked = [replace(texts[length], count=count, right=1.0, space="aborted") for length, count in each]
    whole, aborted = server.do(aborting, asked)
    judge.hold_all(asked[:1], [whole])
    assert aborted.reason["type"] == "abort" and len(aborted.tokens) == 1 + 4 * aborted.verified < 24
    judge.hold(asked[1], aborted)


def test_a_stop_token_among_the_accepted(judge: Judge, server: Child, texts: dict[int, Asked]) -> None:
    """All drafts are right, so tokens come as one from the prefill, then four per step. The stop token is the second of
    a step."""
    text = texts[126]
    new = [token not in text.follows[:i] for i, token in enumerate(text.follows)]
    at = next(i for i in range(6, 150, 4) if new[i])
    asked = replace(text, count=150, right=1.0, stop=text.follows[at], space="stopped")
    answer = server.do(serve, [asked])[0]
    assert answer.tokens == text.follows[: at + 1] and answer.reason["type"] == "stop"
    assert answer.verified == least_steps(at + 1) and len(answer.text) == len(text.prompt) + at + 3
    judge.hold(asked, answer)


def test_the_end_of_the_context(judge: Judge, server: Child) -> None:
    """Drafts exceed the context length, where the model has no positions."""
    asked = Asked(prompt(CONTEXT - 14), 100)
    first = server.do(serve, [asked])[0]
    judge.hold(asked, first)
    assert first.reason["type"] == "length" and CONTEXT - 2 <= len(asked.prompt) + len(first.tokens) <= CONTEXT
    again = replace(asked, follows=first.tokens, right=1.0)
    second = server.do(serve, [again])[0]
    assert second.tokens == first.tokens and second.cached == 384
    assert second.verified == least_steps(len(second.tokens))
    judge.hold(again, second)


@pytest.mark.parametrize(("drafts", "overlap"), [(2, True), (8, False)])
def test_other_numbers_of_drafts(judge: Judge, texts: dict[int, Asked], drafts: int, overlap: bool) -> None:
    asked = [
        replace(texts[length], count=count, right=right) for length, count, right in ((126, 30, 0.7), (1, 12, 1.0))
    ]
    with child(judge.folder, drafts, overlap, **FLAGS) as other:
        answers = other.do(serve, asked)
        some, every = (answer.verified for answer in answers)
        assert least_steps(30, drafts) < some < 29 and every == least_steps(12, drafts)
        judge.hold_all(asked, answers)
        hold_states(other, answers)
        # A verify step wrote the snapshot at 128.
        turn = Asked(answers[0].text[:150] + prompt(20), 8)
        hits = other.do(serve, [turn])
        assert hits[0].cached == 128
        judge.hold_all([turn], hits)
        hold_states(other, hits)
        hold_all_slots_are_used(other)  # With a host cache, a finished save would recheck the queue.
