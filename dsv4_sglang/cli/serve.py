"""`dsv4-sglang serve`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from dsv4_sglang.cli.client import DEFAULT_HOST, DEFAULT_PORT, bind
from dsv4_sglang.srt.integration import launch_command
from dsv4_sglang.srt.integration.launch_error import LaunchError

SGLANG_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
# A conversation shows the pools, so the server has to publish them. SGLang does so every 40 decode steps by default.
# These flags precede the user's, so that the user's win.
POOL_FLAGS = ["--enable-metrics", "--decode-log-interval", "8"]


@contextmanager
def rejections() -> Iterator[None]:
    """Print the reasons of a LaunchError without a traceback, and exit."""
    try:
        yield
    except LaunchError as error:
        error.show()
        raise typer.Exit(2) from None


def require_startable(model_path: str, flags: list[str]) -> None:
    """Check that the model exists and the port is free.

    Raises:
        LaunchError: one of them does not hold.
    """
    launch_command.config_of(model_path, launch_command.flag_value(flags, launch_command.OPT_IN_FLAG))
    host = launch_command.flag_value(flags, "--host") or DEFAULT_HOST
    port = launch_command.flag_value(flags, "--port") or DEFAULT_PORT
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise LaunchError(f"--port {port}: expected a number from 1 to 65535")
    try:
        bind(host, int(port))
    except OSError as error:
        reason = f"cannot listen on --host {host} --port {port}: {error.strerror}"
        raise LaunchError(f"{reason}; give another --port or --host, or stop the process that uses it") from None


def command_for(model_path: str, flags: list[str]) -> launch_command.Command:
    """Return the server command for this machine, or for the CPU if the flags ask for it.

    Raises:
        LaunchError: The options or a flag that is read here are invalid.
    """
    launch_command.opt_in(
        launch_command.flag_value(flags, launch_command.OPT_IN_FLAG)
    )  # before `has_gpu` imports torch
    device = launch_command.flag_value(flags, "--device")
    cpu = device == "cpu" if device is not None else not launch_command.has_gpu()
    return launch_command.server_command(model_path, flags, cpu)


def serve(
    context: typer.Context,
    model_path: Annotated[str, typer.Option("--model-path", "--model", help="Model folder or hub name.")],
    only_print: Annotated[bool, typer.Option("--print", help="Print the command and do nothing else.")] = False,
    ask: Annotated[
        str | None,
        typer.Option(
            help="Once the server is up, ask this and print a conversation of two turns with cache statistics."
        ),
    ] = None,
) -> None:
    """Serve with this package's cache: `python -m sglang.launch_server` with the opt-in and any of SGLang's flags.

    The server replaces this process, so it receives signals directly and its exit code is that of this command.
    """
    with rejections():
        if not only_print:
            require_startable(model_path, context.args)
        command = command_for(model_path, context.args if ask is None else [*POOL_FLAGS, *context.args])
    typer.echo(command.shell())
    if only_print:
        return
    sys.stdout.flush()
    if ask is not None:
        module = [sys.executable, "-m", "dsv4_sglang.cli.ask"]
        subprocess.Popen([*module, str(os.getpid()), model_path, ask, *context.args])
    os.execvpe(command.argv[0], command.argv, command.full_environment())
