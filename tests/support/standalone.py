"""Requests of a `KVCacheManager` with random layers.

The outputs of a request must not depend on concurrent requests.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4_sglang.cache import LayerWeights
from dsv4_sglang.model import DSV4Config, build_schedule
from dsv4_sglang.model.rope import rope_frequencies
from dsv4_sglang.ops.rope import rope_table
from dsv4_sglang.standalone import KVCacheManager, LayerCacheHandle

HEADS, INDEX_HEADS, TOP_K, EPS = 2, 4, 8, 1e-6
LONGEST = 512
CONFIG = dataclasses.replace(
    DSV4Config.flash(),
    num_hidden_layers=4,
    compress_ratios=(0, 4, 128, 4),
    max_position_embeddings=LONGEST,
    index_topk=TOP_K,
)
EXACT = {"kv_format": "fp32", "key_format": "fp32"}
ONLINE: dict[str, Any] = {"hca_state": "online", **EXACT}


def make_manager(
    device: torch.device | str = "cpu", slots: int = 3, blocks: int = 12, config: DSV4Config = CONFIG, **options: Any
) -> KVCacheManager:
    sizes = {"num_blocks_per_csa_layer": blocks, "num_blocks_per_hca_layer": blocks, **options}
    return KVCacheManager(config, build_schedule(config), max_concurrent_requests=slots, device=device, **sizes)


@dataclass
class Layer:
    """Random weights of one layer, and the random inputs of a request at every position."""

    weights: LayerWeights
    sink: Tensor
    inputs: dict[str, Tensor]

    @classmethod
    def make(cls, ratio: int, seed: int, device: torch.device | str = "cpu") -> "Layer":
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        streams = {0: 0, 4: 4, 128: 2}[ratio]
        weights = LayerWeights(
            kv_norm=1 + 0.1 * normal(512),
            rope=rope_table(LONGEST, rope_frequencies(CONFIG, ratio)).to(device),
            eps=EPS,
            entry_norm=1 + 0.1 * normal(512) if ratio else None,
            ape=normal(ratio, streams // 2 * 512) if ratio else None,
            index_norm=1 + 0.1 * normal(128) if ratio == 4 else None,
            index_ape=normal(4, 256) if ratio == 4 else None,
        )
        inputs = {"kv": normal(LONGEST, 512), "q": normal(LONGEST, HEADS, 512)}
        if ratio:
            inputs["kv_score"] = normal(LONGEST, streams * 512)
        if ratio == 4:
            inputs["index_kv_score"] = normal(LONGEST, 4 * 128)
            inputs["index_q"] = normal(LONGEST, INDEX_HEADS, 128)
            inputs["index_weights"] = normal(LONGEST, INDEX_HEADS)
        return cls(weights, normal(HEADS), inputs)


@functools.lru_cache(maxsize=32)
def random_inputs(ratio: int, seed: int, device: torch.device | str) -> dict[str, Tensor]:
    return Layer.make(ratio, seed, device).inputs


def layers_of(seed: int, device: torch.device | str = "cpu") -> list[Layer]:
    """Return the layers with weights that all requests share and the inputs of the request with this seed."""
    return [
        dataclasses.replace(Layer.make(ratio, i, device), inputs=random_inputs(ratio, 1000 * (seed + 1) + i, device))
        for i, ratio in enumerate(CONFIG.compress_ratios)
    ]


def attend(handle: LayerCacheHandle, layer: Layer, inputs: dict[str, Tensor], most: int | None = None) -> Tensor:
    """Compute the attention of one layer from the views.

    `most` is the maximum number of visible entries per token. If it is None, it is read from the device.
    """
    swa, classical, indexer = handle.read_swa_view(), handle.read_classical_view(), handle.read_indexer_view()
    rows = lens = None
    if indexer is not None:
        tokens, most = len(indexer.positions), most or max(1, int(indexer.n_visible.max()))
        rows = torch.empty(tokens, TOP_K, dtype=torch.int32, device=swa.positions.device)
        torch.ops.dsv4_sglang.index_topk(
            inputs["index_q"],
            inputs["index_weights"] * (CONFIG.index_head_dim * CONFIG.index_n_heads) ** -0.5,
            indexer.index_keys,
            indexer.block_table,
            indexer.token_request,
            indexer.positions,
            layer.weights.rope,
            indexer.key_format,
            torch.empty(tokens, most, device=swa.positions.device),
            rows,
        )
        lens = indexer.n_visible.clamp_max(TOP_K)
    elif classical is not None:
        rows, lens = classical.entry_indices, classical.n_visible
    return torch.ops.dsv4_sglang.attend(
        inputs["q"],
        layer.sink,
        swa.window,
        swa.window_indices,
        swa.window_lens,
        classical.entries if classical is not None else None,
        rows,
        lens,
        swa.positions,
        layer.weights.rope,
        CONFIG.head_dim**-0.5,
        swa.kv_format,
    )


@dataclass(eq=False, repr=False)
class Request:
    """A running request: its slot, its layers, and the output of every layer for every token so far."""

    slot: int
    seed: int
    layers: list[Layer]
    outputs: list[list[Tensor]]
    length: int = 0

    def __repr__(self) -> str:
        return f"Request(slot {self.slot}, {self.length} tokens, seed {self.seed})"

    @classmethod
    def admit(cls, manager: KVCacheManager, seed: int) -> "Request":
        layers = layers_of(seed, manager.device)
        return cls(manager.admit_request(), seed, layers, [[] for _ in layers])

    def finish(self, manager: KVCacheManager) -> None:
        manager.release_blocks(self.slot)
        manager.release_request(self.slot)


def run_step(manager: KVCacheManager, chunks: list[tuple[Request, int]], pads: int = 0) -> None:
    """Append `n` tokens of each request to all layers and attend. `pads` padding tokens follow them."""
    for request, n in chunks:
        while 128 * len(manager.blocks_of(request.slot)) < request.length + n:
            manager.allocate_block(request.slot)
    spans = [range(r.length, r.length + n) for r, n in chunks]
    slots = [r.slot for (r, n) in chunks for _ in range(n)] + [-1] * pads
    positions = [t for span in spans for t in span] + [0] * pads
    ids = [b for b, span in enumerate(spans) for _ in span] + [len(chunks) + i for i in range(pads)]
    step = manager.begin_step(*(torch.tensor(x, device=manager.device) for x in (slots, positions, ids)))
    for i in range(len(manager.schedule)):
        inputs = {}
        for name in chunks[0][0].layers[i].inputs:
            parts = [r.layers[i].inputs[name][span.start : span.stop] for (r, _), span in zip(chunks, spans)]
            padding = parts[0].new_full((pads, *parts[0].shape[1:]), 7.0)
            inputs[name] = torch.cat([*parts, padding])
        handle = manager.layer(i, step)
        layer = chunks[0][0].layers[i]
        handle.append(inputs["kv"], layer.weights, inputs.get("kv_score"), inputs.get("index_kv_score"))
        out = attend(handle, layer, inputs)
        for (request, _), part in zip(chunks, out.split([n for _, n in chunks] + [pads] * (pads > 0))):
            request.outputs[i].append(part)
        assert not out[len(out) - pads :].any(), "a padding row attended to something"
    for request, n in chunks:
        request.length += n


@functools.cache
def alone(seed: int, length: int, **options: str) -> list[Tensor]:
    """Return the outputs of a request that runs alone, in one chunk, in a new cache."""
    manager = make_manager(**options)
    request = Request.admit(manager, seed)
    run_step(manager, [(request, length)])
    return [out[0] for out in request.outputs]


def check(request: Request, **options: str) -> None:
    """Assert that every output equals that of the same request alone in one chunk."""
    for i, (got, expected) in enumerate(zip(request.outputs, alone(request.seed, request.length, **options))):
        torch.testing.assert_close(
            torch.cat(got).cpu(), expected, atol=2e-5, rtol=1e-5, msg=lambda text, i=i: f"layer {i}: {text}"
        )


def block_views(manager: KVCacheManager) -> list[Tensor]:
    """Return the tables of blocks of all layers."""
    return [view for pool in manager.paged_pools if pool is not None for view in pool.block_views()]


def state_tensors(manager: KVCacheManager) -> list[Tensor]:
    """Return the tensors of slots of all layers. The first dimension is the slot."""
    return [tensor for pool in manager.state_pools for tensor in pool.tensors]


def all_bytes(manager: KVCacheManager) -> list[Tensor]:
    """Copy all slots and blocks."""
    return [tensor.clone() for tensor in (*state_tensors(manager), *block_views(manager))]
