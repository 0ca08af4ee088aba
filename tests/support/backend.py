"""A real attention backend of one layer over real pools, with SGLang's tables of requests."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from dsv4_sglang.cache import CacheLayout, v4_specs
from dsv4_sglang.model import DSV4Config, build_schedule
from dsv4_sglang.srt.memory.pools import CacheKVPool, CompressedKVPool, StateParams, StateSlotPool
from dsv4_sglang.srt.prefix_cache.copy_timer import CopyTimer

BLOCK, CONTEXT = 128, 512


def make_runner(
    ratio: int,
    *,
    heads: int,
    top_k: int = 64,
    requests: int = 2,
    staging: int = 0,
    snapshots: int = 0,
    context: int = CONTEXT,
    formats: tuple[str, str] = ("fp32", "fp32"),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> SimpleNamespace:
    """Return what a backend reads of SGLang's model runner, for a model of one layer.

    Request r, from 1 on, has state slot r and `context` tokens in blocks of its own.

    Args:
        ratio: compression ratio of the layer.
        heads: query heads.
        top_k: entries that a token selects in a CSA layer.
        requests: number of requests.
        staging: state slots for snapshots of a prefill step.
        snapshots: snapshot slots.
        context: tokens of the longest context.
        formats: formats of the KV entries and of the index keys.
        dtype: dtype of the queries.
        device: device of the pools.
    """
    config = DSV4Config.flash()
    schedule = [spec for spec in build_schedule(config) if spec.attn.ratio == ratio][:1]
    layout = CacheLayout(v4_specs(config, schedule, kv_format=formats[0], key_format=formats[1]), torch.device(device))
    params = StateParams.of(layout, staging, snapshots)
    slots = StateSlotPool(size=requests, cache_params=params, mamba_layer_ids=[0], device=device)
    size = requests * context
    blocks = CompressedKVPool(size=size, page_size=BLOCK, dtype=torch.float32, layout=layout, device=device)
    pages = 1 + torch.arange(size // BLOCK, dtype=torch.int32, device=device).view(requests, -1)
    tokens = (pages[:, :, None] * BLOCK + torch.arange(BLOCK, dtype=torch.int32, device=device)).flatten(1)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(num_attention_heads=heads, index_topk=top_k), context_len=context
        ),
        server_args=SimpleNamespace(enable_hierarchical_cache=False),
        is_draft_worker=False,
        spec_algorithm=SimpleNamespace(is_dspark=lambda: False),
        device=device,
        dtype=dtype,
        req_to_token_pool=SimpleNamespace(
            size=requests,
            req_to_token=torch.cat([torch.zeros_like(tokens[:1]), tokens]),
            mamba_pool=slots,
            mamba_ckpt_pool=SimpleNamespace(timer=CopyTimer(device)),
            req_index_to_mamba_index_mapping=torch.arange(requests + 1, dtype=torch.int32, device=device),
        ),
        token_to_kv_pool=CacheKVPool(blocks, slots),
    )
