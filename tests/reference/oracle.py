"""The oracle: transformers' DeepseekV4ForCausalLM in fp32, optionally with fake-quantised KV entries.

Nothing in transformers is patched. KV entries are quantised in an attention function that this module registers (every
entry that a query can see passes through it, normalised and rotated), index keys and queries in a hook of the scorer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AttentionInterface, DeepseekV4ForCausalLM, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from dsv4_sglang.testing.quantise import fp8_entries
from reference.quantise import bf16_entries, mxfp4_keys

KVFormat = Literal["fp32", "bf16", "fp8"]
KeyFormat = Literal["fp32", "mxfp4"]

_ROW_ROUNDING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"bf16": bf16_entries, "fp8": fp8_entries}


def _attention_over(rounding: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def attention(module: Any, query: Any, key: torch.Tensor, value: Any, mask: Any, **kwargs: Any) -> Any:
        # An entry is both key and value. Entries in transformers' cache are rounded again at each read, which does not
        # change them: the rounding is a function of the entry.
        rows = rounding(key)
        return hf.eager_attention_forward(module, query, rows, rows, mask, **kwargs)

    return attention


for _name, _rounding in _ROW_ROUNDING.items():
    AttentionInterface.register(f"dsv4_oracle_{_name}", _attention_over(_rounding))
    AttentionMaskInterface.register(f"dsv4_oracle_{_name}", eager_mask)


@dataclass(frozen=True)
class Score:
    """The oracle's score of n generated tokens.

    Attributes:
        logprobs: [n], log p of each token.
        best: [n], the token with the highest p.
        margin: [n], log p(best) - log p(token), 0 if they are equal. A small margin is a near tie.
    """

    logprobs: torch.Tensor
    best: torch.Tensor
    margin: torch.Tensor


def score_of(logits: torch.Tensor, generated: Sequence[int]) -> Score:
    """Return the score of the n tokens `generated`. Row i of `logits` [n, vocab] predicts token i."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(list(generated))[:, None])[:, 0]
    top = logprobs.max(dim=-1)
    return Score(logprobs=chosen, best=top.indices, margin=top.values - chosen)


class Oracle:
    """transformers' model of a checkpoint folder, in fp32 on `device`."""

    def __init__(self, folder: str | Path, device: str = "cpu") -> None:
        self.model = DeepseekV4ForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        self.model.to(device).eval()
        self.device = device
        self._keys: KeyFormat = "fp32"
        # Scores by their arguments. Servers answer the same prompts warm and cold, alone and together.
        self._scores: dict[Any, Score] = {}
        for module in self.model.modules():
            if isinstance(module, hf.DeepseekV4IndexerScorer):
                module.register_forward_pre_hook(self._quantise_keys)

    def _quantise_keys(self, _module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._keys == "fp32":
            return None
        query, keys, hidden = args
        return mxfp4_keys(query), mxfp4_keys(keys), hidden

    def _select(self, rows: KVFormat, keys: KeyFormat) -> None:
        self.model.config._attn_implementation = "eager" if rows == "fp32" else f"dsv4_oracle_{rows}"
        self._keys = keys

    @torch.no_grad()
    def logits(
        self, ids: Sequence[int], rows: KVFormat = "fp32", keys: KeyFormat = "fp32", chunk: int | None = None
    ) -> torch.Tensor:
        """Return fp32 [len(ids), vocab] on the CPU. Row i predicts token i + 1.

        Args:
            ids: token ids.
            rows: KV format to which entries are rounded.
            keys: format to which index keys and queries are rounded.
            chunk: tokens per forward pass; None for all at once.
        """
        self._select(rows, keys)
        tokens = torch.tensor([list(ids)], device=self.device)
        cache = DynamicCache(config=self.model.config)
        parts = tokens.split(chunk or len(ids), dim=1)
        return torch.cat([self.model(part, past_key_values=cache, use_cache=True).logits[0].cpu() for part in parts])

    def streams(self, ids: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """Return the residual streams after the last layer, fp32 [len(ids), hc_mult, hidden] on the CPU."""
        parts: list[torch.Tensor] = []
        hook = self.model.model.layers[-1].register_forward_hook(lambda _m, _args, out: parts.append(out[0].cpu()))
        try:
            self.logits(ids, chunk=chunk)
        finally:
            hook.remove()
        return torch.cat(parts)

    def score(
        self,
        prompt: Sequence[int],
        generated: Sequence[int],
        rows: KVFormat = "fp32",
        keys: KeyFormat = "fp32",
        chunk: int | None = None,
    ) -> Score:
        """Return the teacher-forced score of every token of `generated`.

        With chunks of 128, 740 tokens take a third of the time, because each attends to the window only instead of all
        entries.

        Args:
            prompt: token ids.
            generated: token ids after the prompt.
            rows, keys, chunk: as in `logits`.
        """
        asked = (tuple(prompt), tuple(generated), rows, keys, chunk)
        if asked not in self._scores:
            logits = self.logits([*prompt, *generated][:-1], rows, keys, chunk)
            self._scores[asked] = score_of(logits[len(prompt) - 1 :], generated)
        return self._scores[asked]

    @torch.no_grad()
    def selection_gap(self, ids: Sequence[int], rows: KVFormat = "fp32", keys: KeyFormat = "fp32") -> torch.Tensor:
        """Return [len(ids)], the relative distance of the indexer from another selection.

        The value is (last selected score - first one not selected) / |last selected|, the minimum over all layers;
        infinite if all entries are selected. fp32 rounding changes a score by about 1e-6 of its summands, which have
        both signs: processors were seen to differ at 1.4e-5.
        """
        gaps = torch.full((len(ids),), float("inf"))
        top, ratio = self.model.config.index_topk, 4

        def look(_module: Any, _args: Any, scores: torch.Tensor) -> None:
            visible = (torch.arange(len(ids), device=scores.device) + 1) // ratio
            hidden = torch.arange(scores.shape[-1], device=scores.device) >= visible[:, None]
            best = scores[0].masked_fill(hidden, float("-inf")).topk(min(top + 1, scores.shape[-1]), dim=-1).values
            if best.shape[-1] > top:
                gap = (best[:, top - 1] - best[:, top]) / best[:, top - 1].abs().clamp(min=1e-30)
                gaps.copy_(torch.minimum(gaps, gap.nan_to_num(float("inf"), posinf=float("inf")).cpu()))

        modules = [m for m in self.model.modules() if isinstance(m, hf.DeepseekV4IndexerScorer)]
        hooks = [module.register_forward_hook(look) for module in modules]
        try:
            self.logits(ids, rows, keys)
        finally:
            for hook in hooks:
                hook.remove()
        return gaps

    @torch.no_grad()
    def greedy(
        self, prompt: Sequence[int], count: int, rows: KVFormat = "fp32", keys: KeyFormat = "fp32"
    ) -> tuple[list[int], torch.Tensor]:
        """Generate greedily through the model's own cache.

        Args:
            prompt: token ids.
            count: number of tokens to generate.
            rows, keys: as in `logits`.

        Returns:
            The tokens and their log p, fp32 [count].
        """
        self._select(rows, keys)
        cache = DynamicCache(config=self.model.config)
        step = torch.tensor([list(prompt)], device=self.device)
        tokens: list[int] = []
        logprobs: list[float] = []
        for _ in range(count):
            logits = self.model(step, past_key_values=cache, use_cache=True).logits[0, -1]
            best = logits.log_softmax(dim=-1).max(dim=-1)
            tokens.append(int(best.indices))
            logprobs.append(float(best.values))
            step = best.indices.view(1, 1)
        return tokens, torch.tensor(logprobs)
