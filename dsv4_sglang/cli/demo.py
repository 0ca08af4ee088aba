"""`dsv4-sglang demo`."""

from __future__ import annotations

import errno
import random
import signal
from typing import Annotated

import typer

from dsv4_sglang.cli.client import DEFAULT_HOST, Server, bind
from dsv4_sglang.cli.conversation import QUESTION, converse
from dsv4_sglang.cli.serve import POOL_FLAGS, ModelPath, check_flags, command_for, rejections, require_startable
from dsv4_sglang.cli.server import running, wait_ready
from dsv4_sglang.srt.launch.command import flag_value

PORTS = range(20000, 32000)


def free_port(host: str = DEFAULT_HOST) -> int:
    """Return a port of PORTS that is free on the address `host`.

    Raises:
        OSError: this machine does not have that address, or all ports are in use.
    """
    for port in random.sample(PORTS, len(PORTS)):
        try:
            bind(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return port
    raise OSError(f"all ports from {PORTS[0]} to {PORTS[-1]} of {host} are in use")


def demo(
    context: typer.Context,
    model_path: ModelPath = None,
    prompt: Annotated[str, typer.Option(help="Question of the first conversation turn.")] = QUESTION,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the server.", min=1)] = 600.0,
) -> None:
    """Start a server on a free port, print a conversation of two turns with its cache statistics, stop the server."""
    flags = [*POOL_FLAGS, *context.args]
    with rejections():
        model_path = check_flags(context, model_path)
        try:
            if flag_value(flags, "--port") is None:
                flags += ["--port", str(free_port(flag_value(flags, "--host") or DEFAULT_HOST))]
            server = Server.of(flags)
            require_startable(model_path, flags)
            command = command_for(model_path, flags)
            typer.echo(command.shell())
            signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C stops the server
            with running(command) as process:
                wait_ready(server, alive=lambda: process.poll() is None, timeout=timeout)
                converse(server, model_path, prompt, max_tokens)
        except (OSError, RuntimeError) as error:
            typer.echo(f"dsv4-sglang: no conversation: {error}", err=True)
            raise typer.Exit(1) from None
