"""Tests of what SGLang's draft models call in `sgl_kernel` on a CPU, and of a DSPARK head's weights.

test_server_speculation.py compares the NextN layer with plain PyTorch.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import sgl_kernel
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
from sglang.srt import runtime_context
from sglang.srt.distributed import parallel_state
from sglang.srt.models import deepseek_v4_dspark
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import eagle_utils
from torch import Tensor

from dsv4_sglang.srt.sglang.models import config_class
from dsv4_sglang.testing.tiny import make_tiny
from dsv4_sglang.testing.tiny_config import TinySpec

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_process")]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    where = f"file://{tmp_path_factory.mktemp('found')}/found"
    parallel_state.init_distributed_environment(1, 0, where, 0, "gloo")
    args = ServerArgs(model_path="dummy", device="cpu", disable_shared_experts_fusion=True)
    runtime_context.publish(args, role="test", ranks=runtime_context.SpawnRanks(world_rank=0, gpu_id=0))
    parallel_state.initialize_model_parallel(backend="gloo")


@pytest.mark.parametrize("block", [5, 7])
def test_a_dspark_head_is_taken(
    block: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")  # This mode reads the confidence head too.
    folder = make_tiny(tmp_path / "tiny", TinySpec(ratios=(0, 4, 128), dspark=block))
    config = config_class()(**json.loads((folder / "config.json").read_text()))
    model = deepseek_v4_dspark.DeepseekV4ForCausalLMDSpark(config)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    assert not caplog.records, "the loader does not know a tensor"
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert (model.gamma, model.num_stages, model.num_target_features) == (block, 3, 3)
    assert model.enable_confidence_head


# SGLang's Triton kernels, which run instead of the CPU replacements on a GPU, define the expected results. Triton
# interprets them here.


@st.composite
def batches(draw: st.DrawFn) -> SimpleNamespace:
    """Draw requests with d draft tokens to verify, in rows of a table in any order."""
    requests, d = draw(st.integers(1, 5)), draw(st.integers(2, 8))
    lengths = draw(st.lists(st.integers(1, 40), min_size=requests, max_size=requests))
    rows = draw(st.permutations(range(requests + 2)))[:requests]
    return SimpleNamespace(requests=requests, d=d, lengths=torch.tensor(lengths), rows=torch.tensor(rows))


@given(batches(), st.integers(1, 3))
@settings(max_examples=20)
def test_locations_of_drafts(batch: SimpleNamespace, topk: int) -> None:
    table = torch.randperm((batch.requests + 2) * 64).view(-1, 64).int()
    steps = batch.d - 1
    wanted, got = (torch.full((batch.requests * topk * steps,), -1) for _ in range(2))
    arguments = batch.rows, table, batch.lengths
    cache_locs.assign_draft_cache_locs_contiguous[(batch.requests,)](*arguments, wanted, 64, topk, steps)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(*arguments, got, 64, topk, steps)
    assert torch.equal(got, wanted)


def chain(batch: SimpleNamespace, build: Callable[..., None]) -> list[Tensor]:
    """Return the mask, the positions and the three kinds of links of a chain, from SGLang's own preparation."""
    n, d = batch.requests, batch.d
    mask = torch.ones(n * d * d, dtype=torch.bool)
    links = [torch.full((n, d), -1) for _ in range(3)]
    positions = torch.full((n * d,), -1)
    parents, chosen = torch.arange(-1, d - 2).repeat(n, 1), torch.arange(d - 1).repeat(n, 1)
    build(parents, chosen, batch.lengths, mask, positions, *links, 1, d - 1, d, eagle_utils.TreeMaskMode.QLEN_ONLY)
    return [mask, positions, *links]


@given(batches())
@settings(max_examples=20)
def test_chains(batch: SimpleNamespace) -> None:
    wanted = chain(batch, spec_tree.sgl_build_tree_kernel_triton)
    for got, expected in zip(chain(batch, sgl_kernel.build_tree_kernel_efficient_cpu), wanted, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("topk", "mode", "said"), [(2, 1, "topk 2"), (1, 0, "mode 0")])
def test_trees_and_other_masks_are_rejected(topk: int, mode: int, said: str) -> None:
    with pytest.raises(NotImplementedError, match=said):
        sgl_kernel.build_tree_kernel_efficient_cpu(*[torch.zeros(1, 2)] * 8, topk, 1, 2, mode)


@st.composite
def trees(draw: st.DrawFn, batch: SimpleNamespace) -> list[Tensor]:
    """Return links of trees of any shape. The parent of a token is any token before it."""
    where = torch.arange(batch.requests * batch.d).view(batch.requests, batch.d)
    children, siblings = torch.full_like(where, -1), torch.full_like(where, -1)
    for row in range(batch.requests):
        for token in range(1, batch.d):
            parent = draw(st.integers(0, token - 1))
            children[row, parent], siblings[row, token] = token, children[row, parent].clone()
    return [where, children, siblings]


@given(batches(), st.data())
@settings(max_examples=40)
def test_verification(batch: SimpleNamespace, data: st.DataObject) -> None:
    """The vocabulary has two tokens, so drafts are often right. Each request ends with its bonus token."""
    n, d = batch.requests, batch.d
    tokens = st.lists(st.integers(0, 1), min_size=n * d, max_size=n * d)
    candidates, target = (torch.tensor(data.draw(tokens)).view(n, d) for _ in range(2))
    links = data.draw(trees(batch))
    width = data.draw(st.integers(1, d))
    results = []
    for verify in (spec_tree.verify_tree_greedy_triton, sgl_kernel.verify_tree_greedy_cpu):
        made = [torch.zeros(n * d).int(), torch.full((n, width), -1).int(), torch.full((n,), -1).int()]
        verify(*made, candidates, *links, target)
        results.append(made)
    for wanted, got in zip(*results, strict=True):
        assert torch.equal(got, wanted)

    predicts, accept_index, drafts = results[0]
    accepted = predicts[accept_index.long()]
    wanted, got = torch.empty(n, dtype=torch.int32), torch.empty(n, dtype=torch.int32)
    eagle.fill_bonus_tokens[(n,)](accepted, drafts + 1, wanted, width)
    sgl_kernel.fill_bonus_tokens_cpu(accepted, drafts + 1, got, width)
    assert torch.equal(got, wanted)
