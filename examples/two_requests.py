"""Two requests in one cache: admit them, append tokens step by step, read back what each of them sees.

Runs on a GPU where there is one and on the CPU otherwise:

    python examples/two_requests.py

The projections are random; in a model they come from a layer's weights. The layers are those of V4-Flash, cut down to
one of each kind.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from dsv4_sglang.cache import KVCacheManager, LayerWeights, Step, compute_block_budget
from dsv4_sglang.formats import RowTable
from dsv4_sglang.model import DSV4Config, build_schedule
from dsv4_sglang.model.rope import rope_frequencies
from dsv4_sglang.ops.rope import rope_table

CONTEXT = 1024
STREAMS = {0: 0, 4: 4, 128: 2}  # columns of `kv_score` in units of 512: CSA pools two streams of (k, z), HCA one


def layer_weights(config: DSV4Config, ratio: int, device: torch.device) -> LayerWeights:
    half = STREAMS[ratio] // 2
    return LayerWeights(
        kv_norm=torch.ones(512, device=device),
        rope=rope_table(CONTEXT, rope_frequencies(config, ratio, device)),
        eps=config.rms_norm_eps,
        entry_norm=torch.ones(512, device=device) if ratio else None,
        ape=torch.randn(ratio, half * 512, device=device) if ratio else None,
        index_norm=torch.ones(128, device=device) if ratio == 4 else None,
        index_ape=torch.randn(4, half * 128, device=device) if ratio == 4 else None,
    )


def make_step(manager: KVCacheManager, lengths: dict[int, int], counts: dict[int, int]) -> Step:
    """The next `counts[slot]` tokens of each request, with blocks for them."""
    for slot, count in counts.items():
        while 128 * len(manager.blocks_of(slot)) < lengths[slot] + count:
            manager.allocate_block(slot)
    slots = torch.tensor([slot for slot, count in counts.items() for _ in range(count)])
    positions = torch.cat([torch.arange(lengths[slot], lengths[slot] + count) for slot, count in counts.items()])
    # A slot also tells the requests of the step apart.
    return manager.begin_step(slots.to(manager.device), positions.to(manager.device), slots.to(manager.device))


def append(manager: KVCacheManager, step: Step, weights: list[LayerWeights]) -> None:
    tokens = len(step.positions)

    def projection(columns: int) -> Tensor:
        return torch.randn(tokens, columns, device=manager.device)

    for i, schema in enumerate(manager.schemas):
        streams = STREAMS[schema.ratio]
        manager.layer(i, step).append(
            projection(512).bfloat16(),
            weights[i],
            kv_score=projection(streams * 512) if streams else None,
            index_kv_score=projection(streams * 128) if schema.has_indexer else None,
        )


def report(manager: KVCacheManager, step: Step, lengths: dict[int, int]) -> None:
    """What the last token of each request sees, layer by layer."""
    last = (step.metadata.query_start[1:] - 1).tolist()
    for i, schema in enumerate(manager.schemas):
        handle = manager.layer(i, step)
        swa, entries, keys = handle.read_swa_view(), handle.read_classical_view(), handle.read_indexer_view()
        for request, token in enumerate(last):
            slot = int(step.metadata.slots[request])
            seen = f"window of {int((swa.swa_pos[slot] >= 0).sum())} rows"
            if entries is not None:
                n = int(entries.n_visible[token])
                seen += f", {n} entries of {schema.ratio} tokens in blocks {manager.blocks_of(slot)}"
                if entries.entry_rows is not None and n:
                    first = RowTable(entries.entries, handle.schema.row_format).read(entries.entry_rows[token, :1])
                    seen += f", |entry 0| = {float(first.norm()):.1f}"
            if keys is not None:
                seen += f", {int(keys.n_visible[token])} index keys"
            print(f"  layer {i} {schema.attn.name}, request in slot {slot}, {lengths[slot]} tokens: {seen}")


def main() -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(
        DSV4Config.flash(), num_hidden_layers=3, compress_ratios=(0, 4, 128), max_position_embeddings=CONTEXT
    )
    schedule = build_schedule(config)
    budget = compute_block_budget(config, schedule, max_context_len=CONTEXT, max_requests=2)
    manager = KVCacheManager(
        config,
        schedule,
        max_concurrent_requests=budget["state_slots"],
        num_blocks_per_csa_layer=budget["blocks"],
        num_blocks_per_hca_layer=budget["blocks"],
    )
    size = f"{manager.memory_bytes():,} B on {manager.device}"
    print(f"{budget['blocks']} blocks and {budget['state_slots']} state slots: {size}")

    weights = [layer_weights(config, schema.ratio, manager.device) for schema in manager.schemas]
    lengths = {manager.admit_request(): 0, manager.admit_request(): 0}
    first, second = lengths
    for counts in (
        {first: 300, second: 5},  # both prompts in one step
        {first: 1, second: 200},  # one decodes while the other goes on with its prompt
        {second: 1, first: 1},  # a decode step, in any order
    ):
        step = make_step(manager, lengths, counts)
        append(manager, step, weights)
        for slot, count in counts.items():
            lengths[slot] += count
        print(f"step of {counts} tokens a slot")
        report(manager, step, lengths)

    for slot in lengths:
        manager.release_blocks(slot)
        manager.release_request(slot)
    print(f"released: {manager.num_free_blocks} blocks and {manager.num_free_slots} slots free")


if __name__ == "__main__":
    main()
