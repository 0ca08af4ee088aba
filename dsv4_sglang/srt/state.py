"""What this process has decided: the options of the launch, once it has opted in."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_sglang.cache.layout import CacheLayout
from dsv4_sglang.srt.options import Options
from dsv4_sglang.srt.sizing import StateDemand


@dataclass
class Launch:
    """One launch in this process. The layout and the demand for slots are known once the pools are sized."""

    options: Options
    layout: CacheLayout | None = None
    demand: StateDemand | None = None


_launch: Launch | None = None


def open_launch(options: Options) -> Launch:
    """Remember the options; a second model config of the same process must agree with the first."""
    global _launch
    if _launch is None:
        _launch = Launch(options)
    elif _launch.options != options:
        raise ValueError(f"two launches in one process with different options: {_launch.options} and {options}")
    return _launch


def current() -> Launch:
    if _launch is None:
        raise RuntimeError("this process has not opted in to dsv4_sglang")
    return _launch
