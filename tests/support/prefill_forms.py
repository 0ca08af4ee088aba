"""Prefill steps of a real backend of one layer, run eagerly or as graphs of a fixed size in both forms.

On a CUDA device the graphs are CUDA graphs. On a CPU a replay runs the recorded step again, with the Python state that
the backend had when it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from torch import Tensor

from dsv4_sglang.cache.append import LayerWeights
from dsv4_sglang.ops.rope import rope_table
from dsv4_sglang.srt.attention import prefill_graphs
from dsv4_sglang.srt.attention.backend import HybridCacheBackend
from dsv4_sglang.srt.attention.layer_ops import IndexQuery, LayerInputs
from support.backend import make_runner
from support.kernel_cases import recorded


@dataclass(frozen=True)
class Setting:
    """Sizes of a layer and of its graphs.

    Attributes:
        ratio: compression ratio of the layer.
        size: tokens of a graph.
        context: tokens of the longest context.
        heads, index_heads, top_k: as in the model.
        formats: formats of the KV entries and of the index keys.
        dtype: dtype of queries and window projections.
        device: device of the backend.
    """

    ratio: int
    size: int
    context: int
    heads: int
    index_heads: int
    top_k: int
    formats: tuple[str, str]
    dtype: torch.dtype
    device: torch.device


class _Graphs:
    """SGLang's `BreakableCudaGraphBackend` as far as the hooks see it."""

    def __init__(self, backend: HybridCacheBackend) -> None:
        self._model_runner = SimpleNamespace(attn_backend=backend)
        self.backend = backend
        self.replays: dict[ShapeKey, Callable[[], Tensor]] = {}
        # Key of each replayed graph.
        self.replayed: list[ShapeKey] = []

    def capture_one(self, shape_key: ShapeKey, forward_fn: Callable[[], Tensor]) -> None:
        if self.backend.scratch.device.type == "cpu":
            self.replays[shape_key] = self._with_state(forward_fn)
            return
        forward_fn()
        graph, out = recorded(forward_fn, warm_up=True)

        def replay() -> Tensor:
            graph.replay()
            return out

        self.replays[shape_key] = replay

    def _with_state(self, forward_fn: Callable[[], Tensor]) -> Callable[[], Tensor]:
        backend = self.backend
        parts = backend, backend.layers, backend.recorder, backend.scratch, backend.snapshots
        forward_fn()
        state = [dict(vars(part)) for part in parts]

        def replay() -> Tensor:
            now = [dict(vars(part)) for part in parts]
            for part, attributes in zip(parts, state):
                vars(part).update(attributes)
            try:
                return forward_fn()
            finally:
                for part, attributes in zip(parts, now):
                    vars(part).update(attributes)

        return replay

    def replay(self, shape_key: ShapeKey, static_forward_batch: Any) -> Tensor:
        self.replayed.append(shape_key)
        return self.replays[shape_key]()


class FormSteps:
    """The steps. Request r, from 1 on, has state slot r. Two objects with one setting have the same weights."""

    def __init__(self, setting: Setting, requests: int) -> None:
        self.setting = setting
        s, self.generator = setting, torch.Generator().manual_seed(setting.ratio)
        runner = make_runner(
            s.ratio,
            heads=s.heads,
            top_k=s.top_k,
            requests=requests,
            staging=4,
            snapshots=4,
            context=s.context,
            formats=s.formats,
            dtype=s.dtype,
            device=str(s.device),
        )
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.backend = HybridCacheBackend(runner)
        # A model with short forms has CSA layers besides this one.
        self.backend.scratch.scored_per_block = 32
        self.graphs = _Graphs(self.backend)
        self.sink = self._random(128, dtype=torch.float32)
        self.weights = self._weights()
        self.static = self.random_inputs(s.size)
        self.static_batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            positions=torch.zeros(s.size, dtype=torch.int64, device=s.device),
            out_cache_loc=torch.zeros(s.size, dtype=torch.int64, device=s.device),
        )

    def _random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.setting.device)

    def _weights(self) -> LayerWeights:
        fp32, ratio = torch.float32, self.setting.ratio
        norm = {name: 1 + 0.1 * self._random(512, dtype=fp32) for name in ("kv_norm", "entry_norm")}
        rope = rope_table(self.setting.context, torch.logspace(0, -4, 32)).to(self.setting.device)
        if ratio == 0:
            return LayerWeights(kv_norm=norm["kv_norm"], rope=rope)
        if ratio == 128:
            return LayerWeights(**norm, ape=self._random(128, 512, dtype=fp32), rope=rope)
        index_norm, index_ape = 1 + 0.1 * self._random(128, dtype=fp32), self._random(4, 256, dtype=fp32)
        ape = self._random(4, 1024, dtype=fp32)
        return LayerWeights(**norm, index_norm=index_norm, ape=ape, index_ape=index_ape, rope=rope)

    def random_inputs(self, tokens: int) -> list[Tensor]:
        """Return the query, the projections and the index query of `tokens` tokens."""
        s, fp32 = self.setting, torch.float32
        shapes = [(s.heads, 512, s.dtype), (512, s.dtype)]
        if s.ratio:
            shapes.append((2048 if s.ratio == 4 else 1024, fp32))
        if s.ratio == 4:
            shapes += [(512, fp32), (s.index_heads, 128, s.dtype), (s.index_heads, fp32)]
        return [self._random(tokens, *sizes, dtype=dtype) for *sizes, dtype in shapes]

    def _batch(self, prefixes: list[int], chunks: list[int]) -> SimpleNamespace:
        device = self.setting.device
        requests = torch.arange(1, len(chunks) + 1, device=device)
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(prefixes, chunks)]).to(device)
        owner = torch.repeat_interleave(requests, torch.tensor(chunks, device=device))
        return SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(chunks),
            positions=positions,
            out_cache_loc=self.req_to_token[owner, positions].long(),
            req_pool_indices=requests,
            extend_prefix_lens=torch.tensor(prefixes, device=device),
            extend_seq_lens=torch.tensor(chunks, device=device),
            extend_prefix_lens_cpu=prefixes,
            extend_seq_lens_cpu=chunks,
        )

    def _forward(self, batch: Any, inputs: list[Tensor]) -> Tensor:
        """Run the layer as the model's forward pass does. Return the output [tokens, heads, 512]."""
        backend, s = self.backend, self.setting
        backend.begin_recorded()
        q, kv, kv_score, index_kv_score, index_q, index_weights = [*inputs, *[None] * (6 - len(inputs))]
        assert q is not None and kv is not None
        query = backend.query_buffer(len(q))
        query[:, : s.heads] = q
        index_query = None
        if index_q is not None and index_weights is not None:
            index_query = IndexQuery(index_q, index_weights, lambda: None)
        layer_inputs = LayerInputs(self.weights, self.sink, lambda: None, False, kv_score, index_kv_score, index_query)
        layer = SimpleNamespace(layer_id=0, scaling=512**-0.5)
        return backend.forward(query, kv, kv, layer, batch, inputs=layer_inputs).values

    def eager(self, prefixes: list[int], chunks: list[int], inputs: list[Tensor]) -> Tensor:
        """Run a step eagerly. Return the output of its tokens."""
        batch = self._batch(prefixes, chunks)
        self.backend.init_forward_metadata(batch)
        return self._forward(batch, inputs).clone()

    def record(self) -> None:
        """Record a graph as SGLang's runner does, through this package's hook."""
        self.metadata = self.backend.init_forward_metadata_for_breakable_cuda_graph_capture(self.static_batch)
        prefill_graphs.record_forms(
            _Graphs.capture_one,
            self.graphs,
            ShapeKey(size=self.setting.size),
            lambda: self._forward(self.static_batch, self.static),
        )

    def replay(self, prefixes: list[int], chunks: list[int], inputs: list[Tensor]) -> Tensor:
        """Replay the graph for a step, as SGLang's runner does. Return the output of its tokens."""
        batch, tokens = self._batch(prefixes, chunks), sum(chunks)
        for to, value in zip(self.static, inputs):
            to.zero_()[:tokens] = value
        self.static_batch.out_cache_loc.zero_()[:tokens] = batch.out_cache_loc
        self.backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(self.metadata, batch)
        key = ShapeKey(size=self.setting.size)
        return prefill_graphs.replay_form(_Graphs.replay, self.graphs, key, self.static_batch)[:tokens].clone()

    @property
    def is_short(self) -> bool:
        """True if the last replay was of the short form."""
        return self.graphs.replayed[-1].attention_variant == "short"

    def written(self) -> list[Tensor]:
        """Return copies of all tables that the layer writes."""
        tables = self.backend.layers.tables[0]
        return [
            t.clone()
            for t in (tables.ring, tables.compressor_state, tables.entries, tables.index_keys)
            if t is not None
        ]
