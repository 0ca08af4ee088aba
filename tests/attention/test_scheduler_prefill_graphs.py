"""Tests of the new tokens that the scheduler puts into a prefill step, beside prefill graphs of up to GRAPH tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from support.scheduler import Asked, Child, InProcess, child
from support.speculation_judge import prompt

from dsv4_sglang.srt.attention import prefill_graphs
from dsv4_sglang.testing.tiny import make_tiny
from dsv4_sglang.testing.tiny_config import TinySpec

GRAPH, CHUNK, NEW = 256, 1024, 40
PREFIX = prompt(128, seed=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    model = make_tiny(
        tmp_path_factory.mktemp("model") / "tiny",
        TinySpec(ratios=(0, 4), heads=16, index_topk=64, nextn=True, context=2048),
    )
    flags = {"max_running_requests": 32, "max_total_tokens": 16384, "chunked_prefill_size": CHUNK}
    with child(model, 2, False, **flags) as other:
        yield other


def steps_of(server: InProcess, asked: Sequence[Asked], largest: int | None) -> list[list[int]]:
    """Return the new tokens of each request of each prefill step, for requests that arrive together."""
    scheduler, steps = server.scheduler, list[list[int]]()

    def run(original: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        if batch.forward_mode.is_extend_without_speculative():
            steps.append(list(batch.extend_lens))
        return original(batch, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "run_batch", partial(run, scheduler.run_batch))
        # A graph for chunks does not make the steps of short prompts longer.
        patch.setattr(prefill_graphs, "recorded_sizes", lambda: [4, largest, 2048] if largest else [])
        server.flush()
        server.serve([Asked([*PREFIX, 3], 1)])
        steps.clear()
        server.serve(asked)
    return steps


def hits(count: int, seed: int = 0) -> list[Asked]:
    """Return requests with 128 cached tokens and NEW new ones each."""
    return [Asked(PREFIX + prompt(NEW, seed=seed + i + 2), 1) for i in range(count)]


def test_waiting_hits_share_steps_within_the_graph(server: Child) -> None:
    steps = server.do(steps_of, hits(32), GRAPH)
    assert [len(step) for step in steps] == [6, 6, 6, 6, 6, 2] and {new for step in steps for new in step} == {NEW}
    assert max(map(sum, steps)) <= GRAPH < max(map(sum, server.do(steps_of, hits(32), None)))


def test_long_prompt_gets_full_chunks(server: Child) -> None:
    assert server.do(steps_of, [Asked(prompt(CHUNK + 500), 1)], GRAPH) == [[CHUNK], [500]]


def test_short_prompts_fill_the_step_of_a_long_one(server: Child) -> None:
    asked = [*hits(3), Asked(prompt(600), 1), *hits(3, seed=9)]
    assert server.do(steps_of, asked, GRAPH) == [[NEW] * 3 + [600], [NEW] * 3]
    assert server.do(steps_of, [Asked(prompt(600), 1), *hits(8)], GRAPH) == [[600] + [NEW] * 3, [NEW] * 5]


def test_requests_of_a_step_are_limited(server: Child) -> None:
    assert server.do(steps_with_most_requests, 4) == [[NEW] * 4, [NEW] * 4, [NEW]]


def steps_with_most_requests(server: InProcess, most: int) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_graphs, "MAX_RECORDED_REQUESTS", most)
        return steps_of(server, hits(9), GRAPH)
