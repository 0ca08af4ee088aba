"""A seeded random DeepSeek-V4 checkpoint: real shapes where they matter to the cache, small everywhere else.

Everything that the cache depends on is as in DeepSeek-V4-Flash: head_dim 512 with 64 RoPE dims, 64 query heads, 64
index heads of 128, window 128, ratios 0/4/128 and the entry of the MTP block, the RoPE tables, the sink,
hyper-connections, hash and learned routing. Tensor names and dtypes are those of DeepSeek's files. The weights are not
quantised, and every value is exact in bf16, so that loading in fp32 and in bf16 gives the same numbers.

The choice of experts does not depend on rounding. The first `n_routed_experts` channels of the residual stream carry
the class of the token (one-hot). No layer writes to them, and hyper-connections preserve what all streams share. So
each learned router sees the class with full strength and chooses that class's experts by a wide margin. Its other
weights are small and only vary the weights of the experts.

Tensors for speculative decoding are written on request. With a NextN block (MTP), drafts must be right some of the
time, but one layer cannot predict the output of six random layers. So only the output head is made predictable. Each
printable character has a successor, and all of them form one cycle. A character's own embedding adds to its successor's
logit about as much as the logit of the likeliest other token. The rest of the model decides whether greedy text follows
the cycle, which it does about half of the time. The block, whose streams are mostly the embedding, drafts along the
cycle. The tensors of the layers equal those of the checkpoint without the block. The stages of a DSPARK head are
random; its first-order bias encodes the cycle.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dsv4_sglang.testing.tiny_config import (
    DSPARK_STAGES,
    EXPERT_WIDTH,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    HC_MULT,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    MARKOV_RANK,
    O_GROUPS,
    O_LORA,
    Q_LORA,
    TinySizes,
    TinySpec,
    config_json,
)
from dsv4_sglang.testing.tokenizer import printable_ids, write_tokenizer

# RMS of the output of each part. Chosen so that a wrong entry shows in the logits (compressed entries are larger than
# window entries) while rounding entries to bf16 moves a log-probability by 0.004 on average, which
# tests/testing/test_make_tiny.py checks.
ROW_GAIN = 1.2
ENTRY_GAIN = {4: 1.6, 128: 2.0}
ATTENTION_GAIN = 1.0
MLP_GAIN = 0.7
HEAD_GAIN = 2.5
# SUCCESSOR_GAIN: length of the successor's row of the head along the direction of its predecessor's embedding, which
# has length 8 in the input of the head. BLOCK_EMBEDDING_GAIN: weight of the embedding in the NextN block's streams,
# relative to 1 for the output of its layer.
SUCCESSOR_GAIN = 1.0
BLOCK_EMBEDDING_GAIN = 4.0
BLOCK_STREAMS_GAIN = 0.5

# Weight of the successor's bias along its predecessor's vector, which has length 5.7.
MARKOV_GAIN = 0.5


class Draw:
    """Random tensors, rounded to bf16, that depend only on the seed and the tensor's name.

    Attributes:
        weights: the tensors of the file by name. `prefix` precedes the names of those that are added.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.prefix = ""
        self.weights: dict[str, torch.Tensor] = {}

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Context manager: names begin with `part` and a point."""
        before = self.prefix
        self.prefix += f"{part}."
        try:
            yield
        finally:
            self.prefix = before

    def generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{self.prefix}{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def normal(self, name: str, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        """Return bf16 [*shape]."""
        return (torch.randn(*shape, generator=self.generator(name)) * std + mean).bfloat16()

    def linear(self, name: str, out: int, fan_in: int, gain: float = 1.0) -> torch.Tensor:
        """Return bf16 [out, fan_in] that maps unit-variance inputs to variance gain^2."""
        return self.normal(name, out, fan_in, std=gain / math.sqrt(fan_in))

    def subsets(self, name: str, rows: int) -> torch.Tensor:
        """Return int64 [rows, EXPERTS_PER_TOKEN], distinct experts in each row."""
        order = torch.rand(rows, EXPERTS, generator=self.generator(name)).argsort(dim=1)
        return order[:, :EXPERTS_PER_TOKEN].contiguous()

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor into the file, and return it."""
        self.weights[self.prefix + name] = tensor
        return tensor

    def add_linear(self, name: str, out: int, fan_in: int, gain: float = 1.0) -> torch.Tensor:
        """Add the weight of a projection (`linear`)."""
        return self.add(f"{name}.weight", self.linear(name, out, fan_in, gain))

    def add_norm(self, name: str, width: int, gain: float = 1.0) -> None:
        """Add the weight of a norm whose output has the RMS `gain`."""
        self.add(f"{name}.weight", self.normal(name, width, std=0.1 * gain, mean=gain))


def token_embedding(draw: Draw, spec: TinySizes) -> torch.Tensor:
    """Return bf16 [vocab, hidden]: one-hot class of strength 4 in the first EXPERTS channels, noise in the others."""
    weight = draw.normal("embed.weight", spec.vocab, spec.hidden, std=1.0)
    classes = torch.randint(EXPERTS, (spec.vocab,), generator=draw.generator("embed.class"))
    weight[:, :EXPERTS] = 4.0 * torch.nn.functional.one_hot(classes, EXPERTS)
    return weight


def _cycle(draw: Draw, spec: TinySpec) -> torch.Tensor:
    """Return the printable characters in the order of the cycle: each one is followed by its successor."""
    ids = torch.tensor(printable_ids(spec.vocab))
    return ids[torch.randperm(len(ids), generator=draw.generator("head.succession"))]


def _succession(draw: Draw, spec: TinySpec, embedding: torch.Tensor) -> torch.Tensor:
    """Return fp32 [vocab, hidden], added to the head, which makes each printable character predict the next one of the
    cycle.
    """
    cycle = _cycle(draw, spec)
    direction = embedding[cycle].float()
    direction[:, :EXPERTS] = 0.0
    added = torch.zeros(spec.vocab, spec.hidden)
    added[cycle.roll(-1)] = SUCCESSOR_GAIN * torch.nn.functional.normalize(direction, dim=-1)
    return added


def output_head(draw: Draw, spec: TinySizes) -> torch.Tensor:
    """Return bf16 [vocab, hidden], with zero weights for the class channels and half the weight for non-printable
    tokens.

    So greedy text depends on the context and is mostly printable ASCII.
    """
    weight = draw.linear("head", spec.vocab, spec.hidden, gain=HEAD_GAIN)
    quiet = torch.ones(spec.vocab, dtype=torch.bool)
    quiet[printable_ids(spec.vocab)] = False
    weight[quiet] *= 0.5
    weight[:, :EXPERTS] = 0.0
    return weight


def closed_to_classes(weight: torch.Tensor) -> torch.Tensor:
    """Zero the rows of a projection `[hidden, in]` to the residual stream that would write to the class channels."""
    weight[:EXPERTS] = 0.0
    return weight


def _add_compressor(draw: Draw, name: str, spec: TinySpec, ratio: int, dim: int, gain: float) -> None:
    """Add the compressor of SPEC 3.1. `gain` is the RMS of its entries."""
    width = (2 if ratio == 4 else 1) * dim
    with draw.inside(name):
        draw.add_linear("wkv", width, spec.hidden)
        draw.add_linear("wgate", width, spec.hidden, gain=1.5)
        draw.add("ape", draw.normal("ape", ratio, width, std=0.5).float())
        draw.add_norm("norm", dim, gain)


def add_attention_projections(draw: Draw, spec: TinySizes) -> None:
    """Add the projections of a layer for queries, window entries and output, and its sinks."""
    draw.add("attn_sink", draw.normal("attn_sink", spec.heads, std=1.0).float())
    draw.add_linear("wq_a", Q_LORA, spec.hidden)
    draw.add_norm("q_norm", Q_LORA)
    draw.add_linear("wq_b", spec.heads * HEAD_DIM, Q_LORA)
    draw.add_linear("wkv", HEAD_DIM, spec.hidden)
    draw.add_norm("kv_norm", HEAD_DIM, ROW_GAIN)
    draw.add_linear("wo_a", O_GROUPS * O_LORA, spec.heads // O_GROUPS * HEAD_DIM, gain=ATTENTION_GAIN)
    closed_to_classes(draw.add_linear("wo_b", spec.hidden, O_GROUPS * O_LORA))


def add_indexer_projections(draw: Draw, spec: TinySizes, heads: int) -> None:
    """Add the projections of an indexer for queries and head weights."""
    draw.add_linear("wq_b", heads * INDEX_DIM, Q_LORA)
    draw.add_linear("weights_proj", heads, spec.hidden)


def _add_attention(draw: Draw, spec: TinySpec, ratio: int) -> None:
    add_attention_projections(draw, spec)
    if ratio:
        # Compressed entries are larger than window entries, so that a missing or wrong one shows in the logits.
        _add_compressor(draw, "compressor", spec, ratio, HEAD_DIM, gain=ENTRY_GAIN[ratio])
    if ratio == 4:
        with draw.inside("indexer"):
            _add_compressor(draw, "compressor", spec, ratio, INDEX_DIM, gain=1.0)
            add_indexer_projections(draw, spec, INDEX_HEADS)


def _add_router(draw: Draw, spec: TinySizes, hashed: bool) -> None:
    weight = draw.add("weight", draw.normal("weight", EXPERTS, spec.hidden, std=0.3 / math.sqrt(spec.hidden)))
    if hashed:
        draw.add("tid2eid", draw.subsets("tid2eid", spec.vocab))
        return
    chosen = torch.zeros(EXPERTS, EXPERTS, dtype=torch.bool)  # [class, expert]
    chosen.scatter_(1, draw.subsets("chosen", EXPERTS), True)
    strength = 3.0 + 3.0 * torch.rand(EXPERTS, EXPERTS, generator=draw.generator("strength"))
    weight[:, :EXPERTS] = torch.where(chosen, strength, -strength).T.bfloat16()
    draw.add("bias", draw.normal("bias", EXPERTS, std=0.1).float())


def _add_hyper_connection(draw: Draw, name: str, spec: TinySizes) -> None:
    """Add fp32 `fn [24, 4 hidden]`, `base [24]` (pre 4, post 4, comb 16), `scale [3]`; comb is close to the
    identity.
    """
    mix = (2 + HC_MULT) * HC_MULT
    base = draw.normal(f"{name}_base", mix, std=0.5)
    base[2 * HC_MULT :] += 2.0 * torch.eye(HC_MULT, dtype=base.dtype).flatten()
    draw.add(f"{name}_fn", draw.linear(f"{name}_fn", mix, HC_MULT * spec.hidden).float())
    draw.add(f"{name}_base", base.float())
    draw.add(f"{name}_scale", draw.normal(f"{name}_scale", 3, std=0.1, mean=0.5).float())


def add_around_attention(draw: Draw, spec: TinySizes, hashed: bool) -> None:
    """Add norms, experts and hyper-connections of a layer."""
    draw.add_norm("attn_norm", spec.hidden)
    draw.add_norm("ffn_norm", spec.hidden)
    with draw.inside("ffn"):
        with draw.inside("gate"):
            _add_router(draw, spec, hashed)
        for expert in (*(f"experts.{i}" for i in range(EXPERTS)), "shared_experts"):
            with draw.inside(expert):
                draw.add_linear("w1", EXPERT_WIDTH, spec.hidden)
                draw.add_linear("w3", EXPERT_WIDTH, spec.hidden)
                closed_to_classes(draw.add_linear("w2", spec.hidden, EXPERT_WIDTH, gain=MLP_GAIN))
    _add_hyper_connection(draw, "hc_attn", spec)
    _add_hyper_connection(draw, "hc_ffn", spec)


def _add_layer(draw: Draw, spec: TinySpec, ratio: int = 0, hashed: bool = False) -> None:
    """Add a layer, by default that of a draft model: window only, with a learned router."""
    with draw.inside("attn"):
        _add_attention(draw, spec, ratio)
    add_around_attention(draw, spec, hashed)


def _add_collapse(draw: Draw, spec: TinySizes) -> None:
    """Add the norm after the last layer, and the tensors that collapse its streams."""
    draw.add_norm("norm", spec.hidden)
    draw.add("hc_head_fn", draw.linear("hc_head_fn", HC_MULT, HC_MULT * spec.hidden).float())
    draw.add("hc_head_base", draw.normal("hc_head_base", HC_MULT, std=0.5).float())
    draw.add("hc_head_scale", draw.normal("hc_head_scale", 1, std=0.1, mean=0.5).float())


def _add_nextn(draw: Draw, spec: TinySpec) -> None:
    """Add the NextN block."""
    hidden = spec.hidden
    with draw.inside("mtp.0"):
        draw.add_norm("enorm", hidden)
        draw.add_norm("hnorm", hidden)
        embedding = BLOCK_EMBEDDING_GAIN * torch.eye(hidden)
        embedding += closed_to_classes(draw.linear("e_proj", hidden, hidden, gain=0.5)).float()
        draw.add("e_proj.weight", embedding.bfloat16())
        closed_to_classes(draw.add_linear("h_proj", hidden, hidden, gain=BLOCK_STREAMS_GAIN))
        _add_layer(draw, spec)
        _add_collapse(draw, spec)


def _add_dspark(draw: Draw, spec: TinySpec) -> None:
    """Add a DSPARK head.

    It has stages, the projection of the target's streams to the first one and, after the last one, a collapse, a
    first-order bias `markov_w2 @ markov_w1[previous token]`, and the confidence in each token.
    """
    cycle = _cycle(draw, spec)
    for stage in range(DSPARK_STAGES):
        with draw.inside(f"mtp.{stage}"):
            _add_layer(draw, spec)
    with draw.inside("mtp.0"):
        draw.add_linear("main_proj", spec.hidden, DSPARK_STAGES * spec.hidden)
        draw.add_norm("main_norm", spec.hidden)
    with draw.inside(f"mtp.{DSPARK_STAGES - 1}"):
        of_previous = draw.normal("markov_head.markov_w1", spec.vocab, MARKOV_RANK, std=1.0)
        draw.add("markov_head.markov_w1.weight", of_previous)
        biases = draw.add_linear("markov_head.markov_w2", spec.vocab, MARKOV_RANK)
        biases[cycle.roll(-1)] += MARKOV_GAIN * of_previous[cycle]
        confidence = draw.linear("confidence_head.proj", 1, spec.hidden + MARKOV_RANK)
        draw.add("confidence_head.proj.weight", confidence.float())
        _add_collapse(draw, spec)


def tiny_tensors(spec: TinySpec) -> dict[str, torch.Tensor]:
    """Return the tensors by name: bf16 weights, fp32 where the release has fp32, int64 hash tables."""
    draw = Draw(spec.seed)
    embedding = draw.add("embed.weight", token_embedding(draw, spec))
    head = output_head(draw, spec)
    if spec.nextn or spec.dspark is not None:
        head = (head.float() + _succession(draw, spec, embedding)).bfloat16()
    draw.add("head.weight", head)
    for layer, ratio in enumerate(spec.ratios):
        with draw.inside(f"layers.{layer}"):
            _add_layer(draw, spec, ratio, hashed=layer < spec.hash_layers)
    _add_collapse(draw, spec)
    if spec.nextn:
        _add_nextn(draw, spec)
    if spec.dspark is not None:
        _add_dspark(draw, spec)
    return draw.weights


def make_tiny(folder: str | Path, spec: TinySpec | None = None) -> Path:
    """Write the checkpoint to `folder` (created if missing) and return it. Equal specs give equal bytes.

    Raises:
        FileExistsError: `folder` has files that do not belong to such a checkpoint.
    """
    spec = spec or TinySpec()
    return write_checkpoint(Path(folder), spec, config_json(spec), tiny_tensors(spec))


def write_checkpoint(folder: Path, spec: TinySizes, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write the files of `make_tiny`. config.json is the last one, so a folder that has it is complete.

    Args:
        folder: created if missing.
        spec: options of the checkpoint.
        config: contents of config.json.
        tensors: tensors by name.

    Raises:
        FileExistsError: `folder` has files that do not belong to such a checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ours = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in ours)
    if foreign:
        raise FileExistsError(f"{folder} contains other files ({', '.join(foreign[:4])}): give an empty or new folder")
    (folder / "config.json").unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, spec.vocab, spec.context)
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
