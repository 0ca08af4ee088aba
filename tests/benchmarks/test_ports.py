"""Tests of port reservation for servers that start concurrently. test_server_dp.py compares the ports with SGLang's."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from benchmarks import ports

KEEPER = """
import sys
from benchmarks import ports
first = int(sys.argv[1])
ports.FIRSTS = range(first, first + 1)
with ports.reserved() as port:
    print(port, flush=True)
    sys.stdin.read()
"""


def keeper(first: int) -> subprocess.Popen[str]:
    """Start a process that reserves the ports from `first` on and keeps them."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", KEEPER, str(first)], text=True, **pipes)


def test_ports_are_of_one_process_until_it_ends(only_ports: int) -> None:
    """A port stays reserved until its process ends, however it ends."""
    with ports.reserved() as first:
        assert first == only_ports
        with pytest.raises(OSError, match="no ports are left"), ports.reserved():
            pass
        _, said = keeper(first).communicate()
        assert "OSError: no ports are left for a server" in said
    with keeper(first) as other:
        assert other.stdout.readline() == f"{first}\n"
        with pytest.raises(OSError, match=f"1 spans from {first} to {first + 239} are all"), ports.reserved():
            pass
        other.kill()
    with ports.reserved() as again:
        assert again == first


@pytest.mark.parametrize("offset", ports.USED)
def test_used_ports_are_not_reserved(only_ports: int, offset: int) -> None:
    used = socket.create_server(("127.0.0.1", only_ports + offset))
    with used, pytest.raises(OSError, match="no ports are left"), ports.reserved():
        pass
    with ports.reserved() as first:
        assert first == only_ports
