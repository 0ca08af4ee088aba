"""Fixtures and comparisons for tests of speculation. It is a plugin of pytest, so that files share a scheduler and
texts.

Answers are compared with transformers' model, token by token and in log p. States are compared with those of a request
whose prompt is the same text: after a verify step the state must equal that of a prefill, except for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from reference.oracle import Oracle
from torch import Tensor

from dsv4_sglang.testing.tiny import make_tiny
from dsv4_sglang.testing.tiny_config import TinySpec
from support.scheduler import Answer, Asked, Child, InProcess, child

# Tolerance of log p in fp32, as in the server tests.
TOLERANCE = 1e-4
# Tolerance of KV entries and compressor states. Their values are about 1 and at most 20, and two fp32 runs round
# differently.
SAME_STATE = 1e-3
CONTEXT = 400
FLAGS = {"max_total_tokens": 2048, "context_length": CONTEXT, "max_running_requests": 6}
# Prompt length: number of generated tokens.
ASKED = {1: 24, 126: 150, 300: 20}


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 384, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


class Judge:
    """The oracle with a cache of the texts that it has accepted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.oracle = folder, Oracle(folder)
        self.right: list[tuple[list[int], list[int], Tensor]] = []

    def hold(self, asked: Asked, answer: Answer) -> None:
        """Assert that `answer` is greedy, except at near ties, and that its log p are right."""
        known = next(
            (s for p, t, s in self.right if p == asked.prompt and t[: len(answer.tokens)] == answer.tokens), None
        )
        if known is None:
            score = self.oracle.score(asked.prompt, answer.tokens, chunk=128)
            assert score.margin.max() <= 2 * TOLERANCE, "not the oracle's likeliest token"
            self.right.append((asked.prompt, answer.tokens, known := score.logprobs))
        apart = (torch.tensor(answer.logprobs) - known[: len(answer.tokens)]).abs()
        assert apart.max() <= TOLERANCE, "not the oracle's log p"

    def hold_all(self, asked: Sequence[Asked], answers: Sequence[Answer]) -> None:
        for request, answer in zip(asked, answers, strict=True):
            assert len(answer.tokens) == request.count
            self.hold(request, answer)


def least_steps(count: int, draft_tokens: int = 4) -> int:
    """Return the number of verify steps if every draft is right. The prefill makes the first of `count` tokens."""
    return -(-(count - 1) // draft_tokens)


def serve(server: InProcess, asked: Sequence[Asked]) -> list[Answer]:
    return server.serve(asked)


def cold(server: InProcess, answers: Sequence[Answer]) -> list[Answer]:
    """Compute the cached part of each answer's text as a prompt, without a prefix hit."""
    return server.serve([Asked(answer.text[: answer.length], 1, space=uuid4().hex) for answer in answers])


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Return the parts of two states that differ, with their largest difference."""
    assert ours.keys() == theirs.keys()
    found = {name: float((part - theirs[name]).abs().max()) for name, part in ours.items() if part.numel()}
    return {name: difference for name, difference in found.items() if not difference <= SAME_STATE}


def hold_states(server: Child, answers: Sequence[Answer]) -> None:
    for answer, other in zip(answers, server.do(cold, answers), strict=True):
        assert other.length == answer.length and other.cached == 0
        assert not apart(answer.state, other.state)


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    spec = TinySpec(ratios=(0, 4, 128), heads=16, index_topk=64, nextn=True, context=CONTEXT)
    return Judge(make_tiny(tmp_path_factory.mktemp("tiny"), spec))


@pytest.fixture(scope="session")
def server(judge: Judge) -> Iterator[Child]:
    """Start a scheduler with four tokens per verify step, overlap scheduling and a host cache."""
    with child(judge.folder, 4, True, **FLAGS, enable_hierarchical_cache=True, hicache_ratio=4.0) as server:
        yield server


@pytest.fixture(scope="session")
def texts(judge: Judge, server: Child) -> dict[int, Asked]:
    """Return one request per prompt, with its answer in `follows`.

    The model's own drafts made the answers. Some of these drafts were right.
    """
    asked = [Asked(prompt(length), count + 8) for length, count in ASKED.items()]
    answers = server.do(serve, asked)
    judge.hold_all(asked, answers)
    hold_states(server, answers)
    lengths = [len(answer.tokens) / answer.verified for answer in answers]
    assert max(lengths) > 1.5 and {0} == {answer.cached for answer in answers}
    server.do(InProcess.flush)
    return {
        length: replace(request, count=ASKED[length], follows=answer.tokens)
        for length, request, answer in zip(ASKED, asked, answers)
    }
