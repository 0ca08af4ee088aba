"""The FP8 output projection on CUDA: rotated heads must project like heads with the inverse RoPE applied."""

from types import SimpleNamespace

import pytest
import torch
from support.attention_cases import rope
from torch import nn

from dsv4_sglang.attention.base import LayerOutput
from dsv4_sglang.attention.triton_output import inverse_rope

pytestmark = pytest.mark.gpu
GROUPS, RANK, HEADS = 8, 1024, 64
DIM = HEADS // GROUPS * 512


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch):
    """Return an attention layer reduced to its output projection, with FP8 weights and power-of-two tile scales."""
    pytest.importorskip("deep_gemm")
    from dsv4_sglang.srt.models import attention

    if not attention._scales_are_fp32():
        pytest.skip("scales are packed here, so layers take no rotated output")
    monkeypatch.setattr(attention.in_tree, "_FP8_WO_A_GEMM", True)
    g = torch.Generator().manual_seed(1)
    made = object.__new__(attention.CachedAttention)
    nn.Module.__init__(made)
    made.attn_tp_size = 1
    made.n_local_groups, made.o_lora_rank, made.head_dim, made.rope = GROUPS, RANK, 512, rope().cuda()
    scales = torch.exp2(torch.randint(-9, -6, (GROUPS, RANK // 128, DIM // 128), generator=g).float())
    made.wo_a = SimpleNamespace(
        weight=torch.randn(GROUPS * RANK, DIM, generator=g).to(torch.float8_e4m3fn).cuda(),
        weight_scale_inv=SimpleNamespace(data=scales.cuda()),
    )
    made.fp8_wo_a = True
    made.wo_b = lambda x: (x, None)
    return made


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_rotated_and_inverse_rotated_heads_project_alike(layer, tokens):
    g = torch.Generator().manual_seed(tokens)
    rotated = torch.randn(tokens, HEADS, 512, generator=g).bfloat16().cuda()
    positions = torch.randint(0, 4096, (tokens,), generator=g).cuda()
    inverse_rotated = rotated.clone()
    inverse_rope(inverse_rotated, positions, layer.rope)
    got = layer._project_out(LayerOutput(rotated, True), positions, defer_all_reduce=False).double()
    other = layer._project_out(LayerOutput(inverse_rotated, False), positions, defer_all_reduce=False).double()
    tiles = layer.wo_a.weight_scale_inv.data.repeat_interleave(128, 1).repeat_interleave(128, 2)
    weight = layer.wo_a.weight.float().view(GROUPS, RANK, DIM) * tiles
    exact = torch.einsum("tgd,grd->tgr", inverse_rotated.float().view(tokens, GROUPS, DIM), weight).flatten(1).double()
    apart, error = float((got - other).norm() / other.norm()), float((got - exact).norm() / exact.norm())
    assert apart < 8e-3, (
        f"relative distance {apart:.2g} between rotated heads and heads with inverse RoPE; ties of codes give 0.004"
    )
    assert error < 0.04, f"relative error {error:.2g}; e4m3 heads give about 0.026"
