"""`dsv4-sglang demo`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer

from dsv4_sglang.cli.client import complete, wait_ready
from dsv4_sglang.cli.serve import base_url, command_for
from dsv4_sglang.srt import launch

STOP_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running(command: launch.Command) -> Iterator[subprocess.Popen[bytes]]:
    """The server as a process group of its own; stopped at the end, whatever happens: SIGTERM, then SIGKILL."""
    process = subprocess.Popen(command.argv, env=command.full_environment(), start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what a server that has ended may have left
        process.wait()


def demo(
    context: typer.Context,
    model_path: Annotated[str, typer.Option("--model-path", "--model", help="Checkpoint folder or hub name.")],
    prompt: Annotated[str, typer.Option(help="What to complete.")] = "The hybrid cache",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=1)] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the server.", min=1)] = 600.0,
) -> None:
    """Start a server on a free port, print one completion over HTTP, stop the server."""
    flags = list(context.args)
    if launch.flag_value(flags, "--port") is None:
        flags += ["--port", str(free_port())]
    command = command_for(model_path, flags)
    typer.echo(command.shell())
    try:
        with running(command) as server:
            wait_ready(base_url(flags), alive=lambda: server.poll() is None, timeout=timeout)
            answer = complete(base_url(flags), prompt, max_tokens)
    except (OSError, RuntimeError) as error:
        typer.echo(f"dsv4-sglang: no completion: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"dsv4-sglang: {answer}")
