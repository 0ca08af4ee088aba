"""SGLang's constructors without a server, for `dsv4-sglang plan`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from dsv4_sglang.srt.sglang.models import replaced


@contextmanager
def published(server_args: Any, tp: int = 1, dp: int = 1) -> Iterator[None]:
    """Context manager: let SGLang's constructors and configurators run as in the first process of a server with these
    flags.

    No process group is created: constructors only read sizes and ranks. Flags that were published before are restored.

    Args:
        server_args: SGLang's ServerArgs.
        tp: number of processes.
        dp: ranks of DP attention.
    """
    from sglang.srt import runtime_context

    group = SimpleNamespace(world_size=tp, rank_in_group=0, cpu_group=None)
    alone = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)
    ranks = runtime_context.SpawnRanks(world_rank=0)
    context = runtime_context.create_context(server_args, role="scheduler", ranks=ranks)
    with (
        runtime_context.use_context(context),
        runtime_context.get_parallel().override(tp_group=group, pp_group=alone),
        runtime_context.get_flags().dp.override(enabled=dp > 1),
    ):
        yield


@contextmanager
def resolving_for_cuda() -> Iterator[None]:
    """Context manager: let SGLang resolve the flags of DeepSeek-V4.1 as on an NVIDIA GPU. It looks at the machine, not
    at --device."""
    from sglang.srt.arg_groups import deepseek_v4_hook

    with replaced(deepseek_v4_hook, get_platform=lambda: SimpleNamespace(is_cuda=True, is_hip=False)):
        yield


@contextmanager
def fp8_output_projection(enabled: bool) -> Iterator[None]:
    """Context manager: choose whether SGLang's model builds the first output projection in FP8. SGLang reads the
    environment variable at import."""
    from sglang.srt.models import deepseek_v4

    with replaced(deepseek_v4, _FP8_WO_A_GEMM=enabled):
        yield
