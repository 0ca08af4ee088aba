"""Shapes and bytes of the pools of one launch, from the model's config and the launch's formats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsv4_sglang.cache.schema import BLOCK_SIZE_ORIGINAL_TOKENS as BLOCK
from dsv4_sglang.cache.schema import LayerCacheSchema, build_schema
from dsv4_sglang.formats import KeyFormat, RowFormat
from dsv4_sglang.formats.rows import block_stride_bytes
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import CSA_RATIO
from dsv4_sglang.model.layer_schedule import AttentionType, build_schedule
from dsv4_sglang.srt.options import Options


class PoolPart(NamedTuple):
    """One kind of content of a pool, all layers together."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


@dataclass(frozen=True)
class CacheLayout:
    """What a block of 128 tokens and a state slot consist of, layer by layer."""

    schemas: tuple[LayerCacheSchema, ...]
    device: torch.device

    @classmethod
    def from_model(
        cls, config: DSV4Config, kv_cache_dtype: torch.dtype, options: Options, device: str | torch.device
    ) -> CacheLayout:
        if options.entry_format == "fp32":
            rows = RowFormat.FP32
        elif kv_cache_dtype == torch.float8_e4m3fn:
            rows = RowFormat.FP8
        elif kv_cache_dtype == torch.bfloat16:
            rows = RowFormat.BF16
        else:
            raise ValueError(f"KV cache dtype is {kv_cache_dtype}; --kv-cache-dtype takes auto, fp8_e4m3 or bfloat16")
        schemas = [
            build_schema(
                config,
                spec,
                row_format=rows,
                key_format=KeyFormat(options.indexer_format),
                hca_state=options.hca_state,
            )
            for spec in build_schedule(config)
        ]
        return cls(tuple(schemas), torch.device(device))

    def layers(self, kind: AttentionType) -> list[int]:
        """Ids of the layers of a kind, in order."""
        return [layer for layer, schema in enumerate(self.schemas) if schema.attn is kind]

    @property
    def row_format(self) -> RowFormat:
        return self.schemas[0].row_format

    def block_parts(self, blocks: int) -> Iterator[PoolPart]:
        """The paged half: entries and index keys of `blocks` blocks, SGLang's dummy among them."""
        rows = self.row_format
        for kind in (AttentionType.CSA, AttentionType.HCA):
            layers = self.layers(kind)
            if not layers:
                continue
            schema, count = self.schemas[layers[0]], len(layers)
            flat = kind is AttentionType.HCA
            shape = (1, blocks) if flat else (blocks, schema.entries_per_block)
            size = count * shape[0] * block_stride_bytes(shape[1], rows, self.device)
            yield PoolPart(f"{kind.name} entries", (count, *shape, rows.width), rows.dtype, size)
            if schema.has_indexer:
                keys = (count, blocks, schema.indexer_entries_per_block, schema.key_format.width)
                size = count * blocks * schema.indexer_entries_per_block * schema.key_format.key_bytes
                yield PoolPart("index keys", keys, schema.key_format.dtype, size)

    def state_parts(self, slots: int) -> Iterator[PoolPart]:
        """The half that does not grow: window rings and tails of `slots` slots, SGLang's dummy among them."""
        rows, window = self.row_format, self.schemas[0].swa_window_size
        shape = (len(self.schemas), slots, window, rows.width)
        size = len(self.schemas) * slots * block_stride_bytes(window, rows, self.device)
        yield PoolPart("window rings", shape, rows.dtype, size)
        for kind in (AttentionType.CSA, AttentionType.HCA):
            layers = self.layers(kind)
            tail = self.schemas[layers[0]].tail_shape if layers else None
            if tail is not None:
                shape = (len(layers), slots, *tail)
                yield PoolPart(f"{kind.name} tails", shape, torch.float32, 4 * math.prod(shape))

    def checkpoint_parts(self, checkpoints: int) -> Iterator[PoolPart]:
        """What is alive of a state at a multiple of 128 (SPEC 6.6): the rings, and of each CSA compressor the last four
        rows of k and of z of the previous window.
        """
        rows, window = self.row_format, self.schemas[0].swa_window_size
        shape = (len(self.schemas), checkpoints, window, rows.width)
        size = len(self.schemas) * checkpoints * block_stride_bytes(window, rows, self.device)
        yield PoolPart("checkpointed rings", shape, rows.dtype, size)
        layers = self.layers(AttentionType.CSA)
        tail = self.schemas[layers[0]].tail_shape if layers else None
        if tail is not None:
            shape = (len(layers), checkpoints, 2 * CSA_RATIO, tail[1])
            yield PoolPart("checkpointed tails", shape, torch.float32, 4 * math.prod(shape))

    @property
    def checkpoint_bytes(self) -> int:
        return sum(part.bytes for part in self.checkpoint_parts(1))

    @property
    def block_bytes(self) -> int:
        """Bytes of one more block. An HCA layer is one flat table, whose padding does not grow with its rows."""
        csa = [self.schemas[layer] for layer in self.layers(AttentionType.CSA)]
        entries = sum(block_stride_bytes(schema.entries_per_block, self.row_format, self.device) for schema in csa)
        keys = sum(schema.indexer_entries_per_block * schema.indexer_entry_bytes for schema in csa)
        return entries + keys + len(self.layers(AttentionType.HCA)) * self.row_format.row_bytes

    @property
    def slot_bytes(self) -> int:
        return sum(part.bytes for part in self.state_parts(1))

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / BLOCK
