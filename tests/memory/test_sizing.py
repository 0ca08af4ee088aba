"""Tests of the limits and defaults of a server's memory division."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4_sglang.cache import CacheLayout, v4_specs
from dsv4_sglang.model import DSV4Config, build_schedule
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.memory.sizing import (
    GIB,
    StateDemand,
    demand_of,
    memory_after_slots,
    require_context,
    table,
)

CONFIG = DSV4Config.flash()
LAYOUT = CacheLayout(v4_specs(CONFIG, build_schedule(CONFIG)), torch.device("cpu"))


def test_two_snapshots_for_each_running_request() -> None:
    """Fewer are rejected. By default a twelfth of the memory has snapshots, if these are not fewer."""
    assert demand_of(LAYOUT, 10, running=8, step_tokens=4096, max_snapshots=16).snapshots == 16
    with pytest.raises(LaunchError, match=r"max_snapshots is 15; 8 running requests .* need at least 16"):
        demand_of(LAYOUT, 10, running=8, step_tokens=4096, max_snapshots=15)
    assert demand_of(LAYOUT, 60, running=8, step_tokens=4096).snapshots == int(5 * GIB) // LAYOUT.snapshot_bytes
    assert demand_of(LAYOUT, 60, running=4096, step_tokens=4096).snapshots == 8192


def test_total_tokens_limit_the_default_snapshots() -> None:
    tokens = 1 << 20
    few = demand_of(LAYOUT, 600, running=8, step_tokens=4096, max_total_tokens=tokens).snapshots
    assert few == int(tokens * LAYOUT.token_bytes) // 12 // LAYOUT.snapshot_bytes > 16
    most = demand_of(LAYOUT, 6, running=8, step_tokens=4096, max_total_tokens=1 << 30).snapshots
    assert most == demand_of(LAYOUT, 6, running=8, step_tokens=4096).snapshots


@pytest.mark.parametrize(("tokens", "staging"), [(1, 1), (127, 1), (128, 1), (256, 2), (1 << 20, 64)])
def test_staging(tokens: int, staging: int) -> None:
    """A step takes at most one snapshot for each 128 tokens. There is always one slot, and at most 64."""
    assert demand_of(LAYOUT, 10, running=1, step_tokens=tokens).staging == staging


def test_slots_fill_no_more_than_the_memory() -> None:
    demand = StateDemand(running=7, staging=2, snapshots=16, arriving=1)
    needed = (7 + 2 + 1 + 1) * LAYOUT.slot_bytes + 16 * LAYOUT.snapshot_bytes
    assert demand.bytes(LAYOUT) == needed
    assert memory_after_slots(LAYOUT, demand, needed / GIB + 1) == pytest.approx(1)
    with pytest.raises(LaunchError, match=r"the state slots do not fit: 10 slots .* and 16 snapshots"):
        memory_after_slots(LAYOUT, demand, needed / GIB)


def test_a_context_needs_whole_blocks_and_two_to_spare() -> None:
    require_context(LAYOUT, 512, 129, "the pool holds")
    with pytest.raises(LaunchError, match="the pool holds 384 tokens, and --context-length 129 needs 512"):
        require_context(LAYOUT, 384, 129, "the pool holds")


def test_table_counts_all_memory() -> None:
    """Besides the blocks of the tokens and the slots, each pool has SGLang's dummy."""
    demand = StateDemand(running=3, staging=1, snapshots=6)
    parts = [*LAYOUT.block_parts(11), *LAYOUT.state_parts(5), *LAYOUT.snapshot_parts(6)]
    text = table(LAYOUT, 1280, demand)
    assert f"1280 tokens in 10 blocks, {LAYOUT.token_bytes:.2f} bytes a token; 4 state slots" in text
    assert f"{sum(part.bytes for part in parts) / GIB:.3f} GiB in all" in text.splitlines()[0]
    assert len(text.splitlines()) == 1 + len(parts)
    assert "on their way" not in text and "1 for requests on their way" in table(
        LAYOUT, 1280, replace(demand, arriving=1)
    )
