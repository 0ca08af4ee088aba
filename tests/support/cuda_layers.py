"""SGLang's CUDA layer classes in a server on a CPU, for server_plugin.py.

SGLang chooses the class of a decoder layer by device when its module is imported. The CUDA class divides the work with
attention and experts in a different way: it sums the parts of all processes itself. Only GPU kernels are replaced
here: the experts, and V4.1's hyper-connections.
"""

from __future__ import annotations

from typing import Any


def choose() -> None:
    """Let SGLang build its CUDA layer classes in this process. The package's classes must not be imported yet."""
    from sglang.srt.models import deepseek_v4, deepseek_v4_dspark, deepseek_v4_nextn

    for module in (deepseek_v4, deepseek_v4_dspark, deepseek_v4_nextn):
        module._is_cuda = True
    layer = deepseek_v4.DeepseekV4CudaDecoderLayer
    deepseek_v4.DeepseekV4DecoderLayer = deepseek_v4_nextn.DeepseekV4DecoderLayer = layer
    deepseek_v4_dspark.DSparkV4Stage = deepseek_v4_dspark.DSparkV4CudaStage


def _experts(
    original: Any, mlp: Any, x: Any, forward_batch: Any, *, input_ids: Any, input_ids_global: Any, **arguments: Any
) -> Any:
    from sglang.srt.runtime_context import get_parallel

    from dsv4_sglang.srt.cpu import torch_layers

    assert arguments["leave_output_sum"], "the layer is not SGLang's CUDA class"
    ids = input_ids if get_parallel().attn_dp_size == 1 else input_ids_global
    return torch_layers.part_of_experts(mlp, x, ids, getattr(mlp.config, "swiglu_limit", None)).to(x.dtype)


def _mixes(original: Any, hc: Any, x: Any) -> Any:
    """As SGLang's `_mix_stats_impl`: the weights of V4.1's hyper-connection `hc`."""
    from dsv4_sglang.srt.cpu import torch_layers

    return torch_layers.hyper_connection_mixes(
        x, hc.fn, hc.scale, hc.base, iterations=hc.cfg.sinkhorn_iters, norm_eps=hc.cfg.rms_eps, eps=hc.cfg.eps
    )


def _post(original: Any, config: Any, x: Any, residual: Any, post: Any, comb: Any) -> Any:
    from dsv4_sglang.srt.cpu import torch_layers

    return torch_layers.hyper_connection_post(x, residual, post, comb)


HOOKS = {
    "sglang.srt.models.deepseek_v2.DeepseekV2MoE.forward": _experts,
    "sglang.srt.models.deepseek_v4_mhc._mix_stats_impl": _mixes,
    "sglang.srt.models.deepseek_v4_mhc.post": _post,
}
