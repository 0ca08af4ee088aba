"""How the memory of a launch is divided: state slots for the requests and checkpoints first, all the rest in blocks."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator

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


class BlockConfigurator(MemoryPoolConfigurator):
    """Tokens that fit into a number of bytes, in whole blocks, one of which is SGLang's dummy."""

    def __init__(self, layout: CacheLayout, context_len: int) -> None:
        self.layout, self.context_len = layout, context_len

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        blocks = max(0, available_bytes // self.layout.block_bytes - 1)
        return self._config(
            blocks * BLOCK, f"the {available_bytes / GIB:.2f} GiB left after weights and state slots hold"
        )

    def calculate_pool_sizes_from_max_tokens(self, max_total_num_tokens: int, page_size: int) -> MemoryPoolConfig:
        return self._config(max_total_num_tokens // BLOCK * BLOCK, f"--max-total-tokens {max_total_num_tokens} gives")

    def _config(self, tokens: int, reason: str) -> MemoryPoolConfig:
        """SGLang asks twice if --max-total-tokens is given; the answer that counts must hold one longest request."""
        needed = -(-self.context_len // BLOCK) * BLOCK
        if tokens < needed:
            raise ValueError(
                f"the KV cache is too small for one request of the context length: {reason} {tokens} tokens, and "
                f"--context-length {self.context_len} needs {needed} "
                f"({needed * self.layout.token_bytes / GIB:.2f} GiB). What fits: --context-length {tokens}. Or give "
                f"more memory (--mem-fraction-static, --max-total-tokens) or fewer state slots "
                f"(--max-running-requests; {self.layout.slot_bytes / 1e6:.2f} MB a slot)"
            )
        return MemoryPoolConfig(max_total_num_tokens=tokens)


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
