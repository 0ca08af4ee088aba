"""Study snapshots without window entries, whose window is computed again at each hit: hit rates and accuracy.

    python -m benchmarks.window_replay                   # both parts
    python -m benchmarks.window_replay --what distance   # one part

"hits" runs the simulation of `prefix_simulation` in equal memory. Each form of snapshot gets the share of memory that
is best for it:

- `stored` (3.64 MB): with window entries, as in this package.
- `replay` (0.43 MB): the last 128 tokens before the hit are computed again, which is not exact.
- `exact` (no snapshot): the last 5,461 tokens before the hit are computed again (SPEC 6.6).

`saved` is the share of tokens that need not be computed, relative to an infinite cache.

"distance" uses transformers' model in fp32 with random weights. A prompt is computed, its windows are discarded and
rebuilt from the last R tokens, which attend to compressed entries but to no window entry before them. Then other tokens
follow, and their log p are compared with those of the whole sequence computed at once.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.agent_trace import TraceConfig, Turn, load, trace
from benchmarks.prefix_simulation import BLOCK_BYTES, INTERVAL, SNAPSHOT_BYTES, Simulation
from benchmarks.prefix_tree import Match
from benchmarks.reference.oracle import Oracle
from benchmarks.studies import Row, run_studies
from dsv4_sglang.model.config import DSV4Config
from dsv4_sglang.model.geometry import BLOCK_TOKENS as BLOCK
from dsv4_sglang.model.geometry import WINDOW
from dsv4_sglang.testing.tiny import TinySpec, make_tiny

# A snapshot of V4-Flash without its window entries: 21 layers, 4 rows of k and z, 640 channels in fp32.
COMPRESSOR_STATE_BYTES = 430_080
EXACT_TOKENS = (WINDOW - 1) * DSV4Config.flash().num_hidden_layers
# Bytes of a snapshot, tokens computed again at a hit.
FORMS: dict[str, tuple[int, int]] = {
    "stored": (SNAPSHOT_BYTES, 0),
    "replay": (COMPRESSOR_STATE_BYTES, WINDOW),
    "exact": (0, EXACT_TOKENS),
}
SHARES = (0.005, 0.01, 0.02, 0.04, 0.083, 0.12, 0.16, 0.24, 0.32)


class ReplaySimulation(Simulation):
    """`saved_tokens` counts the hit tokens less the `replay` tokens of each hit that are computed again."""

    def __init__(self, blocks: int, snapshots: int, interval: int, replay: int) -> None:
        super().__init__(blocks, snapshots, interval)
        self.replay, self.saved_tokens = replay, 0

    def _resume(self, keys: np.ndarray) -> Match:
        match = super()._resume(keys)
        self.saved_tokens += max(0, match.resume * BLOCK - self.replay)
        return match


def simulate(turns: Iterable[Turn], gigabytes: float, form: str, share: float) -> dict[str, Any]:
    """Return the figures of a trace. A form without snapshots can resume after every block.

    Args:
        turns: the trace.
        gigabytes: memory of the cache in GB.
        form: key of FORMS.
        share: share of the memory for snapshots.
    """
    snapshot_bytes, replay = FORMS[form]
    memory = gigabytes * 1e9
    if snapshot_bytes:
        blocks, interval = int(memory * (1 - share) / BLOCK_BYTES), INTERVAL
        snapshots = int(memory * share / snapshot_bytes)
    else:
        blocks = snapshots = int(memory / BLOCK_BYTES)
        interval, share = BLOCK, 0.0
    simulation = ReplaySimulation(blocks, snapshots, interval, replay)
    simulation.run(turns)
    return {
        "form": form,
        "gigabytes": gigabytes,
        "share": share,
        "hit": round(simulation.hit_tokens / simulation.ideal_tokens, 4),
        "saved": round(simulation.saved_tokens / simulation.ideal_tokens, 4),
    }


def loads() -> dict[str, tuple[list[Turn], float]]:
    """Return turns and GB by name: the measured loads of `prefix_trace`, and the loads that decided SNAPSHOT_SHARE."""
    agents = {
        f"agents, {active} at a time": (load(active, visits, tokens=(2_000, 80_000), generate=(8, 16)), 3.22)
        for active, visits in ((28, 10), (155, 5), (365, 5))
    }
    by_length = {
        f"conversations of {low:,} to {high:,} tokens": (
            list(trace(TraceConfig(conversations=2 * active, active=active, tokens=(low, high)))),
            20.0,
        )
        for (low, high), active in (((2_000, 8_000), 800), ((2_000, 200_000), 250), ((50_000, 200_000), 80))
    }
    return {**agents, **by_length}


def hits() -> Iterator[Row]:
    for name, (turns, gigabytes) in loads().items():
        for form in FORMS:
            shares = SHARES if FORMS[form][0] else (0.0,)
            best = max((simulate(turns, gigabytes, form, share) for share in shares), key=lambda row: row["saved"])
            yield {"load": name, **best}


@contextmanager
def entries_kept(layers: Iterable[Any]) -> Iterator[None]:
    """Keep entries and compressor states unchanged while tokens are computed again: the entries are all there."""
    layers = [layer for layer in layers if hasattr(layer, "compressed_kv")]
    for layer in layers:
        layer.store_compression_weights = lambda _name, kv, gate: (kv[:, :0], gate[:, :0], 0)
    try:
        yield
    finally:
        for layer in layers:
            del layer.store_compression_weights


@torch.no_grad()
def resumed_logits(oracle: Oracle, ids: list[int], hit: int, replay: int) -> torch.Tensor:
    """Return the logits after a hit whose windows are rebuilt.

    Args:
        oracle: the model.
        ids: all tokens.
        hit: tokens of the hit, a multiple of 128.
        replay: tokens, at most `hit`, from which the windows are rebuilt; 0 keeps the windows.

    Returns:
        Logits of the tokens from `hit` on, fp32 [len(ids) - hit, vocab].
    """
    from transformers import DynamicCache

    model = oracle.model
    cache = DynamicCache(config=model.config)
    tokens = torch.tensor([ids], device=oracle.device)
    for part in tokens[:, :hit].split(BLOCK, dim=1):
        model(part, past_key_values=cache, use_cache=True)
    if replay:
        begin = hit - replay
        cache = copy.deepcopy(cache)
        for layer in cache.layers:
            layer.keys = layer.values = layer.keys[:, :, :0]
        with entries_kept(cache.layers):
            for start in range(begin, hit, BLOCK):
                stop = min(start + BLOCK, hit)
                positions = torch.arange(start, stop, device=oracle.device)
                held = torch.arange(max(begin, start - WINDOW + 1), stop, device=oracle.device)
                apart = positions[:, None] - held
                mask = torch.zeros(apart.shape, device=oracle.device)
                mask.masked_fill_((apart < 0) | (apart >= WINDOW), float("-inf"))
                model(
                    tokens[:, start:stop],
                    attention_mask={"all": mask[None, None]},
                    position_ids=positions[None],
                    past_key_values=cache,
                    use_cache=True,
                )
        for layer in cache.layers:
            layer.cumulative_length = hit
    return model(tokens[:, hit:], past_key_values=cache, use_cache=True).logits[0].cpu()


def distances(spec: TinySpec, hit: int, replays: Iterable[int], follow: int = 64, seeds: int = 2) -> Iterator[Row]:
    """Yield |d log p| of the tokens after a hit, relative to the whole sequence computed at once.

    Args:
        spec: sizes of the model.
        hit: tokens of the hit.
        replays: numbers of tokens from which to rebuild the windows.
        follow: tokens after the hit.
        seeds: number of prompts.
    """
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder), spec)
        oracle = Oracle(folder)
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(3, spec.vocab, (hit + follow,), generator=generator).tolist() for _ in range(seeds)]
        wholes = [oracle.logits(ids, chunk=BLOCK)[hit:].log_softmax(-1) for ids in prompts]
        for replay in replays:
            apart, first = [], []
            for ids, whole in zip(prompts, wholes):
                got = resumed_logits(oracle, ids, hit, replay).log_softmax(-1)
                targets = torch.tensor([*ids[hit + 1 :], ids[0]])[:, None]
                difference = (got.gather(1, targets) - whole.gather(1, targets)).abs()[:, 0]
                apart.append(difference)
                first.append((got.argmax(-1) != whole.argmax(-1)).float())
            together = torch.cat(apart)
            yield {
                "layers": len(spec.ratios),
                "hit": hit,
                "replay": replay,
                "mean": float(f"{together.mean():.2g}"),
                "max": float(f"{together.max():.2g}"),
                "other_first_choice": round(float(torch.cat(first).mean()), 4),
            }


def distance() -> Iterator[Row]:
    """Measure six layers, where 127 x 6 = 762 tokens must be exact, and V4-Flash's 43 layers at small widths."""
    flash = DSV4Config.flash()
    few = TinySpec(heads=8)
    many = TinySpec(heads=8, ratios=flash.compress_ratios[: flash.num_hidden_layers], hidden=128)
    exact = (WINDOW - 1) * len(few.ratios)
    yield from distances(few, 1024, (0, 128, 256, 512, exact - WINDOW, exact))
    yield from distances(many, 1024, (0, 128))


if __name__ == "__main__":
    run_studies("window_replay", __doc__, {"hits": hits, "distance": distance})
