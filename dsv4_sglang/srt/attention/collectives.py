"""Collective operations of DP attention, where SGLang's own functions are wrong or need a GPU.

Parameters have the names of those of the replaced functions; the table in `hooks` names these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

Gather = Callable[..., None]


def gather_from_copy(
    original: Gather, global_tokens: Tensor, local_tokens: Tensor, forward_batch: Any, *arguments: Any, **named: Any
) -> None:
    """AROUND `dp_attention.dp_gather_replicate`: leave `local_tokens` unchanged."""
    if get_parallel().attn_tp_size > 1:
        local_tokens = local_tokens.clone()
    original(global_tokens, local_tokens, forward_batch, *arguments, **named)


def logits_of_ranks(
    original: Callable[..., Tensor],
    processor: Any,
    hidden_states: Tensor,
    lm_head: Any,
    logits_metadata: Any,
    *arguments: Any,
    **options: Any,
) -> Tensor:
    """AROUND `targets.LOGITS_OF_RANKS`: compute the logits of a rank's rows [n, hidden], which all ranks do together.

    SGLang copies the agreed number of rows, past the end of a tensor that has fewer. Pad the tensor to that number.
    """
    agreed = logits_metadata.global_num_tokens_for_logprob_cpu
    rows = hidden_states.shape[0]
    if processor.do_tensor_parallel_all_gather_dp_attn and agreed is not None:
        missing = int(agreed[get_parallel().attn_dp_rank]) - rows
        if missing > 0:
            hidden_states = torch.nn.functional.pad(hidden_states, (0, 0, 0, missing))
    return original(processor, hidden_states, lm_head, logits_metadata, *arguments, **options)[:rows]


def sum_token_ids(*args: Any, **kwargs: Any) -> None:
    """REPLACE `parallel_state.inplace_all_reduce(tensor, group_name)`, whose decorator hides the parameters.

    On a CPU only DP attention calls it, to sum token ids of which every process has a part.
    """
    tensor = args[0] if args else kwargs["tensor"]
    torch.distributed.all_reduce(tensor, group=get_parallel().tp_group.device_group)


def all_gather(self: Any, output: Tensor, input: Tensor) -> None:
    """REPLACE `GroupCoordinator.all_gather_into_tensor`: use `torch.distributed`."""
    torch.distributed.all_gather_into_tensor(output, input, group=self.device_group)


def reduce_scatter(self: Any, output: Tensor, input: Tensor) -> None:
    """REPLACE `GroupCoordinator.reduce_scatter_tensor`: use `torch.distributed`."""
    torch.distributed.reduce_scatter_tensor(output, input, group=self.device_group)
