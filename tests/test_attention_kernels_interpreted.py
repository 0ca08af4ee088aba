"""The Triton attention kernels compile for each architecture without a GPU.

interpreted_kernels.py tests their results.
"""

import os

import pytest

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsv4_sglang.attention import (
    flashmla_scheduler,
    sparse_prefill,
    triton_attend,
    triton_attend_v41,
    triton_index_v41,
    triton_metadata,
    triton_output,
    triton_softmax,
)

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="Triton interprets here")

# The shared memory per thread block on sm_80, sm_90 and sm_100, and on sm_86 and sm_89.
SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10}

POINTERS = {
    "q_ptr": "*bf16", "out_ptr": "*bf16", "sink_ptr": "*fp32", "positions_ptr": "*i64", "rope_ptr": "*fp32",
    "window_ptr": "*u8", "entries_ptr": "*u8", "partial_ptr": "*fp32", "stats_ptr": "*fp32", "scale": "fp32",
    "query_ptr": "*fp16", "weights_ptr": "*fp32", "keys_ptr": "*u8", "scores_ptr": "*fp32",
    "winner_scores_ptr": "*fp32",
}  # fmt: skip


def compile_for(kernel, architecture: int, constants: dict, warps: int, **types: str):
    """Compile a kernel to machine code. Strides and pointers are multiples of 16, as in serving."""
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        default = "*i32" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name) or POINTERS.get(name, default)
        if name.endswith(("_ptr", "_stride")) and name not in constants:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
    assert compiled.metadata.shared <= SHARED[architecture], (kernel.__name__, compiled.metadata.shared)
    return compiled


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    "architecture, heads, q, rows, split",
    [
        (80, 64, "*bf16", "*u8", True),
        (80, 16, "*bf16", "*bf16", False),
        (80, 64, "*fp32", "*u8", False),
        (86, 64, "*bf16", "*bf16", True),
        (90, 64, "*bf16", "*u8", False),
        (90, 128, "*bf16", "*u8", True),
        (90, 16, "*fp16", "*u8", True),
        (100, 64, "*bf16", "*u8", True),
    ],
)
def test_attend_compiles(architecture, heads, q, rows, split):
    exact = q != "*bf16"
    tile = triton_softmax.tiling(heads, rows == "*u8", exact, SHARED[architecture])
    constants = {
        "FP8": rows == "*u8", "FOLD": rows == "*u8" and q == "*bf16", "HAS_ENTRIES": True, "SPLIT": split,
        "DOT": tl.float32 if exact else tl.bfloat16, "PRECISION": "ieee" if q == "*fp32" else "tf32",
        "BLOCK_H": tile.heads, "BLOCK_N": tile.rows, "STAGES": tile.stages, "SHIFT": heads != 16,
    }  # fmt: skip
    types = {"q_ptr": q, "out_ptr": q, "window_ptr": rows, "entries_ptr": rows}
    compile_for(triton_attend._attend_kernel, architecture, constants, tile.warps, **types)
    if split and architecture == 90:
        compile_for(triton_softmax.merge_kernel, architecture, {"BLOCK_S": 8}, 4)


@pytest.mark.parametrize(
    "architecture, heads, q, split",
    [(86, 16, "*fp32", False), (90, 64, "*bf16", False), (100, 64, "*bf16", True)],
)
def test_attend_of_v41_compiles(architecture, heads, q, split):
    exact = q != "*bf16"
    tile = triton_softmax.tiling(heads, False, exact, SHARED[architecture])
    constants = {
        "HAS_ENTRIES": True, "SPLIT": split, "DOT": tl.float32 if exact else tl.bfloat16,
        "PRECISION": "ieee" if exact else "tf32", "BLOCK_H": tile.heads, "BLOCK_N": tile.rows,
    }  # fmt: skip
    types = {"q_ptr": q, "out_ptr": q}
    compile_for(triton_attend_v41._attend_v41_kernel, architecture, constants, tile.warps, **types)


@pytest.mark.parametrize("architecture, within", [(80, 0), (100, 8)])
def test_scores_of_v41_compile(architecture, within):
    constants = {
        "RATIO": 1, "WITHIN": within, "DOT": tl.bfloat16, "PRECISION": "tf32", "BLOCK_H": 32,
        "BLOCK_N": triton_index_v41._ENTRIES_PER_PROGRAM,
    }  # fmt: skip
    types = {"query_ptr": "*fp32", "orders_ptr": "*i64"}
    compile_for(triton_index_v41._score_kernel, architecture, constants, 4, **types)


@pytest.mark.parametrize("architecture", [90, 100])
def test_inverse_rope_compiles(architecture):
    compile_for(triton_output._inverse_rope_kernel, architecture, {"BLOCK_H": 32}, 4)
    constants = {"BLOCK_H": triton_output._HEADS_PER_PROGRAM}
    types = {"codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
    compile_for(triton_output._inverse_rope_and_quantise_kernel, architecture, constants, 4, **types)


@pytest.mark.parametrize("architecture, rows", [(90, "*u8"), (90, "*bf16"), (100, "*u8")])
def test_sparse_prefill_compiles(architecture, rows):
    constants = {"FP8": rows == "*u8", "BLOCK_N": sparse_prefill._ENTRIES_PER_PROGRAM}
    types = {"window_ptr": rows, "entries_ptr": rows, "out_ptr": "*bf16"}
    compile_for(sparse_prefill._gather_kernel, architecture, constants, 4, **types)
    compile_for(sparse_prefill._join_kernel, architecture, {"COLUMNS": 256}, 4, out_ptr="*i32")


@pytest.mark.parametrize("architecture", [80, 90])
def test_decode_metadata_compiles(architecture):
    types = {"seq_lens_ptr": "*i64", "track_mask_ptr": "*i1", "track_slots_ptr": "*i64"}
    shared = {"CSA_RATIO": 4, "HCA_RATIO": 128, "COLUMNS_AT_ONCE": 256}
    decode = {"TOKENS_PER_REQUEST": 1, "SEES_BLOCK": False, "WINDOW_LEN": 128, "LISTED": 128, "COLUMNS": 128}
    block = {"TOKENS_PER_REQUEST": 7, "SEES_BLOCK": True, "WINDOW_LEN": 135, "LISTED": 192, "COLUMNS": 256}
    for constants in (
        decode | {"TRACKS": True},
        decode | {"TRACKS": False, "TOKENS_PER_REQUEST": 4},
        block | {"TRACKS": False},
    ):
        compile_for(triton_metadata._decode_kernel, architecture, shared | constants, 1, **types)


@pytest.mark.parametrize("architecture", [80, 90])
def test_prefill_metadata_compiles(architecture):
    constants = {"REQUESTS": 64, "TRACKS": 32, "WINDOW": 128, "BLOCK": 128}
    constants |= {"CSA_RATIO": 4, "HCA_RATIO": 128, "COLUMNS_AT_ONCE": 256}
    compile_for(triton_metadata._prefill_kernel, architecture, constants, 1, positions_ptr="*i64")


@pytest.mark.parametrize("architecture", [90, 100])
@pytest.mark.parametrize("entries", [False, True])
def test_schedule_compiles(architecture, entries):
    constants = {"HAS_ENTRIES": entries, "BLOCK_ENTRIES": 64, "FIELDS": 8, "PARTS": 256, "TOKENS_AT_ONCE": 128}
    compile_for(flashmla_scheduler._schedule_kernel, architecture, constants, 1)


def test_splits_fill_the_gpu_and_no_more():
    assert triton_softmax.split_count(tokens=256, head_groups=1, tiles=10, processors=132) == 1
    assert 4 <= triton_softmax.split_count(tokens=1, head_groups=1, tiles=10, processors=132) <= 10
    assert triton_softmax.split_count(tokens=1, head_groups=1, tiles=1, processors=132) == 1
    assert 16 <= triton_softmax.split_count(tokens=1, head_groups=1, tiles=130, processors=132) <= 64
    assert triton_softmax.split_count(tokens=128, head_groups=1, tiles=10, processors=132) == 1
