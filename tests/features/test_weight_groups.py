"""Joins of groups for weight updates, without processes: time limit, errors of other processes, threads.

tests/server/test_server_endpoints.py has real groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sglang.srt.managers import io_struct

from dsv4_sglang.srt.features import weight_groups
from dsv4_sglang.srt.features.weight_groups import MAX_THREADS, WAITING, StillWaiting, join

Output = io_struct.InitWeightsUpdateGroupReqOutput
JOINED, FAILED = Output(success=True, message=""), Output(success=False, message="no such host")


def request(rid: str, name: str = "") -> Any:
    return io_struct.InitWeightsUpdateGroupReqInput(
        rid=rid, master_address="a", master_port=1, rank_offset=1, world_size=2, group_name=name or rid
    )


def alone(state: str) -> list[str]:
    """Return the states of a server with one process."""
    return [state] if state else []


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yield the event for which `waiting` waits, and end all threads."""
    monkeypatch.setattr(weight_groups, "time_limit", lambda: 60)
    monkeypatch.setattr(weight_groups, "_joins", {})
    event = threading.Event()
    yield event
    event.set()
    for thread in threads():
        thread.join()


@pytest.fixture
def waiting(peers: threading.Event) -> Callable[[Any], Any]:
    def dispatch(_request: Any) -> Any:
        peers.wait()
        return JOINED

    return dispatch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == weight_groups.THREAD_NAME]


def test_a_join_is_asked_for_again(waiting: Callable[[Any], Any], peers: threading.Event) -> None:
    for _ in range(2):
        with pytest.raises(StillWaiting):
            join(waiting, request("a"), alone)
    (thread,) = threads()
    peers.set()
    thread.join()
    with pytest.raises(StillWaiting):  # another process of this server waits
        join(waiting, request("a"), lambda state: [*alone(state), WAITING])
    assert join(waiting, request("a"), alone) is JOINED


@pytest.mark.parametrize("failure", ["an answer", "an exception", "another process"])
def test_an_error_ends_the_join_of_all_processes(waiting: Callable[[Any], Any], failure: str) -> None:
    def fail(_request: Any) -> Any:
        if failure == "an exception":
            raise RuntimeError("no such host")
        return FAILED

    def of_group(state: str) -> list[str]:
        for thread in threads() if failure != "another process" else ():
            thread.join()
        joining = weight_groups._joins["a"]
        return [WAITING, "no such host"] if failure == "another process" else [joining.state()]

    dispatch = waiting if failure == "another process" else fail
    with pytest.raises(ValueError, match="no such host"):
        join(dispatch, request("a"), of_group)
    assert not weight_groups._joins


def test_the_time_limit(waiting: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_groups, "time_limit", lambda: 0)
    with pytest.raises(ValueError, match=r"group 'a' of 2 processes at a:1 did not form in 0 s .--dist-timeout."):
        join(waiting, request("a"), alone)


def test_one_join_a_group(waiting: Callable[[Any], Any]) -> None:
    with pytest.raises(StillWaiting):
        join(waiting, request("a", "same"), alone)
    with pytest.raises(ValueError, match="group 'same' is being joined by another request"):
        join(waiting, request("b", "same"), alone)


def test_threads_are_bounded(waiting: Callable[[Any], Any]) -> None:
    for i in range(MAX_THREADS):
        with pytest.raises(StillWaiting):
            join(waiting, request(f"{i}"), alone)
    with pytest.raises(ValueError, match="still wait for their peers"):
        join(waiting, request("more"), alone)
    assert len(threads()) == MAX_THREADS
