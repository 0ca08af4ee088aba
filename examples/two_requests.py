"""Two requests in one cache: prompts in common steps, decode steps, and a third request in a slot that became free.

Runs on a GPU if there is one, else on the CPU:

    python examples/two_requests.py

The projections are random; in a model a layer's weights compute them. The layers are those of V4-Flash, reduced to one
of each kind.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from dsv4_sglang.cache import LayerWeights
from dsv4_sglang.formats import KVBuffer
from dsv4_sglang.model import DSV4Config, build_schedule
from dsv4_sglang.model.rope import rope_frequencies
from dsv4_sglang.ops.rope import rope_table
from dsv4_sglang.standalone import KVCacheManager, Step, compute_block_budget

CONTEXT = 1024
# Columns of `kv_score` in units of 512, by ratio: CSA pools two streams of (k, z), HCA one.
STREAMS = {0: 0, 4: 4, 128: 2}


def layer_weights(config: DSV4Config, ratio: int, device: torch.device) -> LayerWeights:
    """Return random weights of one layer.

    Args:
        config: config of the model.
        ratio: compression ratio of the layer, 0 without compression.
        device: device of the weights.
    """
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


def make_step(manager: KVCacheManager, counts: dict[int, int]) -> Step:
    """Begin a step of the next `counts[slot]` tokens of each request, and allocate blocks for them."""
    slots: list[int] = []
    positions: list[int] = []
    for slot, count in counts.items():
        length = manager.length_of(slot)
        while 128 * len(manager.blocks_of(slot)) < length + count:
            manager.allocate_block(slot)
        slots += [slot] * count
        positions += range(length, length + count)
    # The slot also serves as the request's id within the step.
    ids = torch.tensor(slots, device=manager.device)
    return manager.begin_step(ids, torch.tensor(positions, device=manager.device), ids)


def run(manager: KVCacheManager, weights: list[LayerWeights], counts: dict[int, int]) -> Step:
    """Append a step to all layers. A model would attend after each append, see `read_swa_view` and its neighbours.

    Args:
        manager: cache of the requests.
        weights: weights of each layer.
        counts: slot -> new tokens of its request.
    """
    step = make_step(manager, counts)
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
    return step


def report(manager: KVCacheManager, step: Step) -> None:
    """Print what the last token of each request attends to, layer by layer."""
    last = (step.metadata.query_start[1:] - 1).tolist()
    for i, schema in enumerate(manager.schemas):
        handle = manager.layer(i, step)
        swa, entries, keys = handle.read_swa_view(), handle.read_classical_view(), handle.read_indexer_view()
        for request, token in enumerate(last):
            slot = int(step.metadata.slots[request])
            seen = f"window of {int((swa.swa_pos[slot] >= 0).sum())} entries"
            if entries is not None:
                n = int(entries.n_visible[token])
                seen += f", {n} entries of {schema.ratio} tokens in blocks {manager.blocks_of(slot)}"
                if entries.entry_indices is not None and n:
                    first = KVBuffer(entries.entries, handle.schema.kv_format).read(entries.entry_indices[token, :1])
                    seen += f", |entry 0| = {float(first.norm()):.1f}"
            if keys is not None:
                seen += f", {int(keys.n_visible[token])} index keys"
            print(f"  layer {i} {schema.attn.name}, request in slot {slot}, {manager.length_of(slot)} tokens: {seen}")


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

    first, second = manager.admit_request(), manager.admit_request()
    run(manager, weights, {first: 300, second: 5})  # both prompts in one step
    step = run(manager, weights, {second: 1, first: 1})  # a decode step; the order of requests is free
    report(manager, step)

    manager.release_blocks(second)
    manager.release_request(second)
    third = manager.admit_request()
    print(f"a third request has slot {third} of the second one")
    run(manager, weights, {third: 127, first: 100})
    step = run(manager, weights, {first: 1, third: 1})
    report(manager, step)

    for slot in (first, third):
        manager.release_blocks(slot)
        manager.release_request(slot)
    print(f"released: {manager.num_free_blocks} blocks and {manager.num_free_slots} slots free")


if __name__ == "__main__":
    main()
