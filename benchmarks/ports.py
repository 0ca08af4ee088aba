"""Ports of servers that start in parallel on one machine.

A server binds its ports while it loads. A free port that SGLang picks for torch's rendezvous may be taken by another
server or connection before it is bound. Each server therefore gets ports below the ephemeral range, reserved among the
servers of this project.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

SPAN = 240
# First ports of the spans. `dsv4_sglang.cli.demo` uses ports above.
FIRSTS = range(12000, 19920, SPAN)
# Offsets used within a span: those of `flags`, and those that SGLang derives from --port with DP attention
# (`PortArgs.init_new` and `DP_ATTENTION_HANDSHAKE_PORT_DELTA`).
USED = (0, 1, 13, *range(233, 240))


@contextmanager
def reserved() -> Iterator[int]:
    """Yield the first of SPAN ports that stay reserved until the context or the process ends.

    An abstract Unix socket is the lock. Like ports, it is shared by all processes of a network namespace, and it
    disappears with its process.

    Raises:
        OSError: all spans are reserved or in use.
    """
    for first in random.sample(FIRSTS, len(FIRSTS)):
        with socket.socket(socket.AF_UNIX) as owned:
            try:
                owned.bind(f"\0dsv4_sglang ports from {first}")
                for offset in USED:
                    with socket.socket() as probe:
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # servers set it too
                        probe.bind(("", first + offset))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            yield first
            return
    raise OSError(
        f"no ports are left for a server: the {len(FIRSTS)} spans from {FIRSTS[0]} to {FIRSTS[-1] + SPAN - 1} are all "
        "reserved or in use; stop servers that are not needed"
    )


def flags(first: int) -> list[str]:
    """Return the flags by which a server takes the ports from `first` on."""
    return ["--port", str(first), "--nccl-port", str(first + 1)]
