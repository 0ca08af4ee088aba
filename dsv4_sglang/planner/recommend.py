"""Other configurations: those that differ from a choice in one option, and the best one for a goal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from dsv4_sglang.planner.choice import Choice
from dsv4_sglang.planner.gpus import MOST_GPUS
from dsv4_sglang.planner.plan import Plan, attempt

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


def _server_sizes(choice: Choice) -> list[int]:
    return [size for size in (choice.tp // 2, choice.tp * 2) if 1 <= size <= MOST_GPUS]


# Each option, the fields of `Choice` that it sets, and the values beside those of a choice.
_OPTIONS: tuple[tuple[str, tuple[str, ...], Callable[[Choice], Iterable[Any]]], ...] = (
    ("--max-running-requests", ("running",), lambda choice: (choice.running // 2, choice.running * 2)),
    (
        "--mem-fraction-static",
        ("mem_fraction",),
        lambda choice: (round(choice.mem_fraction + change, 4) for change in (-0.05, 0.05)),
    ),
    (
        "--kv-cache-dtype",
        ("kv_cache_dtype",),
        lambda choice: ("auto" if choice.kv_cache_dtype == "bfloat16" else "bfloat16",),
    ),
    (
        "--speculative-num-draft-tokens",
        ("draft_tokens",),
        lambda choice: (0 if choice.draft_tokens else choice.model.draft_tokens,),
    ),
    ("--dp", ("dp",), lambda choice: (1, choice.tp)),
    ("--tp", ("tp",), _server_sizes),
    # One server over all GPUs stays one.
    ("--count", ("count", "tp"), lambda choice: _server_sizes(choice) if choice.count == choice.tp else ()),
)


def neighbours(choice: Choice) -> Iterator[tuple[str, Choice]]:
    """Yield the next smaller and larger choices of each option, with the change as a label.

    A server accepts their flags, but some may not fit into the memory.
    """
    for flag, fields, values in _OPTIONS:
        for value in values(choice):
            try:
                other = replace(choice, **dict.fromkeys(fields, value))
            except ValueError:
                continue
            if other != choice:
                yield _label(flag, value), other


def _label(flag: str, value: Any) -> str:
    if flag == "--speculative-num-draft-tokens" and not value:
        return "no speculation"
    return f"{flag} {value:.2f}" if isinstance(value, float) else f"{flag} {value}"


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
    for split in _splits(choice, goal):
        tried = [attempt(choice, **split, mem_fraction=fraction) for fraction in MEMORY_FRACTIONS]
        if fitting := [plan for plan in tried if isinstance(plan, Plan)]:
            found.append(next((plan for plan in fitting if plan.has_room_for_activations), fitting[0]))
        else:
            reasons.append(str(tried[-1]))
    if not found:
        raise ValueError(reasons[0])
    if goal == "latency":
        return found[0]  # on the most GPUs
    if goal == "long-context":
        return max(found, key=lambda made: (made.at_once, made.total_tokens))
    return max(found, key=lambda made: made.total_tokens)


def _splits(choice: Choice, goal: str) -> Iterator[dict[str, Any]]:
    """Yield the fields of each split of the GPUs with the requests and drafts for the goal, the most GPUs first."""
    for tp in (tp for tp in range(min(choice.count, MOST_GPUS), 0, -1) if choice.count % tp == 0):
        if goal == "latency":
            yield {"tp": tp, "dp": 1, "running": LATENCY_REQUESTS, "draft_tokens": choice.model.draft_tokens}
            continue
        for dp in range(1, tp + 1):
            running = THROUGHPUT_REQUESTS if goal == "throughput" and dp == 1 else REQUESTS_OF_A_RANK * dp
            request = choice.served_context if goal == "long-context" else choice.request
            if tp % dp == 0:
                yield {"tp": tp, "dp": dp, "running": running, "request": request}
