"""Tests of the ops' schemas with torch.library.opcheck: mutation, aliasing and fake implementations."""

import pytest
import torch
from support.layer import HIDDEN, SCALE, Layer, make_attention, make_step

from dsv4_sglang.attention import cuda_ops  # noqa: F401  Registers the ops.
from dsv4_sglang.formats import KeyFormat, KVFormat
from dsv4_sglang.ops.schemas import SCHEMAS

CHECKS = ("test_schema", "test_faketensor")


def check(name: str, *args) -> None:
    torch.library.opcheck(getattr(torch.ops.dsv4_sglang, name).default, args, test_utils=CHECKS)


def test_every_op_has_a_cpu_implementation():
    for name in SCHEMAS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dsv4_sglang::{name}", "CPU"), name


@pytest.mark.parametrize("name", ["attend", "index_topk"])
def test_python_ops_register_cuda_without_a_gpu(name):
    """Covers the Triton ops, FlashMLA and the op that calls kernels of the extension. The extension registers the
    others."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dsv4_sglang::{name}", "CUDA")


@pytest.mark.parametrize("rows, keys", [("fp32", "fp32"), ("fp8", "mxfp4"), ("bf16", "nvfp4")])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_append(ratio, rows, keys, monkeypatch):
    layer = Layer(make_attention(ratio), ratio, rows=rows, keys=keys)
    calls: list[tuple] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.dsv4_sglang, "append", lambda *args: calls.append(args))
        layer.step({1: torch.randn(5, HIDDEN), 2: torch.randn(130, HIDDEN)}, {1: [3], 2: [4, 1]}, read=False)
    for table in calls[0]:
        if isinstance(table, torch.Tensor) and table.is_floating_point():
            table.nan_to_num_()  # opcheck compares values, and NaN is not equal to itself.
    check("append", *calls[0])


def test_append_v41():
    batch = torch.tensor([1, -1]).int(), torch.tensor([3, 0]).int(), torch.tensor([0, 3, 4]).int()
    batch += torch.tensor([0, 0, 0, 1]).int(), torch.tensor([3, 4, 5, 128])
    rope, ring = torch.ones(8, 64), torch.zeros(2, 128, 528, dtype=torch.uint8)
    entries, keys = torch.zeros(2, 64, 288, dtype=torch.uint8), torch.zeros(2, 64, 72, dtype=torch.uint8)
    check(
        "append_v41", torch.randn(4, 512).bfloat16(), torch.randn(4, 1024), torch.ones(512), torch.ones(512), rope,
        1e-20, 2, *batch, None, ring, torch.zeros(2, 1, 1024), entries, torch.zeros(4, 512).bfloat16(),
        torch.zeros(1, 4 + 256, 528, dtype=torch.uint8),
    )  # fmt: skip
    check("append_v41_keys", torch.randn(4, 128).bfloat16(), torch.ones(128), rope, 1e-20, 2, *batch, keys)


def test_attention_kernels():
    batch = make_step([(1, 100, 3)], {1: [2]}, 128)
    rope = torch.ones(256, 64)
    rows = torch.zeros(3, 16, dtype=torch.int32)
    check(
        "index_topk", torch.randn(3, 8, 128), torch.randn(3, 8), torch.randn(4, 32, 128), batch.block_table,
        batch.token_request, batch.positions, rope, KeyFormat.FP32.code, torch.empty(0), rows,
    )  # fmt: skip
    check(
        "attend", torch.randn(3, 2, 512), torch.zeros(2), torch.randn(3, 128, 512), batch.window_indices,
        batch.window_lens, torch.randn(4, 32, 512), rows, torch.full((3,), 16, dtype=torch.int32), batch.positions,
        rope, SCALE, KVFormat.FP32.code,
    )  # fmt: skip


def test_moves():
    state = [torch.randn(2, 5, 3), torch.randn(1, 5)]
    pairs = torch.tensor([1, -1, 2]).int(), torch.tensor([3, 0, -1]).int()
    check("copy_state", *pairs, state)
    check("copy_state", *pairs, state, torch.zeros(1).int())
    host = torch.zeros(3, 30, dtype=torch.uint8)
    check("swap_blocks", [torch.randn(4, 6)], host, torch.tensor([1, 3]), torch.tensor([0, 2]), True, [6])
    tables = torch.tensor([1, 0]), torch.tensor([300, 5]), torch.tensor([2, 1]).int(), torch.zeros(2, 384).int()
    check("gather_tables", *tables, torch.zeros(2).int(), torch.zeros(2, 3).int())
