"""Compare the tokens that fit in a given memory: ours and SGLang's, computed.

    python -m benchmarks.capacity [--gib 78.82] [--requests N] [--snapshots N] [--out DIR]

V4 has 256 running requests and 512 snapshots, V4.1 64 requests and as many snapshots as a server keeps by default.
Ours is what the server computes at start-up (`dsv4_sglang.srt.memory.sizing`): one state slot per running request, the
staging slots of a prefill step, the snapshots, and blocks in the remaining memory. SGLang's is the result of the
installed release's own pool configurator, called with flags that a user can set
(`dsv4_sglang.planner.ask_sglang`). No GPU is needed.

`--swa-full-tokens-ratio` is the number of window entries that SGLang keeps per token:

- 0.1 is its default for this model.
- 0.5 is what users set for prefix hits.
- 0.01 with its online HCA state is close to the largest token capacity that it can be tuned to. It leaves room for the
  windows of the running requests only.

For V4.1 SGLang sizes the windows by the running requests, and `--swa-prefix-tails` prefixes keep theirs: by default
four per running request. With `--enable-encoder-swa-bounded-replay` none does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import command_line, report
from dsv4_sglang.model.config import ModelConfig
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.supported import CONFIGS as SUPPORTED
from dsv4_sglang.planner.ask_sglang import in_tree_capacity
from dsv4_sglang.planner.models import CONFIGS as RELEASED
from dsv4_sglang.srt.launch.options import Options
from dsv4_sglang.srt.memory.served_layout import served_layout
from dsv4_sglang.srt.memory.sizing import demand_of

GIB = 1 << 30
# Tokens of a verify step with EAGLE 3/1/4.
DRAFTS = 4
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}
ROWS = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
# Tokens of a prefill step.
CHUNK = 8192


@dataclass(frozen=True)
class Case:
    """A model and the load of its servers. `snapshots` is None for the default of a server."""

    config: Path
    requests: int
    snapshots: int | None
    drafts: tuple[int, ...]


CASES = {
    "flash": Case(RELEASED / "DeepSeek-V4-Flash.json", 256, 512, (0, DRAFTS)),
    "pro": Case(RELEASED / "DeepSeek-V4-Pro.json", 256, 512, (0, DRAFTS)),
    # Its cache is that of V4.1-Flash.
    "v41": Case(command_line.MODELS["v41wide"].folder / "config.json", 64, None, (0,)),
}


@dataclass(frozen=True)
class Cost:
    """Bytes per token of context, and the fixed bytes of requests and snapshots."""

    token: float
    fixed: int

    def tokens(self, memory: float) -> int:
        """Return the tokens that fit in `memory` bytes, in whole blocks."""
        return max(0, int((memory - self.fixed) / self.token)) // BLOCK * BLOCK


def ours(
    config: ModelConfig, gib: float, requests: int, snapshots: int | None, kv_format: str = "fp8", drafts: int = 0
) -> Cost:
    """Return the cost of our cache. Fixed: the state slots, the snapshots, and the two blocks that serve no request.

    Args:
        config: config of the model.
        gib: memory for the cache in GiB, from which the default number of snapshots follows.
        requests: running requests.
        snapshots: state snapshots, None for the default.
        kv_format: "fp8" or "bf16"; V4.1 has its own formats.
        drafts: tokens of a verify step, 0 without speculation.
    """
    draft_layers = 1 if drafts else 0
    layout = served_layout(config, ROWS[kv_format], Options(), "cpu", draft_tokens=drafts, draft_layers=draft_layers)
    demand = demand_of(layout, gib, running=requests, step_tokens=CHUNK, max_snapshots=snapshots)
    return Cost(layout.token_bytes, demand.bytes(layout) + 2 * layout.block_bytes)


def in_tree(config_json: str, gib: float, requests: int, drafts: int, **flags: Any) -> dict[str, Any]:
    """Return the token capacity of SGLang's cache.

    Args:
        config_json: config of the model.
        gib: memory for the cache.
        requests: running requests.
        drafts: tokens of a verify step, 0 without speculation.
        **flags: further fields of ServerArgs.
    """
    speculation = EAGLE | {"speculative_num_draft_tokens": drafts, "speculative_num_steps": drafts - 1}
    held = in_tree_capacity(
        config_json,
        gib,
        **{"max_running_requests": requests, "chunked_prefill_size": CHUNK, **(speculation if drafts else {}), **flags},
    )
    fixed = gib - held.tokens * held.token_bytes / GIB
    return {"B a token": held.token_bytes, "fixed GiB": fixed, "tokens": held.tokens}


def in_tree_settings(model: str) -> dict[str, dict[str, Any]]:
    """Return the fields of ServerArgs of each setting of SGLang for a model of CASES."""
    default: dict[str, dict[str, Any]] = {"in-tree, default": {}}
    if model == "v41":
        return default | {
            "in-tree, 1,024 windows": {"swa_prefix_tails": 1024},
            "in-tree, encoder replay": {"enable_encoder_swa_bounded_replay": True},
        }
    return default | {"in-tree, windows for hits (0.5)": {"swa_full_tokens_ratio": 0.5}}


def computed(model: str, gib: float, requests: int, snapshots: int | None, drafts: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each setting of ours and of SGLang.

    Args:
        model: key of CASES.
        gib: memory for the cache in GiB.
        requests: running requests.
        snapshots: state snapshots of ours, None for the default.
        drafts: tokens of a verify step, 0 without speculation.
    """
    config_json = CASES[model].config.read_text()
    values = json.loads(config_json)
    sizes = partial(in_tree, config_json, gib, requests, drafts)
    rows = {name: sizes(**flags) for name, flags in in_tree_settings(model).items()}
    if model != "v41" and not drafts:  # SGLang's online state does not support speculation
        with patch.dict(os.environ, {"SGLANG_OPT_USE_ONLINE_COMPRESS": "1"}):
            rows["in-tree, most tokens (0.01, online)"] = sizes(swa_full_tokens_ratio=0.01)
    ours_of = partial(ours, SUPPORTED[values["model_type"]].from_hf(values), gib, requests, snapshots, drafts=drafts)
    costs = {"ours": ours_of()}
    if model != "v41":
        costs["ours, bf16 rows"] = ours_of(kv_format="bf16")
    for name, cost in costs.items():
        rows[name] = {
            "B a token": cost.token,
            "fixed GiB": cost.fixed / GIB,
            "tokens": cost.tokens(gib * GIB),
        }
    base = rows["in-tree, default"]["tokens"]
    for name, row in rows.items():
        beside = {"tokens a GiB": row["tokens"] / gib, "x in-tree default": row["tokens"] / base}
        of_case = {"model": model, "requests": requests, "setting": name, "drafts": drafts, "kind": "computed"}
        yield {**of_case, **row, **beside}


def main(argv: list[str] | None = None) -> int:
    options = command_line.report_parser(__doc__)
    options.add_argument("--gib", type=float, default=78.82, help="memory for the cache in GiB (%(default)s)")
    options.add_argument("--requests", type=int, help="running requests (256, V4.1 64)")
    options.add_argument("--snapshots", type=int, help="state snapshots of ours (512, V4.1 the default of a server)")
    args = options.parse_args(argv)
    given = {"gib": args.gib, "requests": args.requests, "snapshots": args.snapshots}
    result = report.Report("capacity", args, given)
    for model, case in CASES.items():
        requests, snapshots = args.requests or case.requests, args.snapshots or case.snapshots
        for drafts in case.drafts:
            part = partial(computed, model, args.gib, requests, snapshots, drafts)
            result.part(f"{model}, {drafts} draft tokens", part)
    columns = ["setting", "model", "requests", "drafts", "B a token", "fixed GiB", "tokens", "tokens a GiB"]
    result.table(f"tokens in {args.gib} GiB", [*columns, "x in-tree default"])
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
