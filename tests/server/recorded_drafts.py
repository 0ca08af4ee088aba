"""SGLang plugin that records the drafts of DSPARK or EAGLE, one file per step in the folder DRAFTS."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

DRAFTS = "DSV4_SGLANG_TEST_DRAFTS"
PROPOSE = "sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose"
DRAFT = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft"
_steps = count()


class Block(NamedTuple):
    """Drafts of one request in one step.

    EAGLE chooses the first draft in the previous step. For that draft `streams` is recorded instead of logits.

    Attributes:
        rid: Request id.
        length: Number of tokens before the block.
        tokens: Last accepted token, followed by the drafts.
        logits: [drafts, vocab], from which the drafts were chosen; None inside a CUDA graph.
        streams: EAGLE: residual streams [hc_mult * hidden] of the NextN layer; None with DSPARK.
    """

    rid: str
    length: int
    tokens: list[int]
    logits: Any
    streams: Any


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(PROPOSE, _propose, HookType.AROUND)
    HookRegistry.register(DRAFT, _draft, HookType.AROUND)


def _propose(original: Callable[..., Any], proposer: Any, *, batch: Any, **arguments: Any) -> Any:
    import torch

    made = original(proposer, batch=batch, **arguments)
    anchors, drafts = made.draft_block_ids[:, :1], made.draft_block.draft_tokens
    logits = made.draft_block.corrected_logits.float().cpu()
    _keep(batch, torch.cat([anchors, drafts], dim=1), logits, [None] * len(batch.reqs))
    return made


def _draft(original: Callable[..., Any], worker: Any, batch: Any, *rest: Any, **named: Any) -> Any:
    import torch

    runner, streams, logits = worker.draft_runner, batch.spec_info.hidden_states.float().cpu(), []
    forward = runner.forward

    def kept(*step: Any, **options: Any) -> Any:
        out = forward(*step, **options)
        logits.append(out.logits_output.next_token_logits)
        return out

    runner.forward = kept
    try:
        made = original(worker, batch, *rest, **named)
    finally:
        del runner.forward
    by = torch.stack(logits, dim=1).float().cpu() if logits else [None] * len(batch.reqs)
    _keep(batch, made.draft_token.view(len(batch.reqs), -1), by, streams)
    return made


def _keep(batch: Any, tokens: Any, logits: Any, streams: Any) -> None:
    import torch

    step = {
        "rids": [request.rid for request in batch.reqs],
        "lengths": batch.seq_lens.cpu(),
        "tokens": tokens.cpu(),
        "logits": logits,
        "streams": streams,
    }
    file = Path(os.environ[DRAFTS]) / f"{next(_steps)}.pt"
    torch.save(step, file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)


def recorded(folder: Path) -> Iterator[Block]:
    """Yield all blocks recorded so far."""
    import torch

    for file in folder.glob("*.pt"):
        step = torch.load(file)
        lengths, tokens = step["lengths"].tolist(), step["tokens"].tolist()
        rows = zip(step["rids"], lengths, tokens, step["logits"], step["streams"], strict=True)
        yield from (Block(*row) for row in rows)
