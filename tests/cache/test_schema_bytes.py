"""Tests of schemas, and of every byte count of SPEC 5 for V4-Flash and V4-Pro."""

from typing import Any

import pytest
import torch

from dsv4_sglang.cache import CacheLayout, LayerCacheSchema, StateStorage, build_schema, v4_specs
from dsv4_sglang.formats import KVFormat, make_kv_buffers
from dsv4_sglang.model import AttentionType, DSV4Config, build_schedule
from dsv4_sglang.srt.launch.options import Options
from dsv4_sglang.srt.memory.served_layout import served_layout
from dsv4_sglang.standalone import KVCacheManager, compute_block_budget

CPU = torch.device("cpu")
CSA, HCA, SWA = AttentionType.CSA, AttentionType.HCA, AttentionType.SWA
FLASH, PRO = DSV4Config.flash(), DSV4Config.pro()


def of(kind: AttentionType, **options: Any) -> LayerCacheSchema:
    return next(build_schema(FLASH, spec, **options) for spec in build_schedule(FLASH) if spec.attn is kind)


def bytes_of(layout: CacheLayout) -> dict[str, int]:
    """Return the bytes of one state slot by part."""
    return {part.name: part.bytes for part in layout.state_parts(1)}


def test_bytes_per_block() -> None:
    """Check the column "this package" of SPEC 5.1."""

    def block_bytes(kind: AttentionType, **options: str) -> int:
        return CacheLayout((of(kind, **options),), CPU).block_bytes

    assert [block_bytes(kind) for kind in (CSA, HCA, SWA)] == [32 * (584 + 72), 584, 0]
    assert [block_bytes(HCA, kv_format=name) for name in ("bf16", "fp32")] == [1024, 2048]
    assert [block_bytes(CSA, key_format=name) for name in ("nvfp4", "fp32")] == [32 * (584 + 72), 32 * (584 + 512)]


@pytest.mark.parametrize(
    ("config", "per_token", "swa", "swa_bf16", "csa_layers", "hca_raw", "hca_online"),
    [
        # Bytes per token are N_csa (584 + 72) / 4 + N_hca 584 / 128 (SPEC 5.2). The state sizes are those of SPEC 5.3.
        (FLASH, 21 * 656 / 4 + 20 * 584 / 128, 3_214_336, 5_636_096, 21, 10_485_760, 122_880),
        (PRO, 30 * 656 / 4 + 31 * 584 / 128, 4_559_872, 7_995_392, 30, 16_252_928, 190_464),
    ],
    ids=["flash", "pro"],
)
def test_bytes_of_model(
    config: DSV4Config,
    per_token: float,
    swa: int,
    swa_bf16: int,
    csa_layers: int,
    hca_raw: int,
    hca_online: int,
) -> None:
    raw = CacheLayout(v4_specs(config, build_schedule(config)), CPU)
    assert raw.token_bytes == per_token
    # The size lies between SPEC 5.3's minimum of 51,200 B a layer (3 + 7 rows) and the usual 81,920 B (8 rows each).
    csa = csa_layers * 24 * 640 * 4
    assert bytes_of(raw) == {"window rings": swa, "CSA compressor states": csa, "HCA compressor states": hca_raw}
    online = CacheLayout(v4_specs(config, build_schedule(config), hca_state="online", kv_format="bf16"), CPU)
    assert list(bytes_of(online).values()) == [swa_bf16, csa, hca_online]


@pytest.mark.parametrize(
    ("config", "formats"),
    [
        (FLASH, {"kv_format": "fp8", "key_format": "mxfp4", "hca_state": "raw"}),
        (PRO, {"kv_format": "fp32", "key_format": "fp32", "hca_state": "online"}),
    ],
    ids=["flash", "pro"],
)
def test_a_budget_is_what_the_cache_allocates(config: DSV4Config, formats: dict[str, Any]) -> None:
    schedule = build_schedule(config)
    budget = compute_block_budget(config, schedule, max_context_len=300, max_requests=2, **formats)
    assert (budget["csa"], budget["hca"], budget["blocks"], budget["state_slots"]) == (6 * 32, 6, 6, 2)
    manager = KVCacheManager(
        config,
        schedule,
        max_concurrent_requests=2,
        num_blocks_per_csa_layer=budget["blocks"],
        num_blocks_per_hca_layer=budget["blocks"],
        device="cpu",
        **formats,
    )
    assert manager.memory_bytes() == budget["bytes"]
    assert sum(pool.memory_bytes() for pool in manager.state_pools) == 2 * budget["state_bytes"]


def test_unsupported_options_are_rejected() -> None:
    for name in ("max_context_len", "max_requests"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            compute_block_budget(FLASH, build_schedule(FLASH), **{"max_context_len": 1, "max_requests": 1, name: 0})
    with pytest.raises(ValueError, match=r"kv_format is 'fp4'.*'fp8', 'bf16', 'fp32'"):
        of(CSA, kv_format="fp4")
    for draft_tokens in (-1, 10):
        with pytest.raises(ValueError, match=rf"draft_tokens is {draft_tokens}; expected 0 to 9"):
            of(HCA, draft_tokens=draft_tokens)
    assert of(CSA, draft_tokens=2).compressor_state_shape == (48, 640), "a layer without such a state"
    with pytest.raises(ValueError, match=r"hca_state is 'raw' with draft_tokens 2.*expected 'online'"):
        of(HCA, draft_tokens=2)


# Sizes with speculation of d tokens per request and step, with the rings of draft layers: bytes of a ring of Flash, of
# its CSA and HCA compressor states, of a slot and of a snapshot. The sizes for d = 1 are those without speculation.
SPECULATION = [
    (1, 0, 128, 74_752, 1_290_240, 122_880, 4_627_456, 3_644_416),
    (3, 1, 132, 77_088, 2_580_480, 491_520, 6_463_872, 3_821_952),
    (8, 3, 136, 79_424, 3_440_640, 1_105_920, 8_200_064, 4_083_584),
]


@pytest.mark.parametrize(("d", "draft_layers", "rows", "ring", "csa", "hca", "slot", "snapshot"), SPECULATION)
def test_bytes_with_speculation(
    d: int, draft_layers: int, rows: int, ring: int, csa: int, hca: int, slot: int, snapshot: int
) -> None:
    layout = served_layout(FLASH, torch.float8_e4m3fn, Options(), "cpu", draft_tokens=d, draft_layers=draft_layers)
    assert layout.ring_rows == rows
    assert [schema.attn for schema in layout.schemas[43:]] == [SWA] * draft_layers
    assert list(bytes_of(layout).values()) == [(43 + draft_layers) * ring, csa, hca]
    assert (layout.slot_bytes, layout.snapshot_bytes) == (slot, snapshot)
    # The counted bytes equal the allocated bytes.
    few = CacheLayout(layout.schemas[:4] + layout.schemas[43:], layout.device)
    assert StateStorage(few, 2, snapshots=3).memory_bytes() == 2 * few.slot_bytes + 3 * few.snapshot_bytes


@pytest.mark.parametrize("blocks", [7, 8])
def test_rows_of_layers_are_aligned_to_16_bytes(blocks: int) -> None:
    """FlashMLA requires 16-byte alignment. One flat HCA block with an odd number of 584 B rows would break it for all
    other layers."""
    tables = make_kv_buffers(3, 1, blocks, KVFormat.FP8, CPU)
    assert all(tables[layer].data_ptr() % 16 == tables.data_ptr() % 16 for layer in range(3))
