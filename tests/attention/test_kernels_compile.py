"""The Triton kernels compile for each architecture without a GPU, as their host code launches them.

interpreted_kernels.py tests their results.
"""

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.attention_cases import BLOCK_SCALED, attend_case, prefill_case

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from dsv4_sglang.attention import (
    flashmla_scheduler,
    sparse_decode,
    sparse_prefill,
    triton_attend,
    triton_metadata,
    triton_output,
    triton_softmax,
)
from dsv4_sglang.attention.step_buffers import DecodeBuffers, PrefillBuffers
from dsv4_sglang.cache.step import v4_limits
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.srt.models import triton_latent, triton_query

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="Triton interprets here"),
]

# The shared memory per thread block on sm_80, sm_90 and sm_100, and on sm_86 and sm_89.
LIMITS, V41_LIMITS = v4_limits(512), {2: 512, 1: 512}
SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10}


def compile_launch(architecture: int, kernel: JITFunction, *args, grid, warmup, num_warps: int, **constants) -> None:
    """Compile a launch to machine code instead of running it."""
    values = dict(zip(kernel.arg_names, args)) | constants
    constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else mangle_type(values[name])
        # In serving, addresses are multiples of 16 bytes.
        if name not in constants and (isinstance(values[name], torch.Tensor) or values[name] % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": num_warps})
    assert compiled.metadata.shared <= SHARED[architecture], (kernel.__name__, compiled.metadata.shared)


def attend(splits: int = 1, **shape) -> None:
    triton_attend.attend(*attend_case(tokens=2, width=512, **shape).inputs(), splits=splits)


def inverse_rope() -> None:
    out, positions, rope = torch.zeros(2, 64, 512).bfloat16(), torch.zeros(2).long(), torch.zeros(4, 64)
    triton_output.inverse_rope(out, positions, rope)
    triton_output.inverse_rope_and_quantise(out, positions, rope)


def sparse(ratio: int = 4, **formats: KVFormat) -> None:
    step, blocks, case = prefill_case(ratio=ratio, heads=64, **formats)
    kernel = sparse_prefill.SparsePrefillAttention(8, 128)
    kernel.begin_step(step, blocks)
    kernel.attend(*case.inputs(), output_is_rotated=True)


def sparse_for_decode() -> None:
    q, inputs = attend_case(tokens=32, heads=64, width=512, per_block=128, **BLOCK_SCALED).inputs()
    kernel = sparse_decode.SparseDecodeAttention(512)
    step = SimpleNamespace(window_indices=inputs.window.indices, positions=inputs.positions, is_decode=True)
    kernel.begin_step(step, None)
    kernel.attend(q, inputs, output_is_rotated=True)


def decode_metadata(each: int, sees_block: bool, tracks: bool, limits: dict[int, int | None] = LIMITS) -> None:
    buffers = DecodeBuffers(4, 64, "cpu", 136, each, sees_block, limits=limits)
    track = (torch.ones(2).bool(), torch.ones(2).long()) if tracks else (None, None)
    triton_metadata.build(buffers, torch.ones(2).long(), -1, *track)


def prefill_metadata(limits: dict[int, int | None] = LIMITS) -> None:
    triton_metadata.build_prefill(PrefillBuffers(2048, 32, 64, range(20, 60), "cpu", limits=limits), 2048)


def schedule(entries: bool) -> None:
    lens = torch.ones(4).int()
    flashmla_scheduler.build(lens, lens if entries else None, 132, 5)


def latent() -> None:
    triton_latent.norm_and_quantise(torch.zeros(2, 1536).bfloat16(), torch.ones(1536).bfloat16(), 1e-6)


def query_rope() -> None:
    q = torch.zeros(2, 64, 512).bfloat16()
    triton_query.query_rope(q, q, torch.zeros(2).long(), torch.zeros(4, 64))


def launch_id(value: object) -> str:
    """Return a test id without addresses, which differ between the processes of xdist."""
    if not isinstance(value, partial):
        return getattr(value, "__name__", str(value))
    return " ".join([value.func.__name__, *map(str, value.args), *(f"{key}={x}" for key, x in value.keywords.items())])


FP8, BF16 = KVFormat.FP8, KVFormat.BF16


@pytest.mark.parametrize(
    ("architecture", "launch"),
    [
        (80, partial(attend, heads=64, splits=3)),
        (80, partial(attend, heads=16, kv_format=BF16, per_block=31)),
        (80, partial(attend, heads=64, q_dtype=torch.float32)),
        (86, partial(attend, heads=64, kv_format=BF16, splits=3)),
        (90, partial(attend, heads=64)),
        (90, partial(attend, heads=128, splits=3)),
        (90, partial(attend, heads=16, q_dtype=torch.float16, splits=3)),
        (100, partial(attend, heads=64, splits=3)),
        (86, partial(attend, heads=16, q_dtype=torch.float32, **BLOCK_SCALED)),
        (90, partial(attend, heads=64, **BLOCK_SCALED)),
        (100, partial(attend, heads=64, splits=3, **BLOCK_SCALED)),
        (90, latent),
        (90, query_rope),
        *((architecture, inverse_rope) for architecture in (90, 100)),
        *(
            (architecture, partial(sparse, kv_format=kv_format))
            for architecture, kv_format in ((90, FP8), (90, BF16), (100, FP8))
        ),
        *((architecture, partial(sparse, 1, **BLOCK_SCALED)) for architecture in (90, 100)),
        *((architecture, sparse_for_decode) for architecture in (90, 100)),
        *(
            (architecture, partial(decode_metadata, *shape))
            for architecture in (80, 90)
            for shape in ((1, False, True), (4, False, False), (7, True, False, {}), (1, False, True, V41_LIMITS))
        ),
        *((architecture, prefill_metadata) for architecture in (80, 90)),
        (90, partial(prefill_metadata, V41_LIMITS)),
        *((architecture, partial(schedule, entries)) for architecture in (90, 100) for entries in (False, True)),
    ],
    ids=launch_id,
)
def test_compiles(architecture: int, launch: Callable[[], None], monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", lambda *args, **given: compile_launch(architecture, *args, **given))
    monkeypatch.setattr(triton_softmax, "device_limits", lambda device: (SHARED[architecture], 132))
    for module in (sparse_prefill, sparse_decode):
        monkeypatch.setattr(module, "sparse_attention", lambda q, *inputs: q)
    launch()


@pytest.mark.parametrize(
    ("tokens", "tiles", "least", "most"),
    [(256, 10, 1, 1), (128, 10, 1, 1), (1, 10, 4, 10), (1, 1, 1, 1), (1, 130, 16, 64)],
)
def test_splits_fill_the_gpu_once(tokens: int, tiles: int, least: int, most: int) -> None:
    assert least <= triton_softmax.split_count(tokens, 1, tiles, processors=132) <= most
