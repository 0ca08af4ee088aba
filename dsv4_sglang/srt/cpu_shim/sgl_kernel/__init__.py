"""Stands in for `sgl_kernel` on a machine without a GPU, where no build of it exists.

`dsv4-sglang serve` puts the folder above on PYTHONPATH when it launches for the CPU; it is never used on a GPU machine.
SGLang's CPU path imports many names and calls two of them. No operator of `torch.ops.sgl_kernel` is defined, which
SGLang reads as a CPU without AMX, so that it takes its plain PyTorch layers.
"""

from __future__ import annotations

from typing import NoReturn

import torch

__version__ = "0.0.0+dsv4.sglang.cpu"


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


def __getattr__(name: str) -> object:
    """Any other name: importable, and an error that names it when called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist without a GPU")

    missing.__name__ = name
    return missing
