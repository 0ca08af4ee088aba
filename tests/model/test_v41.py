"""Tests of DeepSeek-V4.1's geometry (SPEC 11): config, layers, bytes, formats, and the rows that a step appends.

The expected values come from DeepSeek's own formulas (`v41_formulas`): `act_quant`, `fp4_act_quant`, `Compressor`,
`Indexer` and `Attention._window_kv` of inference/model.py and kernel.py. With a release of SGLang that supports V4.1,
its quantisers and layouts are compared too.
"""

import functools

import pytest
import torch
from reference.v41_formulas import E2M1, EPS, LENGTH, act_quant, fp4_act_quant, freqs_cis, normalised, rotated, same
from support.layer import make_step

import dsv4_sglang.ops  # noqa: F401
from dsv4_sglang.cache import CacheLayout
from dsv4_sglang.cache.layer_spec import Selection, source_of
from dsv4_sglang.cache.specs_v41 import v41_specs
from dsv4_sglang.formats import KVBuffer, KVFormat, make_kv_buffers
from dsv4_sglang.model import DSV4Config
from dsv4_sglang.model.v41 import V41Config, pair_draft_tokens, pair_rows

# Fields published with DeepSeek-V4.1-Flash that the cache depends on, and a few others.
PUBLISHED = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "sliding_window": 128,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "engram_layer_ids": [1, 14],
        "num_nextn_predict_layers": 3,
    },
}


def test_config_as_published():
    assert V41Config.from_hf(PUBLISHED) == V41Config.flash()
    flat = {**PUBLISHED["text_config"], "model_type": "deepseek_v41"}  # The form of SGLang's config.
    assert V41Config.from_hf(flat) == V41Config.flash()
    assert V41Config.from_hf({**flat, "candidate_source_layer_id": -1}).candidate_source_layer_id == -1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"compress_ratios": [4] * 40},
            r"'compress_ratios\[0\]' is 4; expected 0, 1 or 2, the ratios of published",
        ),
        ({"compress_ratios": [0, 0, *[2] * 18]}, "has 20 entries; expected at least num_hidden_layers = 40"),
        ({"compress_ratios": [0, 0, *[2] * 18, *[1] * 21]}, r"'compress_ratios\[40\]' is 1; layers from"),
        (
            {"compress_ratios": [0, 2, *[2] * 18, *[1] * 20]},
            "ratio 2, but neither it nor an earlier layer writes",
        ),
        ({"compress_ratios": [0, 0, *[2] * 17, *[1] * 21]}, r"'compress_ratios\[19\]' is 1, but .* of ratio 2"),
        ({"kv_source_layer_ids": [2, 8, 14, 20, 40]}, "has layer 40; expected 0..39"),
        ({"kv_source_layer_ids": [1, 2, 20]}, "has layer 1, whose compress ratio is 0"),
        ({"kv_source_layer_ids": [8, 2, 20]}, r"is \[8, 2, 20\]; expected layers in ascending order"),
        ({"kv_source_layer_ids": [2, 9, 20]}, "has layer 9, which is not in 'index_source_layer_ids'"),
        ({"kv_source_layer_ids": [2, 20, 24]}, "is 20, but the later layer 24 writes entries"),
        ({"candidate_source_layer_id": 21}, "'candidate_source_layer_id' is 21; expected a layer of"),
        ({"candidate_block_size": 0}, "'candidate_block_size' is 0; expected at least 1"),
        ({"head_dim": 256}, "'head_dim' is 256; this cache stores only 512"),
        ({"model_type": "deepseek_v4"}, "'model_type' is 'deepseek_v4'; expected one of"),
        ({"kv_source_layer_ids": [2, "8"]}, r"'kv_source_layer_ids\[1\]' is '8'; expected an integer"),
    ],
)
def test_unsupported_configs_are_rejected(change, said):
    with pytest.raises((ValueError, TypeError), match=said):
        V41Config.from_hf({**PUBLISHED["text_config"], **change})


@pytest.mark.parametrize("model_type", ["deepseek_v41", "deepseek_v41_text"])
def test_v4_config_rejects_v41(model_type):
    with pytest.raises(
        ValueError, match=rf"'model_type' is '{model_type}': this is DeepSeek-V4.1, which has a different cache"
    ):
        DSV4Config.from_hf({**PUBLISHED["text_config"], "model_type": model_type})


def test_layers():
    """The released model has compressors and index keys in 4 layers, and indexers in 8."""
    specs = v41_specs(V41Config.flash(), draft_layers=3)

    def layers_with(selection: Selection) -> list[int]:
        return [layer for layer, spec in enumerate(specs) if spec.selection is selection]

    assert layers_with(Selection.NONE) == [0, 1, 40, 41, 42]
    assert layers_with(Selection.TOP_K) == [2, 8, 14, 20, 24, 28, 32, 36]
    assert len(layers_with(Selection.REUSE)) == 30
    assert {layer: spec.ratio for layer, spec in enumerate(specs) if spec.ratio} == {2: 2, 8: 2, 14: 2, 20: 1}
    assert all(spec.has_indexer == (spec.ratio > 0) for spec in specs)
    sources = {layer: source_of(specs, layer) for layer in (1, 7, 8, 13, 19, 20, 36, 39)}
    assert sources == {1: 1, 7: 2, 8: 8, 13: 8, 19: 14, 20: 20, 36: 20, 39: 20}
    candidates = {layer: spec.candidates for layer, spec in enumerate(specs) if spec.candidates}
    assert candidates == {20: (2048, 8, True), **dict.fromkeys((24, 28, 32, 36), (2048, 8, False))}


def test_bytes():
    """The report's 890 B per token are 288 and 68 B for each entry of four layers. Our keys take 72 B."""
    layout = CacheLayout(v41_specs(V41Config.flash()), torch.device("cpu"))
    entries_of_a_token = 3 / 2 + 1
    latent, key = 512 // 2 + 512 // 16, 128 // 2 + 128 // 32
    assert (latent + key) * entries_of_a_token == 890
    assert layout.token_bytes == (latent + 128 // 2 + 128 // 16) * entries_of_a_token
    assert [layout.schemas[i].entries_per_block for i in (0, 2, 3, 20, 24)] == [0, 64, 0, 128, 0]
    ring = 128 * (512 + 512 // 32)
    assert layout.slot_bytes == 40 * ring + 3 * 1024 * 4
    assert layout.snapshot_bytes == 40 * ring == 2_703_360
    assert (layout.token_bytes, layout.block_bytes) == (900, 115_200)
    drafted = CacheLayout(v41_specs(V41Config.flash(), 3, draft_tokens=5), torch.device("cpu"), draft_layers=3)
    assert drafted.slot_bytes == 43 * 133 * 528 + 3 * 3 * 1024 * 4


def test_rows_of_a_compressor_state():
    """No rollback overwrites a row that is still needed."""
    for d in range(1, 12):
        rows = pair_rows(d)
        assert d <= pair_draft_tokens(rows) and (rows == 1 or pair_draft_tokens(rows - 1) < d)
        for length in range(2, 4):
            written = [t for t in range(length, length + d) if t % 2 == 0]
            needed = {length - 1, *range(length, length + d if d > 1 else length)}
            live = sorted({*written, *(t for t in needed if t % 2 == 0)})
            assert len({t // 2 % rows for t in live}) == len(live)
    with pytest.raises(ValueError, match="draft_tokens is -1"):
        pair_rows(-1)


# ---- rows


def rows_of_all_sizes() -> torch.Tensor:
    """Return random rows, corner values and every tie of the grids, in bf16."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(24, 512, generator=g) * 2.0 ** torch.randint(-16, 16, (24, 1), generator=g)
    rows[0], rows[1], rows[2] = 0, -0.0, 1e-6
    rows[3, ::7] = 3000.0
    ties = E2M1.float()
    ties = torch.cat([ties, (ties[1:] + ties[:-1]) / 2, torch.tensor([6.0])])
    rows[4] = torch.cat([ties, -ties]).repeat(16)[:512].sort().values.view(32, 16).T.flatten()
    rows[5] = torch.linspace(-448, 448, 512)
    return rows.bfloat16()


@pytest.mark.parametrize(
    ("kv_format", "trained"),
    [(KVFormat.MXFP8, act_quant), (KVFormat.NVFP4, functools.partial(fp4_act_quant, block_size=16, e4m3_scale=True))],
)
def test_rows_are_those_of_training(kv_format, trained):
    """The window has FP8 rows, the compressed entries FP4 rows."""
    rows = rows_of_all_sizes()
    table = KVBuffer(make_kv_buffers(1, 2, 12, kv_format, torch.device("cpu"))[0], kv_format)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    table.write(order, rows.float())
    assert torch.equal(table.read(order), trained(rows.double()).float())


def test_layout_of_a_block():
    """All rows' data comes first, then their scales, as FlashMLA's V4.1 kernels read them."""
    x = rows_of_all_sizes()[6:8].float()
    for kv_format in (KVFormat.MXFP8, KVFormat.NVFP4):
        table = make_kv_buffers(1, 2, 2, kv_format, torch.device("cpu"))[0]
        KVBuffer(table, kv_format).write(torch.tensor([2, 3]), x)
        data, scales = kv_format.quantise(x)
        assert torch.equal(table[1].flatten(), torch.cat([data.flatten(), scales.flatten()]))
        assert not table[0].any()


def test_formats_equal_those_of_sglang():
    from sglang.kernels.ops.attention.dsv4 import kv_layout as layouts
    from sglang.test.kernels.deepseek_v4 import dsv41_kv_quant_reference as reference

    x = rows_of_all_sizes()
    small = (
        x.float().unflatten(-1, (-1, 32)).abs().amax(-1).amin(-1) <= 448e-4
    )  # FP8 scales have different floors (SPEC 11.4).
    for kv_format, layout, quantise, rows in (
        (KVFormat.MXFP8, layouts.KVLayout.V41, reference.quantize_k_cache_v41, x[~small]),
        (KVFormat.NVFP4, layouts.KVLayout.V41_FP4, reference.quantize_k_cache_v41_fp4, x),
    ):
        assert (layout.data_bytes, layout.scale_bytes) == (kv_format.data_bytes, kv_format.scale_bytes)
        table = make_kv_buffers(1, 1, len(rows), kv_format, torch.device("cpu"))[0]
        KVBuffer(table, kv_format).write(torch.arange(len(rows)), rows.float())
        assert len(rows) > 10
        assert torch.equal(table.flatten(), quantise(rows[None])[0, : table.numel()])


# ---- append


@pytest.mark.parametrize("ratio", [1, 2])
def test_entries_equal_those_of_sglang(ratio):
    """Compare DeepSeek's formulas, with which test_v41_cache.py compares the ops, with SGLang's torch kernels."""
    from sglang.kernels.ops.quantization.fp4_fake_quant import fake_quant_compressed_kv, fake_quant_fp4
    from sglang.srt.layers.attention.dsv4.dsv41_sparse import DeepseekV41Compressor, RMSNorm, rope_tail

    def norm(weight: torch.Tensor) -> RMSNorm:
        module = RMSNorm(len(weight), EPS)
        module.weight.data = weight
        return module.requires_grad_(False)

    g = torch.Generator().manual_seed(ratio)
    x, raw_keys = torch.randn(LENGTH, 512 * ratio, generator=g) * 2, torch.randn(LENGTH, 128, generator=g).bfloat16()
    latent_norm, key_norm = ((1 + 0.2 * torch.randn(n, generator=g)).bfloat16() for n in (512, 128))
    freqs, raw_keys = freqs_cis(ratio)[::ratio], raw_keys[ratio - 1 :: ratio]
    mine = theirs = x.bfloat16()
    if ratio == 2:
        kv, score = x.unflatten(0, (-1, 2)).split(512, -1)
        mine = (kv * score.softmax(1)).sum(1).bfloat16()
        theirs = DeepseekV41Compressor.pool_pairs(kv, score).bfloat16()
    mine, theirs = normalised(mine, latent_norm), norm(latent_norm)(theirs)
    same(mine.float(), theirs.float())
    entries = fake_quant_compressed_kv(rope_tail(theirs, freqs, 64))
    same(fp4_act_quant(rotated(mine, freqs).double(), 16, True).float(), entries.float())
    keys = fake_quant_fp4(rope_tail(norm(key_norm)(raw_keys), freqs, 64))
    same(fp4_act_quant(rotated(normalised(raw_keys, key_norm), freqs).double(), 32, False).float(), keys.float())


@pytest.mark.parametrize(
    ("ratio", "draft_tokens", "ring", "counts", "said"),
    [
        (2, 0, 127, (1, 1), "ring has 127 rows per slot; expected at least 128"),
        (2, 0, 128, (2, 2), "2 tokens of each request without `window`, but ring has 128 rows per slot"),
        (2, 3, 140, (4, 4), "4 tokens of each .*, but compressor_state has 2 rows per slot, for at most 3"),
        (2, 3, 140, (1, 2), "3 tokens for 2 requests without `window`"),
        (4, 0, 128, (1, 1), "ratio is 4; expected 0, 1 or 2"),
    ],
)
def test_errors_name_the_value(ratio, draft_tokens, ring, counts, said):
    tokens = sum(counts)
    step = make_step([(slot, 0, count) for slot, count in zip((2, 1), counts)], {2: [0], 1: [1]}, ring)
    at = step.slots, step.prefix_lens, step.query_start, step.token_request, step.out_loc
    rings, entries = torch.zeros(4, ring, 528, dtype=torch.uint8), torch.zeros(6, 64, 288, dtype=torch.uint8)
    state, latents = torch.zeros(4, pair_rows(draft_tokens), 1024), torch.zeros(tokens, 512).bfloat16()
    with pytest.raises(ValueError, match=said):
        torch.ops.dsv4_sglang.append_v41(
            torch.zeros(tokens, 512).bfloat16(), torch.zeros(tokens, 1024), torch.ones(512), torch.ones(512),
            torch.ones(9, 64), EPS, ratio, *at, None, rings, state, entries, latents, None,
        )  # fmt: skip
