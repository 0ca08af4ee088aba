"""Tests of schemas, and of every byte count of SPEC 5 for V4-Flash and V4-Pro."""

from typing import Any

import pytest
import torch

from dsv4_sglang.cache import (
    CacheLayout,
    LayerCacheSchema,
    StateStorage,
    build_schema,
    compute_block_budget,
)
from dsv4_sglang.formats import KVFormat, make_kv_buffers
from dsv4_sglang.model import AttentionType, DSV4Config, build_schedule
from dsv4_sglang.srt.integration.options import Options
from dsv4_sglang.srt.memory.served_layout import served_layout
from dsv4_sglang.standalone import KVCacheManager

CSA, HCA, SWA = AttentionType.CSA, AttentionType.HCA, AttentionType.SWA
FLASH, PRO = DSV4Config.flash(), DSV4Config.pro()
MODELS = pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])


def schemas(config: DSV4Config, **options: Any) -> list[LayerCacheSchema]:
    return [build_schema(config, spec, **options) for spec in build_schedule(config)]


def of(kind: AttentionType, **options: Any) -> LayerCacheSchema:
    return next(schema for schema in schemas(FLASH, **options) if schema.attn is kind)


def test_geometry() -> None:
    assert [of(k).entries_per_block for k in (CSA, HCA, SWA)] == [32, 1, 0]
    assert [of(k).indexer_entries_per_block for k in (CSA, HCA, SWA)] == [32, 0, 0]
    assert [of(k).ratio for k in (CSA, HCA, SWA)] == [4, 128, 0]
    assert [of(k).compressor_state_shape for k in (CSA, HCA, SWA)] == [(24, 640), (256, 512), None]
    assert of(HCA, hca_state="online").compressor_state_shape == (3, 512)
    for kind in (CSA, HCA, SWA):
        assert (of(kind).swa_window_size, of(kind).entry_head_dim, of(kind).rope_dim) == (128, 512, 64)


def test_bytes_per_entry_and_block() -> None:
    """Check the column "this package" of SPEC 5.1."""
    assert [of(CSA, kv_format=f).entry_bytes for f in ("fp8", "bf16", "fp32")] == [584, 1024, 2048]
    assert [of(CSA, key_format=f).indexer_entry_bytes for f in ("mxfp4", "nvfp4", "fp32")] == [72, 72, 512]
    assert of(HCA).indexer_entry_bytes == of(SWA).indexer_entry_bytes == 0
    assert [of(k).block_bytes for k in (CSA, HCA, SWA)] == [32 * (584 + 72), 584, 0]
    assert of(HCA, kv_format="bf16").block_bytes == 1024
    assert of(SWA).swa_bytes == 74752
    assert of(SWA, kv_format="bf16").swa_bytes == 131072


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
    layers = schemas(config)
    assert sum(s.block_bytes for s in layers) / 128 == per_token
    assert sum(s.swa_bytes for s in layers) == swa
    assert sum(s.swa_bytes for s in schemas(config, kv_format="bf16")) == swa_bf16
    # The size lies between SPEC 5.3's minimum of 51,200 B a layer (3 + 7 rows) and the usual 81,920 B (8 rows each).
    assert sum(s.compressor_state_bytes for s in layers if s.attn is CSA) == csa_layers * 24 * 640 * 4
    assert sum(s.compressor_state_bytes for s in schemas(config, hca_state="raw") if s.attn is HCA) == hca_raw
    assert sum(s.compressor_state_bytes for s in schemas(config, hca_state="online") if s.attn is HCA) == hca_online
    assert all(s.compressor_state_bytes == 0 for s in layers if s.attn is SWA)


def test_spec_figures_follow_from_the_formula() -> None:
    """The same formula with 68 B keys gives SPEC 5.2's 3514.25 and 5031.4375 B per token."""
    for config, figure in ((FLASH, 3514.25), (PRO, 5031.4375)):
        csa = sum(s.attn is CSA for s in schemas(config))
        assert sum(s.block_bytes for s in schemas(config)) / 128 - csa * (72 - 68) / 4 == figure


@MODELS
@pytest.mark.parametrize(
    ("kv_format", "key_format", "hca_state"),
    [("fp8", "mxfp4", "raw"), ("fp8", "nvfp4", "online"), ("bf16", "mxfp4", "online"), ("fp32", "fp32", "raw")],
)
def test_allocations_equal_the_schema(config: DSV4Config, kv_format: str, key_format: str, hca_state: str) -> None:
    """The pools of all layers allocate exactly the budgeted bytes."""
    schedule = build_schedule(config)
    formats = {"kv_format": kv_format, "key_format": key_format, "hca_state": hca_state}
    budget = compute_block_budget(config, schedule, max_context_len=300, max_requests=2, **formats)
    assert budget["blocks"] == 6
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
    assert manager.state.memory_bytes() == 2 * budget["state_bytes"]
    assert sum(p.memory_bytes() for p in manager.paged_pools if p is not None) == 6 * budget["block_bytes"]


@MODELS
def test_budget(config: DSV4Config) -> None:
    schedule = build_schedule(config)
    budget = compute_block_budget(config, schedule, max_context_len=4096, max_requests=3)
    assert budget["hca"] == budget["blocks"] == 3 * 32
    assert budget["csa"] == 32 * budget["hca"]
    assert budget["state_slots"] == 3
    assert budget["bytes"] == 96 * budget["block_bytes"] + 3 * budget["state_bytes"]
    one_more = compute_block_budget(config, schedule, max_context_len=4097, max_requests=3)
    assert one_more["blocks"] == 3 * 33


@pytest.mark.parametrize("name", ["max_context_len", "max_requests"])
def test_budget_rejects_nothing(name: str) -> None:
    arguments = {"max_context_len": 1, "max_requests": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        compute_block_budget(FLASH, build_schedule(FLASH), **arguments)


def test_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match=r"kv_format is 'fp4'.*'fp8', 'bf16', 'fp32'"):
        of(CSA, kv_format="fp4")
    with pytest.raises(ValueError, match=r"key_format is 'fp8'.*'mxfp4', 'nvfp4', 'fp32'"):
        of(CSA, key_format="fp8")
    with pytest.raises(ValueError, match=r"hca_state is 'folded'.*'raw', 'online'"):
        of(HCA, hca_state="folded")


# Sizes with speculation of d tokens per request and step, with the ring of one draft layer: bytes of a ring of Flash,
# of its CSA and HCA compressor states, of a slot and of a snapshot. The sizes for d = 1 are those without speculation.
SPECULATION = [
    (1, 0, 128, 74_752, 1_290_240, 122_880, 4_627_456, 3_644_416),
    (2, 1, 130, 75_920, 2_580_480, 368_640, 6_289_600, 3_770_560),
    (3, 1, 132, 77_088, 2_580_480, 491_520, 6_463_872, 3_821_952),
    (4, 1, 132, 77_088, 2_580_480, 614_400, 6_586_752, 3_821_952),
    (5, 1, 134, 78_256, 2_580_480, 737_280, 6_761_024, 3_873_344),
    (8, 1, 136, 79_424, 3_440_640, 1_105_920, 8_041_216, 3_924_736),
    (8, 3, 136, 79_424, 3_440_640, 1_105_920, 8_200_064, 4_083_584),
    (9, 1, 138, 80_592, 3_440_640, 1_228_800, 8_215_488, 3_976_128),
]


@pytest.mark.parametrize(("d", "draft_layers", "rows", "ring", "csa", "hca", "slot", "snapshot"), SPECULATION)
def test_bytes_with_speculation(
    d: int, draft_layers: int, rows: int, ring: int, csa: int, hca: int, slot: int, snapshot: int
) -> None:
    layout = served_layout(FLASH, torch.float8_e4m3fn, Options(), "cpu", draft_tokens=d, draft_layers=draft_layers)
    assert layout.ring_rows == rows
    assert [schema.attn for schema in layout.schemas[43:]] == [SWA] * draft_layers
    parts = {part.name: part.bytes for part in layout.state_parts(1)}
    assert parts == {
        "window rings": (43 + draft_layers) * ring,
        "CSA compressor states": csa,
        "HCA compressor states": hca,
    }
    assert (layout.slot_bytes, layout.snapshot_bytes) == (slot, snapshot)
    assert layout.block_bytes == served_layout(FLASH, torch.float8_e4m3fn, Options(), "cpu").block_bytes
    # The counted bytes equal the allocated bytes, and the schemas' bytes by kind of layer.
    few = CacheLayout(layout.schemas[:4] + layout.schemas[43:], layout.device)
    storage = StateStorage(few, 2, snapshots=3)
    counted = [*few.state_parts(2), *few.position_parts(2), *few.snapshot_parts(3)]
    assert storage.memory_bytes() == sum(part.bytes for part in counted)
    assert sum(schema.swa_bytes + schema.compressor_state_bytes for schema in layout.schemas) == slot


def test_no_draft_tokens_is_one_token_a_step() -> None:
    """A step without speculation writes one token per request, so nothing grows."""
    plain = schemas(FLASH)
    assert schemas(FLASH, draft_tokens=0) == plain
    for one, schema in zip(schemas(FLASH, draft_tokens=1), plain, strict=True):
        assert (one.rows, one.compressor_state_shape, one.state_bytes) == (
            schema.rows,
            schema.compressor_state_shape,
            schema.state_bytes,
        )
    budget = {"max_context_len": 128, "max_requests": 1}
    four = compute_block_budget(FLASH, build_schedule(FLASH), draft_tokens=4, hca_state="online", **budget)
    online = schemas(FLASH, draft_tokens=4, hca_state="online")
    assert four["state_bytes"] == sum(schema.state_bytes for schema in online)


@pytest.mark.parametrize("draft_tokens", [-1, 10])
def test_draft_tokens_that_cannot_be(draft_tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"draft_tokens is {draft_tokens}; expected 0 to 9"):
        of(SWA, draft_tokens=draft_tokens)


def test_raw_hca_state_is_not_for_drafts() -> None:
    assert of(HCA, draft_tokens=1).compressor_state_shape == (256, 512)
    csa = next(spec for spec in build_schedule(FLASH) if spec.attn is CSA)
    assert build_schema(FLASH, csa, draft_tokens=2).compressor_state_shape == (48, 640), "a layer without such a state"
    with pytest.raises(ValueError, match=r"hca_state is 'raw' with draft_tokens 2.*expected 'online'"):
        of(HCA, draft_tokens=2)


def test_layers_for_several_numbers_of_draft_tokens() -> None:
    with pytest.raises(ValueError, match=r"several numbers of draft tokens \[0, 3\]"):
        CacheLayout((of(SWA), of(CSA, draft_tokens=3, hca_state="online")), torch.device("cpu"))


@pytest.mark.parametrize("blocks", [1, 2, 7, 8])
def test_rows_of_every_layer_start_at_multiples_of_16_bytes(blocks: int) -> None:
    """FlashMLA requires 16-byte alignment. One flat HCA block with an odd number of 584 B rows would break it for all
    other layers."""
    tables = make_kv_buffers(3, 1, blocks, KVFormat.FP8, torch.device("cpu"))
    assert all(tables[layer].data_ptr() % 16 == tables.data_ptr() % 16 for layer in range(3))
