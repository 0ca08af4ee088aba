"""Shapes and bytes of the pools of one launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4_sglang.sglang.options import BLOCK, Options

WINDOW = 128
CSA_ROWS = BLOCK // 4
ENTRY_WIDTH = {torch.uint8: 584, torch.bfloat16: 512, torch.float32: 512}
INDEX_WIDTH = {torch.uint8: 72, torch.float32: 128}
CSA_TAIL = (24, 640)
HCA_TAIL = {"online": (3, 512), "raw": (256, 512)}


@dataclass(frozen=True)
class CacheLayout:
    """What a block of 128 tokens and a state slot consist of, for the layers of one model.

    `entry_dtype` is the format of window rows and compressed entries, `index_dtype` that of indexer keys: uint8 is the
    quantised one (see `dsv4_sglang.ops.rows` and `dsv4_sglang.ops.index_keys`).
    """

    ratios: tuple[int, ...]
    entry_dtype: torch.dtype
    index_dtype: torch.dtype
    hca_state: str
    window_layers: tuple[int, ...] = field(init=False)
    csa_layers: tuple[int, ...] = field(init=False)
    hca_layers: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name, wanted in (("window_layers", (0, 4, 128)), ("csa_layers", (4,)), ("hca_layers", (128,))):
            object.__setattr__(self, name, tuple(i for i, r in enumerate(self.ratios) if r in wanted))

    @classmethod
    def from_model(cls, hf_config: Any, kv_cache_dtype: torch.dtype, options: Options) -> CacheLayout:
        """`compress_ratios` may be longer than the layers: the rest belongs to draft heads (SPEC 1.1)."""
        if options.entry_format == "fp32":
            entry_dtype = torch.float32
        elif kv_cache_dtype == torch.float8_e4m3fn:
            entry_dtype = torch.uint8
        elif kv_cache_dtype == torch.bfloat16:
            entry_dtype = torch.bfloat16
        else:
            raise ValueError(f"KV cache dtype is {kv_cache_dtype}; --kv-cache-dtype takes auto, fp8_e4m3 or bfloat16")
        return cls(
            ratios=tuple(hf_config.compress_ratios[: hf_config.num_hidden_layers]),
            entry_dtype=entry_dtype,
            index_dtype=torch.float32 if options.indexer_format == "fp32" else torch.uint8,
            hca_state=options.hca_state,
        )

    @property
    def entry_width(self) -> int:
        return ENTRY_WIDTH[self.entry_dtype]

    @property
    def index_width(self) -> int:
        return INDEX_WIDTH[self.index_dtype]

    def block_shapes(self, blocks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The paged tensors, all layers of a kind in one; `blocks` counts the dummy block."""
        return {
            "CSA entries": ((len(self.csa_layers), blocks, CSA_ROWS, self.entry_width), self.entry_dtype),
            "indexer keys": ((len(self.csa_layers), blocks, CSA_ROWS, self.index_width), self.index_dtype),
            "HCA entries": ((len(self.hca_layers), 1, blocks, self.entry_width), self.entry_dtype),
        }

    def state_shapes(self, slots: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The state tensors, slot dimension second; `slots` counts the dummy slot."""
        return {
            "window rings": ((len(self.window_layers), slots, WINDOW, self.entry_width), self.entry_dtype),
            "CSA tails": ((len(self.csa_layers), slots, *CSA_TAIL), torch.float32),
            "HCA tails": ((len(self.hca_layers), slots, *HCA_TAIL[self.hca_state]), torch.float32),
        }

    @property
    def block_bytes(self) -> int:
        return sum(tensor_bytes(*spec) for spec in self.block_shapes(1).values())

    @property
    def slot_bytes(self) -> int:
        return sum(tensor_bytes(*spec) for spec in self.state_shapes(1).values())

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / BLOCK


def tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = 1
    for n in shape:
        count *= n
    return count * dtype.itemsize
