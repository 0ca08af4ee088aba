"""Blocks beyond the first 2^31 bytes of a table, as in a pool of 20 M tokens, must give the same bytes as near ones."""

import dataclasses

import pytest
import torch
from support.attention_cases import GARBAGE, attend_case, index_case, prefill_case
from support.kernel_cases import DEVICE, FORMATS, Layer, Step, ops
from torch import Tensor

from dsv4_sglang.attention import triton_attend
from dsv4_sglang.attention.base import EntryList
from dsv4_sglang.attention.flashmla import FlashMLAAttention
from dsv4_sglang.attention.sparse_prefill import SparsePrefillAttention
from dsv4_sglang.formats import KVFormat
from dsv4_sglang.ops import cuda_index

pytestmark = pytest.mark.gpu
BLOCKS = 170_000


def far(table: Tensor) -> Tensor:
    """Return the blocks of `table` [n, ...] as the last blocks of a large table on the device."""
    large = torch.zeros(BLOCKS, *table.shape[1:], dtype=table.dtype, device=DEVICE)
    large[-table.shape[0] :] = table
    return large


def shifted(rows: Tensor, by: int) -> Tensor:
    return torch.where((rows >= 0) & (rows < GARBAGE), rows + by, rows)


def far_list(near: EntryList) -> EntryList:
    """Return the same entries in a table whose blocks are `far`, with 32 entries each."""
    return EntryList(far(near.table), shifted(near.indices, (BLOCKS - near.table.shape[0]) * 32), near.topk_length)


@pytest.mark.parametrize("kernel", ["flashmla", "triton"])
def test_attend(kernel):
    case = attend_case(tokens=9, heads=64, width=320, seed=3)
    if kernel == "flashmla" and not FlashMLAAttention.supports(DEVICE, 64, torch.bfloat16, KVFormat.FP8):
        pytest.skip("FlashMLA does not run here")

    def attend(q, inputs):
        return triton_attend.attend(q, inputs) if kernel == "triton" else FlashMLAAttention().attend(q, inputs).values

    q, near = case.inputs(DEVICE)
    distant = far_list(near.entries)
    assert distant.table.untyped_storage().nbytes() > 2**31
    got = attend(q, near._replace(entries=distant))
    assert torch.equal(got, attend(q, near)) and got.any()


def test_sparse_prefill():
    step, of_step, case = prefill_case(ratio=4, kv_format=KVFormat.FP8, heads=64)
    step = dataclasses.replace(step, **{k: v.cuda() for k, v in vars(step).items() if isinstance(v, Tensor)})
    if not SparsePrefillAttention.supports(DEVICE, 64, torch.bfloat16, KVFormat.FP8):
        pytest.skip("FlashMLA does not run here")
    q, near = case.inputs(DEVICE)
    outs = []
    for entries in (near.entries, far_list(near.entries)):
        blocks = entries.table.shape[0]
        shift = blocks - near.entries.table.shape[0]
        kernel = SparsePrefillAttention(blocks)
        assert kernel.begin_step(dataclasses.replace(step, block_table=step.block_table + shift), of_step)
        outs.append(kernel.attend(q, near._replace(entries=entries)).values)
    assert torch.equal(*outs) and outs[0].any()


@pytest.mark.parametrize("tokens", [1, 40])
def test_index(tokens):
    case = index_case(lens=[(8000, 8000 + tokens), (4000, 4000 + tokens)], heads=64, top=512)
    shift = BLOCKS - case.index_keys.shape[0]
    near, distant = list(case.args(DEVICE)), list(case.args(DEVICE))
    distant[2], distant[3] = far(case.index_keys), distant[3] + shift
    cuda_index.index_topk(*near)
    cuda_index.index_topk(*distant)
    assert torch.equal(distant[-1] - 32 * shift, near[-1])


@pytest.mark.parametrize("decode", [True, False])
def test_append(decode):
    requests = [(1, 131, 1), (3, 255, 1), (-1, 0, 1)] if decode else [(1, 126, 200), (0, 0, 5), (3, 130, 260)]
    near = Layer("csa", *FORMATS[0], slots=8, blocks=16).on(DEVICE)
    distant = Layer("csa", *FORMATS[0], slots=8, blocks=16).on(DEVICE)
    step = Step.make(near, requests, decode)
    step.run(ops(), near)
    for name in ("entries", "index_keys"):
        distant.tables[name] = far(distant.tables[name])
    step.batch["out_loc"] = step.batch["out_loc"] + 128 * (BLOCKS - 16)
    step.run(ops(), distant)
    for name, table in near.tables.items():
        assert torch.equal(distant.tables[name][-table.shape[0] :], table), name
    assert not distant.tables["entries"][:-16].any()
