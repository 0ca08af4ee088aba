"""The audit of a scheduler's pools and tree. Tests call it on pools and trees without a server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.srt.features.integrity.owners import FREE, REQUESTS, Finding, PoolOwners
from dsv4_sglang.srt.features.integrity.tree import AuditedTree
from dsv4_sglang.srt.prefix_cache.cache import PrefixCache
from dsv4_sglang.srt.prefix_cache.notes import RequestNote


@dataclass
class AuditResult:
    """Result of the check: the pools with their owners, and the inconsistencies."""

    pools: list[PoolOwners]
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(f"{what}: {wrong}" for what, wrong in self.findings) or "sound"


def audit(cache: Any, requests: Iterable[Any]) -> AuditResult:
    """Check the pools of a scheduler's tree cache, between two iterations of the scheduler.

    Reads tables and indices from the device and waits for it.

    Args:
        cache: tree cache of the scheduler.
        requests: all requests that may hold memory: running, in a step, between chunks, or waiting.
    """
    holders, tables, allocator = list(requests), cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    tree = AuditedTree(cache) if isinstance(cache, PrefixCache) else None  # SGLang's own with --disable-radix-cache
    blocks = PoolOwners("block", range(1, allocator.size // BLOCK + 1))
    rows = PoolOwners("request row", range(1, tables.req_to_token.shape[0]))
    live = PoolOwners("state slot", range(1, tables.mamba_allocator.size + 1))
    found = AuditResult([blocks, rows, live])

    blocks.record_owner(FREE, "the free list", allocator.get_all_free_pages().tolist())
    rows.record_owner(FREE, "the free list", tables.free_slots)
    live.record_owner(FREE, "the free list", tables.mamba_allocator.free_slots.tolist())
    slots = getattr(tables, "mamba_ckpt_pool", None)
    snapshots = PoolOwners("snapshot slot", range(1, (slots.num_slots if slots else 0) + 1))
    if slots is not None:
        snapshots.record_owner(FREE, "the free list", slots.free_slots())
        found.pools.append(snapshots)

    for req in holders:
        name, kv_record = f"request {req.rid}", req.kv
        snapshots.record_owner(REQUESTS, name, [pending.slot for pending in RequestNote.of(req).pending or ()])
        if kv_record.mamba_pool_idx is not None:
            live.record_owner(REQUESTS, name, [int(kv_record.mamba_pool_idx)])
        if kv_record.req_pool_idx is None:
            continue
        rows.record_owner(REQUESTS, name, [int(kv_record.req_pool_idx)])
        table = (tables.req_to_token[kv_record.req_pool_idx, : kv_record.kv_allocated_len : BLOCK] // BLOCK).tolist()
        inserted = 0 if tree is None else kv_record.cache_protected_len // BLOCK
        blocks.record_owner(REQUESTS, name, table[inserted:])
        if tree is not None:
            tree.record_request(req, name, table[:inserted])

    if tree is not None:
        tree.record_owners(blocks, snapshots)
        found.pools += tree.host_pools()
    found.findings += [finding for pool in found.pools for finding in pool.findings()]
    if tree is not None:
        found.findings += tree.findings()
    return found
