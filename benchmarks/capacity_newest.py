"""Tokens that fit in a memory: ours, and what a newer SGLang's own pool configurator computes for its cache.

    python -m benchmarks.capacity_newest [--gib 78.82] [--requests 256] [--checkpoints 512] [--out DIR]

Runs where SGLang 0.5.21 or later is installed (`make setup SGLANG=0.5.23`); no GPU is needed. SGLang's
DSV4PoolConfigurator is asked itself, for the model of benchmarks/configs/flashshape. Since 0.5.21 it has two ways to
size its window pool: with `--swa-full-tokens-ratio` by rows for each token of the pool; without, by the running
requests and by the cached prefixes whose last window it keeps (`--swa-prefix-tails`, four a running request by
default). A prefix without its window is no hit there; what corresponds here is a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from benchmarks import report
from benchmarks.environment import ROOT
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.srt import launch
from dsv4_sglang.srt.layout import served_layout
from dsv4_sglang.srt.options import Options
from dsv4_sglang.srt.sizing import MAX_STAGING, StateDemand, tokens_in_bytes

GIB = 1 << 30
DRAFTS = 4
PAGE = 256
CHUNK = 8192
EAGLE = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": DRAFTS - 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": DRAFTS,
}
"""Fields of ServerArgs."""


def flashshape() -> dict[str, Any]:
    values: dict[str, Any] = json.loads((ROOT / "benchmarks/configs/flashshape/config.json").read_text())
    return values


def ours(gib: float, requests: int, checkpoints: int, drafts: int) -> dict[str, Any]:
    """Blocks with what live slots, staging slots and checkpoints leave."""
    import torch

    config = DSV4Config.from_hf(flashshape())
    layout = served_layout(
        config, torch.float8_e4m3fn, Options(), "cpu", draft_tokens=drafts, draft_layers=1 if drafts else 0
    )
    fixed = StateDemand(requests, MAX_STAGING, checkpoints).bytes(layout)
    tokens = tokens_in_bytes(layout, int(gib * GIB) - fixed)
    return {"tokens": tokens, "prefixes": checkpoints, "B a token": layout.token_bytes, "fixed GiB": fixed / GIB}


def in_tree(gib: float, requests: int, **flags: Any) -> dict[str, Any]:
    """What SGLang's configurator says with these fields of ServerArgs."""
    from sglang.srt import runtime_context
    from sglang.srt.model_executor.pool_configurator import DSV4PoolConfigurator
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from dsv4_sglang.srt import compat

    # SGLang resolves nothing for a model path of "dummy", and reads the flags as they are.
    given = {"max_running_requests": requests, "chunked_prefill_size": CHUNK, "page_size": PAGE, **flags}
    args = ServerArgs(model_path="dummy", device="cuda", **given)
    config = compat.config_class()(**flashshape())
    model = SimpleNamespace(
        hf_config=config,
        compress_ratios=config.compress_ratios,
        qk_nope_head_dim=config.head_dim - config.qk_rope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        index_head_dim=config.index_head_dim,
        window_size=config.sliding_window,
        context_len=config.max_position_embeddings,
    )
    asks = SimpleNamespace(
        model_config=model,
        kv_cache_dtype_str="fp8_e4m3",
        layer_info=SimpleNamespace(start_layer=0, end_layer=config.num_hidden_layers),
        sliding_window_size=config.sliding_window,
        page_size=PAGE,
        pp_size=1,
        attn_dp_size=1,
        spec_algorithm=SpeculativeAlgorithm.from_string(args.speculative_algorithm),
        spec_aux_config=None,
    )
    with runtime_context.use_context(runtime_context.create_context(args, role="scheduler")):
        configurator = DSV4PoolConfigurator(asks)
        sizes = configurator.calculate_pool_sizes(int(gib * GIB), PAGE)
    by_requests = configurator.swa_cap_tokens is not None
    return {
        "tokens": sizes.max_total_num_tokens,
        "prefixes": configurator.swa_prefix_tails if by_requests else None,
        "B a token": configurator.bytes_per_full_token,
        "fixed GiB": (gib * GIB - sizes.max_total_num_tokens * configurator.bytes_per_full_token) / GIB,
    }


RATIO = {"swa_full_tokens_ratio": 0.1, "_swa_full_tokens_ratio_explicitly_set": True}


def computed(gib: float, requests: int, checkpoints: int, drafts: int) -> Iterator[dict[str, Any]]:
    speculation = EAGLE if drafts else {}
    settings = {
        "in-tree, default": partial(in_tree, gib, requests, **speculation),
        "in-tree, --swa-full-tokens-ratio 0.1": partial(in_tree, gib, requests, **RATIO, **speculation),
        "in-tree, --swa-prefix-tails 0": partial(in_tree, gib, requests, swa_prefix_tails=0, **speculation),
        f"in-tree, --swa-prefix-tails {checkpoints}": partial(
            in_tree, gib, requests, swa_prefix_tails=checkpoints, **speculation
        ),
        f"ours, {checkpoints} checkpoints": partial(ours, gib, requests, checkpoints, drafts),
        f"ours, {4 * requests} checkpoints": partial(ours, gib, requests, 4 * requests, drafts),
    }
    base = None
    for name, size in settings.items():
        row = size()
        base = base or row["tokens"]
        yield {"setting": name, "drafts": drafts, **row, "x in-tree default": row["tokens"] / base}


def main(argv: list[str] | None = None) -> int:
    options = report.parser(__doc__)
    options.add_argument("--gib", type=float, default=78.82, help="memory for the cache (%(default)s GiB)")
    options.add_argument("--requests", type=int, default=256, help="running requests (%(default)s)")
    options.add_argument("--checkpoints", type=int, default=512, help="checkpoints and prefix tails (%(default)s)")
    args = options.parse_args(argv)
    launch.prepare_this_process(cpu=not launch.has_gpu())
    given = {"gib": args.gib, "requests": args.requests, "checkpoints": args.checkpoints}
    result = report.Report("capacity_newest", args, given)
    for drafts in (0, DRAFTS):
        name = f"{drafts} draft tokens" if drafts else "no drafts"
        result.part(name, partial(computed, args.gib, args.requests, args.checkpoints, drafts))
    columns = ["setting", "drafts", "tokens", "prefixes", "B a token", "fixed GiB", "x in-tree default"]
    result.table(f"tokens in {args.gib} GiB, {args.requests} running requests", columns)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
