"""Benchmark the write path of a step: one `append` kernel per layer against SGLang's kernels for the same work.

    python -m benchmarks.append [--quick] [--out DIR]

Decode is one recorded CUDA graph of all layers. Every layer has its own random inputs, window rings, compressor states,
compressed entries and index keys. Loads of decode:

- "steady": requests at random phases of their compression windows,
- "csa": all requests complete a window of 4 tokens in the step,
- "csa+hca": all requests complete a window of 4 and one of 128 tokens,
- "none": no request completes a window.

Times are medians. The floor is the larger of bytes / copy rate and launches x time of an empty launch. Bytes come from
`benchmarks.traffic`, the rates from the ceilings of the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import command_line, loads, report, timing, traffic
from benchmarks.append_in_tree import InTree
from benchmarks.append_ours import Inputs, Ours, ops_for, random_inputs
from benchmarks.loads import Load
from benchmarks.traffic import Formats
from dsv4_sglang.formats import KVBuffer, KVFormat
from dsv4_sglang.model.config import DSV4Config

CONTEXT = 4096
BATCHES = (1, 16, 64, 256)
PREFILLS = ((1, 8192), (8, 2048))
MODELS = {"flash": DSV4Config.flash, "pro": DSV4Config.pro}
# Class, and formats for the byte count, of both sides with their defaults.
SUBJECTS: dict[str, tuple[type[Ours] | type[InTree], Formats]] = {
    "ours": (Ours, traffic.OURS),
    "in-tree": (InTree, traffic.IN_TREE),
}


def first_layers(config: DSV4Config, layers: int) -> DSV4Config:
    """Return the model cut to its first layers, for the dry run."""
    return dataclasses.replace(
        config, num_hidden_layers=layers, compress_ratios=config.compress_ratios[:layers], num_nextn_predict_layers=0
    )


def decode_loads(batch: int, context: int) -> dict[str, list[Load]]:
    return {
        "steady": loads.steady(batch, context),
        "none": [loads.no_entry(batch, context)],
        "csa": [loads.csa_entry(batch, context)],
        "csa+hca": [loads.both_entries(batch, context)],
    }


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cpu" if args.dry_run else "cuda")
        self.context = 256 if args.dry_run else CONTEXT
        self.samples = 10 if args.quick else 30
        self.copy_gbs = self.launch_us = 0.0

    def config(self, model: str) -> DSV4Config:
        config = MODELS[model]()
        return first_layers(config, 4) if self.args.dry_run else config

    def decode(self, model: str, subject: str, batch: int) -> Iterator[dict[str, Any]]:
        """Yield the times of a decode step, one row per load.

        Args:
            model: key of MODELS.
            subject: key of SUBJECTS.
            batch: number of requests.
        """
        kind, formats = SUBJECTS[subject]
        config = self.config(model)
        step = kind(config, batch, self.context, self.device)
        step.set_lengths(loads.csa_entry(batch, self.context).prefix_lens)
        recorded = timing.Recorded(step.step, self.device)
        for name, drawn in decode_loads(batch, self.context).items():
            times, moved, weights = [], 0.0, [load.weight for load in drawn]
            for load in drawn:
                step.set_lengths(load.prefix_lens)
                times.append(recorded.time(self.samples))
                moved += traffic.decode_bytes(config, load, formats) * load.weight / sum(weights)
            us = timing.weighted(times, weights)
            row = {"model": model, "work": f"decode x {batch}", "load": name, "subject": subject, "us": us}
            yield row | {"low": times[0].low, "high": times[0].high} | self._rates(us, moved, step.launches)

    def prefill(self, model: str, subject: str, batch: int, chunk: int) -> Iterator[dict[str, Any]]:
        """Yield the time of a prefill step.

        Args:
            model: key of MODELS.
            subject: key of SUBJECTS.
            batch: number of requests.
            chunk: tokens of each request.
        """
        kind, formats = SUBJECTS[subject]
        config = self.config(model)
        step = kind(config, batch, chunk, self.device, chunk=chunk)
        time = timing.Recorded(step.step, self.device).time(max(5, self.samples // 3))
        moved = traffic.prefill_bytes(config, [chunk] * batch, formats)
        row = {"model": model, "work": f"prefill {batch} x {chunk}", "load": "new", "subject": subject, "us": time.us}
        yield row | {"low": time.low, "high": time.high} | self._rates(time.us, moved, step.launches)

    def _rates(self, us: float, moved: float, launches: int) -> dict[str, float]:
        floor, rate = timing.floor_us(moved, launches, self.copy_gbs, self.launch_us), moved / us / 1e3
        row = {"MB": moved / 1e6, "launches": launches, "floor us": floor, "x floor": us / floor}
        return row | {"GB/s": rate, "% of copy": 100 * rate / self.copy_gbs}

    def agreement(self) -> Iterator[dict[str, Any]]:
        """Check that both sides store the same values, up to rounding, for the same prompts.

        Raises:
            ValueError: the stored values differ, so one side does not do the work.
        """
        from sglang.kernels.ops.attention.dsv4.dequant_k_cache import dequantize_k_cache_paged_dsv4

        config = first_layers(DSV4Config.flash(), 4)
        chunk, batch = 300, 2
        generator = torch.Generator(device=self.device).manual_seed(3)
        inputs: list[Inputs] = [
            random_inputs(config.ratio(layer), chunk * batch, self.device, generator) for layer in range(4)
        ]
        ours = Ours(config, batch, chunk, self.device, chunk=chunk, inputs=inputs)
        theirs = InTree(config, batch, chunk, self.device, chunk=chunk, inputs=inputs)
        ours.step(), theirs.step()
        last = torch.arange(chunk - 128, chunk, device=self.device)
        for layer in range(4):
            ratio = config.ratio(layer)
            for request in range(batch):
                ring_rows = ours.slots[request].long() * 128 + last % 128
                slots = theirs.req_to_token[request + 1][last].long()
                pairs = [
                    (
                        "window",
                        KVBuffer(ours.layers[layer].ring, KVFormat.FP8).read(ring_rows),
                        dequantize_k_cache_paged_dsv4(theirs.layers[layer].window, theirs.full_to_swa[slots], 128),
                    )
                ]
                if ratio:
                    starts = torch.arange(0, chunk // ratio * ratio, ratio, device=self.device)
                    table = ours.layers[layer].entries
                    assert table is not None
                    at = (ours.block_table[request][starts // 128] * 128 + starts % 128) // ratio
                    there = theirs.req_to_token[request + 1][starts].long() // ratio
                    pairs.append(
                        (
                            "entries",
                            KVBuffer(table, KVFormat.FP8).read(at),
                            dequantize_k_cache_paged_dsv4(theirs.layers[layer].entries, there, 256 // ratio),
                        )
                    )
                for what, mine, other in pairs:
                    other = other.flatten(1).float()
                    difference = ((mine - other).norm() / other.norm()).item()
                    yield {"work": "agreement", "subject": f"layer {layer} {what}", "difference": difference}
                    if not difference < 0.05:
                        raise ValueError(f"layer {layer} request {request}: {what} differ by {difference:.3f}")


def wanted_parts(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[Bench], Iterator[dict[str, Any]]]]]:
    """Yield (name, function of the bench) in execution order: ours and in-tree of one size follow each other."""
    models = ["flash"] if args.quick or args.dry_run else list(MODELS)
    subjects = ["ours"] if args.dry_run else list(SUBJECTS)
    batches = (1, 256) if args.quick else BATCHES
    prefills = PREFILLS[:1] if args.quick else PREFILLS
    if args.dry_run:
        batches, prefills = (2,), ((2, 131),)
    for model in models:
        for batch in batches:
            for subject in subjects:
                yield f"decode/{model}/{batch}/{subject}", lambda b, m=model, s=subject, n=batch: b.decode(m, s, n)
        for batch, chunk in prefills:
            for subject in subjects:
                name = f"prefill/{model}/{batch}x{chunk}/{subject}"
                yield name, lambda b, m=model, s=subject, n=batch, c=chunk: b.prefill(m, s, n, c)


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one table row per work and load: times by subject, and the ratio of the two defaults."""
    table: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        if "us" not in row:
            continue
        key = (row["model"], row["work"], row["load"])
        line = table.setdefault(key, {"model": key[0], "work": key[1], "load": key[2]})
        line[row["subject"]] = row["us"]
        if row["subject"] == "ours":
            line |= {"ours % of copy": row["% of copy"], "ours x floor": row["x floor"], "floor us": row["floor us"]}
    for line in table.values():
        if line.get("ours") and line.get("in-tree"):
            line["in-tree / ours"] = line["in-tree"] / line["ours"]
    return list(table.values())


def main(argv: list[str] | None = None) -> int:
    args = command_line.report_parser(__doc__).parse_args(argv)
    bench = Bench(args)
    result = report.Report("append", args, {"context": bench.context, "samples": bench.samples})
    if "copy_gbs" not in result.data["facts"]:
        result.part("ceilings", partial(timing.ceilings, bench.device, result.fact), setup=True)
    bench.copy_gbs = result.data["facts"].get("copy_gbs", 0.0)
    bench.launch_us = result.data["facts"].get("empty_launch_us", 0.0)
    if not args.dry_run:
        result.part("load ours", partial(ops_for, bench.device), setup=True)
        result.part("agreement", bench.agreement)
    for name, function in wanted_parts(args):
        result.part(name, partial(function, bench))
    subjects = [name for name in SUBJECTS if any(row.get("subject") == name for row in result.rows)]
    columns = ["work", "model", "load", *subjects, "in-tree / ours", "floor us", "ours x floor", "ours % of copy"]
    result.table("append, us per step over all layers", columns, compare(result.rows))
    copy, launch = bench.copy_gbs, bench.launch_us
    result.console.print(f"copy rate {copy:,.0f} GB/s, empty launch {launch:.2f} us", highlight=False)
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
