"""Tests of one layer's attention on a CPU, with fake streams that record ordering.

Every operation records what its stream has seen as a vector clock. An operation is ordered after another only if its
stream waited for it, directly or through other streams, whatever the order of Python's calls.
"""

import os
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.server_args import ServerArgs
from torch import nn

from dsv4_sglang.attention.flashmla import FlashMLAAttention
from dsv4_sglang.attention.registry import PortableAttention
from dsv4_sglang.cache.append import LayerTables
from dsv4_sglang.cache.schema import build_schema
from dsv4_sglang.model import DSV4Config, build_schedule
from dsv4_sglang.srt.attention.backend import HybridCacheBackend, LayerOutput
from dsv4_sglang.srt.models import layers
from dsv4_sglang.srt.models.layers import CachedAttention, CompressorWeights, IndexerWeights
from dsv4_sglang.srt.sglang.models import config_class
from dsv4_sglang.testing.tiny import TinySpec, config_json

CONFIG = SimpleNamespace(
    hidden_size=8, rms_norm_eps=1e-6, index_n_heads=4, index_head_dim=128, q_lora_rank=16, head_dim=512
)


class Stream:
    def __init__(self) -> None:
        self.seen: dict[Stream, int] = {}

    def wait_stream(self, other: "Stream") -> None:
        for stream, count in other.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def record_event(self) -> "Stream":
        """Return an event with everything that this stream has seen."""
        event = Stream()
        event.seen = dict(self.seen)
        return event

    wait_event = wait_stream


class Device:
    """Fake of `torch.cuda` with streams and the work done on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = Stream()
        self.work: dict[str, tuple[Stream, int, dict[Stream, int]]] = {}
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.switch)

    @contextmanager
    def switch(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def do(self, name: str) -> None:
        stream = self.current
        stream.seen[stream] = stream.seen.get(stream, 0) + 1
        self.work[name] = stream, stream.seen[stream], dict(stream.seen)

    def ordered(self, first: str, then: str) -> bool:
        stream, count, _ = self.work[first]
        return self.work[then][2].get(stream, 0) >= count

    def doing(self, name: str, result=None):
        def work(*args, **kwargs):
            self.do(name)
            return result(*args) if callable(result) else result

        return work


def make_layer(ratio: int, streams: list[Stream], device: Device, name: str) -> CachedAttention:
    layer = CachedAttention.__new__(CachedAttention)
    nn.Module.__init__(layer)
    layer.compress_ratio, layer.eps, layer.rope, layer.streams = ratio, 1e-6, torch.zeros(4, 64), tuple(streams)
    layer.kv_norm, layer._sinks = nn.LayerNorm(512), torch.zeros(1)
    layer._widths, layer._weight_of_x, layer.quantises_output = [], torch.zeros(0), False
    layer.compressor = CompressorWeights(CONFIG, ratio, 512, "compressor") if ratio else None
    layer.indexer = IndexerWeights(CONFIG, None, "indexer") if ratio == 4 else None
    layer._overlaps = lambda x: True
    layer._down = device.doing(f"{name} down", (torch.zeros(1, 16), torch.zeros(1, 512)))
    layer._latent = device.doing(f"{name} latent", torch.zeros(1, 16))
    layer._query = device.doing(f"{name} query")
    layer._project_out = device.doing(f"{name} out", torch.zeros(1, 8))
    if ratio:
        project = layer._project_x
        layer._project_x = device.doing(f"{name} project", project)
    if layer.indexer:
        layer.indexer.wq_b.forward = device.doing(f"{name} index query", (torch.zeros(1, 512), None))
    return layer


def make_backend(
    device: Device, monkeypatch: pytest.MonkeyPatch, ratio: int = 4
) -> tuple[HybridCacheBackend, SimpleNamespace]:
    """Make the real backend's decode over fake ops, which record themselves under the name of the current layer."""
    backend = HybridCacheBackend.__new__(HybridCacheBackend)
    config = DSV4Config.flash()
    spec = next(spec for spec in build_schedule(config) if spec.attn.ratio == ratio)
    backend.schemas = [build_schema(config, spec, kv_format="fp32", key_format="fp32")]
    backend.tables = [LayerTables(None, None, None, None)]
    backend.state = SimpleNamespace(layout=SimpleNamespace(ring_rows=128))
    backend.last_layer, backend.top_k, backend.device = -1, 8, "cpu"
    backend.is_draft = backend.drafts_blocks = backend._recorded = False
    backend.draft_tokens = 0
    backend.heads, backend.dtype, backend.kernels = 1, torch.float32, [PortableAttention()]
    backend.kernel, backend._graph_scratch, backend._scratch = PortableAttention(), {}, {}
    i = torch.zeros(1, dtype=torch.int32)
    backend.metadata = SimpleNamespace(
        **dict.fromkeys(("slots", "prefix_lens", "query_start", "token_request", "out_loc", "csa_lens", "hca_lens"), i),
        positions=i,
        block_table=i[None],
        window_indices=i[None],
        window_lens=i,
        hca_list=lambda: (i[None], i, None),
        track_slots=None,
        is_decode=True,
        copy_src=None,
    )
    at = SimpleNamespace(layer="")
    for op, result in (("append", None), ("index_topk", None), ("attend", torch.zeros(1, 1, 512))):
        monkeypatch.setattr(
            torch.ops.dsv4_sglang, op, lambda *args, op=op, result=result: device.do(f"{at.layer} {op}") or result
        )
    return backend, at


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_order_of_a_layer(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    streams = [Stream(), Stream()]
    backend, at = make_backend(device, monkeypatch, ratio)
    monkeypatch.setattr(layers, "get_attn_backend", lambda: backend)
    for name in "AB":
        layer = make_layer(ratio, streams, device, name)
        at.layer = name
        layer.attn_mqa = lambda q, k, v, batch, inputs: backend.forward(
            q, k, v, SimpleNamespace(layer_id=0, scaling=1.0), batch, inputs=inputs
        )
        device.do(f"{name} x")
        batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
        assert layer(torch.zeros(1), torch.zeros(1, 8), batch).shape == (1, 8)
    work = {name[2:] for name in device.work}
    assert len(work) == {0: 7, 128: 8, 4: 10}[ratio]
    needs = {
        "project": ["x"],
        "down": ["x"],
        "latent": ["down"],
        "query": ["latent"],
        "index query": ["latent"],
        "append": ["down", "project"],
        "index_topk": ["append", "index query", "project"],
        "attend": ["append", "index_topk", "query"],
        "out": ["attend"],
    }
    for name in "AB":
        for then, firsts in needs.items():
            for first in firsts:
                if then in work and first in work:
                    assert device.ordered(f"{name} {first}", f"{name} {then}"), (first, then)
    # Memory that the next layer reuses is free by then.
    for then in work - {"x"}:
        assert device.ordered("A out", f"B {then}"), then

    beside_query = [("query", name) for name in ("append", "index_topk", "project", "index query")]
    for pair in [*beside_query, ("latent", "append"), ("index query", "append"), ("down", "project")]:
        if set(pair) <= work:
            one, other = (f"A {name}" for name in pair)
            assert not device.ordered(one, other) and not device.ordered(other, one), pair


def test_projections_of_x_are_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters are views of the fused weight, stay so after weights are reloaded, and give the same products."""
    torch.manual_seed(0)
    layer = make_layer(4, [None, None], Device(monkeypatch), "A")
    linears = [layer.compressor.wkv_gate, layer.indexer.compressor.wkv_gate, layer.indexer.weights_proj]
    names = {name for name, _ in layer.named_parameters()}
    x = torch.randn(5, 8)
    for _ in range(2):
        for linear in linears:
            linear.weight.weight_loader(linear.weight, torch.randn(linear.weight.shape))
        layer.fuse_projections_of_x()
        fused = layer._weight_of_x
        assert {name for name, _ in layer.named_parameters()} == names
        for projected, linear in zip(layer._project_x(x), linears):
            assert linear.weight.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
            expected = layers.linear_fp32(x, linear.weight)
            assert projected.dtype == torch.float32 and torch.allclose(projected, expected, atol=1e-5)
    address = fused.data_ptr()
    layer.fuse_projections_of_x()
    assert layer._weight_of_x.data_ptr() == address


def test_graphs_keep_their_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded graphs write to fixed addresses, so their buffers stay allocated when a longer step needs larger ones.
    Padding heads of a query are zero in every step, inside CUDA graphs and outside them."""
    backend, _ = make_backend(Device(monkeypatch), monkeypatch)
    backend.max_blocks, backend.heads = 64, 5
    assert backend.query_buffer(3).shape == (3, 5, 512)
    backend.kernel = FlashMLAAttention()
    backend.kernels.insert(0, backend.kernel)
    backend.init_cuda_graph_state(4, 4)
    width = backend._score_width(backend._graph_buffers.block_table)
    assert width > 0

    def scratch(tokens: int) -> list[torch.Tensor]:
        indices = backend._buffer("indices", tokens, backend.top_k, torch.int32)
        return [backend.query_buffer(tokens), indices, backend._buffer("scores", tokens, width, torch.float32)]

    recorded = [tensor.data_ptr() for tensor in scratch(4)]
    for tokens in (4, 100, 3, 300, 100, 4):
        query, *others = scratch(tokens)
        assert query.shape == (tokens, 64, 512) and not query[:, 5:].any()
        query[:, :5] = float("nan")
        assert all(len(tensor) == tokens for tensor in others)
    assert [tensor.data_ptr() for tensor in scratch(4)] == recorded


def in_processes(count: int, folder: Path, work: Callable[[int], None]) -> None:
    """Run `work(rank)` in forks of this process, which find each other through a file. All of them must succeed."""
    children = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            try:
                where = f"file://{folder}/found"
                parallel_state.init_distributed_environment(count, rank, where, rank, "gloo")
                work(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count


def test_attention_is_summed_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tensor-parallel processes, of which two share a layer's heads, each get the whole output. SGLang splits this
    way with DP attention, and with context parallelism."""
    monkeypatch.setattr(layers.in_tree, "_FP8_WO_A_GEMM", False)
    spec = TinySpec()
    config = config_class()(**config_json(spec))
    torch.manual_seed(0)
    dim = config.num_attention_heads * 512 // config.o_groups
    wo_a = torch.randn(config.o_groups * config.o_lora_rank, dim, dtype=torch.bfloat16)
    wo_b = torch.randn(config.hidden_size, config.o_groups * config.o_lora_rank)
    heads = torch.randn(5, config.num_attention_heads, 512)
    low = torch.einsum("tgd,grd->tgr", heads.view(5, config.o_groups, dim), wo_a.float().view(config.o_groups, -1, dim))
    whole = low.flatten(1) @ wo_b.T

    def work(rank: int) -> None:
        args = ServerArgs(model_path="dummy", device="cpu", tp_size=4, dp_size=2, enable_dp_attention=True)
        runtime_context.publish(args, role="test", ranks=runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank))
        parallel_state.initialize_model_parallel(backend="gloo")  # takes the sizes from the published flags
        layer = CachedAttention(config, 0, None, "", None)
        layer.wo_a.weight.weight_loader(layer.wo_a.weight, wo_a)
        layer.wo_b.weight.weight_loader(layer.wo_b.weight, wo_b)
        mine = heads.tensor_split(2, dim=1)[rank % 2]
        out = layer._project_out(LayerOutput(mine, rotated=False), torch.arange(5), defer_all_reduce=False)
        assert layer.attn_tp_size == 2 and torch.allclose(out, whole, rtol=1e-4, atol=1e-4 * whole.abs().max())
        # The buffer holds this process's sinks, also after a reload, and padding for kernels with more heads.
        for sinks in (torch.arange(config.num_attention_heads), torch.randn(config.num_attention_heads)):
            default_weight_loader(layer.attn_sink, sinks.float())
            own = sinks.float().tensor_split(2)[rank % 2]
            assert torch.equal(layer._sinks[: len(own)], own) and len(layer._sinks) >= 128

    in_processes(4, tmp_path, work)
