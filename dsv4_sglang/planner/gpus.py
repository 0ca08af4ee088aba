"""The GPUs that can be planned for, and what of their memory is gone before the cache is allocated."""

from __future__ import annotations

from typing import NamedTuple

from dsv4_sglang.srt.memory.sizing import GIB

MIB = 1 << 20
BEFORE_WEIGHTS = int(1.65 * GIB)
"""CUDA context and NCCL: what of an H200 was not free when SGLang began to load, two GPUs; docs/recipes.md."""
BESIDE_WEIGHTS = int(0.90 * GIB)
"""What loading takes beyond the parameters (compiled kernels, workspaces): mean of four runs; docs/recipes.md."""
MOST_GPUS = 8
"""Of one host."""


class Gpu(NamedTuple):
    """`memory` is what torch reports as `total_memory`, in bytes; `source` where that was seen (docs/recipes.md)."""

    name: str
    memory: int
    source: str
    sm100: bool = False
    expert_runner: str | None = None
    """SGLang's `--moe-runner-backend` for FP4 experts."""


GPUS = {
    "h100": Gpu("H100", 81089 * MIB, "public logs", expert_runner="marlin"),
    "h200": Gpu("H200", 150_109_880_320, "as torch reports", expert_runner="marlin"),
    "b200": Gpu("B200", 182631 * MIB, "public logs", sm100=True, expert_runner="flashinfer_mxfp4"),
}
