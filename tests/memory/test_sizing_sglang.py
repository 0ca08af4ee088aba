"""Tests of the memory division when SGLang's own configurator asks: state slots, snapshots, and blocks in the remaining
memory."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache import mamba_checkpoint_pool
from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len
from sglang.srt.server_args import ServerArgs

from benchmarks import capacity
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.planner.choice import Choice
from dsv4_sglang.planner.gpus import GPUS
from dsv4_sglang.planner.models import Format, Model
from dsv4_sglang.planner.plan import plan
from dsv4_sglang.planner.reserves import token_table_bytes
from dsv4_sglang.srt.launch.options import Options
from dsv4_sglang.srt.memory.sizing import GIB, StateDemand, table
from dsv4_sglang.srt.plugin.server_context import ServerContext
from dsv4_sglang.srt.sglang.planning import published

# GiB for the cache with --mem-fraction-static 0.6 on an H200 and the weights of benchmarks/configs/flashshape.
MEMORY = 78.82


def flashshape() -> DSV4Config:
    folder = Path(capacity.__file__).parent / "configs" / "flashshape"
    values = json.loads((folder / "config.json").read_text())
    return DSV4Config.from_hf(values)


def speculation(drafts: int) -> dict[str, Any]:
    """Return the fields of ServerArgs for EAGLE with `drafts` tokens per verify step, or without EAGLE."""
    return {
        "speculative_algorithm": "EAGLE" if drafts else None,
        "speculative_num_steps": drafts - 1 if drafts else None,
        "speculative_eagle_topk": 1 if drafts else None,
        "speculative_num_draft_tokens": drafts or None,
    }


class Configurator(SimpleNamespace):
    """Fields of SGLang's KVCacheConfigurator that the hooks read. `overridden` holds the values that they set."""


@pytest.fixture
def configurator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the configurator of a launch from its config, running requests and options.

    `drafts` is the number of tokens per verify step of EAGLE. `mode` is --disaggregation-mode, with two slots per
    running request for requests in transfer.
    """

    def make(
        config: DSV4Config | V41Config,
        running: int,
        radix: bool = True,
        ranks: int = 1,
        drafts: int = 0,
        mode: str = "null",
        **options: Any,
    ) -> Configurator:
        overridden: dict[str, int] = {}
        settings: dict[str, dict[str, Any]] = {
            "schedule": {
                "max_running_requests": running,
                "chunked_prefill_size": 8192,
                "max_prefill_tokens": 16384,
                "disable_overlap_schedule": False,
            },
            "exec": {"features": SimpleNamespace(enable_memory_saver=False)},
            "disagg": {"disaggregation_mode": mode, "disaggregation_decode_extra_slots": 2 * running},
            "memory": {"disable_radix_cache": not radix},
            "context": {"override": lambda _name, **values: overridden.update(values)},
            "parallel": {"attn_dp_size": ranks},
        }
        for name, values in settings.items():
            monkeypatch.setattr(runtime_context, f"get_{name}", partial(lambda part: part, SimpleNamespace(**values)))
        monkeypatch.setattr("dsv4_sglang.srt.plugin.server_context.model_config", lambda _config: config)
        monkeypatch.setattr(mamba_checkpoint_pool, "maybe_init_int8_mamba_checkpoint_pool", lambda **_: None)
        return Configurator(
            model_config=SimpleNamespace(hf_config=None, context_len=1 << 20),
            kv_cache_dtype=torch.float8_e4m3fn,
            device="cpu",
            server_args=SimpleNamespace(max_total_tokens=None, **speculation(drafts)),
            overridden=overridden,
            context=ServerContext(Options(**options)),
        )

    return make


def tokens_of(configurator: Configurator, gib: float) -> int:
    def sglangs_way(*_args: Any) -> Any:
        raise AssertionError("SGLang's own division was asked for")

    left = configurator.context.state_slots(sglangs_way, configurator, gib)
    blocks = configurator.context.pool_configurator(sglangs_way, configurator)
    return blocks.calculate_pool_sizes(int(left * GIB), 128).max_total_num_tokens


def built_pool(launched: Configurator, **sizes: int) -> Any:
    """Return the pool of state slots that the server allocates, for a context of 256 tokens."""
    schedule = runtime_context.get_schedule()
    schedule.max_mamba_cache_size, schedule.chunked_prefill_size = launched.overridden["max_mamba_cache_size"], 128
    launched.model_config.context_len = 256
    pool = launched.context.request_pool(lambda *_: None, launched, max_num_reqs=2, **sizes)
    counted = launched.context.demand.bytes(launched.context.layout)
    assert pool.mamba_pool.bytes == counted, "allocated and counted bytes differ"
    return pool


@pytest.mark.parametrize("make", [DSV4Config.flash, DSV4Config.pro, flashshape])
def test_allocation_equals_the_benchmarks_figure(configurator: Any, make: Any) -> None:
    launched = configurator(make(), 256, max_snapshots=512)
    tokens = tokens_of(launched, MEMORY)
    assert tokens == capacity.ours(make(), MEMORY, 256, 512).tokens(MEMORY * GIB)
    assert launched.context.demand == StateDemand(256, 64, 512)
    if make is flashshape:
        assert tokens >= 21_000_000


@pytest.mark.parametrize("model", [Model.of("flash"), Model.of("pro")], ids=lambda model: model.name)
@pytest.mark.parametrize(
    ("options", "drafts"),
    [({}, 0), ({"indexer_format": "fp32", "max_snapshots": 600}, 0), ({}, 4), ({}, 9)],
    ids=["defaults", "options", "4 draft tokens", "9 draft tokens"],
)
def test_allocation_equals_the_plan(configurator: Any, model: Model, options: dict[str, Any], drafts: int) -> None:
    given = Choice(model, GPUS["h200"], 8, 8, 1, Format.FP4, 128, options=Options(**options), draft_tokens=drafts)
    made = plan(given)
    launched = configurator(model.config, 128, drafts=drafts, **options)
    assert tokens_of(launched, made.available_gib) == made.tokens
    assert launched.context.demand == made.demand
    assert launched.context.layout.slot_bytes == made.layout.slot_bytes


def test_the_published_v41(configurator: Any) -> None:
    """Four layers have entries and keys, three of them one per two tokens. 40 layers have rings, which a snapshot keeps
    whole. A slot has three more rows that wait for a partner (SPEC 11.5)."""
    launched = configurator(V41Config.flash(), 256, max_snapshots=512)
    tokens = tokens_of(launched, MEMORY)
    layout, demand = launched.context.layout, launched.context.demand
    ring = 40 * 128 * 528
    assert (layout.token_bytes, layout.snapshot_bytes, layout.slot_bytes) == (900, ring, ring + 3 * 4096)
    state = (256 + 64 + 1) * (ring + 3 * 4096) + 512 * ring
    assert demand == StateDemand(256, 64, 512) and demand.bytes(layout) == state
    # Subtract SGLang's dummy block and the block that pads tables.
    assert tokens == ((int(MEMORY * GIB) - state) // (128 * 900) - 2) * 128
    assert "900.00 bytes a token" in table(layout, tokens, demand)


@pytest.mark.parametrize(
    ("flags", "demand"),
    [
        ({"max_snapshots": 512}, StateDemand(256, 64, 512)),
        ({"max_snapshots": 64, "ranks": 8}, StateDemand(32, 64, 64)),  # a rank of DP attention
        ({"radix": False}, StateDemand(256)),
    ],
)
def test_a_running_request_has_one_live_slot(configurator: Any, flags: dict[str, Any], demand: StateDemand) -> None:
    launched = configurator(flashshape(), 256, **flags)
    tokens_of(launched, MEMORY)
    assert launched.context.demand == demand
    assert launched.overridden == {"max_mamba_cache_size": demand.running}, "SGLang would take 3 slots a request"
    assert launched.context.slots_of_request(lambda _configurator: 5, launched) == 1


def test_decode_server_has_slots_for_transfers(configurator: Any) -> None:
    """SGLang adds two slots per running request when there are few requests. They are counted, and the log reports
    them."""
    more = tokens_of(configurator(flashshape(), 16, radix=False), MEMORY)
    launched = configurator(flashshape(), 16, radix=False, mode="decode")
    tokens = tokens_of(launched, MEMORY)
    demand, layout = launched.context.demand, launched.context.layout
    assert demand == StateDemand(16, arriving=32) and launched.overridden == {"max_mamba_cache_size": 48}
    assert (more - tokens) // 128 in (blocks := 32 * layout.slot_bytes // layout.block_bytes, blocks + 1)
    text = table(layout, tokens, demand)
    assert "48 state slots" in text and "16 requests, 0 for the snapshots of a step, 32 for requests on" in text
    with pytest.raises(ValueError, match=r"max_snapshots is 8, but there is no prefix cache: .*decode server"):
        tokens_of(configurator(flashshape(), 16, radix=False, mode="decode", max_snapshots=8), MEMORY)


def test_decode_server_has_the_planned_pool(configurator: Any) -> None:
    launched = configurator(flashshape(), 2, radix=False, mode="decode")
    tokens_of(launched, MEMORY)
    pool = built_pool(launched, extra_max_context_len=4, pre_alloc_size=4)
    assert (pool.size, len(pool.free_slots), pool.mamba_allocator.size, pool.mamba_pool.size) == (2, 6, 6, 6)


@pytest.mark.parametrize("drafts", [0, 4])
def test_request_takes_one_slot_of_the_pool(configurator: Any, drafts: int) -> None:
    with published(ServerArgs(model_path="dummy", device="cpu", page_size=128, **speculation(drafts))):
        extra = get_req_to_token_extra_context_len()
    launched = configurator(flashshape(), 2, max_snapshots=4, drafts=drafts)
    tokens_of(launched, MEMORY)
    pool = built_pool(launched, extra_max_context_len=extra)
    assert (pool.mamba_allocator.size, pool.mamba_pool.size, pool.mamba_ckpt_pool.num_slots) == (2, 2, 4)
    given = Choice(
        Model.of("flash"), GPUS["h200"], 2, 2, 1, Format.FP4, 2, context_length=256, request=256, draft_tokens=drafts
    )
    assert pool.req_to_token.nbytes == token_table_bytes(given)
    request = SimpleNamespace(inflight_middle_chunks=0, kv=ReqKvInfo())
    assert pool.alloc([request]) is not None
    assert pool.mamba_allocator.available_size() == 1
