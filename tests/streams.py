"""Streams and events that run late and in random order, in place of those of a device."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import sglang.srt.managers.cache_controller as base_controller

from dsv4_sglang.srt import compat

if compat.since("0.5.23"):
    import sglang.srt.mem_cache.l2_transfer as copies
else:
    import sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller as copies


class Streams:
    """What is queued on a stream runs in its order, and only when somebody waits or `run_some` picks the stream."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.all: list[Stream] = []
        self.current = Stream(self)
        self.stalled: Stream | None = None
        """Does nothing until somebody waits for something."""

    def run_some(self, count: int) -> bool:
        """Up to `count` things that may run now, of streams picked at random; False when nothing may."""
        for _ in range(count):
            ready = [stream for stream in self.all if stream is not self.stalled and stream.ready()]
            if not ready:
                return False
            self.rng.choice(ready).step()
        return True

    def run_all(self) -> None:
        self.stalled = None
        while self.run_some(100):
            pass

    def queue(self, work: Callable[[], None]) -> None:
        """On the current stream."""
        self.current.queue.append(work)

    def use(self, monkeypatch: Any) -> None:
        """SGLang's controllers take these for the streams and events of their device."""
        module = SimpleNamespace(
            Stream=lambda: Stream(self),
            Event=lambda: Event(self),
            stream=lambda stream: On(self, stream),
            current_stream=lambda: self.current,
            __name__="late streams",
        )
        for place in (base_controller, copies):
            monkeypatch.setattr(place, "device_module", module)
            monkeypatch.setattr(place, "_timing_events_supported", lambda: False, raising=False)


class Stream:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.queue: deque[Any] = deque()
        streams.all.append(self)

    def ready(self) -> bool:
        if not self.queue:
            return False
        first = self.queue[0]
        return not isinstance(first, Wait) or first.event.done >= first.count

    def step(self) -> None:
        first = self.queue.popleft()
        if callable(first):
            first()

    def wait_event(self, event: Event) -> None:
        self.queue.append(Wait(event, event.recorded))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.streams)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        event = Event(self.streams)
        event.record(self)
        event.synchronize()


class Wait:
    def __init__(self, event: Event, count: int) -> None:
        self.event, self.count = event, count


class Event:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.recorded, self.done = streams, 0, 0

    def record(self, stream: Stream | None = None) -> None:
        self.recorded += 1
        (stream or self.streams.current).queue.append(self._reached)

    def _reached(self) -> None:
        self.done += 1

    def query(self) -> bool:
        return self.done >= self.recorded

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.streams.current).wait_event(self)

    def synchronize(self) -> None:
        while not self.query():
            if self.streams.run_some(1):
                continue
            self.streams.stalled = None
            assert self.streams.run_some(1), "streams wait for each other"


class On:
    """Within: the stream is the current one."""

    def __init__(self, streams: Streams, stream: Stream) -> None:
        self.streams, self.stream = streams, stream

    def __enter__(self) -> None:
        self.before, self.streams.current = self.streams.current, self.stream

    def __exit__(self, *error: object) -> None:
        self.streams.current = self.before
