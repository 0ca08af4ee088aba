"""`dsv4-sglang serve`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from dsv4_sglang.cli.client import DEFAULT_HOST, DEFAULT_PORT, bind
from dsv4_sglang.requirements import advice, missing, plugin_fault
from dsv4_sglang.srt.launch.checkpoint_check import check_checkpoint
from dsv4_sglang.srt.launch.command import (
    INTERRUPTIBLE,
    Command,
    config_of,
    flag_value,
    has_gpu,
    model_path_of,
    opt_in,
    overrides_given,
    server_command,
    with_file,
)
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.launch.flag_names import reject_unknown

ModelPath = Annotated[
    str | None, typer.Option("--model-path", "--model", help="Model folder or hub name; may be in the --config file.")
]
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
    """Check that SGLang is installed and loads the plugin, the checkpoint is complete and the port is free.

    Raises:
        LaunchError: one of them does not hold.
    """
    if absent := missing():
        raise LaunchError(advice(absent))
    if fault := plugin_fault():
        raise LaunchError(fault)
    overrides = overrides_given(flags)
    config = config_of(model_path, overrides)
    given = with_file(flags)
    check_checkpoint(model_path, config, lambda field: flag_value(given, "--" + field.replace("_", "-")))
    host = flag_value(flags, "--host") or DEFAULT_HOST
    port = flag_value(flags, "--port") or DEFAULT_PORT
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise LaunchError(f"--port {port}: expected a number from 1 to 65535")
    try:
        bind(host, int(port))
    except OSError as error:
        reason = f"cannot listen on --host {host} --port {port}: {error.strerror}"
        raise LaunchError(f"{reason}; give another --port or --host, or stop the process that uses it") from None


def command_for(model_path: str, flags: list[str]) -> Command:
    """Return the server command for this machine, or for the CPU if the flags ask for it.

    Raises:
        LaunchError: The options or a flag that is read here are invalid.
    """
    device = flag_value(flags, "--device")
    cpu = device == "cpu" if device is not None else not has_gpu()
    return server_command(model_path, flags, cpu)


def check_flags(context: typer.Context, model_path: str | None) -> str:
    """Check the flags of a command that starts a server. Return the model path.

    Raises:
        LaunchError: SGLang has no such flag, the options are invalid, or there is no model path.
    """
    own = [name for parameter in context.command.params for name in parameter.opts]
    reject_unknown(with_file(context.args), own)
    opt_in(overrides_given(context.args))
    return model_path_of(model_path, context.args)


def serve(
    context: typer.Context,
    model_path: ModelPath = None,
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
        model_path = check_flags(context, model_path)
        if not only_print:
            require_startable(model_path, context.args)
        command = command_for(model_path, context.args if ask is None else [*POOL_FLAGS, *context.args])
    typer.echo(command.shell())
    if only_print:
        return
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the server receives it, in `interruptible`
    if ask is not None:
        module = [sys.executable, "-m", "dsv4_sglang.cli.ask"]
        subprocess.Popen([*module, str(os.getpid()), model_path, ask, *context.args])
    python, run, *server = command.argv
    os.execvpe(python, [python, run, INTERRUPTIBLE, *server], command.full_environment())
