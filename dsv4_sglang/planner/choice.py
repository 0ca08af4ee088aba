"""The planned deployment: model, GPUs and flags, and the command that starts a server."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import MAX_DRAFT_TOKENS
from dsv4_sglang.planner.gpus import Gpu
from dsv4_sglang.planner.models import Format, Model
from dsv4_sglang.planner.weights import Split, check_split
from dsv4_sglang.srt.integration.options import KEY, Options

# KV entry dtype by the value of --kv-cache-dtype.
ENTRY_DTYPES = {"auto": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Choice:
    """Planned deployment: `count` GPUs in servers of `tp` GPUs each. Raises ValueError for a configuration that a
    server would reject."""

    model: Model
    gpu: Gpu
    count: int
    tp: int
    dp: int
    experts: Format
    # --max-running-requests of one server.
    running: int = 256
    mem_fraction: float = 0.85
    kv_cache_dtype: str = "auto"
    options: Options = field(default_factory=Options)
    # --chunked-prefill-size.
    chunk: int = 8192
    # --context-length; None: the model's maximum.
    context_length: int | None = None
    # Tokens per request for which the capacity is computed.
    request: int = 32768
    # Tokens per verify step; 0: no speculation. EAGLE: --speculative-num-draft-tokens. DSPARK (models with such a
    # head): block size + 1.
    draft_tokens: int = 0
    # --hicache-size: GB (10^9 bytes) of host memory per process; 0: no host cache.
    host_gb: int = 0

    def __post_init__(self) -> None:
        for flag, value in (("--count", self.count), ("--tp", self.tp), ("--dp", self.dp), ("--context", self.request)):
            if value < 1:
                raise ValueError(f"{flag} is {value}; expected at least 1")
        if self.host_gb < 0:
            raise ValueError(f"--hicache-size is {self.host_gb}; expected at least 0, in GB (10^9 bytes)")
        if self.count % self.tp:
            raise ValueError(f"--count {self.count} is no multiple of --tp {self.tp}: servers have {self.tp} GPUs each")
        check_split(self.model, self.split)
        if self.running < self.dp:
            raise ValueError(
                f"--max-running-requests {self.running} is divided by --dp {self.dp}; expected at least {self.dp}"
            )
        if not 0 < self.mem_fraction < 1:
            raise ValueError(f"--mem-fraction-static is {self.mem_fraction:g}; expected more than 0 and less than 1")
        if self.kv_cache_dtype not in ENTRY_DTYPES:
            raise ValueError(f"--kv-cache-dtype is {self.kv_cache_dtype!r}; expected one of {', '.join(ENTRY_DTYPES)}")
        if self.chunk < 1 or self.chunk % (self.dp * BLOCK):
            raise ValueError(
                f"--chunked-prefill-size {self.chunk} is {self.chunk / self.dp:g} tokens for each of --dp {self.dp}; "
                f"expected a multiple of {BLOCK}"
            )
        if self.experts is not Format.BF16 and not self.model.quantised:
            raise ValueError(
                f"--experts {self.experts.value}: the weights of {self.model.name} are not quantised, and this package "
                "serves them as they are; give bf16"
            )
        if self.experts is Format.BF16 and self.model.quantised:
            raise ValueError(
                f"--experts bf16: the weights of {self.model.name} are quantised, and SGLang builds the experts in fp8 "
                "or fp4; give one of these"
            )
        if self.draft_tokens:
            self._check_drafts()
        most = self.model.config.max_position_embeddings
        if not 1 <= self.served_context <= most:
            raise ValueError(f"--context-length is {self.served_context}; expected 1 to {most}, the model's positions")
        if self.request > self.served_context:
            raise ValueError(
                f"--context {self.request} is longer than a request may be: {self.served_context} tokens "
                "(--context-length)"
            )

    def _check_drafts(self) -> None:
        head, given = self.model.dspark, f"--speculative-num-draft-tokens {self.draft_tokens}"
        if head is not None:
            given = f"--speculative-dspark-block-size {self.draft_tokens - 1}"
            if not 2 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
                raise ValueError(f"{given}: expected 1 to {MAX_DRAFT_TOKENS - 1}, the tokens of a block")
            if self.dp > 1:
                raise ValueError(f"{given}: DSPARK with --dp {self.dp} is rejected at start; give --dp 1")
        elif not 2 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"{given}: expected 2 to {MAX_DRAFT_TOKENS}, a token and its drafts, or 0 for no speculation"
            )
        elif not self.model.config.num_nextn_predict_layers:
            raise ValueError(f"{given}: {self.model.name} has no NextN layer to draft with (num_nextn_predict_layers)")

    @property
    def split(self) -> Split:
        return Split(self.tp, self.dp)

    @property
    def draft_layers(self) -> int:
        """Number of draft model layers, each with a window ring in every state slot."""
        if not self.draft_tokens:
            return 0
        return 1 if self.model.dspark is None else self.model.dspark.stages

    @property
    def served_context(self) -> int:
        return self.model.config.max_position_embeddings if self.context_length is None else self.context_length

    def gpus(self, count: int) -> Choice:
        """Return the same configuration with one server of `count` GPUs."""
        return replace(self, count=count, tp=count)

    def sglang_fields(self) -> dict[str, Any]:
        """Return the ServerArgs fields with which SGLang sizes its own cache for this deployment."""
        fields: dict[str, Any] = {
            "tp_size": self.tp,
            "dp_size": self.dp,
            "enable_dp_attention": self.dp > 1,
            "max_running_requests": self.running,
            "chunked_prefill_size": self.chunk,
            "mem_fraction_static": self.mem_fraction,
            "kv_cache_dtype": self.kv_cache_dtype,
            "context_length": self.context_length,
        }
        return fields | self._speculative_fields()

    def _speculative_fields(self) -> dict[str, Any]:
        if not self.draft_tokens:
            return {}
        steps = self.draft_tokens - 1
        if head := self.model.dspark:
            block = {} if steps == head.block else {"speculative_dspark_block_size": steps}
            return {"speculative_algorithm": "DSPARK", **block}
        fields = {"speculative_algorithm": "EAGLE", "speculative_num_steps": steps, "speculative_eagle_topk": 1}
        return {**fields, "speculative_num_draft_tokens": self.draft_tokens}

    def command(self) -> str:
        """Return the command line that starts one server."""
        released = self.model.path.startswith("deepseek-ai/")  # these checkpoints have FP4 experts
        path = "CHECKPOINT-WITH-FP8-EXPERTS" if released and self.experts is Format.FP8 else self.model.path
        words = ["dsv4-sglang", "serve", "--model-path", path, "--tp-size", str(self.tp)]
        if self.dp > 1:
            words += ["--dp-size", str(self.dp), "--enable-dp-attention"]
        if self.experts is Format.FP4 and self.gpu.expert_runner:
            words += ["--moe-runner-backend", self.gpu.expert_runner]
        if self.kv_cache_dtype != "auto":
            words += ["--kv-cache-dtype", self.kv_cache_dtype]
        words += ["--max-running-requests", str(self.running), "--chunked-prefill-size", str(self.chunk)]
        words += ["--mem-fraction-static", f"{self.mem_fraction:g}"]
        for name, value in self._speculative_fields().items():
            words += ["--" + name.replace("_", "-"), str(value)]
        if self.host_gb:
            words += ["--enable-hierarchical-cache", "--hicache-size", str(self.host_gb)]
        if self.context_length is not None:
            words += ["--context-length", str(self.context_length)]
        given = {f.name: getattr(self.options, f.name) for f in fields(Options)}
        if chosen := {name: value for name, value in given.items() if value != getattr(Options(), name)}:
            words += ["--json-model-override-args", json.dumps({KEY: chosen})]
        return shlex.join(words)
