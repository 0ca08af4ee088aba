"""Division of a server's memory: first state slots of requests and snapshots, then blocks in the rest."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.launch.error import LaunchError

GIB = 1 << 30
# Default share of snapshots in the memory that the weights leave (docs/benchmarks/load.md).
SNAPSHOT_SHARE = 1 / 12
MAX_STAGING = 64
# Tokens of a pool beyond a request of the context length. SGLang counts a block more than a request has, and cuts an
# answer as if it began in a block of its own. In a smaller pool a long prompt would get no tokens, or wait forever, and
# with it all requests behind it.
SPARE_TOKENS = 2 * BLOCK


@dataclass(frozen=True)
class StateDemand:
    """Number of state slots and snapshots of a server.

    A running request has one slot. `staging` slots hold the snapshots of a prefill step. `arriving` slots of a decode
    server are for requests that a prefill server is sending. `snapshots` belong to the prefix tree, or are the latest
    of a running request.
    """

    running: int
    staging: int = 0
    snapshots: int = 0
    arriving: int = 0

    @property
    def slots(self) -> int:
        return self.running + self.arriving + self.staging

    def bytes(self, layout: CacheLayout) -> int:
        """Return the bytes of all slots and snapshots, including SGLang's dummy slot."""
        return (self.slots + 1) * layout.slot_bytes + self.snapshots * layout.snapshot_bytes


def require_snapshots(snapshots: int, running: int) -> None:
    """Raise LaunchError if there are fewer than two snapshots for each running request: the one that it resumed from
    and its latest."""
    if snapshots < 2 * running:
        raise LaunchError(
            f"dsv4_sglang option max_snapshots is {snapshots}; {running} running requests "
            f"(--max-running-requests) need at least {2 * running}: raise it, lower --max-running-requests, or give "
            f"--disable-radix-cache"
        )


def demand_of(
    layout: CacheLayout,
    available_gib: float,
    *,
    running: int,
    step_tokens: int,
    arriving: int = 0,
    max_snapshots: int | None = None,
    max_total_tokens: int | None = None,
    prefix_cache: bool = True,
) -> StateDemand:
    """Compute the slots and snapshots of one process.

    By default there are as many snapshots as fit into SNAPSHOT_SHARE of the memory, but at least two per running
    request.

    Args:
        layout: layout of the cache.
        available_gib: GiB that the weights leave for the cache.
        running: maximum number of running requests.
        step_tokens: maximum number of tokens of a prefill step.
        arriving: slots for requests on their way from a prefill server. Only without a prefix cache, as on a decode
            server.
        max_snapshots: the option of this name.
        max_total_tokens: --max-total-tokens, which limits the memory for default snapshots.
        prefix_cache: False with --disable-radix-cache and on a decode server.

    Raises:
        LaunchError: `max_snapshots` is too small, or is set without a prefix cache.
    """
    if not prefix_cache:
        if max_snapshots:
            raise LaunchError(
                f"dsv4_sglang option max_snapshots is {max_snapshots}, but there is no prefix cache: "
                "--disable-radix-cache is given, or it is a decode server (--disaggregation-mode decode)"
            )
        return StateDemand(running, arriving=arriving)
    available = int(available_gib * GIB)
    if max_total_tokens:
        available = min(available, int(max_total_tokens * layout.token_bytes))
    default = max(2 * running, int(SNAPSHOT_SHARE * available) // layout.snapshot_bytes)
    snapshots = default if max_snapshots is None else max_snapshots
    require_snapshots(snapshots, running)
    return StateDemand(running, max(1, min(MAX_STAGING, step_tokens // BLOCK)), snapshots)


def memory_after_slots(layout: CacheLayout, demand: StateDemand, available_gib: float) -> float:
    """Return the GiB that state slots and snapshots leave for blocks.

    Args:
        layout: layout of the cache.
        demand: number of slots and snapshots.
        available_gib: GiB that the weights leave for the cache.

    Raises:
        LaunchError: slots and snapshots do not fit.
    """
    needed = demand.bytes(layout) / GIB
    if needed >= available_gib:
        raise LaunchError(
            f"the state slots do not fit: {demand.slots} slots of {layout.slot_bytes / 1e6:.2f} MB and "
            f"{demand.snapshots} snapshots of {layout.snapshot_bytes / 1e6:.2f} MB take {needed:.2f} GiB of "
            f"{available_gib:.2f} GiB. Lower --max-running-requests or max_snapshots, or raise --mem-fraction-static"
        )
    return available_gib - needed


def tokens_of_context(context_len: int) -> int:
    """Return the tokens of the smallest pool that serves all requests of the context length."""
    return -(-context_len // BLOCK) * BLOCK + SPARE_TOKENS


def require_context(layout: CacheLayout, tokens: int, context_len: int, reason: str) -> None:
    """Raise LaunchError if a pool cannot serve one request of the context length.

    Args:
        layout: layout of the cache.
        tokens: size of the pool.
        context_len: --context-length.
        reason: origin of `tokens`, the start of a sentence for the message.
    """
    needed = tokens_of_context(context_len)
    if tokens < needed:
        raise LaunchError(
            f"the KV cache is too small for one request of the context length: {reason} {tokens} tokens, and "
            f"--context-length {context_len} needs {needed} ({needed * layout.token_bytes / GIB:.2f} GiB). What fits: "
            f"--context-length {max(0, tokens - SPARE_TOKENS)}. Or give more memory (--mem-fraction-static, "
            f"--max-total-tokens) or fewer state slots (--max-running-requests; {layout.slot_bytes / 1e6:.2f} MB a "
            f"slot)"
        )


def tokens_of_pool(layout: CacheLayout, available: int, context_len: int) -> int:
    """Return the number of tokens of the block pool: whole blocks, less SGLang's dummy block and one for the padding of
    tables.

    Args:
        layout: layout of the cache.
        available: bytes that weights, state slots and snapshots leave.
        context_len: --context-length.

    Raises:
        LaunchError: one request of the context length does not fit.
    """
    tokens = max(0, available // layout.block_bytes - 2) * BLOCK
    memory = f"the {available / GIB:.2f} GiB that weights and state slots leave hold"
    require_context(layout, tokens, context_len, memory)
    return tokens


def table(layout: CacheLayout, tokens: int, demand: StateDemand) -> str:
    """Return the log text that describes a server's pools, one line per tensor.

    Args:
        layout: layout of the cache.
        tokens: tokens of the block pool.
        demand: number of slots and snapshots.
    """
    of_a_slot = f"{demand.running} requests, {demand.staging} for the snapshots of a step"
    if demand.arriving:
        of_a_slot += f", {demand.arriving} for requests on their way"
    if draft_tokens := layout.schemas[0].draft_tokens:
        of_a_slot += f"; room for {draft_tokens} draft tokens each"
    if layout.draft_layers:
        model = len(layout.schemas) - layout.draft_layers
        of_a_slot += f"; rings of {model} layers and {layout.draft_layers} of the draft model"
    parts = [*layout.block_parts(tokens // BLOCK + 1), *layout.state_parts(demand.slots + 1)]
    if demand.snapshots:
        parts += layout.snapshot_parts(demand.snapshots)
    lines = [
        f"  {part.name:<18} {'x'.join(map(str, part.shape)):>24} {str(part.dtype).removeprefix('torch.'):<9} "
        f"{part.bytes / GIB:9.3f} GiB"
        for part in parts
    ]
    return "\n".join(
        [
            f"dsv4_sglang cache: {tokens} tokens in {tokens // BLOCK} blocks, {layout.token_bytes:.2f} bytes a token; "
            f"{demand.slots} state slots of {layout.slot_bytes} bytes ({of_a_slot}); "
            f"{demand.snapshots} snapshots of {layout.snapshot_bytes} bytes; "
            f"{sum(part.bytes for part in parts) / GIB:.3f} GiB in all",
            *lines,
        ]
    )
