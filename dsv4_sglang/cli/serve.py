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
POOL_FLAGS = ["--enable-metrics", "--decode-log-interval", "8"]
"""What a conversation shows of the pools, the server has to publish: SGLang does so after 40 decode steps, unless told
otherwise. Put before a user's flags, so that those win."""


@contextmanager
def rejections() -> Iterator[None]:
    """Show a LaunchError as its reasons alone, and exit."""
    try:
        yield
    except LaunchError as error:
        error.show()
        raise typer.Exit(2) from None


def require_startable(model_path: str, flags: list[str]) -> None:
    """Raise LaunchError if there is no such checkpoint or the port is not free."""
    launch_command.config_of(model_path)
    host = launch_command.flag_value(flags, "--host") or DEFAULT_HOST
    port = launch_command.flag_value(flags, "--port") or DEFAULT_PORT
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise LaunchError(f"--port {port}: expected a number from 1 to 65535")
    try:
        bind(host, int(port))
    except OSError as error:
        reason = f"cannot listen on --host {host} --port {port}: {error.strerror}"
        raise LaunchError(f"{reason}; give another --port or --host, or stop the process that has it") from None


def command_for(model_path: str, flags: list[str]) -> launch_command.Command:
    """The server command for this machine, or the CPU's if the flags ask for it.

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
    model_path: Annotated[str, typer.Option("--model-path", "--model", help="Checkpoint folder or hub name.")],
    only_print: Annotated[bool, typer.Option("--print", help="Print the command and do nothing else.")] = False,
    ask: Annotated[
        str | None,
        typer.Option(help="Once the server is up, ask this, print two turns of a conversation and what the cache did."),
    ] = None,
) -> None:
    """Serve with this package's cache: `python -m sglang.launch_server` with the opt-in and any of SGLang's flags.

    The server replaces this process, so signals reach it as they are and its exit code is this command's.
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
