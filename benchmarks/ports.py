"""Ports of servers that start beside others on one machine.

A server binds its ports while it loads. One that SGLang chooses, where the processes of torch meet, is one that the
system gave to it before and may since have given to somebody else: to another server, or to a connection. So each
server gets ports below those that systems give away, and no other server of this project is given them.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

SPAN = 240
FIRSTS = range(12000, 19920, SPAN)
"""Of spans of ports; `dsv4_sglang.cli.demo` begins above."""
USED = (0, 1, 13, *range(233, 240))
"""Of a span: those of `flags`, and what SGLang derives from --port with DP attention (`PortArgs.init_new`, and
`DP_ATTENTION_HANDSHAKE_PORT_DELTA`)."""


@contextmanager
def reserved() -> Iterator[int]:
    """The first of SPAN ports that are nobody else's until this ends, or this process does. Raises OSError if all are
    taken.

    Whose they are says an abstract Unix socket: as ports, it is one for all processes of a network namespace, and goes
    with the process.
    """
    for first in random.sample(FIRSTS, len(FIRSTS)):
        with socket.socket(socket.AF_UNIX) as owned:
            try:
                owned.bind(f"\0dsv4_sglang ports from {first}")
                for offset in USED:
                    with socket.socket() as probe:
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                        probe.bind(("", first + offset))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            yield first
            return
    raise OSError(
        f"no ports are left for a server: the {len(FIRSTS)} spans from {FIRSTS[0]} to {FIRSTS[-1] + SPAN - 1} are all "
        "reserved or in use; expected one that is free, end servers that are not needed"
    )


def flags(first: int) -> list[str]:
    """By which a server takes the ports from `first` on."""
    return ["--port", str(first), "--nccl-port", str(first + 1)]
