"""Token masks of requests with a grammar (`json_schema`, `regex`, tools) without a GPU: xgrammar's host functions."""

from __future__ import annotations

from typing import Any

import torch


def apply_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Set the logits [requests, tokens] of tokens that the mask does not allow to -inf."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def apply_mask_of_grammar(self: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Apply a mask, as a method of a grammar."""
    apply_mask(logits, vocab_mask)
