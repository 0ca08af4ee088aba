"""Fake streams, events and threads for the device and for SGLang. They run late and in random order."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from types import SimpleNamespace
from typing import Any, NamedTuple

import sglang.srt.managers.cache_controller as base_controller
import sglang.srt.mem_cache.l2_transfer as copies


class Streams:
    """Fake streams of a device.

    The work of each stream runs in its order, and only when a caller waits for it or `run_some` picks the stream.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.all: list[Stream | Thread] = []
        self.current = Stream(self)
        # This stream or thread makes no progress until a caller waits.
        self.stalled: Stream | Thread | None = None
        # The running thread; None if the scheduler runs.
        self.thread: Thread | None = None

    def run_some(self, count: int) -> bool:
        """Run up to `count` ready items of randomly picked streams. Return False if no stream is ready."""
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

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Context manager that makes a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def queue(self, work: Callable[[], None]) -> None:
        """Append work to the current stream."""
        self.current.queue.append(work)

    def use(self, monkeypatch: Any) -> None:
        """Replace the streams and events of SGLang's controllers with these."""
        module = SimpleNamespace(
            Stream=lambda: Stream(self),
            Event=lambda: Event(self),
            stream=self.on,
            current_stream=lambda: self.current,
            __name__="late streams",
        )
        for place in (base_controller, copies):
            monkeypatch.setattr(place, "device_module", module)
            monkeypatch.setattr(place, "_timing_events_supported", lambda: False, raising=False)

    def use_threads(self, monkeypatch: Any) -> None:
        """Replace the threads of SGLang's controllers.

        Like a stream, a thread runs only when it is picked. It then runs until it waits for work or calls `pause`. The
        order of execution depends only on the seed.
        """
        streams = self

        class Late(Queue[Any]):
            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                if block:
                    streams.pause(self)
                return super().get(block=False)

        module = SimpleNamespace(**vars(threading))
        module.Thread = lambda target, daemon: Thread(self, target)
        monkeypatch.setattr(base_controller, "threading", module)
        monkeypatch.setattr(base_controller, "Queue", Late)

    def pause(self, work: Queue[Any] | None = None) -> None:
        """Let others run until the calling thread is picked again. With `work`, the queue is then not empty.

        The scheduler does not pause.
        """
        if self.thread is not None:
            self.thread.pause(work)


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


class Thread:
    """A thread that runs only inside `step`."""

    def __init__(self, streams: Streams, target: Callable[[], None]) -> None:
        self.streams, self.target = streams, target
        self.picked, self.paused = threading.Semaphore(0), threading.Semaphore(0)
        self.work: Queue[Any] | None = None
        self.over = False
        self.error: BaseException | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()
        self.streams.all.append(self)
        self.step()

    def _run(self) -> None:
        self.picked.acquire()
        try:
            self.target()
        except BaseException as error:
            self.error = error
        self.over = True
        self.paused.release()

    def pause(self, work: Queue[Any] | None) -> None:
        self.work = work
        self.paused.release()
        self.picked.acquire()

    def ready(self) -> bool:
        return not self.over and (self.work is None or not self.work.empty())

    def step(self) -> None:
        before, self.streams.thread = self.streams.thread, self
        self.picked.release()
        self.paused.acquire()
        self.streams.thread = before
        if self.over:
            self.streams.all.remove(self)
        if self.error is not None:
            raise self.error

    def join(self, timeout: float | None = None) -> None:
        while not self.over:
            self.step()

    def is_alive(self) -> bool:
        return not self.over


class Wait(NamedTuple):
    event: Event
    count: int


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
