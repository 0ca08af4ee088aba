"""Work of a layer on several CUDA streams. Without a stream, everything runs on the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def progress_event(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Record the progress of the current stream as an event for `stream` to wait for. Return None without `stream`."""
    return None if stream is None else torch.cuda.current_stream().record_event()


def wait_for(event: torch.cuda.Event | None) -> None:
    """Let the current stream wait for `event`, if there is one."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None, after: torch.cuda.Event | None) -> Iterator[None]:
    """Context manager: run the body on `stream` after `after`. If either is None, run it on the current stream."""
    if stream is None or after is None:
        yield
        return
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
