"""Drafts of the tiny model: NextN's drafts are right some of the time, and SGLang accepts them."""

from pathlib import Path

import pytest
from reference.nextn import NextN
from reference.oracle import Oracle
from transformers import AutoTokenizer

from dsv4_sglang.testing.tiny import make_tiny
from dsv4_sglang.testing.tiny_config import TinySpec

TEXTS = ("The quick brown fox jumps over", "def f(x): return x + 1\n", "1 2 3 4 5 6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("nextn"), TinySpec(nextn=True))


@pytest.mark.full
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


def test_a_snapshot_without_a_block_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mtp\.0\.e_proj.*--nextn"):
        NextN(make_tiny(tmp_path / "plain", TinySpec(ratios=(0,), hash_layers=0)))
