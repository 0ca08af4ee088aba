"""The imports of a server on a CPU.

server_forkserver.py imports this module once, in the process that forks the servers.
"""

import gc
from typing import Any

import setproctitle
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # noqa: F401  (imports the models)
import zmq
from sglang.srt.managers import data_parallel_controller
from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

# Not the table of hooks (srt/plugin): a server imports it after server_plugin.py has replaced functions in it.
import dsv4_sglang.srt.attention.backend
import dsv4_sglang.srt.host_cache.storage  # noqa: F401

_receive = data_parallel_controller.sock_recv


def _wait_and_receive(socket: zmq.Socket[bytes], flags: int = 0) -> Any:
    """Receive a message of the DP controller. Wait for it first, but let the controller feed its watchdog."""
    socket.poll(1000)
    return _receive(socket, flags=flags)


def _sleep(sleeper: IdleSleeper) -> None:
    """Sleep until a request arrives, for at most 50 ms."""
    sleeper.poller.poll(50)


data_parallel_controller.sock_recv = _wait_and_receive
IdleSleeper.maybe_sleep = _sleep
# The title's memory is found through the environment of the process start, which a forked process changes.
setproctitle.getproctitle()
# A garbage collection would copy the memory that the servers share.
gc.freeze()
