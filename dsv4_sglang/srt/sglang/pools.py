"""SGLang's memory pools."""

from __future__ import annotations

from typing import Any


def fill_state_pool(pool: Any) -> None:
    """Set the attributes of a state pool that SGLang's constructor would set and its request pool reads."""
    pool.debug_memory_pool = False
    pool.enable_linear_replayssm = pool.enable_linear_replayssm_spec = pool.replayssm_spec_fold = False
    pool.replayssm_is_kda = False
    pool.replayssm_write_pos = pool.replayssm_cache_base = pool.replayssm_is_flush = None
    pool.enable_custom_mem_pool, pool.custom_mem_pool = False, None
    pool.conv_shard_groups, pool.conv_slice_axis = None, 0
    pool.replayssm_spec_write_pos = None
    pool._slot_state_siblings = []
