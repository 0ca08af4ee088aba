"""The NextN (MTP) block of a checkpoint in fp32, over full sequences: the reference for SGLang's draft model.

transformers has no such block. But after its input it is a window-only decoder layer, a collapse of the residual
streams and a norm (SPEC 4.6), so it is loaded as a DeepseekV4ForCausalLM with one layer, which shares embedding and
head. Position p takes the target's residual streams after its last layer at p and the embedding of token p + 1, and
predicts token p + 2 (DeepSeek-V3's report, section 2.2, per stream; `models/deepseek_v4_nextn.py` of SGLang):

    x[p] = h_proj(hnorm(streams[p])) + e_proj(enorm(embedding(token[p + 1])))

For further drafts the block's own streams replace the target's.
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

from reference.oracle import Oracle

BLOCK = "mtp.0."
_INPUT = ("enorm", "hnorm", "e_proj", "h_proj")
_BEHIND_THE_LAYER = ("norm.", "hc_head_")


def _as_one_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the block's tensors as in a checkpoint with one layer."""
    named = {name: tensors[name] for name in ("embed.weight", "head.weight")}
    for name, tensor in tensors.items():
        part = name.removeprefix(BLOCK)
        if part != name and not part.startswith(_INPUT):
            named[part if part.startswith(_BEHIND_THE_LAYER) else f"layers.0.{part}"] = tensor
    return named


class NextN:
    """The NextN block of a checkpoint folder. Raises ValueError for a checkpoint without one."""

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
        self.config = self.model.config  # unlike `config`, it has the eager attention setting, on which masks depend
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
        """Return logits [n, vocab] and streams [n, hc_mult, hidden], fp32, of the n positions after those in `cache`.

        Args:
            tokens: the n tokens one position ahead.
            streams: fp32 [n, hc_mult, hidden].
            cache: KV cache of the block; None for an empty one.
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
        """Return the number of tokens that each verify step of greedy speculation adds, bonus token included (1 ..
        steps + 1).

        Args:
            oracle: the target model.
            tokens: a prompt and the target's greedy continuation. Steps whose drafts would go beyond its end are
                omitted.
            prompt: length of the prompt.
            steps: number of drafts per step.
        """
        streams = oracle.streams(tokens)
        cache = DynamicCache(config=self.config)
        lengths: list[int] = []
        written, known = 0, prompt + 1  # positions in the cache; number of accepted tokens
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
