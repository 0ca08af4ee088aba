"""Alternatives of a choice that differ in one option."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4_sglang.model.geometry import MAX_DRAFT_TOKENS
from dsv4_sglang.planner.choice import Choice
from dsv4_sglang.planner.gpus import MOST_GPUS

# Tokens of a verify step with EAGLE 3/1/4, for the alternative with speculation.
DRAFT_TOKENS = 4


def others(choice: Choice) -> Iterator[tuple[str, Choice]]:
    """Yield the next smaller and larger choices of each option, with the change as a label. Some may not fit."""
    config, head = choice.model.config, choice.model.dspark
    for running in (choice.running // 2, choice.running * 2):
        if running >= choice.dp:
            yield f"--max-running-requests {running}", replace(choice, running=running)
    for fraction in (choice.mem_fraction - 0.05, choice.mem_fraction + 0.05):
        if 0 < fraction < 0.97:
            yield f"--mem-fraction-static {fraction:.2f}", replace(choice, mem_fraction=round(fraction, 4))
    rows = "auto" if choice.kv_cache_dtype == "bfloat16" else "bfloat16"
    yield f"--kv-cache-dtype {rows}", replace(choice, kv_cache_dtype=rows)
    if choice.draft_tokens:
        yield "no speculation", replace(choice, draft_tokens=0)
    elif head is not None and choice.dp == 1 and head.block < MAX_DRAFT_TOKENS:
        yield "--speculative-algorithm DSPARK", replace(choice, draft_tokens=head.block + 1)
    elif head is None and config.num_nextn_predict_layers:
        yield f"--speculative-num-draft-tokens {DRAFT_TOKENS}", replace(choice, draft_tokens=DRAFT_TOKENS)
    for dp in (1,) if head is not None and choice.draft_tokens else (1, choice.tp):
        if dp != choice.dp and choice.running >= dp and config.o_groups % (choice.tp // dp) == 0:
            yield f"--dp {dp}", replace(choice, dp=dp)
    for gpus in (choice.tp // 2, choice.tp * 2):
        if gpus < choice.dp or gpus > MOST_GPUS or config.o_groups % max(gpus // choice.dp, 1):
            continue
        if choice.count % gpus == 0:
            yield f"--tp {gpus}", replace(choice, tp=gpus)
        if choice.count == choice.tp:
            yield f"--count {gpus}", choice.gpus(gpus)
