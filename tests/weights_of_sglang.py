"""Weights as SGLang's own constructors make them, without memory; `test_plan.py` runs this file."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.models import deepseek_v4 as in_tree
from sglang.srt.models import deepseek_v4_nextn
from sglang.srt.server_args import ServerArgs
from torch import nn

from dsv4_sglang.srt import compat
from dsv4_sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
from dsv4_sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
from dsv4_sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN
from dsv4_sglang.srt.weights import (
    DraftWeights,
    Format,
    Model,
    Split,
    draft_weight_bytes,
    dspark_weight_bytes,
    weight_bytes,
)
from dsv4_sglang.testing.tiny import TinySpec, config_json

NAMES = (
    "hidden_size",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "num_attention_heads",
    "moe_intermediate_size",
    "n_routed_experts",
)
WIDTHS = {
    "flash": dict(zip(NAMES, (4096, 1024, 1024, 8, 64, 2048, 256))),
    "pro": dict(zip(NAMES, (7168, 1536, 1024, 16, 128, 3072, 384))),
}
LAYERS = (0, 4, 128, 4)
"""As V4-Flash, some with the window alone; V4-Pro has none of these."""


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    where = f"file://{tmp_path_factory.mktemp('found')}/found"
    parallel_state.init_distributed_environment(1, 0, where, 0, "gloo")
    runtime_context.publish(
        ServerArgs(model_path="dummy", device="cpu", disable_shared_experts_fusion=True), role="test"
    )
    parallel_state.initialize_model_parallel(1, backend="gloo")


@contextmanager
def first_of(split: Split, monkeypatch: pytest.MonkeyPatch):
    """What a model that is built meanwhile sees is the first process of `split`, and memory is not allocated."""
    sizes = {"tp": split.tp, "attn_tp": split.attention, "moe_tp": split.tp, "attn_dp": split.dp}
    seen = {f"{name}_{what}": n for name, size in sizes.items() for what, n in (("size", size), ("rank", 0))}
    monkeypatch.setattr(in_tree, "_FP8_WO_A_GEMM", True)  # SGLang's default, which is not that of the nursery
    for module in (in_tree, deepseek_v4_nextn):
        monkeypatch.setattr(module, "is_dp_attention_enabled", lambda: split.dp > 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with runtime_context.get_parallel().override(**seen), torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def fp8(experts: Format) -> Fp8Config:
    return Fp8Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="dynamic",
        weight_block_size=[128, 128],
        is_fp4_experts=experts is Format.FP4,
    )


def group(name: str) -> str:
    for part, found in (
        ("shared_experts", "shared experts"),
        ("mlp.experts", "routed experts"),
        ("compressor", "compressors, indexers"),
        ("indexer", "compressors, indexers"),
        ("self_attn", "attention"),
        ("embed_tokens", "embedding, head"),
        ("lm_head", "embedding, head"),
    ):
        if part in name:
            return found
    return "routers, norms, streams"


def kept_bytes(model: nn.Module, name: str) -> int:
    """SGLang loads the scales of FP4 experts as fp32, and its kernels keep a byte of each."""
    parameter = model.get_parameter(name)
    if "mlp.experts" in name and name.endswith("_scale_inv"):
        weight = model.get_parameter(name.removesuffix("_scale_inv"))
        if weight.dtype == torch.int8:
            assert parameter.dtype == torch.float32
            return parameter.numel()
    return parameter.numel() * parameter.element_size()


def parameters_of(model: nn.Module) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, _ in model.named_parameters():
        sums[group(name)] = sums.get(group(name), 0) + kept_bytes(model, name)
    return sums


def tables_of(model: nn.Module) -> dict[int, int]:
    """Bytes of each RoPE table; layers and models share them."""
    named = (buffer for name, buffer in model.named_buffers() if name.endswith("freqs_cis"))
    return {id(table): table.numel() * table.element_size() for table in named}


@pytest.mark.parametrize(
    ("widths", "layers", "split", "experts"),
    [
        ("flash", LAYERS, Split(1), Format.FP8),
        ("flash", LAYERS, Split(2), Format.FP4),
        ("flash", LAYERS, Split(4, 2), Format.FP8),
        ("pro", LAYERS[1:], Split(8), Format.FP4),
        ("pro", LAYERS[1:], Split(8, 8), Format.FP8),
    ],
    ids=str,
)
def test_bytes_of_each_kind(
    widths: str,
    layers: tuple[int, ...],
    split: Split,
    experts: Format,
    one_process: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = config_json(TinySpec(ratios=layers, vocab=129280)) | WIDTHS[widths]
    config = compat.config_class()(**values)
    quantised = fp8(experts)
    with first_of(split, monkeypatch):
        built = DeepseekV4ForCausalLM(config, quantised)
        draft = DeepseekV4ForCausalLMNextN(config, quantised)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**values, "quantization_config": {"quant_method": "fp8"}}))
    model, tables = Model.from_file(file), tables_of(built)
    assert {**parameters_of(built), "RoPE tables": sum(tables.values())} == weight_bytes(model, split, experts)
    drafts = parameters_of(draft)
    shared = drafts.pop("embedding, head")
    of_its_own = sum(size for table, size in tables_of(draft).items() if table not in tables)
    assert DraftWeights(sum(drafts.values()) + of_its_own, shared) == draft_weight_bytes(model, split, experts)


@pytest.mark.parametrize(
    ("widths", "layers", "split", "experts"),
    [
        ("flash", LAYERS, Split(1), Format.FP8),
        ("flash", LAYERS, Split(4), Format.FP4),
        ("pro", LAYERS[1:], Split(8), Format.FP4),
    ],
    ids=str,
)
def test_bytes_of_a_dspark_head(
    widths: str,
    layers: tuple[int, ...],
    split: Split,
    experts: Format,
    one_process: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = config_json(TinySpec(ratios=layers, vocab=129280, dspark=5)) | WIDTHS[widths]
    quantised = fp8(experts)
    with first_of(split, monkeypatch):
        config = compat.config_class()(**values)
        built, head = DeepseekV4ForCausalLM(config, quantised), DeepseekV4ForCausalLMDSpark(config, quantised)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**values, "quantization_config": {"quant_method": "fp8"}}))
    tables = tables_of(built)
    of_its_own = sum(size for table, size in tables_of(head).items() if table not in tables)
    assert sum(parameters_of(head).values()) + of_its_own == dspark_weight_bytes(Model.from_file(file), split, experts)
