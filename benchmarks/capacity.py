"""Tokens that fit in a memory: ours and SGLang's, computed from the formats, and as running servers allocated them.

    python -m benchmarks.capacity [--gib 78.82] [--requests 256] [--checkpoints 512] [--serve serve.json] [--out DIR]

Ours: what the server itself computes at start-up (`dsv4_sglang.srt.sizing`): one live slot a running request, the
staging slots of a prefill step, the checkpoints, and blocks with what is left. SGLang's: the formula of its
DSV4PoolConfigurator (0.5.17). Its setting swa_full_tokens_ratio says how many window rows it keeps for every token:
0.1 by default; 0.5 is what users set for prefix hits; 0.01 with its online HCA state is about the most tokens it can
be tuned to, with room for the windows of the running requests alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import CSA_RATIO, HCA_RATIO
from dsv4_sglang.srt.layout import served_layout
from dsv4_sglang.srt.options import Options
from dsv4_sglang.srt.sizing import MAX_STAGING, StateDemand

GIB = 1 << 30
MODELS = {"flash": DSV4Config.flash, "pro": DSV4Config.pro}
ROWS = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Cost:
    """Bytes that grow with the tokens, and bytes that the requests and checkpoints cost."""

    token: float
    fixed: int

    def tokens(self, memory: float) -> int:
        """Those of whole blocks."""
        return max(0, int((memory - self.fixed) / self.token)) // BLOCK * BLOCK


def ours(
    config: DSV4Config, requests: int, checkpoints: int, row_format: str = "fp8", hca_state: str = "online"
) -> Cost:
    """Fixed are the state slots, the checkpoints, and the two blocks that serve no request."""
    layout = served_layout(config, ROWS[row_format], Options(hca_state=hca_state), "cpu")
    demand = StateDemand(requests, MAX_STAGING, checkpoints)
    return Cost(layout.token_bytes, demand.bytes(layout) + 2 * layout.block_bytes)


def in_tree(config: DSV4Config, requests: int, window_ratio: float = 0.1, online: bool = False) -> Cost:
    """Bytes of SGLang 0.5.17: FP8 rows and index keys, fp32 compressor states, pages of 256 tokens."""
    row, key, dim, index_dim, fp32 = 448 + 64 * 2 + 8, 128 + 4, 512, 128, 4
    ratios = [config.ratio(layer) for layer in range(config.num_hidden_layers)]
    layers, csa, hca = len(ratios), ratios.count(CSA_RATIO), ratios.count(HCA_RATIO)
    ring_share = 8 / 128
    token = (
        window_ratio * row * layers
        + (row + key) / 4 * csa
        + row / 128 * hca
        + window_ratio * ring_share * 4 * (dim + index_dim) * fp32 * csa
    )
    slots = requests + 1
    if online:
        fixed = (slots + 2) * 3 * dim * fp32 * hca
    else:
        rows = math.ceil((slots * 128 + 128 + 1) / 128) * 128
        fixed = rows * 2 * dim * fp32 * hca
    return Cost(token, fixed)


def settings(config: DSV4Config, requests: int, checkpoints: int) -> dict[str, Cost]:
    return {
        "ours": ours(config, requests, checkpoints),
        "ours, raw HCA state": ours(config, requests, checkpoints, hca_state="raw"),
        "ours, bf16 rows": ours(config, requests, checkpoints, row_format="bf16"),
        "in-tree, default": in_tree(config, requests),
        "in-tree, windows for hits (0.5)": in_tree(config, requests, 0.5),
        "in-tree, most tokens (0.01, online)": in_tree(config, requests, 0.01, online=True),
    }


def computed(gib: float, requests: int, checkpoints: int) -> Iterator[dict[str, Any]]:
    for model, make in MODELS.items():
        costs = settings(make(), requests, checkpoints)
        base = costs["in-tree, default"].tokens(gib * GIB)
        for name, cost in costs.items():
            tokens = cost.tokens(gib * GIB)
            yield {
                "model": model,
                "setting": name,
                "kind": "computed",
                "B a token": cost.token,
                "fixed GiB": cost.fixed / GIB,
                "tokens": tokens,
                "tokens a GiB": tokens / gib,
                "x in-tree default": tokens / base,
            }


def allocated(file: Path) -> Iterator[dict[str, Any]]:
    """What the servers of a `serve` run reported (43 layers with the ratios of Flash)."""
    if not file.is_file():
        return
    first: dict[str, dict[str, Any]] = {}
    for row in json.loads(file.read_text())["rows"]:
        if row.get("measure") == "tokens in the cache" and row.get("value"):
            first.setdefault(row["subject"], row)
    base = first.get("in-tree", {}).get("value")
    for subject, row in first.items():
        gib = row.get("gib")
        yield {
            "model": "flashshape",
            "setting": f"{subject}, server",
            "kind": "allocated",
            "B a token": row.get("bytes_a_token"),
            "fixed GiB": row.get("fixed_gib"),
            "tokens": row["value"],
            "tokens a GiB": row["value"] / gib if gib else None,
            "x in-tree default": row["value"] / base if base else None,
        }


def main(argv: list[str] | None = None) -> int:
    options = report.parser(__doc__)
    options.add_argument("--gib", type=float, default=78.82, help="memory for the cache (%(default)s GiB)")
    options.add_argument("--requests", type=int, default=256, help="running requests (%(default)s)")
    options.add_argument("--checkpoints", type=int, default=512, help="checkpoints of ours (%(default)s)")
    options.add_argument("--serve", type=Path, help="result of `serve` (serve.json in the folder of --out)")
    args = options.parse_args(argv)
    given = {"gib": args.gib, "requests": args.requests, "checkpoints": args.checkpoints}
    result = report.Report("capacity", args, given)
    result.part("computed", partial(computed, args.gib, args.requests, args.checkpoints))
    result.part("allocated", partial(allocated, args.serve or Path(args.out) / "serve.json"))
    columns = ["setting", "model", "B a token", "fixed GiB", "tokens", "tokens a GiB", "x in-tree default"]
    title = f"tokens in {args.gib} GiB, {args.requests} requests, {args.checkpoints} checkpoints of ours"
    result.table(title, columns)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
