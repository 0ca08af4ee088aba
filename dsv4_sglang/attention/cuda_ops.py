"""Registers the CUDA implementations of all ops; import it where there is a CUDA device.

The extension is built here on first use. It holds the writing and moving ops and the kernels of `index_topk`; `attend`
is FlashMLA and Triton.
"""

import torch
from torch import Tensor

from dsv4_sglang.attention import cuda_index, flashmla, triton_attend
from dsv4_sglang.formats import RowFormat
from dsv4_sglang.ops import extension
from dsv4_sglang.ops.schemas import NAMESPACE


def attend(
    q: Tensor,
    sink: Tensor,
    window: Tensor,
    window_rows: Tensor,
    window_lens: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    entry_lens: Tensor | None,
    positions: Tensor,
    rope: Tensor,
    scale: float,
    row_format: int,
) -> Tensor:
    """FlashMLA where it takes the tensors, with a schedule for this call alone, else Triton."""
    fits = flashmla.supported(q, RowFormat.from_code(row_format))
    reader = flashmla.FlashMLAReader().attend if fits else triton_attend.attend
    lists = window, window_rows, window_lens, entries, entry_rows, entry_lens
    return reader(q, sink, *lists, positions, rope, scale, row_format)


extension.load()
torch.library.impl(f"{NAMESPACE}::attend", "CUDA", attend)
torch.library.impl(f"{NAMESPACE}::index_topk", "CUDA", cuda_index.index_topk)
