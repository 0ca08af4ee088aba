"""Second oracle of DeepSeek-V4.1, which shares no code with the project: the model of NVIDIA's nemo-automodel, in fp32
on a CPU. Its own adapter reads the checkpoint.

The package rounds stored values to the formats of the cache, from the precision of its activations. In the release that
is bf16. In fp32 the package therefore omits roundings to bf16 that the release and the server apply, and this moves
log p by 0.009 on average. `logits` adds them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41 import attention
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
from safetensors.torch import load_file
from torch import Tensor

from reference.oracle import Score, score_of

# Rounding of stored values: none, to the cache's formats, or to bf16 and then to these formats.
Rounding = Literal["none", "formats", "release"]

quantise = attention.quantize_cache


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


_STORED: dict[Rounding, Callable[..., Tensor]] = {
    "none": lambda values, **_: values,
    "formats": quantise,
    "release": lambda values, **kind: quantise(_bf16(values), **kind),
}


class Automodel:
    """The model of a checkpoint folder: text only, without Engram layers."""

    def __init__(self, folder: str | Path) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        config["text_config"]["torch_dtype"] = "float32"
        backend = BackendConfig(
            attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch"
        )
        self.model = DeepseekV41ForCausalLM(
            DeepseekV41Config(**config, vision_config={"num_hidden_layers": 0}), backend=backend
        )
        tensors = self.model.state_dict_adapter.from_hf(load_file(Path(folder) / "model.safetensors"))
        missing, unexpected = self.model.load_state_dict(tensors, strict=False)
        # Image tokens have their own router bias.
        assert not unexpected and all(name.endswith("gate.bias_vl") for name in missing), (missing, unexpected)
        self.model.float().eval()
        self._rounding: Rounding = "release"
        self._round_to_bf16()

    def _round_to_bf16(self) -> None:
        """Round at the places where the release has bf16 tensors on the way to the cache."""

        def after(_module: Any, _args: Any, out: Tensor) -> Tensor:
            return _bf16(out) if self._rounding == "release" else out

        def before(_module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
            return (_bf16(args[0]),) if self._rounding == "release" else args

        for name, module in self.model.named_modules():
            if name.endswith((".kv_norm", ".compressor.norm", ".indexer.k_norm")):
                module.register_forward_hook(after)
            if name.endswith(".compressor") and module.ratio > 1:  # pooled in fp32
                module.norm.register_forward_pre_hook(before)

    @torch.no_grad()
    def logits(self, ids: Sequence[int], rounding: Rounding = "release") -> Tensor:
        """Return fp32 [len(ids), vocab]. Row i predicts token i + 1."""
        self._rounding = rounding
        # The package compiles an activation, which needs a C++ compiler.
        with torch.compiler.set_stance("force_eager"), patch.object(attention, "quantize_cache", _STORED[rounding]):
            return self.model(torch.tensor([list(ids)])).logits[0]

    def score(self, prompt: Sequence[int], generated: Sequence[int]) -> Score:
        """Return the teacher-forced score of every token of `generated`."""
        return score_of(self.logits([*prompt, *generated][:-1])[len(prompt) - 1 :], generated)
