"""The query latent on CUDA: one kernel normalises and quantises it like SGLang's two."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dim", [1024, 1536])
@pytest.mark.parametrize("tokens", [1, 3, 4, 257])
def test_latent_equals_that_of_sglang(tokens, dim):
    from sgl_kernel import rmsnorm
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    from dsv4_sglang.srt.models.triton_latent import norm_and_quantise

    g = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, dim + 512, generator=g).mul(10 ** torch.randn(tokens, 1, generator=g)).bfloat16().cuda()
    latent, weight = wide[:, :dim], torch.rand(dim, generator=g).bfloat16().cuda()
    codes, scales = norm_and_quantise(latent, weight, 1e-6)
    normed = rmsnorm(latent.contiguous(), weight, 1e-6)
    other, other_scales = sglang_per_token_group_quant_fp8(
        normed, 128, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=False
    )
    assert codes.shape == other.shape and codes.dtype == other.dtype and codes.is_contiguous()
    assert scales.shape == other_scales.shape and (tokens == 1 or scales.stride() == other_scales.stride())
    assert scales.data_ptr() % 16 == 0 and scales.stride(1) % 4 == 0
    # A sum of squares in a different order changes a bf16 by at most one last bit, and with it possibly a code.
    assert torch.allclose(scales, other_scales, rtol=2**-7)
    got, expected = (c.float() * s.repeat_interleave(128, 1) for c, s in ((codes, scales), (other, other_scales)))
    largest = normed.float().view(tokens, -1, 128).abs().amax(-1).repeat_interleave(128, 1)
    assert ((got - expected).abs() <= expected.abs() / 7 + largest * 2**-16).all()
    assert (got != expected).float().mean() < 0.05


@pytest.mark.parametrize("tokens, heads", [(1, 64), (257, 16)])
def test_query_rope_equals_pytorch(tokens, heads):
    from support.attention_cases import rope

    from dsv4_sglang.ops.rope import rotate
    from dsv4_sglang.srt.models.triton_query import query_rope

    g = torch.Generator().manual_seed(tokens)
    q, positions = torch.randn(tokens, heads, 512, generator=g).bfloat16(), torch.arange(tokens) * 13
    out = torch.full((tokens, 64, 512), -7.0, dtype=torch.bfloat16, device="cuda")
    query_rope(q.cuda(), out[:, :heads], positions.cuda(), rope().cuda())
    expected, got = rotate(q.float(), positions, rope()), out[:, :heads].cpu()
    # A fused multiply-add may round a sum to the other of two neighbours.
    assert torch.allclose(got.float(), expected, rtol=2**-8, atol=1e-6) and (out[:, heads:] == -7).all()
    assert (got != expected.bfloat16()).float().mean() < 1e-3
