"""GPUs that can be planned for, and the memory that is taken before the cache is allocated."""

from __future__ import annotations

from typing import NamedTuple

from dsv4_sglang.srt.memory.sizing import GIB

MIB = 1 << 20
# CUDA context and NCCL: memory of an H200 that was not free when SGLang began to load on two GPUs. Public logs of
# 8 H200 say 1.7 GiB (github.com/SemiAnalysisAI/InferenceX/issues/2128).
BEFORE_WEIGHTS = int(1.65 * GIB)
# Memory that loading takes beyond the parameters (compiled kernels, workspaces): the mean of four runs.
BESIDE_WEIGHTS = int(0.90 * GIB)
# GPUs of one host.
MOST_GPUS = 8


class Gpu(NamedTuple):
    """A kind of GPU.

    Attributes:
        memory: bytes that torch reports as `total_memory`.
        source: where that number was seen (of a B200, in github.com/pytorch/ao/pull/4002).
        sm100: the architecture is sm_100, which pads blocks of FP8 entries.
        expert_runner: SGLang's `--moe-runner-backend` for FP4 experts.
    """

    name: str
    memory: int
    source: str
    sm100: bool = False
    expert_runner: str | None = None


GPUS = {
    "h100": Gpu("H100", 81089 * MIB, "public logs", expert_runner="marlin"),
    "h200": Gpu("H200", 150_109_880_320, "as torch reports", expert_runner="marlin"),
    "b200": Gpu("B200", 182631 * MIB, "public logs", sm100=True, expert_runner="flashinfer_mxfp4"),
}
