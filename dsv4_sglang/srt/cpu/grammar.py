"""The masks of requests with a grammar (`json_schema`, `regex`, tools) without a GPU: xgrammar's own, on the host."""

from __future__ import annotations

from typing import Any

import torch


def allocate_mask(vocab_size: int, batch_size: int) -> torch.Tensor:
    """int32[batch_size, ceil(vocab_size / 32)] that allows every token."""
    import xgrammar

    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def apply_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Set logits [requests, tokens] of the tokens that a mask does not allow to -inf."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def apply_mask_of_grammar(self: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """The same, as a method of a grammar."""
    apply_mask(logits, vocab_mask)
