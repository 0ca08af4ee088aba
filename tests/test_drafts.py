"""Drafts of the tiny model: NextN's drafts are right some of the time, and SGLang accepts them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache

from benchmarks.reference.nextn import NextN
from benchmarks.reference.oracle import Oracle
from dsv4_sglang.testing.tiny import TinySpec, make_tiny

TEXTS = ("The quick brown fox jumps over", "def f(x): return x + 1\n", "1 2 3 4 5 6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("nextn"), TinySpec(nextn=True))


@pytest.mark.slow
def test_drafts_are_right_some_of_the_time(folder: Path) -> None:
    oracle, block, tokenizer = Oracle(folder), NextN(folder), AutoTokenizer.from_pretrained(folder)
    lengths: list[int] = []
    for text in TEXTS:
        prompt = tokenizer(text)["input_ids"]
        tokens = [*prompt, *oracle.greedy(prompt, 40)[0]]
        lengths += block.accept_lengths(oracle, tokens, len(prompt))
    assert 1.5 <= sum(lengths) / len(lengths) <= 3.0
    assert set(lengths) == {1, 2, 3, 4}


def test_a_block_goes_on_from_its_cache(folder: Path) -> None:
    """Single positions after a cached prefix, beyond the window, have the same logits as all positions at once."""
    block, generator = NextN(folder), torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 384, (140,), generator=generator).tolist()
    streams = torch.randn(140, 4, 256, generator=generator)
    wanted, _ = block.forward(tokens, streams)
    cache = DynamicCache(config=block.config)
    parts = [slice(0, 130), *(slice(p, p + 1) for p in range(130, 140))]
    logits = torch.cat([block.forward(tokens[part], streams[part], cache)[0] for part in parts])
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-3)


def test_a_snapshot_without_a_block_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mtp\.0\.e_proj.*--nextn"):
        NextN(make_tiny(tmp_path / "plain", TinySpec(ratios=(0,), hash_layers=0)))
