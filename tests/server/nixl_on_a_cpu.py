"""SGLang plugin that enables NIXL transfers between CPU servers, which this package rejects otherwise.

SGLang registers all cache memory as GPU memory, and NIXL rejects CPU memory under that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

AGENT = "nixl._api.nixl_agent."
# Methods with a memory type argument, and its position.
TOLD = {"register_memory": 1, "get_xfer_descs": 1, "prep_xfer_dlist": 2}


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method, place in TOLD.items():
        HookRegistry.register(AGENT + method, _as_it_is(place), HookType.AROUND)
    HookRegistry.register(
        "dsv4_sglang.srt.integration.flag_validation._rejected_with_disaggregation", _lifted, HookType.AROUND
    )


def _as_it_is(place: int) -> Callable[..., Any]:
    def method(original: Callable[..., Any], agent: Any, *given: Any) -> Any:
        told = list(given)
        told[place] = "DRAM"
        return original(agent, *told)

    return method


def _lifted(original: Callable[..., Iterable[tuple[str, str]]], args: Any) -> list[tuple[str, str]]:
    return [row for row in original(args) if "nixl" not in row[0]]
