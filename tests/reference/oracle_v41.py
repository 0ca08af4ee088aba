"""Oracle of DeepSeek-V4.1: the whole model in fp32 from the formulas of SPEC 11, over full sequences, without a cache.

No release of transformers has the model. test_oracle_v41.py compares the oracle with another implementation.
Contents of the cache and index queries are rounded as in the server; everything else is fp32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from dsv4_sglang.testing.formula import rope
from reference.oracle import Score, score_of
from reference.quantise import mxfp4, v41_entries, v41_keys, v41_rows

WINDOW = 128


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class OracleV41:
    """The model of a checkpoint folder: text only, without Engram layers."""

    def __init__(self, folder: str | Path) -> None:
        self.config = json.loads((Path(folder) / "config.json").read_text())["text_config"]
        self.weights = {name: tensor.float() for name, tensor in load_file(Path(folder) / "model.safetensors").items()}
        self._scores: dict[Any, Score] = {}  # by the arguments, as in `Oracle`

    @torch.no_grad()
    def logits(self, ids: Sequence[int], chunk: int | None = None) -> Tensor:
        """Return fp32 [len(ids), vocab]. Row i predicts token i + 1.

        `chunk` limits the number of tokens that attend at once, to save memory.
        """
        return _Forward(self.config, self.weights, len(ids), chunk).logits(ids)

    def score(self, prompt: Sequence[int], generated: Sequence[int], chunk: int | None = None) -> Score:
        """Return the teacher-forced score of every token of `generated`."""
        asked = (tuple(prompt), tuple(generated), chunk)
        if asked not in self._scores:
            logits = self.logits([*prompt, *generated][:-1], chunk)
            self._scores[asked] = score_of(logits[len(prompt) - 1 :], generated)
        return self._scores[asked]


class _Forward:
    """One pass over `tokens` positions, and the values that layers share."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], tokens: int, chunk: int | None) -> None:
        self.config, self.weights, self.chunk = config, weights, chunk or tokens
        self.at = torch.arange(tokens)
        self.eps = config["rms_norm_eps"]
        self.ratio = 0
        self.entries = self.keys = self.selected = self.candidates = torch.empty(0)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weights[f"{name}.weight"]

    def logits(self, ids: Sequence[int]) -> Tensor:
        streams = self.weights["embed.weight"][list(ids)][:, None].repeat(1, self.config["hc_mult"], 1)
        # A sublayer collapses the streams with weights that the previous one computed; the first one uses the first
        # stream.
        collapse = torch.zeros(streams.shape[:2])
        collapse[:, 0] = 1
        for layer in range(self.config["num_hidden_layers"]):
            for sublayer, run in (("attn", self.attention), ("ffn", self.experts)):
                prefix = f"layers.{layer}"
                pre, post, mix = self.hyper_connection(streams, f"{prefix}.hc_{sublayer}")
                x = self.norm((collapse[..., None] * streams).sum(1), f"{prefix}.{sublayer}_norm")
                out = run(x, layer)
                streams = post[..., None] * out[:, None] + torch.einsum("tji,tjd->tid", mix, streams)
                collapse = pre
        return self.linear(self.norm((collapse[..., None] * streams).sum(1), "norm"), "head")

    def hyper_connection(self, streams: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        n, eps = self.config["hc_mult"], self.config["hc_eps"]
        flat = streams.flatten(1)
        mixes = flat @ self.weights[f"{name}_fn"].T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        scale = self.weights[f"{name}_scale"].repeat_interleave(torch.tensor([n, n, n * n]))
        pre, post, mix = (mixes * scale + self.weights[f"{name}_base"]).split([n, n, n * n], -1)
        mix = mix.unflatten(-1, (n, n)).softmax(-1) + eps
        mix = mix / (mix.sum(1, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            mix = mix / (mix.sum(2, keepdim=True) + eps)
            mix = mix / (mix.sum(1, keepdim=True) + eps)
        return pre.sigmoid() + eps, 2 * post.sigmoid(), mix

    def experts(self, x: Tensor, layer: int) -> Tensor:
        prefix, config = f"layers.{layer}.ffn", self.config
        scores = F.softplus(self.linear(x, f"{prefix}.gate")).sqrt()
        chosen = (scores + self.weights[f"{prefix}.gate.bias"]).topk(config["num_experts_per_tok"], -1).indices
        share = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        share = share / share.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        out = self.expert(x, f"{prefix}.shared_experts")
        for expert in range(config["n_routed_experts"]):
            takes = share[:, expert] > 0
            out[takes] += share[takes, expert, None] * self.expert(x[takes], f"{prefix}.experts.{expert}")
        return out

    def expert(self, x: Tensor, prefix: str) -> Tensor:
        limit = self.config["swiglu_limit"]
        gate, up = self.linear(x, f"{prefix}.w1").clamp(max=limit), self.linear(x, f"{prefix}.w3").clamp(-limit, limit)
        return self.linear(F.silu(gate) * up, f"{prefix}.w2")

    def attention(self, x: Tensor, layer: int) -> Tensor:
        prefix, heads, width = f"layers.{layer}.attn", self.config["num_attention_heads"], self.config["head_dim"]
        ratio = self.config["compress_ratios"][layer]
        latent = self.norm(self.linear(x, f"{prefix}.wq_a"), f"{prefix}.q_norm")
        q = rope(self.linear(latent, f"{prefix}.wq_b").unflatten(-1, (heads, width)), self.at, ratio)
        window = _bf16(self.norm(self.linear(x, f"{prefix}.wkv"), f"{prefix}.kv_norm"))
        rows = v41_rows(rope(window, self.at, ratio))
        if layer in self.config["kv_source_layer_ids"]:
            self.write_entries(x, prefix, ratio)
        if layer in self.config["index_source_layer_ids"]:
            self.select(x, latent, prefix, layer)
        sink = self.weights[f"{prefix}.attn_sink"]
        out = torch.cat([self.read(q[at], rows, at, ratio, sink) for at in self.at.split(self.chunk)])
        out = rope(out, self.at, ratio, inverse=True)
        grouped = out.reshape(len(x), self.config["o_groups"], -1)
        wo_a = self.weights[f"{prefix}.wo_a.weight"].unflatten(0, (self.config["o_groups"], -1))
        return self.linear(torch.einsum("tgd,grd->tgr", grouped, wo_a).flatten(1), f"{prefix}.wo_b")

    def read(self, q: Tensor, window: Tensor, at: Tensor, ratio: int, sink: Tensor) -> Tensor:
        """Return [n, heads, 512], the attention of the queries `q` of tokens `at` [n] over window entries and
        compressed entries.
        """
        positions = torch.arange(max(0, int(at[0]) - WINDOW + 1), int(at[-1]) + 1)
        age = at[:, None] - positions
        rows, sees = window[positions], (age >= 0) & (age < WINDOW)
        if ratio:
            entries = (int(at[-1]) + 1) // ratio
            rows, sees = torch.cat([rows, self.entries[:entries]]), torch.cat([sees, self.selected[at, :entries]], 1)
        logits = torch.einsum("thd,rd->htr", q, rows) / math.sqrt(rows.shape[1])
        logits = torch.cat([logits.masked_fill(~sees, -math.inf), sink[:, None, None].expand(-1, len(at), 1)], -1)
        return torch.einsum("htr,rd->thd", logits.softmax(-1)[..., :-1], rows)

    def write_entries(self, x: Tensor, prefix: str, ratio: int) -> None:
        """Compute `entries` [n, 512] and `keys` [n, 128] of this layer, which later layers use until the next source
        layer.
        """
        pooled = self.linear(x, f"{prefix}.compressor.wkv")
        if ratio > 1:
            whole = len(x) // ratio * ratio
            k, score = (
                y[:whole].unflatten(0, (-1, ratio)) for y in (pooled, self.linear(x, f"{prefix}.compressor.wgate"))
            )
            pooled = _bf16((k * score.softmax(1)).sum(1))
        latents = _bf16(self.norm(pooled, f"{prefix}.compressor.norm"))
        first = torch.arange(len(latents)) * ratio
        keys = _bf16(self.norm(self.linear(latents, f"{prefix}.indexer.wk"), f"{prefix}.indexer.k_norm"))
        self.ratio = ratio
        self.entries, self.keys = v41_entries(rope(latents, first, ratio)), v41_keys(rope(keys, first, ratio))

    def select(self, x: Tensor, latent: Tensor, prefix: str, layer: int) -> None:
        """Compute `selected` [tokens, n], True for the entries that each token attends to."""
        config = self.config
        query = self.linear(latent, f"{prefix}.indexer.wq_b").unflatten(-1, (config["index_n_heads"], -1))
        similar = torch.einsum("thd,nd->thn", mxfp4(_bf16(rope(query, self.at, self.ratio))), self.keys).relu()
        scores = torch.einsum("thn,th->tn", similar, self.linear(x, f"{prefix}.indexer.weights_proj"))
        visible = (self.at + 1) // self.ratio
        scores = scores.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], -math.inf)
        if layer == config["candidate_source_layer_id"]:
            self.candidates = self.best_blocks(scores, visible)
        elif 0 <= config["candidate_source_layer_id"] < layer:
            scores = scores.masked_fill(~self.candidates, -math.inf)
        self.selected = self.best(scores, config["index_topk"])

    def best(self, scores: Tensor, count: int) -> Tensor:
        """Return a mask of the `count` highest scores of each row that are not -inf."""
        top = scores.topk(min(count, scores.shape[1]), -1)
        return torch.zeros_like(scores, dtype=torch.bool).scatter(1, top.indices, top.values > -math.inf)

    def best_blocks(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Return a mask of the blocks with the highest scores, always including the one with the newest visible
        entry.
        """
        size, entries = self.config["candidate_block_size"], scores.shape[1]
        blocks = F.pad(scores, (0, -entries % size), value=-math.inf).unflatten(1, (-1, size)).amax(-1)
        newest = torch.arange(blocks.shape[1]) == ((visible - 1) // size)[:, None]
        chosen = self.best(blocks.masked_fill(newest, math.inf), self.config["candidate_topk_blocks"])
        return chosen.repeat_interleave(size, 1)[:, :entries]
