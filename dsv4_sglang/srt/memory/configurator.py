"""Number of tokens of the KV pool, computed for blocks of this cache in SGLang's interface."""

from __future__ import annotations

from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.memory.sizing import require_context, tokens_of_pool


class BlockConfigurator(MemoryPoolConfigurator):
    """Configurator of the pool size. SGLang first calls it for the tokens that fit into memory and then, if the user
    gave a limit of tokens, for the size under that limit."""

    def __init__(self, layout: CacheLayout, context_len: int) -> None:
        self.layout, self.context_len = layout, context_len

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        return MemoryPoolConfig(max_total_num_tokens=tokens_of_pool(self.layout, available_bytes, self.context_len))

    def calculate_pool_sizes_from_max_tokens(self, max_total_num_tokens: int, page_size: int) -> MemoryPoolConfig:
        tokens = max_total_num_tokens // BLOCK * BLOCK
        require_context(self.layout, tokens, self.context_len, f"--max-total-tokens {max_total_num_tokens} gives")
        return MemoryPoolConfig(max_total_num_tokens=tokens)
