"""Checks of the tensors of a Triton kernel before its launch, as `csrc/tensors.h` has them for the CUDA ops.

They read dtypes, shapes, strides and addresses on the host. A CUDA graph is recorded with checked tensors and does not
repeat the checks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_sglang.attention.base import EntryList
from dsv4_sglang.attention.triton_entries import table_stride
from dsv4_sglang.formats import KVFormat, StorageFormat
from dsv4_sglang.formats.kv_entries import ENTRY_DIM, ROPE_DIM

# The kernels load 16 bytes at once, and their block strides are multiples of 16 elements.
_ALIGNMENT = 16
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _described(dtype: str, shape: tuple[object, ...]) -> str:
    return f"{dtype} [{', '.join('any' if size is None else str(size) for size in shape)}]"


class TensorChecker(NamedTuple):
    """Checker of the tensors of one call. All of them must be on one device.

    The methods raise ValueError and name the tensor, what it is and what is expected.

    Attributes:
        op: name of the op, for messages.
        device: device of the call.
    """

    op: str
    device: torch.device

    def tensor(
        self,
        name: str,
        tensor: Tensor,
        dtypes: torch.dtype | tuple[torch.dtype, ...],
        shape: tuple[int | None, ...],
        dense_from: int = 0,
    ) -> None:
        """Check device, dtype, shape and strides of a tensor.

        Args:
            name: name of the tensor, for messages.
            tensor: the tensor.
            dtypes: allowed dtypes.
            shape: sizes, None for any.
            dense_from: this and all later dimensions must have no gaps.
        """
        dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
        right = len(shape) == tensor.dim() and all(n in (None, size) for n, size in zip(shape, tensor.shape))
        right = right and tensor.dtype in dtypes and tensor.device == self.device
        stride = 1
        for size, found in reversed(list(zip(tensor.shape, tensor.stride()))[dense_from:]):
            right = right and (size == 1 or found == stride)
            stride *= size
        if not right:
            expected = _described(" or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes), shape)
            got = _described(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            raise ValueError(
                f"{self.op}: {name} is {got} with strides {tuple(tensor.stride())} on {tensor.device}; expected "
                f"{expected} on {self.device}, without gaps from dimension {dense_from} on"
            )

    def table(self, name: str, table: Tensor, stored: StorageFormat, per_block: int | None = None) -> None:
        """Check that the kernels can read a buffer [blocks, entries per block, width].

        Args:
            name: name of the buffer, for messages.
            table: the buffer.
            stored: format of its entries or keys.
            per_block: entries per block, None for any.
        """
        self.tensor(name, table, stored.dtype, (None, per_block, stored.width), dense_from=1)
        if table_stride(table) % _ALIGNMENT or table.data_ptr() % _ALIGNMENT:
            raise ValueError(
                f"{self.op}: {name} begins at {table.data_ptr():#x} with a block stride of {table.stride(0)}; expected "
                f"multiples of {_ALIGNMENT}"
            )

    def listed(self, name: str, entries: EntryList, stored: StorageFormat, tokens: int) -> None:
        """Check a buffer and the list of its entries that each token attends to.

        Args:
            name: name of the buffer, for messages.
            entries: the buffer with the lists.
            stored: format of the entries.
            tokens: number of tokens.
        """
        self.table(name, entries.table, stored)
        lists = tokens if entries.owner is None else None
        self.tensor(f"the list of {name}", entries.indices, torch.int32, (lists, None), dense_from=1)
        self.tensor(f"the lengths of the list of {name}", entries.topk_length, torch.int32, (tokens,))
        if entries.owner is not None:
            self.tensor(f"the owner of the list of {name}", entries.owner, torch.int32, (tokens,))

    def formats(self, window: KVFormat, entries: KVFormat) -> None:
        """Check that a kernel takes window entries and compressed entries of these formats together."""
        expected = KVFormat.NVFP4 if window is KVFormat.MXFP8 else window
        if entries is not expected:
            raise ValueError(
                f"{self.op}: compressed entries are {entries.value} beside window entries in {window.value}; expected "
                f"{expected.value}"
            )

    def rotation(self, tokens: int, positions: Tensor, rope: Tensor) -> None:
        """Check the positions of the tokens, int64 [tokens], and the RoPE table, fp32 [positions, 64]."""
        self.tensor("positions", positions, torch.int64, (tokens,))
        self.tensor("rope", rope, torch.float32, (None, ROPE_DIM))

    def query(self, q: Tensor, sink: Tensor) -> None:
        """Check the queries [T, H, 512] of attention and its sinks, fp32 [H]."""
        self.tensor("q", q, FLOATS, (None, None, ENTRY_DIM), dense_from=2)
        self.tensor("sink", sink, torch.float32, (q.shape[1],))
