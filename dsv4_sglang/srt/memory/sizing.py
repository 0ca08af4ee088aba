"""How the memory of a launch is divided: state slots for the requests and snapshots first, all the rest in blocks."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.integration.launch_error import LaunchError
from dsv4_sglang.srt.memory.served_layout import ServedLayout

GIB = 1 << 30
SNAPSHOT_SHARE = 1 / 12
"""Of the memory that weights leave; benchmarks/prefix_simulation.py, docs/benchmarks/results.md."""
MAX_STAGING = 64


@dataclass(frozen=True)
class StateDemand:
    """State slots of a launch: one a running request, and `staging` for the snapshots that a prefill step takes.

    `snapshots` hang on the prefix tree or are a running request's latest. On a decode server `arriving` are slots of
    requests that are on their way from a prefill server.
    """

    running: int
    staging: int = 0
    snapshots: int = 0
    arriving: int = 0

    @property
    def slots(self) -> int:
        return self.running + self.arriving + self.staging

    def bytes(self, layout: ServedLayout) -> int:
        """With SGLang's dummy slot."""
        return (self.slots + 1) * layout.slot_bytes + self.snapshots * layout.snapshot_bytes


def default_snapshots(layout: ServedLayout, running: int, available: int) -> int:
    """SNAPSHOT_SHARE of `available` bytes; a running request holds two, the one it resumed from and its latest."""
    return max(2 * running, int(SNAPSHOT_SHARE * available) // layout.snapshot_bytes)


def state_demand(running: int, *, step_tokens: int, default: int, max_snapshots: int | None) -> StateDemand:
    """Slots for `running` requests with the prefix cache; a prefill step has up to `step_tokens` tokens."""
    least = 2 * running
    snapshots = default if max_snapshots is None else max_snapshots
    if snapshots < least:
        raise LaunchError(
            f"dsv4_sglang option max_snapshots is {snapshots}; {running} running requests "
            f"(--max-running-requests) need at least {least}: raise it, lower --max-running-requests, or give "
            f"--disable-radix-cache"
        )
    return StateDemand(running, max(1, min(MAX_STAGING, step_tokens // BLOCK)), snapshots)


def demand_of(
    layout: ServedLayout,
    available_gib: float,
    *,
    running: int,
    step_tokens: int,
    arriving: int = 0,
    max_snapshots: int | None = None,
    max_total_tokens: int | None = None,
    prefix_cache: bool = True,
) -> StateDemand:
    """What one process keeps beside its blocks, of the `available_gib` that the weights leave it for the cache.

    Raises LaunchError for `max_snapshots` that are too few, or without a prefix cache too many.
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
    default = default_snapshots(layout, running, available)
    return state_demand(running, step_tokens=step_tokens, default=default, max_snapshots=max_snapshots)


def memory_after_slots(layout: ServedLayout, demand: StateDemand, available_gib: float) -> float:
    """GiB that state slots and snapshots leave for blocks. Raises if they do not fit."""
    needed = demand.bytes(layout) / GIB
    if needed >= available_gib:
        raise LaunchError(
            f"the state slots do not fit: {demand.slots} slots of {layout.slot_bytes / 1e6:.2f} MB and "
            f"{demand.snapshots} snapshots of {layout.snapshot_bytes / 1e6:.2f} MB take {needed:.2f} GiB of "
            f"{available_gib:.2f} GiB. Lower --max-running-requests or max_snapshots, or raise --mem-fraction-static"
        )
    return available_gib - needed


def tokens_in_bytes(layout: ServedLayout, available: int) -> int:
    """Tokens that fit into `available` bytes: whole blocks, less SGLang's dummy and one for the padding of tables."""
    return max(0, available // layout.block_bytes - 2) * BLOCK


def require_context(layout: ServedLayout, tokens: int, context_len: int, reason: str) -> None:
    """Raise if `tokens` cannot hold one request of the context length; `reason` says where the number is from."""
    needed = -(-context_len // BLOCK) * BLOCK
    if tokens < needed:
        raise LaunchError(
            f"the KV cache is too small for one request of the context length: {reason} {tokens} tokens, and "
            f"--context-length {context_len} needs {needed} ({needed * layout.token_bytes / GIB:.2f} GiB). What fits: "
            f"--context-length {tokens}. Or give more memory (--mem-fraction-static, --max-total-tokens) or fewer "
            f"state slots (--max-running-requests; {layout.slot_bytes / 1e6:.2f} MB a slot)"
        )


def tokens_of_pool(layout: ServedLayout, available: int, context_len: int) -> int:
    """Tokens of the blocks in the `available` bytes behind state slots and snapshots. LaunchError if one request of
    the context length does not fit.
    """
    tokens = tokens_in_bytes(layout, available)
    memory = f"the {available / GIB:.2f} GiB that weights and state slots leave hold"
    require_context(layout, tokens, context_len, memory)
    return tokens


def table(layout: ServedLayout, tokens: int, demand: StateDemand) -> str:
    """The pools of a launch for the log, one line a tensor."""
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
