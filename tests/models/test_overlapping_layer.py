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
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.server_args import ServerArgs
from support.backend import make_runner

from dsv4_sglang.attention.flashmla import FlashMLAAttention
from dsv4_sglang.attention.registry import PortableAttention
from dsv4_sglang.srt.attention import backend as backend_module
from dsv4_sglang.srt.attention import layer_ops
from dsv4_sglang.srt.attention.backend import HybridCacheBackend, LayerOutput
from dsv4_sglang.srt.models import attention
from dsv4_sglang.srt.models.attention import CachedAttention
from dsv4_sglang.srt.sglang.models import config_class
from dsv4_sglang.testing.tiny_config import TinySpec, config_json

SPEC = TinySpec()


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

    def doing(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that records `name` and then does the work."""

        def recorded(*args: Any) -> Any:
            self.do(name)
            return work(*args)

        return recorded


def in_processes(count: int, folder: Path, work: Callable[[int], None], **flags: Any) -> None:
    """Run `work(rank)` in forks of this process, a group of tensor-parallel servers with these flags. All of them must
    succeed."""
    children = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            try:
                where = f"file://{folder}/found"
                parallel_state.init_distributed_environment(count, rank, where, rank, "gloo")
                args = ServerArgs(model_path="dummy", device="cpu", tp_size=count, **flags)
                ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank)
                runtime_context.publish(args, role="test", ranks=ranks)
                parallel_state.initialize_model_parallel(backend="gloo")  # takes the sizes from the published flags
                work(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count


def make_config() -> Any:
    return config_class()(**config_json(SPEC))


def make_layer(ratio: int, streams: list[Stream]) -> CachedAttention:
    """Return a layer of a model with random parameters."""
    torch.manual_seed(0)
    layer = CachedAttention(make_config(), SPEC.ratios.index(ratio), None, "", streams)
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


def record_work(layer: CachedAttention, device: Device, name: str) -> None:
    """Record what the layer does under `name`, and let it use its streams, which it does in CUDA graphs only."""
    layer._overlaps = lambda x: True
    works = {"_down": "down", "_latent": "latent", "_query": "query", "_project_out": "out"}
    if layer.compressor:
        works["projections"] = "project"
    for method, work in works.items():
        setattr(layer, method, device.doing(f"{name} {work}", getattr(layer, method)))
    if layer.indexer:
        projection = layer.indexer.wq_b
        projection.forward = device.doing(f"{name} index query", projection.forward)


def begin_decode(backend: HybridCacheBackend) -> SimpleNamespace:
    """Build the metadata of a decode step of one request with three tokens. Return its batch."""
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=1,
        seq_lens=torch.tensor([4]),
        req_pool_indices=torch.tensor([1]),
        out_cache_loc=backend.req_to_token_pool.req_to_token[1, 3:4].long(),
        mamba_track_mask=None,
        mamba_track_indices=None,
    )
    backend.init_forward_metadata(batch)
    return batch


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_order_of_a_layer(ratio: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> None:
        check_order(ratio, monkeypatch)

    in_processes(1, tmp_path, work)


@torch.no_grad()
def check_order(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    streams = [Stream(), Stream()]
    made = {name: make_layer(ratio, streams) for name in "AB"}
    backend = HybridCacheBackend(make_runner(ratio, heads=SPEC.heads))
    monkeypatch.setattr(attention, "get_attn_backend", lambda: backend)
    at = SimpleNamespace(layer="")
    for op in ("append", "index_topk", "attend"):
        real = getattr(torch.ops.dsv4_sglang, op)

        def recorded(*args: Any, op: str = op, real: Callable[..., Any] = real) -> Any:
            device.do(f"{at.layer} {op}")
            return real(*args)

        monkeypatch.setattr(torch.ops.dsv4_sglang, op, recorded)
    for name, layer in made.items():
        record_work(layer, device, name)
        layer.attn_mqa.layer_id, at.layer = 0, name
        batch = begin_decode(backend)
        device.do(f"{name} x")
        out = layer(torch.tensor([3]), torch.randn(1, SPEC.hidden), batch)
        assert out.shape == (1, SPEC.hidden) and out.isfinite().all()
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


def test_projections_of_x_are_one_matrix(tmp_path: Path) -> None:
    """The parameters are views of the fused weight, stay so after weights are reloaded, and give the same products."""

    def work(rank: int) -> None:
        layer = make_layer(4, [])
        linears = [layer.compressor.wkv_gate, layer.indexer.compressor.wkv_gate, layer.indexer.weights_proj]
        names = {name for name, _ in layer.named_parameters()}
        x = torch.randn(5, SPEC.hidden)
        for _ in range(2):
            for linear in linears:
                linear.weight.weight_loader(linear.weight, torch.randn(linear.weight.shape))
            layer.projections.fuse()
            fused = layer.projections.weight
            assert {name for name, _ in layer.named_parameters()} == names
            for projected, linear in zip(layer.projections(x), linears):
                assert linear.weight.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
                expected = x.double() @ linear.weight.double().T
                # The error of an fp32 sum of n products is at most n eps times the sum of their magnitudes.
                bound = x.abs() @ linear.weight.abs().T * SPEC.hidden * torch.finfo(torch.float32).eps
                assert projected.dtype == torch.float32 and ((projected - expected).abs() <= bound).all()
        address = fused.data_ptr()
        layer.projections.fuse()
        assert layer.projections.weight.data_ptr() == address

    in_processes(1, tmp_path, work)


def test_graphs_keep_their_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded graphs write to fixed addresses, so their buffers stay allocated when a longer step needs larger ones.
    Padding heads of a query are zero in every step, inside CUDA graphs and outside them."""
    kernels = [FlashMLAAttention(), PortableAttention()]
    monkeypatch.setattr(backend_module, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1, attn_dp_size=1))
    monkeypatch.setattr(layer_ops, "make_kernels", lambda *model: kernels)
    backend = HybridCacheBackend(make_runner(4, heads=5, top_k=8))
    assert backend.query_buffer(3).shape == (3, 5, 512)
    backend.layers.kernel = kernels[0]
    backend.init_cuda_graph_state(4, 4)
    table = torch.zeros(4, 64)

    def scratch(tokens: int) -> list[torch.Tensor]:
        return [
            backend.query_buffer(tokens),
            backend.scratch.indices(tokens),
            backend.scratch.scores(tokens, table),
        ]

    assert scratch(4)[2].shape == (4, 64 * 32)
    recorded = [tensor.data_ptr() for tensor in scratch(4)]
    for tokens in (4, 100, 3, 300, 100, 4):
        query, *others = scratch(tokens)
        assert query.shape == (tokens, 64, 512) and not query[:, 5:].any()
        query[:, :5] = float("nan")
        assert all(len(tensor) == tokens for tensor in others)
    backend.free_scratch()
    assert [tensor.data_ptr() for tensor in scratch(4)] == recorded


def test_attention_is_summed_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tensor-parallel processes, of which two share a layer's heads, each get the whole output. SGLang splits this
    way with DP attention, and with context parallelism."""
    monkeypatch.setattr(attention.in_tree, "_FP8_WO_A_GEMM", False)
    config = make_config()
    torch.manual_seed(0)
    dim = config.num_attention_heads * 512 // config.o_groups
    wo_a = torch.randn(config.o_groups * config.o_lora_rank, dim, dtype=torch.bfloat16)
    wo_b = torch.randn(config.hidden_size, config.o_groups * config.o_lora_rank)
    heads = torch.randn(5, config.num_attention_heads, 512)
    low = torch.einsum("tgd,grd->tgr", heads.view(5, config.o_groups, dim), wo_a.float().view(config.o_groups, -1, dim))
    whole = low.flatten(1) @ wo_b.T

    def work(rank: int) -> None:
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

    in_processes(4, tmp_path, work, dp_size=2, enable_dp_attention=True)
