"""Recommend a server configuration for a model, given GPUs and a goal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4_sglang.planner.choice import Choice
from dsv4_sglang.planner.gpus import MOST_GPUS
from dsv4_sglang.planner.neighbours import DRAFT_TOKENS
from dsv4_sglang.planner.plan import Plan, plan
from dsv4_sglang.srt.integration import compat

GOALS = {
    "latency": "one server over all GPUs with speculation, for few concurrent requests",
    "throughput": "the split of the GPUs that holds the most tokens, for many concurrent requests",
    "long-context": "the split of the GPUs that holds the most requests of the whole context length",
}
# Above about 64 concurrent requests speculation gains little (docs/benchmarks/results.md).
LATENCY_REQUESTS = 32
# Per server without DP attention; SGLang's default for this model.
THROUGHPUT_REQUESTS = 256
# Per rank of DP attention, and per server for long contexts.
REQUESTS_OF_A_RANK = 128
# Values of `--mem-fraction-static`, in the order in which they are tried.
MEMORY_FRACTIONS = (0.85, 0.8, 0.88, 0.9)


def recommend(choice: Choice, goal: str) -> Plan:
    """Return the recommended plan for a goal.

    Args:
        choice: Given options. Split, concurrent requests, speculation and memory fraction are chosen here.
        goal: One of GOALS.

    Raises:
        ValueError: Nothing fits. The message is that of one server over as many GPUs as possible.
    """
    found: list[Plan] = []
    reasons: list[str] = []
    for tp, dp in _splits(choice.count, goal):
        try:
            found.append(_with_room(choice, goal, tp, dp))
        except ValueError as error:
            reasons.append(str(error))
    if not found:
        raise ValueError(reasons[0])
    if goal == "latency":
        return max(found, key=lambda made: made.choice.tp)
    if goal == "long-context":
        return max(found, key=lambda made: (made.at_once, made.total_tokens))
    return max(found, key=lambda made: made.total_tokens)


def _with_room(choice: Choice, goal: str, tp: int, dp: int) -> Plan:
    """Return the plan of one split, with the first memory fraction that fits and leaves room for activations.

    If none leaves room, take the first that fits. Raises ValueError if none fits.
    """
    found: list[Plan] = []
    reasons: list[ValueError] = []
    for fraction in MEMORY_FRACTIONS:
        try:
            found.append(plan(_for_goal(replace(choice, tp=tp, dp=dp, mem_fraction=fraction, running=dp), goal)))
        except ValueError as error:
            reasons.append(error)
            continue
        if found[-1].has_room_for_activations:
            return found[-1]
    if not found:
        raise reasons[-1]
    return found[0]


def _splits(count: int, goal: str) -> Iterator[tuple[int, int]]:
    """Yield (GPUs of a server, ranks of DP attention), the most GPUs first."""
    for tp in (tp for tp in range(min(count, MOST_GPUS), 0, -1) if count % tp == 0):
        yield tp, 1
        if goal != "latency" and compat.SERVES_DP_ATTENTION:
            yield from ((tp, dp) for dp in range(2, tp + 1) if tp % dp == 0)


def _for_goal(split: Choice, goal: str) -> Choice:
    if goal == "latency":
        head = split.model.dspark
        drafts = head.block + 1 if head else DRAFT_TOKENS if split.model.config.num_nextn_predict_layers else 0
        return replace(split, running=LATENCY_REQUESTS, draft_tokens=drafts)
    if goal == "throughput":
        requests = REQUESTS_OF_A_RANK * split.dp if split.dp > 1 else THROUGHPUT_REQUESTS
        return replace(split, running=requests)
    return replace(split, running=REQUESTS_OF_A_RANK * split.dp, request=split.served_context)
