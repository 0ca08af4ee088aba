"""A plugin of SGLang that keeps the blocks that a server under test drafts with DSPARK, a file a step in DRAFTS."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

DRAFTS = "DSV4_SGLANG_TEST_DRAFTS"
PROPOSE = "sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose"
_steps = count()


class Block(NamedTuple):
    """Of the request `rid`, behind its first `length` tokens: the decided token with the drafts, and the logits
    [drafts, vocab] by which these were chosen."""

    rid: str
    length: int
    tokens: list[int]
    logits: Any


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(PROPOSE, _propose, HookType.AROUND)


def _propose(original: Callable[..., Any], proposer: Any, *, batch: Any, **arguments: Any) -> Any:
    import torch

    made = original(proposer, batch=batch, **arguments)
    anchors, drafts = made.draft_block_ids[:, :1], made.draft_block.draft_tokens
    step = {
        "rids": [request.rid for request in batch.reqs],
        "lengths": batch.seq_lens.cpu(),
        "tokens": torch.cat([anchors, drafts], dim=1).cpu(),
        "logits": made.draft_block.corrected_logits.float().cpu(),
    }
    file = Path(os.environ[DRAFTS]) / f"{next(_steps)}.pt"
    torch.save(step, file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)
    return made


def recorded(folder: Path) -> Iterator[Block]:
    """All blocks so far."""
    import torch

    for file in folder.glob("*.pt"):
        step = torch.load(file)
        rows = zip(step["rids"], step["lengths"].tolist(), step["tokens"].tolist(), step["logits"])
        yield from (Block(*row) for row in rows)
