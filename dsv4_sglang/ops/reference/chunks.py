"""Parts of `append` and `append_v41`: the tokens of a step by request, their window entries, and checks of its size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4_sglang.formats import KVBuffer
from dsv4_sglang.model.geometry import WINDOW


@dataclass(frozen=True)
class Chunk:
    """Tokens of one request in the step: rows [begin, end) of the inputs, positions [length, length + count).

    The last `own` of them are written, the others are only read.
    """

    request: int
    slot: int
    begin: int
    end: int
    length: int
    own: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.length, self.length + self.count)

    def latest(self, keep: int) -> tuple[Tensor, slice]:
        """Return the positions of the last `keep` written tokens and the slice of their inputs."""
        kept = min(keep, self.own)
        return self.positions[self.count - kept :], slice(self.end - kept, self.end)


def make_chunks(slots: Tensor, prefix_lens: Tensor, query_start: Tensor, by_token: bool = False) -> list[Chunk]:
    """Return one chunk per request or, with `by_token`, one per token, like the thread blocks of a decode step.

    All tokens of a decode step continue from the state before the step, in any order. Here the last token comes first,
    which is the hardest case for rings and compressor states.

    Args:
        slots: int32 [B], state slots. Requests with a negative slot are left out.
        prefix_lens: int32 [B], tokens before the step.
        query_start: int32 [B + 1], first token of each request.
        by_token: one chunk per token instead of one per request.
    """
    starts = query_start.tolist()
    requests = [
        Chunk(b, slot, begin, end, length, own=end - begin)
        for b, (slot, length, begin, end) in enumerate(zip(slots.tolist(), prefix_lens.tolist(), starts, starts[1:]))
        if slot >= 0 and end > begin
    ]
    if not by_token:
        return requests
    return [replace(chunk, end=end, own=1) for chunk in requests for end in range(chunk.end, chunk.begin, -1)]


def token_positions(prefix_lens: Tensor, query_start: Tensor, token_request: Tensor) -> Tensor:
    """Return the position of each token of a step, int64 [T]. Arguments as in `append`."""
    request = token_request.long()
    return prefix_lens.long()[request] + torch.arange(len(request)) - query_start.long()[request]


def check(op: str, ok: bool, message: str) -> None:
    """Raise ValueError with the name of the op and `message` unless `ok`."""
    if not ok:
        raise ValueError(f"{op}: {message}")


def check_step(
    op: str,
    tokens: int,
    requests: int,
    ring: Tensor,
    window: Tensor | None,
    compressor_state: Tensor | None,
    state_draft_tokens: int,
) -> None:
    """Check the size of the workspace of a prefill step, or the tokens per request of a decode step, which has none.

    Args:
        op: name of the op in error messages.
        tokens: number of tokens, T.
        requests: number of requests, B.
        ring: [slots, R, w], window rings.
        window: [1, T + 128 B, w], workspace of a prefill step; None in a decode step.
        compressor_state: [slots, rows, D]; None without one.
        state_draft_tokens: tokens per request that `compressor_state` supports in a decode step.

    Raises:
        ValueError: a size does not fit, or the requests of a decode step have different numbers of tokens.
    """
    check(op, ring.shape[1] >= WINDOW, f"ring has {ring.shape[1]} rows per slot; expected at least {WINDOW}")
    if window is not None:
        expected = tokens + WINDOW * requests
        check(op, window.shape[1] == expected, f"window has {window.shape[1]} entries; expected {expected}")
        return
    per_request, rest = divmod(tokens, max(requests, 1))
    check(
        op,
        rest == 0,
        f"{tokens} tokens for {requests} requests without `window`; expected the same number for each. A step with "
        "chunks needs `window`",
    )
    check_rows(op, "ring", per_request, ring, ring.shape[1] - WINDOW + 1)
    if compressor_state is not None:
        check_rows(op, "compressor_state", per_request, compressor_state, state_draft_tokens)


def check_rows(op: str, name: str, per_request: int, table: Tensor, most: int) -> None:
    check(
        op,
        per_request <= most,
        f"{per_request} tokens of each request without `window`, but {name} has {table.shape[1]} rows per slot, "
        f"for at most {most}. Construct the cache with draft_tokens {per_request}",
    )


def write_window(chunk: Chunk, rows: Tensor, ring: KVBuffer, window: Tensor | None, track: Tensor | None) -> None:
    """Write the window entries of a chunk to its ring, to the workspace of a prefill step, and to snapshots.

    Args:
        chunk: tokens of one request.
        rows: window entries of all tokens of the step.
        ring: window rings of all slots.
        window: workspace of a prefill step, in the format of `ring`.
        track: staging slot of the snapshot that each token's entry belongs to, or -1; None without snapshots.
    """
    slot, length, ring_rows = chunk.slot, chunk.length, ring.data.shape[1]
    if window is not None:
        base = chunk.begin + WINDOW * chunk.request + WINDOW
        old = torch.arange(max(0, length - WINDOW), length)
        workspace = ring._replace(data=window)
        workspace.copy_entries(ring, slot * ring_rows + old % ring_rows, base + old - length)
        workspace.write(base + torch.arange(chunk.count), rows[chunk.begin : chunk.end])
    positions, at = chunk.latest(WINDOW)
    ring.write(slot * ring_rows + positions % ring_rows, rows[at])
    if track is not None:
        positions, at = chunk.latest(chunk.own)
        tracked = track[at] >= 0
        ring.write(track[at][tracked].long() * ring_rows + positions[tracked] % ring_rows, rows[at][tracked])
