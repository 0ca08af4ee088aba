"""One attention layer in two implementations: HF transformers' DeepseekV4Attention in fp32, and our ops on real pools.

The widths that the cache fixes (512, 64, 128, window 128, ratios 4 and 128) are the real ones. Hidden size and number
of heads are small.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from dsv4_sglang.cache.append import LayerTables, LayerWeights, Projections, append_layer
from dsv4_sglang.cache.step import StepMetadata, v4_limits
from dsv4_sglang.formats import KeyFormat, KVFormat
from dsv4_sglang.model import DSV4Config
from dsv4_sglang.model.geometry import StateRows, state_rows
from dsv4_sglang.model.rope import rope_frequencies
from dsv4_sglang.ops.rope import rms_norm, rope_table, rotate

HIDDEN, HEADS, Q_RANK, GROUPS = 64, 4, 32, 2
NO_DRAFTS = state_rows(0)
INDEX_HEADS, EPS, SCALE = 32, 1e-6, 512**-0.5
LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def frequencies(ratio: int) -> Tensor:
    return rope_frequencies(DSV4Config.flash(), ratio, torch.get_default_device())


def undefined(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory whose contents make a read of unwritten entries visible."""
    return torch.full(shape, 127 if dtype == torch.uint8 else math.nan, dtype=dtype)


def make_config(topk: int) -> DeepseekV4Config:
    config = DeepseekV4Config(
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        head_dim=512,
        partial_rotary_factor=64 / 512,
        q_lora_rank=Q_RANK,
        layer_types=list(LAYER_TYPES.values()),
        compress_rates={LAYER_TYPES[4]: 4, LAYER_TYPES[128]: 128},
        sliding_window=128,
        o_groups=GROUPS,
        o_lora_rank=8,
        index_n_heads=INDEX_HEADS,
        index_head_dim=128,
        index_topk=topk,
        max_position_embeddings=1048576,
        vocab_size=100,
        moe_intermediate_size=32,
        n_routed_experts=8,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )
    config._attn_implementation = "eager"
    return config


def make_attention(ratio: int, seed: int = 0, topk: int = 16) -> hf.DeepseekV4Attention:
    """Return the HF attention of one layer kind with every parameter initialised.

    HF leaves the biases and sinks of a new layer uninitialised.
    """
    generator = torch.Generator().manual_seed(seed)
    attention = hf.DeepseekV4Attention(make_config(topk), list(LAYER_TYPES).index(ratio))
    with torch.no_grad():
        for name, p in attention.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if p.dim() > 1 or "sink" in name else 0.1))
            if "norm" in name:
                p.add_(1.0)
    return attention.eval().requires_grad_(False)


def hf_forward(attention, x: Tensor, cache: DynamicCache | None = None, start: int = 0) -> Tensor:
    """Run one chunk x [n, HIDDEN] at position `start` through HF (SPEC 8).

    A band mask over [past 127 | new] keys limits the window.
    """
    rotary = hf.DeepseekV4RotaryEmbedding(attention.config)
    n = x.shape[0]
    positions = torch.arange(start, start + n)[None]
    embeddings = {kind: rotary(x[None], positions, layer_type=kind) for kind in ("main", "compress")}
    past = min(start, 127) if cache is not None else 0
    keys = torch.arange(start - past, start + n)
    query = positions[0][:, None]
    mask = torch.where((keys[None] <= query) & (keys[None] > query - 128), 0.0, -math.inf)[None, None]
    with torch.no_grad():
        return attention(x[None], embeddings, positions, mask, past_key_values=cache)[0][0]


@dataclass
class Layer:
    """Our layer: HF's weights in the format of model checkpoints, our pools, and one `step` per batch of chunks."""

    attention: torch.nn.Module
    ratio: int
    rows: str = "fp32"
    keys: str = "fp32"
    hca_state: str = "raw"
    sizes: StateRows = NO_DRAFTS
    slots: int = 4
    blocks: int = 16
    topk: int = 16
    dtype: torch.dtype = torch.float32
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        a = self.attention
        self.rope = rope_table(self.blocks * 128, frequencies(self.ratio))
        self.kv_format = self.ring_format = KVFormat(self.rows)
        self.key_format = KeyFormat(self.keys)
        width, dtype = self.kv_format.width, self.kv_format.dtype
        self.ring = undefined((self.slots, self.sizes.ring, width), dtype)
        self.entries = self.index_keys = self.compressor_state = None
        self.kv_weight = a.kv_proj.weight
        if not self.ratio:
            return
        c = a.compressor
        self.score_weight, self.ape, self.entry_norm = (
            torch.cat([c.kv_proj.weight, c.gate_proj.weight]),
            c.position_bias.detach(),
            c.kv_norm.weight,
        )
        if self.ratio == 128:
            self.entries = undefined((1, self.blocks, width), dtype)
            rows = {"raw": 256, "online": 3 * self.sizes.hca_state_copies}[self.hca_state]
            self.compressor_state = torch.full((self.slots, rows, 512), float("nan"))
            return
        self.entries = undefined((self.blocks, 32, width), dtype)
        self.compressor_state = torch.full((self.slots, self.sizes.csa.rows, 640), float("nan"))
        self.index_keys = undefined((self.blocks, 32, self.key_format.width), self.key_format.dtype)
        i = c.indexer
        self.index_score_weight = torch.cat([i.kv_proj.weight, i.gate_proj.weight])
        self.index_ape, self.index_norm = i.position_bias.detach(), i.kv_norm.weight

    def project(self, x: Tensor) -> Projections:
        """Return the raw projections that `append` takes."""
        return Projections(
            (x @ self.kv_weight.T).to(self.dtype),
            (x @ self.score_weight.T).float() if self.ratio else None,
            (x @ self.index_score_weight.T).float() if self.ratio == 4 else None,
        )

    @property
    def weights(self) -> LayerWeights:
        names = ("entry_norm", "ape", "index_norm", "index_ape")
        compressor = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return LayerWeights(kv_norm=self.attention.kv_norm.weight, rope=self.rope, eps=EPS, **compressor)

    def append(self, step: StepMetadata, projections: Projections, window: Tensor | None) -> None:
        tables = LayerTables(self.ring, self.compressor_state, self.entries, self.index_keys)
        append_layer(self, tables, self.weights, projections, step, window)

    def step(
        self, chunks: dict[int, Tensor], tables: dict[int, list[int]], decode=False, track=None, read=True
    ) -> dict:
        """Append and attend a batch of chunks.

        Args:
            chunks: {slot: x [n, HIDDEN]}.
            tables: {slot: block ids}.
            decode: read the window from the rings.
            track: snapshot slot of each token, or None.
            read: compute the outputs.

        Returns:
            {slot: output [n, HIDDEN]}.
        """
        requests = [(s, self.lengths.get(s, 0), len(x)) for s, x in chunks.items()]
        step = make_step(requests, tables, self.sizes.ring if decode else None)
        step.staging_slots = track
        x = torch.cat(list(chunks.values()))
        window = None
        if not decode:
            window = undefined((1, step.window_size, self.kv_format.width), self.kv_format.dtype)
        self.append(step, self.project(x), window)
        out = self.read(step, x, window) if read else x
        for slot, rows in chunks.items():
            self.lengths[slot] = self.lengths.get(slot, 0) + len(rows)
        return dict(zip(chunks, out.split([len(c) for c in chunks.values()])))

    def visible(self, positions: Tensor) -> Tensor:
        """Return the number of entries that each query sees (SPEC 4.3)."""
        return (positions + 1) // self.ratio

    def read(self, step: StepMetadata, x: Tensor, window: Tensor | None) -> Tensor:
        a, ratio, positions = self.attention, self.ratio, step.positions
        latent = rms_norm(x @ a.q_a_proj.weight.T, a.q_a_norm.weight, EPS)
        q = (latent @ a.q_b_proj.weight.T).view(-1, HEADS, 512)
        q = rotate(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS), positions, self.rope).to(self.dtype)
        entry_indices = entry_lens = entry_owner = None
        if ratio:
            visible = self.visible(positions)
            if ratio == 4:
                i = a.compressor.indexer
                weights = (x @ i.scorer.weights_proj.weight.T) * (128**-0.5 * INDEX_HEADS**-0.5)
                entry_indices = torch.empty(len(x), self.topk, dtype=torch.int32)
                query = (latent @ i.q_b_proj.weight.T).view(-1, INDEX_HEADS, 128).to(self.dtype)
                torch.ops.dsv4_sglang.index_topk(
                    query, weights, self.index_keys, step.block_table, step.token_request, positions, self.rope,
                    self.key_format.code, torch.empty(0), entry_indices,
                )  # fmt: skip
                entry_lens = visible.clamp_max(self.topk).int()
            else:
                entry_indices, _, entry_owner = step.hca_list()
                entry_lens = visible.int()
        o = torch.ops.dsv4_sglang.attend(
            q, a.sinks.float(), self.ring if window is None else window, step.window_indices, step.window_lens,
            self.entries, entry_indices, entry_lens, positions, self.rope, SCALE, self.kv_format.code,
            entry_owner,
        )  # fmt: skip
        g = o.float().reshape(len(x), GROUPS, -1)
        w = a.o_a_proj.weight.view(GROUPS, -1, g.shape[-1])
        return torch.einsum("ngd,grd->ngr", g, w).flatten(1) @ a.o_b_proj.weight.T


def make_step(
    requests: list[tuple[int, int, int]], tables: dict[int, list[int]], ring_rows: int | None = None
) -> StepMetadata:
    """Return the metadata of a step of `requests`: (slot, tokens before, new tokens).

    Args:
        requests: the requests.
        tables: block ids by slot.
        ring_rows: entries of a ring, for a decode step; None for a prefill step.
    """
    slots, prefix, counts = (torch.tensor(c, dtype=torch.int32) for c in zip(*requests))
    start = torch.nn.functional.pad(counts.cumsum(0).int(), (1, 0))
    request = torch.repeat_interleave(torch.arange(len(requests)), counts.long())
    positions = (prefix[request] + torch.arange(len(request)) - start[request]).long()
    table = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(tables[s], dtype=torch.int32) for s in slots.tolist()], batch_first=True, padding_value=-1
    )
    return StepMetadata.build(
        slots=slots,
        prefix_lens=prefix,
        query_start=start,
        token_request=request.int(),
        positions=positions,
        out_loc=table[request, positions // 128].long() * 128 + positions % 128,
        block_table=table,
        limits=v4_limits(),
        decode_ring_rows=ring_rows,
    )
