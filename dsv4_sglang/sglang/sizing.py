"""How the memory of a launch is divided: state slots for the requests and checkpoints first, all the rest in blocks."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_sglang.cache.schema import BLOCK_SIZE_ORIGINAL_TOKENS as BLOCK
from dsv4_sglang.sglang.layout import CacheLayout

GIB = 1 << 30


@dataclass(frozen=True)
class StateDemand:
    """State slots of a launch. `held` is what one running request holds: its live slot and its track slots.

    `checkpoints` may hang on the prefix tree; a running request can pin one of them and another while it hands one
    over.
    """

    running: int
    held: int
    checkpoints: int

    @property
    def slots(self) -> int:
        return self.running * self.held + self.checkpoints


def state_demand(running: int, radix: bool, overlap: bool, max_checkpoints: int | None) -> StateDemand:
    """Slots for `running` requests; without the prefix cache a request holds its live slot only."""
    if not radix:
        if max_checkpoints:
            raise ValueError(
                f"dsv4_sglang option max_checkpoints is {max_checkpoints}, but --disable-radix-cache is given"
            )
        return StateDemand(running, 1, 0)
    least = 2 * running
    checkpoints = least if max_checkpoints is None else max_checkpoints
    if checkpoints < least:
        raise ValueError(
            f"dsv4_sglang option max_checkpoints is {checkpoints}; {running} running requests "
            f"(--max-running-requests) need at least {least}: raise it, lower --max-running-requests, or give "
            f"--disable-radix-cache"
        )
    return StateDemand(running, 3 if overlap else 2, checkpoints)


def memory_after_slots(layout: CacheLayout, demand: StateDemand, available_gib: float) -> float:
    """GiB that the state slots, SGLang's dummy among them, leave for blocks. Raises if they do not fit."""
    needed = (demand.slots + 1) * layout.slot_bytes / GIB
    if needed >= available_gib:
        raise ValueError(
            f"the state slots do not fit: {demand.slots} slots of {layout.slot_bytes / 1e6:.2f} MB "
            f"({demand.running} requests x {demand.held} + {demand.checkpoints} checkpoints) take {needed:.2f} GiB of "
            f"{available_gib:.2f} GiB. Lower --max-running-requests or max_checkpoints, or raise --mem-fraction-static"
        )
    return available_gib - needed


def tokens_in_bytes(layout: CacheLayout, available: int) -> int:
    """Tokens that fit into `available` bytes: whole blocks, less SGLang's dummy and one for the padding of tables."""
    return max(0, available // layout.block_bytes - 2) * BLOCK


def require_context(layout: CacheLayout, tokens: int, context_len: int, reason: str) -> None:
    """Raise if `tokens` cannot hold one request of the context length; `reason` says where the number is from."""
    needed = -(-context_len // BLOCK) * BLOCK
    if tokens < needed:
        raise ValueError(
            f"the KV cache is too small for one request of the context length: {reason} {tokens} tokens, and "
            f"--context-length {context_len} needs {needed} ({needed * layout.token_bytes / GIB:.2f} GiB). What fits: "
            f"--context-length {tokens}. Or give more memory (--mem-fraction-static, --max-total-tokens) or fewer "
            f"state slots (--max-running-requests; {layout.slot_bytes / 1e6:.2f} MB a slot)"
        )


def table(layout: CacheLayout, tokens: int, demand: StateDemand) -> str:
    """The pools of a launch for the log, one line a tensor."""
    parts = [*layout.block_parts(tokens // BLOCK + 1), *layout.state_parts(demand.slots + 1)]
    lines = [
        f"  {part.name:<13} {'x'.join(map(str, part.shape)):>24} {str(part.dtype).removeprefix('torch.'):<9} "
        f"{part.bytes / GIB:9.3f} GiB"
        for part in parts
    ]
    return "\n".join(
        [
            f"dsv4_sglang cache: {tokens} tokens in {tokens // BLOCK} blocks, {layout.token_bytes:.2f} bytes a token; "
            f"{demand.slots} state slots of {layout.slot_bytes} bytes ({demand.running} requests x {demand.held} + "
            f"{demand.checkpoints} checkpoints); {sum(part.bytes for part in parts) / GIB:.3f} GiB in all",
            *lines,
        ]
    )
