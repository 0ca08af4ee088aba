"""Hooks for the processes of `--tokenizer-worker-num`, which accept HTTP requests and send them to the scheduler."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins import load_plugins


class _Plugins:
    """Value whose unpickling loads SGLang's plugins. It decodes to None."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return load_plugins, ()


def share_plugins(original: Callable[..., Any], port_args: Any, server_args: Any, scheduler_info: dict) -> Any:
    """AROUND write_data_for_multi_tokenizer: add the plugins to the data that a worker decodes first.

    The worker then builds its model config, which installs this package (`plugin.OptIn`).
    """
    return original(port_args, server_args, {**scheduler_info, "dsv4_sglang": _Plugins()})


def keep_quit_handler(original: Callable[..., None], supervisor: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND Multiprocess.__init__: keep SGLang's SIGQUIT handler, which ends all processes of the server."""
    handler = signal.getsignal(signal.SIGQUIT)
    original(supervisor, *args, **kwargs)
    signal.signal(signal.SIGQUIT, handler)
