"""Our ops against HF transformers' DeepseekV4 attention in fp32, layer kind by layer kind (SPEC 8)."""

import pytest
import torch
from support.layer import HIDDEN, Layer, hf_forward, make_attention, relative
from transformers.cache_utils import DynamicCache

N = 300
TABLE = {1: [5, 2, 9, 3], 2: [7, 11, 0]}  # scattered blocks
PLANS = {
    "one shot": [N],
    "token by token": [1] * N,
    "uneven": [7, 1, 1, 30, 5, 64, 3, 2, 1, 50, 39, 97],
    "around a block": [127, 1, 1, 127, 2, 42],
    "long then short": [130, 126, 1, 43],
    "short then long": [126, 1, 1, 172],
    "short and odd": [3, 2, 2, 2, 3, 5, 110, 2, 126, 2, 43],
}
CASES = [(0, "raw"), (4, "raw"), (128, "raw"), (128, "online")]


def run(layer: Layer, x: torch.Tensor, plan: list[int], slot: int = 1, decode_single: bool = True) -> torch.Tensor:
    out, at = [], 0
    for n in plan:
        out.append(layer.step({slot: x[at : at + n]}, TABLE, decode=decode_single and n == 1)[slot])
        at += n
    return torch.cat(out)


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"ratio{c[0]}-{c[1]}")
def case(request):
    ratio, hca_state = request.param
    attention = make_attention(ratio)
    x = torch.randn(N, HIDDEN, generator=torch.Generator().manual_seed(7))
    return ratio, hca_state, attention, x, hf_forward(attention, x)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_any_chunking_equals_hf(case, plan):
    ratio, hca_state, attention, x, expected = case
    got = run(Layer(attention, ratio, hca_state=hca_state), x, plan)
    assert relative(got, expected) < 1e-5


def test_hf_cache_agrees_with_one_shot(case):
    """HF in chunks equals HF in one call."""
    _, _, attention, x, expected = case
    cache, out, at = DynamicCache(config=attention.config), [], 0
    for n in (130, 126, 1, 43):
        out.append(hf_forward(attention, x[at : at + n], cache, at))
        at += n
    assert relative(torch.cat(out), expected) < 1e-5


def test_two_requests_interleaved_and_a_reused_slot(case):
    ratio, hca_state, attention, x, expected = case
    y = torch.randn(140, HIDDEN, generator=torch.Generator().manual_seed(8))
    layer = Layer(attention, ratio, hca_state=hca_state)
    run(layer, torch.randn(3, HIDDEN), [2, 1])  # a short earlier request in slot 1
    layer.lengths[1] = 0
    got, at = {1: [], 2: []}, {1: 0, 2: 0}
    for a, b in ((100, 60), (30, 1), (1, 1), (1, 70), (128, 8), (40, 0)):
        chunks = {s: src[at[s] : at[s] + n] for s, src, n in ((1, x, a), (2, y, b)) if n}
        for s, out in layer.step(chunks, TABLE, decode=all(len(c) == 1 for c in chunks.values())).items():
            got[s].append(out)
            at[s] += len(out)
    assert relative(torch.cat(got[1]), expected) < 1e-5
    assert relative(torch.cat(got[2]), hf_forward(attention, y)) < 1e-5
