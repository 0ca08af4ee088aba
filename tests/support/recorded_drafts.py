"""Recorder of the drafts of DSPARK or EAGLE for server_plugin.py, one file per step in the plugin's folder `drafts`.

The first process of an attention TP group records. Every draft depends on the parts of all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from support.server_plugin import folder

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
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel()
    if ranks.attn_tp_rank:
        return
    rids = [request.rid for request in batch.reqs]
    rows = zip(rids, batch.seq_lens.tolist(), tokens.tolist(), logits, streams, strict=True)
    file = folder() / "drafts" / f"{ranks.tp_rank}_{next(_steps)}.pt"
    torch.save([tuple(row) for row in rows], file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)


def recorded(plugin: Path) -> Iterator[Block]:
    """Yield all blocks recorded so far in the plugin's folder."""
    import torch

    for file in (plugin / "drafts").glob("*.pt"):
        yield from (Block(*row) for row in torch.load(file))


HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose": _propose,
    "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft": _draft,
}
