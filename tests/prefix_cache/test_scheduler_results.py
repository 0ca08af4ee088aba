"""Tests of the order in which SGLang's scheduler handles the result of a prefill step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.scheduler import Answer, Asked, Child, InProcess
from support.speculation_judge import Judge, prompt, serve

SENT, CACHED, FREED = "sent", "cached", "freed"


def events_of(server: InProcess, asked: Sequence[Asked]) -> list[list[str]]:
    """Return what the scheduler does with the result of each prefill step."""
    steps, in_step = list[list[str]](), False
    scheduler = server.scheduler
    processor, streamer, cache = scheduler.batch_result_processor, scheduler.output_streamer, scheduler.tree_cache

    def note(owner: Any, name: str, event: str) -> None:
        original = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            if in_step:
                steps[-1].append(event)
            return original(*arguments, **named)

        patch.setattr(owner, name, noted)

    original = type(processor).process_batch_result_prefill

    def step(*arguments: Any) -> None:
        nonlocal in_step
        steps.append([])
        in_step = True
        original(*arguments)
        in_step = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(processor), "process_batch_result_prefill", step)
        note(type(streamer), "stream_output", SENT)
        note(cache, "checkpoint", CACHED)
        note(cache, "on_release", FREED)
        server.serve(asked)
    return steps


def test_first_tokens_are_sent_before_prompts_are_cached(server: Child) -> None:
    prompts = [prompt(128, seed=50 + i) for i in range(2)]
    assert server.do(events_of, [Asked(text, 1) for text in prompts]) == [[SENT, CACHED, FREED, CACHED, FREED]]
    server.do(InProcess.flush)
    assert server.do(events_of, [Asked(text, 4) for text in prompts]) == [[SENT, CACHED, CACHED]]


def test_equal_prompts_of_a_step_are_cached_once(server: Child, judge: Judge) -> None:
    server.do(InProcess.flush)
    text = prompt(128, seed=60)
    both, longer = [Asked(text, 12)] * 2, [Asked([*text, 5], 12)]
    answers: list[Answer] = server.do(serve, both) + server.do(serve, longer)
    judge.hold_all(both + longer, answers)
    assert [answer.cached for answer in answers] == [0, 0, 128]
