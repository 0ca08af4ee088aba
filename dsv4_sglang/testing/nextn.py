"""The NextN (MTP) block of a checkpoint in fp32, over full sequences: what SGLang's draft model has to compute.

transformers has no such block, but all of it behind its input is a window-only decoder layer, a collapse of the streams
and a norm (SPEC 4.6): it is loaded as a DeepseekV4ForCausalLM of one layer that shares embedding and head. Position p
takes the target's residual streams behind its last layer at p and the embedding of token p + 1, and predicts token
p + 2 (DeepSeek-V3's report, section 2.2, per stream; `models/deepseek_v4_nextn.py` of SGLang):

    x[p] = h_proj(hnorm(streams[p])) + e_proj(enorm(embedding(token[p + 1])))

The block's own streams stand in for the target's where it drafts on from its own token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from dsv4_sglang.testing.oracle import Oracle

BLOCK = "mtp.0."
_INPUT = ("enorm", "hnorm", "e_proj", "h_proj")
_BEHIND_THE_LAYER = ("norm.", "hc_head_")


def _as_one_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The block's tensors by the names that a checkpoint of one layer gives them."""
    named = {name: tensors[name] for name in ("embed.weight", "head.weight")}
    for name, tensor in tensors.items():
        part = name.removeprefix(BLOCK)
        if part != name and not part.startswith(_INPUT):
            named[part if part.startswith(_BEHIND_THE_LAYER) else f"layers.0.{part}"] = tensor
    return named


class NextN:
    """The block of a checkpoint folder. Raises ValueError for a checkpoint without one."""

    def __init__(self, folder: str | Path) -> None:
        tensors = load_file(Path(folder) / "model.safetensors")
        if f"{BLOCK}e_proj.weight" not in tensors:
            raise ValueError(f"{folder} has no tensor {BLOCK}e_proj.weight: make the checkpoint with make-tiny --nextn")
        config = DeepseekV4Config.from_pretrained(str(folder), local_files_only=True)
        config.num_hidden_layers = 1
        config.layer_types, config.mlp_layer_types = ["sliding_attention"], ["moe"]
        self.model = DeepseekV4ForCausalLM.from_pretrained(
            None, config=config, state_dict=_as_one_layer(tensors), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.config = self.model.config  # unlike the one above, it says that attention is eager: masks depend on that
        width = config.hidden_size
        self.enorm = hf.DeepseekV4RMSNorm(width, eps=config.rms_norm_eps)
        self.hnorm = hf.DeepseekV4RMSNorm(width, eps=config.rms_norm_eps)
        self.e_proj = nn.Linear(width, width, bias=False)
        self.h_proj = nn.Linear(width, width, bias=False)
        for name in _INPUT:
            getattr(self, name).weight.data = tensors[f"{BLOCK}{name}.weight"].float()

    @torch.no_grad()
    def forward(
        self, tokens: Sequence[int], streams: Tensor, cache: DynamicCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """(logits [n, vocab], streams [n, hc_mult, hidden]), fp32, of the n positions that follow those in `cache`.

        tokens: the n tokens one position ahead. streams: fp32 [n, hc_mult, hidden].
        """
        model = self.model.model
        cache = cache if cache is not None else DynamicCache(config=self.config)
        embedded = model.embed_tokens(torch.tensor([list(tokens)]))
        x = self.h_proj(self.hnorm(streams[None])) + self.e_proj(self.enorm(embedded))[:, :, None]
        positions = cache.get_seq_length() + torch.arange(len(tokens))[None]
        mask = create_sliding_window_causal_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=None,
            past_key_values=cache,
            position_ids=positions,
        )
        out = model.layers[0](
            x,
            position_embeddings={"main": model.rotary_emb(x, position_ids=positions, layer_type="main")},
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
        )
        return self.model.lm_head(model.norm(model.hc_head(out)))[0], out[0]

    def accept_lengths(self, oracle: Oracle, tokens: Sequence[int], prompt: int, steps: int = 3) -> list[int]:
        """Tokens that each verify step of greedy speculation adds, bonus included (1 .. steps + 1).

        tokens: a prompt of `prompt` tokens and the target's greedy continuation. Steps that would draft past its end
        are left out.
        """
        streams = oracle.streams(tokens)
        cache = DynamicCache(config=self.config)
        lengths: list[int] = []
        written, known = 0, prompt + 1  # positions in the cache; tokens that are decided
        while known + steps <= len(tokens):
            logits, own = self.forward(tokens[written + 1 : known], streams[written : known - 1], cache)
            written = known - 1
            drafted = copy.deepcopy(cache)
            right = 0
            while (token := int(logits[-1].argmax())) == tokens[known + right]:
                right += 1
                if right == steps:
                    break
                logits, own = self.forward([token], own[-1:], drafted)
            lengths.append(right + 1)
            known += right + 1
        return lengths
