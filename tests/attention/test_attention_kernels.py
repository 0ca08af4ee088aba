"""The choice of the attention kernel for a step from the kernels' own declarations.

The GPUs are stand-ins, on which no kernel runs.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.attention_cases import BLOCK_SCALED, attend_case, prefill_case

from dsv4_sglang.attention.registry import make_kernels
from dsv4_sglang.formats import KVFormat

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from dsv4_sglang.attention import flashmla, sparse_decode, sparse_prefill
from dsv4_sglang.attention.flashmla import FlashMLAAttention

FP8, BF16, FP32 = KVFormat.FP8, KVFormat.BF16, KVFormat.FP32
SPARSE, DECODE, PORTABLE = "SparsePrefillAttention", "FlashMLAAttention", "PortableAttention"
Gpu = Callable[..., torch.device]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes a GPU of a given architecture, with or without FlashMLA."""

    monkeypatch.setattr(JITFunction, "run", lambda *args, **given: None)

    def make(capability: tuple[int, int], installed: bool = True) -> torch.device:
        flashmla.has_kernel.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(flashmla, "installed", lambda: installed)
        monkeypatch.setattr(flashmla, "scheduler_config", lambda device, heads: None)  # would run FlashMLA
        return torch.device("cuda", 0)

    yield make
    flashmla.has_kernel.cache_clear()


def chosen(device: torch.device, heads: int, dtype: torch.dtype, kv_format: KVFormat) -> tuple[str, str]:
    """Return the attention kernels of a prefill step and of a following decode step."""
    kernels = make_kernels(device, 8, heads, dtype, kv_format)
    step, blocks, _ = prefill_case(ratio=4, kv_format=kv_format, heads=heads)
    return tuple(
        next(type(kernel).__name__ for kernel in kernels if kernel.begin_step(step, most)) for most in (blocks, None)
    )


@pytest.mark.parametrize("heads", [1, 64, 128])
@pytest.mark.parametrize(
    "kv_format, prefill, decode", [(FP8, SPARSE, DECODE), (BF16, SPARSE, PORTABLE), (FP32, PORTABLE, PORTABLE)]
)
@pytest.mark.parametrize("capability", [(9, 0), (10, 3)])
def test_flashmla_is_chosen_for_supported_steps(gpu: Gpu, capability, kv_format, prefill, decode, heads) -> None:
    assert chosen(gpu(capability), heads, torch.bfloat16, kv_format) == (prefill, decode)


@pytest.mark.parametrize(
    "capability, installed, heads, dtype",
    [
        ((8, 9), True, 64, torch.bfloat16),
        ((12, 0), True, 64, torch.bfloat16),
        ((9, 0), False, 64, torch.bfloat16),
        ((9, 0), True, 129, torch.bfloat16),
        ((9, 0), True, 64, torch.float16),
    ],
)
def test_other_steps_take_the_triton_kernel(gpu: Gpu, capability, installed, heads, dtype) -> None:
    assert chosen(gpu(capability, installed), heads, dtype, FP8) == (PORTABLE, PORTABLE)
    assert chosen(torch.device("cpu"), heads, dtype, FP8) == (PORTABLE, PORTABLE)


def test_steps_of_v41(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager prefill steps and decode steps take FlashMLA's sparse kernel, others the Triton kernel."""
    kernels = make_kernels(gpu((9, 0)), 8, 64, torch.bfloat16, KVFormat.MXFP8, entries_per_block=128, top_k=8)
    step, blocks, _ = prefill_case(ratio=1, heads=64, **BLOCK_SCALED)
    decoding = replace(step, window_size=0, window_indices=step.window_indices[:1])
    names = [
        next(type(kernel).__name__ for kernel in kernels if kernel.begin_step(*of))
        for of in ((step, blocks), (step, None), (decoding, None))
    ]
    assert names == [SPARSE, PORTABLE, "SparseDecodeAttention"]
    monkeypatch.setattr(sparse_decode, "MAX_GATHERED", 1)
    assert not kernels[1].begin_step(decoding, None)


@pytest.mark.parametrize("limit", ["MAX_GATHERED", "MAX_GATHERED_PER_TOKEN"])
def test_prefill_with_long_context_reads_the_tables(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, limit) -> None:
    monkeypatch.setattr(sparse_prefill, limit, 1)
    assert chosen(gpu((9, 0)), 64, torch.bfloat16, FP8)[0] == DECODE


@pytest.mark.parametrize("heads, padded", [(1, 64), (64, 64), (65, 128), (128, 128)])
def test_heads_are_padded_for_flashmla(heads: int, padded: int) -> None:
    q, inputs = attend_case(tokens=2, heads=heads, width=None).inputs()
    more_q, more = flashmla.pad_heads(q, inputs)
    assert FlashMLAAttention().query_heads(heads) == padded
    assert more_q.shape == (2, padded, 512) and more.sink.shape == (padded,) and more.heads == heads
    assert torch.equal(more_q[:, :heads], q) and torch.equal(more.sink[:heads], inputs.sink)
    assert not more_q[:, heads:].any() and (padded != heads or more_q is q)
