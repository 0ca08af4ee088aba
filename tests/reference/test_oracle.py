"""Tests of the oracle: its cache, its fake quantisers and its measures are right."""

from types import SimpleNamespace

import oracle_distance
import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from dsv4_sglang.formats import KVBuffer, KVFormat, index_keys, quantise
from dsv4_sglang.testing.quantise import fp8_entries
from dsv4_sglang.testing.tiny import make_tiny
from dsv4_sglang.testing.tiny_config import TinySpec
from reference.oracle import Oracle, Score
from reference.quantise import bf16_entries, mxfp4_keys

LENGTH = 260
TOPK = 16
FP32_NOISE = 1e-4


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Three layers, one of each kind. The selection omits entries by a wide margin (see `_same_but_for_rounding`)."""
    spec = TinySpec(seed=9, ratios=(0, 4, 128), heads=16, hash_layers=1, index_topk=TOPK)
    return Oracle(make_tiny(tmp_path_factory.mktemp("tiny"), spec))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return torch.randint(3, 384, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.full
def test_chunks_and_single_tokens_equal_one_forward(oracle: Oracle, prompt: list[int]) -> None:
    whole = oracle.logits(prompt)
    assert (oracle.logits(prompt, chunk=77) - whole).abs().max() < FP32_NOISE
    assert (oracle.logits(prompt[:140], chunk=1) - whole[:140]).abs().max() < FP32_NOISE


def _same_but_for_rounding(oracle: Oracle, start: list[int], formats: dict[str, str]) -> tuple[float, float]:
    """Return (mean, maximum), the bounds on the difference of log p between two runs with different summation orders.

    In fp32 the bound is the noise of the sums. In rounded formats this noise makes some elements round the other way,
    by one step of the format. The two runs are then two roundings of the same rows that share most elements. Two
    roundings that shared no element would differ by sqrt(2) times the effect of rounding (SPEC 7.1: 0.0266 of each row
    for FP8, 2^-9 / sqrt(3) = 0.0011 for bf16). Small noise grows from layer to layer to a fraction of that. The bound
    of the mean is half the effect of rounding, and the bound of a single token is the whole effect. The effect is
    measured here on the same tokens, so the bounds hold on any processor.
    """
    if not formats:
        return FP32_NOISE, FP32_NOISE
    tokens = oracle.greedy(start, 8, **formats)[0]
    moved = (oracle.score(start, tokens, **formats).logprobs - oracle.score(start, tokens).logprobs).abs()
    # Rounding must not change the selection, because that would move log p further.
    assert oracle.selection_gap([*start, *tokens], **formats).min() > 1e-3
    return float(moved.mean()) / 2, float(moved.max())


@pytest.mark.parametrize("formats", [{}, {"rows": "bf16"}, {"rows": "fp8", "keys": "mxfp4"}])
def test_teacher_forced_equals_incremental(
    oracle: Oracle, prompt: list[int], formats: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt length leaves every kind of window partially filled, and generation crosses the end of a block."""
    start = prompt[:125]
    mean, most = _same_but_for_rounding(oracle, start, formats)

    def apart() -> tuple[list[int], Score, torch.Tensor]:
        tokens, logprobs = oracle.greedy(start, 8, **formats)
        score = oracle.score(start, tokens, **formats)
        return tokens, score, (score.logprobs - logprobs).abs()

    tokens, score, distance = apart()
    assert distance.mean() <= mean and distance.max() <= most
    # Where the runs choose different tokens, their log p differ by at most the sum of both bounds.
    assert score.margin.mean() <= 2 * mean and score.margin.max() <= 2 * most
    other = oracle.score(start, [tokens[0], (tokens[1] + 1) % 384, *tokens[2:]], **formats)
    assert other.margin[0] <= 2 * most
    assert other.margin[1] > 0

    rotary = hf.DeepseekV4RotaryEmbedding.forward

    def a_position_late(self, x, position_ids, **kwargs):  # type: ignore[no-untyped-def]
        return rotary(self, x, position_ids + (position_ids.shape[-1] == 1), **kwargs)

    monkeypatch.setattr(hf.DeepseekV4RotaryEmbedding, "forward", a_position_late)
    assert apart()[2].mean() > mean, "the bound lets a wrong position pass"


def test_formats_change_what_they_should(oracle: Oracle, prompt: list[int]) -> None:
    exact = oracle.logits(prompt)
    keys = oracle.logits(prompt, keys="mxfp4")
    selection_starts = 4 * (TOPK + 1) - 1  # The first query with more entries than it may select.
    assert (keys[:selection_starts] - exact[:selection_starts]).abs().max() < FP32_NOISE
    assert (keys[selection_starts:] - exact[selection_starts:]).abs().max() > 100 * FP32_NOISE
    bf16, fp8 = ((oracle.logits(prompt, rows=r) - exact).abs().mean() for r in ("bf16", "fp8"))
    assert 0 < 5 * bf16 < fp8
    assert torch.equal(oracle.logits(prompt), exact)  # No format leaves a trace.


@pytest.mark.parametrize("scale", [1e-6, 0.02, 1.0, 300.0])
def test_quantisers_agree_with_the_ops(scale: float) -> None:
    """The ops' rows and keys hold exactly the values of the fake quantisers, which are a second implementation of
    SPEC."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(500, 512, generator=generator) * scale
    x[:40, ::3] *= 1000.0
    x[40, :448] = 0.0
    assert torch.equal(bf16_entries(x), x.bfloat16().float())
    table = KVBuffer(torch.zeros(4, 128, KVFormat.FP8.width, dtype=torch.uint8), KVFormat.FP8)
    at = torch.randperm(512, generator=generator)[:500]
    table.write(at, x)
    assert torch.equal(table.read(at), fp8_entries(x))
    keys = x[:, :128]
    packed, scales = quantise.quantise_mxfp4(index_keys.hadamard(keys.bfloat16().float()))
    differ = (quantise.dequantise_fp4(packed, scales) != mxfp4_keys(keys)).float().mean()
    assert differ < 1e-4  # The two transforms add in different orders, which can move a value across a rounding edge.


def test_the_gap_of_the_selection(oracle: Oracle, prompt: list[int]) -> None:
    """The gap is infinite while all entries are selected. The 17th entry is complete at position 67, after which the
    gap is a fraction of the score."""
    gaps = oracle.selection_gap(prompt)
    assert gaps[:67].isinf().all() and gaps[67:].isfinite().all()
    assert (gaps[67:] >= 0).all() and 1e-6 < gaps[67:].median() < 0.5


# tests/oracle_distance.py


def test_distances_to_the_oracle() -> None:
    score = SimpleNamespace(
        logprobs=torch.tensor([-1.0, -2.0, -3.0]), margin=torch.tensor([0.0, 0.01, 2.0]), best=torch.tensor([1, 2, 3])
    )
    answer = {"decode": [-1.1, -2.0, -3.5]}
    found = oracle_distance.distances(answer, score, "decode")
    assert found["mean"] == pytest.approx(0.2)
    assert found["max"] == pytest.approx(0.5)
    assert (found["agree"], found["agree or near tie"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    row = {"kind": "prompt", "server": "fp8", "path": "decode", "prompt": 5, "seed": 0}
    [line] = oracle_distance.summary([row | found, row | found | {"seed": 1, "values": [1.0, 1.0, 1.0]}])
    assert (line["tokens"], line["seeds"], line["mean"], line["max"]) == (6, 2, pytest.approx(0.6), 1.0)


def test_an_answer_is_scored_again_as_a_prompt() -> None:
    """The second request sends prompt and answer. Its last log p are those of the answer's tokens."""
    pairs = [[-0.5 - i, 10 + i, None] for i in range(3)]
    sent = [[None, 5, None], [-1.0, 6, None], *([-2.0 - i, 10 + i, None] for i in range(3))]
    asked: list[list[int]] = []

    def generate(ids: list[int], tokens: int, **fields: object) -> dict:
        asked.append(ids)
        return {"meta_info": {"output_token_logprobs": pairs, "input_token_logprobs": sent}}

    server = SimpleNamespace(generate=generate, flush=lambda: None)
    answer = oracle_distance.ask(server, [5, 6], 3)  # type: ignore[arg-type]
    assert asked == [[5, 6], [5, 6, 10, 11, 12]]
    assert answer["tokens"] == [10, 11, 12]
    assert (answer["decode"], answer["prefill"]) == ([-0.5, -1.5, -2.5], [-2.0, -3.0, -4.0])
    pairs[0][1] = 9
    with pytest.raises(ValueError, match="do not end with the tokens that were sent"):
        oracle_distance.ask(server, [5, 6], 3)  # type: ignore[arg-type]
