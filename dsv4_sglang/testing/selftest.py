"""Comparison of the ops with `formula` on one layer of each kind, which `dsv4-sglang doctor` runs on the user's
machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_sglang.attention import cuda_ops  # noqa: F401  (registers `attend` for CUDA)
from dsv4_sglang.cache import LayerWeights
from dsv4_sglang.formats import KeyFormat, KVFormat
from dsv4_sglang.model import DSV4Config, build_schedule
from dsv4_sglang.ops.rope import rope_table, rotate
from dsv4_sglang.standalone import KVCacheManager
from dsv4_sglang.testing.formula import EPS, FormulaInputs, frequencies, layer_output
from dsv4_sglang.testing.quantise import fp8_entries

HEADS = INDEX_HEADS = 64
PREFILL, TOKENS = 133, 140  # a chunk across a block boundary, then single tokens that complete a CSA window
BLOCKS = 4


@dataclass(frozen=True)
class Formats:
    """Formats of a comparison.

    Attributes:
        dtype: dtype of projections and queries.
        rows: KV format.
        keys: format of the index keys.
        stored: rounding of entries when they are stored.
        topk: entries that a token selects.
    """

    dtype: torch.dtype
    rows: KVFormat
    keys: KeyFormat
    stored: Callable[[Tensor], Tensor]
    topk: int

    @property
    def unwritten(self) -> float:
        """Fill value of KV buffers: NaN, also as e4m3 and exponent bytes, so that a read of unwritten memory is
        detected.
        """
        return 127 if self.rows is KVFormat.FP8 else float("nan")


# Exact formats can detect a wrong selection. The served formats select everything, because FP4 changes the order of
# scores.
EXACT = Formats(torch.float32, KVFormat.FP32, KeyFormat.FP32, lambda rows: rows, topk=16)
SERVED = Formats(torch.bfloat16, KVFormat.FP8, KeyFormat.MXFP4, fp8_entries, topk=512)


def random_inputs(ratio: int, seed: int = 0) -> FormulaInputs:
    """Return random projections and weights of one layer, on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * std + mean

    x = FormulaInputs(
        ratio=ratio,
        kv=normal(TOKENS, 512),
        kv_norm=normal(512, mean=1.0, std=0.1),
        q=normal(TOKENS, HEADS, 512),
        sink=normal(HEADS),
    )
    if ratio:
        streams = 2 if ratio == 4 else 1
        x.kv_score = normal(TOKENS, 2 * streams * 512)
        x.entry_norm = normal(512, mean=1.0, std=0.1)
        x.ape = normal(ratio, streams * 512, std=0.5)
    if ratio == 4:
        x.index_kv_score = normal(TOKENS, 4 * 128)
        x.index_norm = normal(128, mean=1.0, std=0.1)
        x.index_ape = normal(4, 256, std=0.5)
        x.index_q = normal(TOKENS, INDEX_HEADS, 128)
        x.index_weights = normal(TOKENS, INDEX_HEADS, std=128**-0.5 * INDEX_HEADS**-0.5)
    return x


def _make_cache(ratio: int, formats: Formats, device: torch.device | str) -> tuple[KVCacheManager, int]:
    """Return an uninitialised cache of one layer, and the slot of a request in it.

    Slot 0 and block 0 are not the request's, so that a wrong index is detected.
    """
    config = dataclasses.replace(
        DSV4Config.flash(), num_hidden_layers=1, compress_ratios=(ratio,), max_position_embeddings=BLOCKS * 128
    )
    manager = KVCacheManager(
        config,
        build_schedule(config),
        max_concurrent_requests=2,
        num_blocks_per_csa_layer=BLOCKS,
        num_blocks_per_hca_layer=BLOCKS,
        kv_format=formats.rows,
        key_format=formats.keys,
        hca_state="online",
        device=device,
    )
    manager.admit_request()
    slot = manager.admit_request()
    manager.allocate_block()
    for _ in range(2):
        manager.allocate_block(slot)
    for pool in manager.state_pools:
        pool.ring.fill_(formats.unwritten)
        if pool.compressor_state is not None:
            pool.compressor_state.fill_(float("nan"))
    for table in (table for pool in manager.paged_pools if pool for table in pool.allocations):
        table.fill_(formats.unwritten)
    return manager, slot


def _step(manager: KVCacheManager, slot: int, x: FormulaInputs, tokens: slice, formats: Formats) -> Tensor:
    """Run append and attend for the request's tokens `tokens`. Return [n, H, 512]."""
    device = manager.device
    rope = rope_table(BLOCKS * 128, frequencies(x.ratio)).to(device)

    def part(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return None if tensor is None else tensor[tokens].to(dtype).contiguous()

    positions = torch.arange(TOKENS, device=device)[tokens]
    slots = torch.full_like(positions, slot)
    layer = manager.layer(0, manager.begin_step(slots, positions, slots))
    weights = LayerWeights(
        kv_norm=x.kv_norm,
        entry_norm=x.entry_norm,
        index_norm=x.index_norm,
        ape=x.ape,
        index_ape=x.index_ape,
        rope=rope,
        eps=EPS,
    )
    layer.append(x.kv[tokens].to(formats.dtype), weights, part(x.kv_score), part(x.index_kv_score))
    window, classical, keys = layer.read_swa_view(), layer.read_classical_view(), layer.read_indexer_view()
    entries = rows = lens = None
    if classical is not None:
        entries, rows, lens = classical.entries, classical.entry_indices, classical.n_visible
    if keys is not None:
        rows = torch.empty(len(positions), formats.topk, dtype=torch.int32, device=device)
        lens = keys.n_visible.clamp_max(formats.topk)
        torch.ops.dsv4_sglang.index_topk(
            *(part(x.index_q, formats.dtype), part(x.index_weights), keys.index_keys, keys.block_table),
            *(keys.token_request, positions, rope, keys.key_format),
            *(torch.empty(len(positions), BLOCKS * 32, device=device), rows),
        )
    q = rotate(x.q[tokens], positions, rope).to(formats.dtype)
    read = (window.window, window.window_indices, window.window_lens, entries, rows, lens)
    return torch.ops.dsv4_sglang.attend(q, x.sink, *read, positions, rope, 512**-0.5, window.kv_format)


def layer_error(ratio: int, device: torch.device | str, formats: Formats = EXACT) -> float:
    """Return the relative L2 distance of the ops from the formulas for one layer, of the worst token.

    Expected values. EXACT: 1e-6 on a CPU, 1e-3 on a GPU that multiplies in tf32. SERVED: 1 to 2 percent, because values
    that differ after the rounding to bf16 can be rounded to different FP8 values.

    Args:
        ratio: compression ratio of the layer, 0, 4 or 128.
        device: device of the ops.
        formats: formats of the comparison.
    """
    inputs = random_inputs(ratio)
    manager, slot = _make_cache(ratio, formats, device)
    x = inputs.to(manager.device)
    steps = [slice(0, PREFILL), *(slice(t, t + 1) for t in range(PREFILL, TOKENS))]
    found = torch.cat([_step(manager, slot, x, tokens, formats) for tokens in steps]).float().cpu()
    expected = layer_output(inputs, formats.topk, formats.stored)
    return float(((found - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))).max())
