"""Tests of sleep, wake-up and weight updates in SGLang's own scheduler, with speculation, overlap scheduling and a host
cache. Released memory is filled with NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)
from support.scheduler import Answer, Asked, Child, InProcess
from support.speculation_judge import CONTEXT, TOLERANCE, Judge, hold_states, serve

from dsv4_sglang.testing.tiny import make_tiny
from dsv4_sglang.testing.tiny_config import TinySpec

pytestmark = pytest.mark.full


class Spoiling:
    """Fake of SGLang's torch_memory_saver adapter, which does nothing on a CPU."""

    enabled = True

    def __init__(self, server: InProcess) -> None:
        blocks = server.scheduler.token_to_kv_pool_allocator.get_kvcache().full_kv_pool
        self.memory = [server.pools.req_to_token, *server.storage.allocations]
        self.memory += [table for pool in blocks.pools if pool is not None for table in pool.allocations]
        self.spoilt = 0

    def pause(self, tag: str) -> None:
        if tag == GPU_MEMORY_TYPE_KV_CACHE:
            self.spoilt += 1
            for tensor in self.memory:
                torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)

    def resume(self, tag: str) -> None:
        return


def interrupted(server: InProcess, asked: Sequence[Asked], orders: Sequence[tuple[int, list[Any]]]) -> list[Answer]:
    """Return the answers. Memory is overwritten whenever it is released."""
    updater = server.scheduler.weight_updater
    adapter, spoiling = updater.memory_saver_adapter, Spoiling(server)
    updater.memory_saver_adapter = spoiling
    try:
        answers = server.serve(asked, orders)
    finally:
        updater.memory_saver_adapter = adapter
    released = [order for _, each in orders for order in each if isinstance(order, ReleaseMemoryOccupationReqInput)]
    assert spoiling.spoilt == min(1, len(released))
    return answers


def release(*tags: str) -> ReleaseMemoryOccupationReqInput:
    return ReleaseMemoryOccupationReqInput(tags=list(tags) or None)


def resume(*tags: str) -> ResumeMemoryOccupationReqInput:
    return ResumeMemoryOccupationReqInput(tags=list(tags) or None)


ORDERS = {
    "one by one, and twice": [
        (7, [release("kv_cache", "everything"), release("kv_cache")]),
        (0, [ContinueGenerationReqInput(), release()]),
        (0, [resume("weights", "everything")]),
        (0, [resume(), resume()]),
    ],
    "in a pause": [
        (7, [PauseGenerationReqInput(mode="in_place")]),
        (0, [release()]),
        (0, [resume()]),
        (0, [ContinueGenerationReqInput()]),
    ],
}


@pytest.mark.parametrize("name", ORDERS)
def test_answers_after_sleep(judge: Judge, server: Child, texts: dict[int, Asked], name: str) -> None:
    """Requests continue after a sleep during decoding, and cached prefixes are restored from the host."""
    asked = [replace(text, right=0.6, space=name) for text in texts.values()]
    answers = server.do(interrupted, asked, ORDERS[name])
    judge.hold_all(asked, answers)
    hold_states(server, answers)
    server.do(interrupted, [replace(texts[1], count=2)], [(1, [release("kv_cache")]), (0, [resume("kv_cache")])])
    warm = server.do(serve, [replace(texts[300], count=4, space=name)])
    assert warm[0].cached == 256
    judge.hold_all([replace(texts[300], count=4)], warm)
    hold_states(server, warm)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Judge with other weights."""
    spec = TinySpec(seed=7, ratios=(0, 4, 128), heads=16, index_topk=64, nextn=True, context=CONTEXT)
    return Judge(make_tiny(tmp_path_factory.mktemp("other"), spec))


def update(folder: Path, flush_cache: bool) -> UpdateWeightFromDiskReqInput:
    return UpdateWeightFromDiskReqInput(model_path=str(folder), load_format="auto", flush_cache=flush_cache)


def test_new_weights(judge: Judge, other: Judge, server: Child, texts: dict[int, Asked]) -> None:
    """No prefix is found after a weight update right behind an answer, with or without a requested flush."""
    own = Asked(texts[300].prompt, 12)
    server.do(serve, [own])
    for flush_cache in (False, True):
        for known in (other, judge):
            server.do(interrupted, [Asked(texts[1].prompt, 2)], [(1, [update(known.folder, flush_cache)])])
            for cached in (0, 256):
                answers = server.do(serve, [own])
                assert answers[0].cached == cached
                known.hold_all([own], answers)
            hold_states(server, answers)  # These requests resumed from what the previous ones left.


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_new_weights_in_a_pause(judge: Judge, other: Judge, server: Child, texts: dict[int, Asked], mode: str) -> None:
    """The tokens of a running request are recomputed with the new weights."""
    asked = [Asked(texts[300].prompt, 30), Asked(texts[126].prompt, 30)]
    orders = [
        (7, [PauseGenerationReqInput(mode=mode)]),
        (0, [update(other.folder, True)]),
        (0, [ContinueGenerationReqInput()]),
    ]
    answers = server.do(interrupted, asked, orders)
    for request, answer in zip(asked, answers):
        scores = [known.oracle.score(request.prompt, answer.tokens, chunk=128) for known in (judge, other)]
        right = [(torch.tensor(answer.logprobs) - score.logprobs).abs() for score in scores]
        assert right[0][:4].max() < TOLERANCE and right[1][-8:].max() < TOLERANCE
        assert right[0][-8:].max() > 100 * TOLERANCE
    server.do(interrupted, [Asked(texts[1].prompt, 2)], [(1, [update(judge.folder, False)])])
    answers = server.do(serve, asked[:1])
    assert answers[0].cached == 0
    judge.hold_all(asked[:1], answers)
