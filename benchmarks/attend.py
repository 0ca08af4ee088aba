"""Benchmark attention over window entries and compressed entries: our kernels, FlashMLA alone, SGLang's path.

    python -m benchmarks.attend [--quick] [--out DIR]

A CUDA graph holds all layers of one kind (CSA or HCA) of a decode step, or four layers of a prefill step. Each layer
has its own KV buffers and queries with random values. Times are per layer, so a layer bears its share of the work that
is done once a step. Subjects:

- "flashmla": FlashMLA alone on our buffers, in decode only, with a schedule computed in advance.
- "ours": our attention kernel through FlashMLA, with its schedule once a step and the inverse RoPE of the output. In
  prefill it also expands the entries to bf16 and builds the index lists.
- "ours rotated": the same without the inverse RoPE. Served layers with an FP8 output projection use this, because the
  quantisation of the output applies the inverse RoPE.
- "ours triton": the portable kernel.
- "in-tree": FlashMLA on SGLang's pages with its schedule and its inverse RoPE kernel. Prefill is its dequantisation to
  a bf16 workspace and FlashMLA's sparse prefill kernel.

Index lists that all layers of a prefill step share are built before the timing, on both sides. The floor is the larger
of bytes / copy rate and products / measured bf16 rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import command_line, report, timing
from benchmarks.append_ours import ops_for
from benchmarks.attend_cases import Case
from benchmarks.attend_in_tree import in_tree_subject
from benchmarks.attend_ours import our_subject

SUBJECTS = ("flashmla", "ours", "ours rotated", "ours triton", "in-tree")


def cases(args: argparse.Namespace) -> list[Case]:
    flash, pro = ("flash", 64, 512), ("pro", 128, 1024)
    if args.dry_run:
        return [Case("flash", 4, 64, kind, 2, 1024) for kind in ("csa", "hca")] + [
            Case("flash", 4, 64, "csa", 1, 512, chunk=40)
        ]
    K = 1024
    found = []
    for model in [flash] if args.quick else [flash, pro]:
        for batch in (1, 64, 256) if args.quick else (1, 16, 64, 128, 256):
            found.append(Case(*model, "csa", batch, 128 * K))
        for context in (128 * K,) if args.quick else (4 * K, K * K):
            found += [Case(*model, "csa", batch, context) for batch in ((16,) if args.quick else (1, 64, 256))]
        for context in (128 * K,) if args.quick else (4 * K, 16 * K, 128 * K, K * K):
            found += [Case(*model, "hca", batch, context) for batch in ((64,) if args.quick else (1, 16, 64, 256))]
        for context in (8 * K,) if args.quick else (8 * K, 128 * K):
            found += [Case(*model, kind, 1, context, chunk=8 * K) for kind in ("csa", "hca")]
    return list(dict.fromkeys(found))


def measure(case: Case, subject: str, device: torch.device, facts: dict[str, float], samples: int) -> Iterator[Any]:
    """Yield a row with the times of one case.

    Args:
        case: the step.
        subject: one of SUBJECTS.
        device: device of the tensors.
        facts: ceilings of the device.
        samples: number of samples.
    """
    layers = 2 if device.type == "cpu" else case.layers
    step = in_tree_subject(case, device, layers) if subject == "in-tree" else our_subject(case, subject, device, layers)
    time = timing.Recorded(step, device).time(samples, divide=layers)
    floor = max(
        timing.floor_us(case.bytes_moved(), 1, facts.get("copy_gbs") or 1.0, facts.get("empty_launch_us", 0.0)),
        case.products() / (facts.get("bf16_tflops") or 1.0) / 1e6,
    )
    row = {
        "case": case.name,
        "subject": subject,
        "layers": layers,
        "us": time.us,
        "low": time.low,
        "high": time.high,
    }
    yield row | {
        "TFLOP/s": case.products() / time.us / 1e6,
        "GB/s": case.bytes_moved() / time.us / 1e3,
        "floor us": floor,
        "x floor": time.us / floor,
    }


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "us" in row:
            line = lines.setdefault(row["case"], {"case": row["case"], "floor us": row["floor us"]})
            line[row["subject"]] = row["us"]
    for line in lines.values():
        base = line.get("flashmla")
        for subject in SUBJECTS[1:]:
            if base and line.get(subject):
                line[f"{subject} / flashmla"] = line[subject] / base
    return list(lines.values())


def main(argv: list[str] | None = None) -> int:
    args = command_line.report_parser(__doc__).parse_args(argv)
    device = torch.device("cpu" if args.dry_run else "cuda")
    samples = 10 if args.quick else 20
    result = report.Report("attend", args, {"samples": samples})
    facts = result.data["facts"]
    if "copy_gbs" not in facts:
        result.part("ceilings", partial(timing.ceilings, device, result.fact), setup=True)
    result.part("load ours", partial(ops_for, device), setup=True)
    subjects = ("ours",) if args.dry_run else SUBJECTS
    for case in cases(args):
        for subject in subjects[1:] if case.chunk and not args.dry_run else subjects:
            result.part(f"{case.name}/{subject}", partial(measure, case, subject, device, facts, samples))
    ratios = [f"{subject} / flashmla" for subject in SUBJECTS[1:]]
    columns = ["case", *subjects, *(ratios if len(subjects) > 1 else []), "floor us"]
    result.table("attend, us per layer", columns, compare(result.rows))
    return result.close()


if __name__ == "__main__":
    raise SystemExit(main())
