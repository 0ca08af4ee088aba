"""A byte-level tokenizer with the special tokens of DeepSeek-V4 and V4.1, in the files that `AutoTokenizer` loads."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"

# The first three have the ids of the release. The others are markers of the chat encodings; the last one is V4.1's.
LEADING_SPECIALS = (BOS, EOS, PAD)
CHAT_SPECIALS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜System｜>",
)
NUM_BYTES = 256
MIN_VOCAB = len(LEADING_SPECIALS) + NUM_BYTES + len(CHAT_SPECIALS)


def build_vocab(vocab_size: int) -> dict[str, int]:
    """Return token -> id: leading specials, one token per byte, chat markers, placeholders up to `vocab_size`.

    Raises:
        ValueError: `vocab_size` is too small for these tokens.
    """
    if vocab_size < MIN_VOCAB:
        raise ValueError(f"vocab_size {vocab_size} is too small: bytes and special tokens need {MIN_VOCAB}")
    tokens = [*LEADING_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *CHAT_SPECIALS]
    tokens += [f"<｜place▁holder▁no▁{i}｜>" for i in range(vocab_size - len(tokens))]
    return {token: i for i, token in enumerate(tokens)}


def printable_ids(vocab_size: int) -> list[int]:
    """Return the ids of the printable ASCII characters. The byte-level alphabet writes a space as Ġ, the others
    unchanged.
    """
    vocab = build_vocab(vocab_size)
    return [vocab["Ġ" if character == " " else character] for character in map(chr, range(32, 127))]


def write_tokenizer(folder: Path, vocab_size: int, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json to `folder`."""
    vocab = build_vocab(vocab_size)
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token in vocab if token not in alphabet])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
