"""Stands in for `sgl_kernel` on a machine without a GPU, where no build of it exists.

`dsv4-sglang serve` puts the folder above on PYTHONPATH when it launches for the CPU; it is never used on a GPU machine.
SGLang's CPU path imports many names and calls few of them: two always, the others for EAGLE drafts. No operator of
`torch.ops.sgl_kernel` is defined, which SGLang reads as a CPU without AMX, so that it takes its plain PyTorch layers.
"""

from __future__ import annotations

from typing import NoReturn

import torch

__version__ = "0.0.0+dsv4.sglang.cpu"

QLEN_ONLY = 1
"""SGLang's `TreeMaskMode`: a mask over the tokens to verify alone, without those before them."""


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write consecutive pieces of `out_cache_loc` into columns [start, end) of the requests' rows of `req_to_token`."""
    lengths = (end_offset - start_offset).tolist()
    pieces = out_cache_loc[: sum(lengths)].to(req_to_token.dtype).split(lengths)
    for row, start, piece in zip(req_pool_indices.tolist(), start_offset.tolist(), pieces):
        req_to_token[row, start : start + len(piece)] = piece


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The inverse: read columns [start, end) of the requests' rows, one after the other, into `out_cache_loc`."""
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist())
    locs = torch.cat([req_to_token[row, start:end] for row, start, end in bounds])
    out_cache_loc[: len(locs)] = locs.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Read the `topk * speculative_num_steps` columns behind each request's length into `out_cache_loc`."""
    columns = seq_lens.long()[:, None] + torch.arange(topk * speculative_num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[:, None], columns].flatten())


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill in mask, positions and links of the tokens to verify, which with a top-k of 1 are a chain.

    Links are `[requests, draft_token_num]`: where a token lies in the batch, its first child (-1 behind the last), its
    next sibling (none). The mask is a causal one for each request (QLEN_ONLY).
    """
    if topk != 1:
        raise NotImplementedError(f"speculative_eagle_topk {topk}: without a GPU only 1 is there")
    if tree_mask_mode != QLEN_ONLY:
        raise NotImplementedError(
            f"tree mask mode {tree_mask_mode}: without a GPU only QLEN_ONLY ({QLEN_ONLY}) is there"
        )
    requests, d = len(verified_seq_len), draft_token_num
    order = torch.arange(d)
    positions.copy_((verified_seq_len[:, None] + order).flatten())
    tree_mask.view(-1)[: requests * d * d] = (order <= order[:, None]).repeat(requests, 1).flatten()
    retrieve_index.copy_(torch.arange(requests * d).view(requests, d))
    retrieve_next_token[:, :-1] = order[1:]


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk from each request's first token to the child that the target predicts, as long as there is one.

    Fills in what is visited: in `predicts` the target's token behind it, in `accept_index` where it lies in the batch.
    `accept_token_num` counts the steps, thus drafted tokens.
    """
    for row, tokens in enumerate(candidates.tolist()):
        child_of, sibling_of = retrive_next_token[row].tolist(), retrive_next_sibling[row].tolist()
        node = 0
        for step in range(accept_index.shape[1]):
            where, wanted = retrive_index[row, node], int(target_predict[row, node])
            accept_index[row, step], predicts[where], accept_token_num[row] = where, wanted, step
            child = child_of[node]
            while child != -1 and tokens[child] != wanted:
                child = sibling_of[child]
            if child == -1:
                break
            node = child


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Read each request's last accepted token; it has `accept_stride` places, the first `accept_lens` filled."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def _empty_cache() -> None:
    """A CPU's allocator keeps nothing back."""


if not hasattr(torch.cpu, "empty_cache"):  # SGLang calls it for any device when a draft gets the target's embedding
    setattr(torch.cpu, "empty_cache", _empty_cache)  # noqa: B010  (a type checker knows that it is not there)


def __getattr__(name: str) -> object:
    """Any other name: importable, and an error that names it when called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist without a GPU")

    missing.__name__ = name
    return missing
