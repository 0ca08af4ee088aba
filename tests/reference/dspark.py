"""A checkpoint's DSPARK head in fp32: the reference for SGLang's draft model for one block of drafts.

transformers has no such head. But its stages are window-only decoder layers, followed by a collapse of the residual
streams and a norm (`models/deepseek_v4_dspark.py` of SGLang), so they are loaded as a DeepseekV4ForCausalLM with as
many layers, which shares embedding and head. A block begins with the last accepted token, at position L, followed by
placeholder tokens for the drafts. All of its queries attend to the whole block and, as context, to the 128 positions
before it:

    context entry of stage s at p = rope(kv_norm(wkv(main_norm(main_proj(hidden[p])))))
    logits[j] = head(norm(collapse(streams[j]))) + markov_w2 markov_w1[token j]

hidden[p]: means of the target's residual streams after some of its layers. Token 0 is the accepted one, the others are
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from reference.oracle import Oracle

WINDOW = 128
_BEHIND_THE_LAYERS = ("norm.", "hc_head_")
_OWN = ("main_proj", "main_norm", "markov_head", "confidence_head")


class _Context:
    """Replacement for a KV cache: entries [1, 1, n, 512] of each stage, which precede those of the step."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows = rows

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return (torch.cat([self.rows[layer], key], dim=2),) * 2


class DSpark:
    """The DSPARK head of a checkpoint folder. Raises ValueError for a checkpoint without one."""

    def __init__(self, folder: str | Path) -> None:
        config = DeepseekV4Config.from_pretrained(str(folder), local_files_only=True)
        if not getattr(config, "dspark_target_layer_ids", None):
            raise ValueError(f"{folder} has no dspark_target_layer_ids: make the checkpoint with make-tiny --dspark 5")
        self.target_layers: list[int] = config.dspark_target_layer_ids
        self.block: int = config.dspark_block_size
        self.stands_for_drafts: int = config.dspark_noise_token_id
        stages = len(self.target_layers)
        config.num_hidden_layers = stages
        config.layer_types, config.mlp_layer_types = ["sliding_attention"] * stages, ["moe"] * stages
        tensors = load_file(Path(folder) / "model.safetensors")
        named = {name: tensors[name] for name in ("embed.weight", "head.weight")}
        for name, tensor in tensors.items():
            if name.startswith("mtp."):
                _, stage, part = name.split(".", 2)
                if not part.startswith(_OWN):
                    named[part if part.startswith(_BEHIND_THE_LAYERS) else f"layers.{stage}.{part}"] = tensor
        self.model = DeepseekV4ForCausalLM.from_pretrained(
            None, config=config, state_dict=named, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        width, last = config.hidden_size, f"mtp.{stages - 1}.markov_head."
        self.main_proj = nn.Linear(stages * width, width, bias=False)
        self.main_proj.weight.data = tensors["mtp.0.main_proj.weight"].float()
        self.main_norm = hf.DeepseekV4RMSNorm(width, eps=config.rms_norm_eps)
        self.main_norm.weight.data = tensors["mtp.0.main_norm.weight"].float()
        self.of_previous = tensors[last + "markov_w1.weight"].float()
        self.biases = tensors[last + "markov_w2.weight"].float()

    def hidden(self, oracle: Oracle, ids: Sequence[int]) -> Tensor:
        """Return fp32 [len(ids), target layers * hidden], the hidden states of the target model that the head takes."""
        found: dict[int, Tensor] = {}
        layers = oracle.model.model.layers
        hooks = [
            layers[i].register_forward_hook(lambda _m, _args, out, i=i: found.update({i: out[0].mean(1).cpu()}))
            for i in self.target_layers
        ]
        try:
            oracle.logits(ids)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([found[i] for i in self.target_layers], dim=-1)

    @torch.no_grad()
    def logits(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return fp32 [block, vocab], the logits of a block. Row j is for draft j.

        Args:
            hidden: [L, target layers * hidden], hidden states of the positions before the block.
            tokens: the accepted token at position L and the chosen drafts. The last draft has no effect.
        """
        model, length = self.model.model, hidden.shape[0]
        first = max(0, length - WINDOW)
        context = self.main_norm(self.main_proj(hidden[first:]))[None]
        positions = torch.arange(first, length + self.block)[None]
        cos, sin = model.rotary_emb(context, position_ids=positions, layer_type="main")
        seen = length - first
        rows = [
            hf.apply_rotary_pos_emb(
                layer.self_attn.kv_norm(layer.self_attn.kv_proj(context))[:, None], cos[:, :seen], sin[:, :seen]
            )
            for layer in model.layers
        ]
        ids = torch.tensor([[tokens[0], *[self.stands_for_drafts] * (self.block - 1)]])
        streams = model.embed_tokens(ids)[:, :, None].repeat(1, 1, model.config.hc_mult, 1)
        for layer in model.layers:
            streams = layer(
                streams,
                position_embeddings={"main": (cos[:, seen:], sin[:, seen:])},
                position_ids=positions[:, seen:],
                attention_mask=None,
                past_key_values=_Context(rows),
            )
        logits = self.model.lm_head(model.norm(model.hc_head(streams)))[0]
        return logits + self.of_previous[torch.tensor(list(tokens))[: self.block]] @ self.biases.T
