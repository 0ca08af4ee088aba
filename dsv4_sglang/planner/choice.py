"""The planned deployment: model, GPUs and flags, and the command that starts a server."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import MAX_DRAFT_TOKENS
from dsv4_sglang.model.v41 import V41Config
from dsv4_sglang.planner.gpus import Gpu
from dsv4_sglang.planner.models import OWNER, Format, Model
from dsv4_sglang.planner.weights import check_split
from dsv4_sglang.srt.launch.options import KEY, Options

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
    # Tokens per verify step, with DSPARK the block size + 1; 0: no speculation.
    draft_tokens: int = 0
    # --hicache-size: GB (10^9 bytes) of host memory per cache; 0: no host cache.
    host_gb: int = 0

    def __post_init__(self) -> None:
        if self.count % self.tp:
            raise ValueError(f"--count {self.count} is no multiple of --tp {self.tp}: servers have {self.tp} GPUs each")
        check_split(self.model, self.tp, self.dp)
        if self.running < self.dp:
            raise ValueError(
                f"--max-running-requests {self.running} is divided by --dp {self.dp}; expected at least {self.dp}"
            )
        if not 0 < self.mem_fraction < 1:
            raise ValueError(f"--mem-fraction-static is {self.mem_fraction:g}; expected more than 0 and less than 1")
        if self.chunk % (self.dp * BLOCK):
            raise ValueError(
                f"--chunked-prefill-size {self.chunk} is {self.chunk / self.dp:g} tokens for each of --dp {self.dp}; "
                f"expected a multiple of {BLOCK}"
            )
        if (self.experts is Format.BF16) == self.model.quantised:
            quantised, formats = ("quantised", "fp8 or fp4") if self.model.quantised else ("not quantised", "bf16")
            raise ValueError(
                f"--experts {self.experts.value}: the weights of {self.model.name} are {quantised}; give {formats}"
            )
        if self.is_v41:
            self._check_v41()
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

    def _check_v41(self) -> None:
        if self.kv_cache_dtype == "bfloat16":
            raise ValueError(
                "--kv-cache-dtype bfloat16: KV entries of DeepSeek-V4.1 have the formats that it was trained with; "
                "leave it out"
            )

    def _check_drafts(self) -> None:
        given = f"--speculative-num-draft-tokens {self.draft_tokens}"
        if not 2 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"{given}: expected 2 to {MAX_DRAFT_TOKENS}, a token and its drafts, or 0 for no speculation"
            )
        if self.is_v41:
            raise ValueError(f"{given}: speculation with DeepSeek-V4.1 is rejected at start; give 0")
        if not self.model.draft_tokens:
            raise ValueError(f"{given}: {self.model.name} has no NextN layer to draft with (num_nextn_predict_layers)")
        if self.model.dspark and self.dp > 1:
            raise ValueError(f"{given}: DSPARK with --dp {self.dp} is rejected at start; give --dp 1")

    @property
    def is_v41(self) -> bool:
        return isinstance(self.model.config, V41Config)

    @property
    def draft_layers(self) -> int:
        """Number of draft model layers, each with a window ring in every state slot."""
        if not self.draft_tokens:
            return 0
        return 1 if self.model.dspark is None else self.model.dspark.stages

    @property
    def served_context(self) -> int:
        return self.model.config.max_position_embeddings if self.context_length is None else self.context_length

    def sglang_fields(self) -> dict[str, Any]:
        """Return the ServerArgs fields of one server with which SGLang sizes its own cache."""
        fields: dict[str, Any] = {"tp_size": self.tp}
        if self.dp > 1:
            fields |= {"dp_size": self.dp, "enable_dp_attention": True}
        if self.kv_cache_dtype != "auto":
            fields["kv_cache_dtype"] = self.kv_cache_dtype
        fields["max_running_requests"] = self.running
        fields["chunked_prefill_size"] = self.chunk
        fields["mem_fraction_static"] = self.mem_fraction
        if self.context_length is not None:
            fields["context_length"] = self.context_length
        if self.draft_tokens and (head := self.model.dspark):
            fields["speculative_algorithm"] = "DSPARK"
            if self.draft_tokens != head.block + 1:
                fields["speculative_dspark_block_size"] = self.draft_tokens - 1
        elif self.draft_tokens:
            fields |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": self.draft_tokens - 1}
            fields |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": self.draft_tokens}
        return fields

    def command(self) -> str:
        """Return the command line that starts one server."""
        released = self.model.path.startswith(f"{OWNER}/")  # these checkpoints have FP4 experts
        path = "CHECKPOINT-WITH-FP8-EXPERTS" if released and self.experts is Format.FP8 else self.model.path
        flags = {"model_path": path, **self.sglang_fields()}
        if self.experts is Format.FP4 and self.gpu.expert_runner:
            flags["moe_runner_backend"] = self.gpu.expert_runner
        if self.host_gb:
            flags |= {"enable_hierarchical_cache": True, "hicache_size": self.host_gb}
        if self.options.max_snapshots is not None:
            flags["json_model_override_args"] = json.dumps({KEY: {"max_snapshots": self.options.max_snapshots}})
        words = ["dsv4-sglang", "serve"]
        for name, value in flags.items():
            words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
        return shlex.join(words)
