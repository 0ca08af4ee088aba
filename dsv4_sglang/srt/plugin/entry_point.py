"""Entry point of the group `sglang.srt.plugins`. It runs in the launcher and in every scheduler process.

Without the opt-in `--json-model-override-args '{"dsv4_sglang": {...}}'` it only wraps three functions that check for
the opt-in. With the opt-in, everything else is installed when SGLang builds its model config: in the launcher while the
flags are resolved, in a scheduler process before weights and pools exist.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from dsv4_sglang.srt.launch.options import Options
    from dsv4_sglang.srt.plugin.server_context import ServerContext

PARSER = "sglang.srt.server_args.ServerArgs.add_cli_args"
COMMAND_LINE = "sglang.srt.server_args.ServerArgs.from_cli_args"
OPT_IN = "sglang.srt.configs.model_config.ModelConfig.from_server_args"


def register() -> None:
    """Register the functions that check for the opt-in.

    SGLang only logs an exception of a plugin and continues with its own pools. So this function ends a process that
    opted in.
    """
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(PARSER, reject_in_one_line, HookType.AROUND)
        HookRegistry.register(COMMAND_LINE, before_command_line, HookType.BEFORE)
        HookRegistry.register(OPT_IN, OptIn().build_model_config, HookType.AROUND)
    except Exception as error:
        if _opts_in():
            raise SystemExit(f"dsv4_sglang cannot hook into SGLang: {error!r}") from error
        raise


def _opts_in() -> bool:
    """Return True if the command line of this process names this package."""
    return any("dsv4_sglang" in argument for argument in sys.argv)


def reject_in_one_line(original: Callable[..., Any], parser: ArgumentParser) -> None:
    """AROUND `ServerArgs.add_cli_args`: after an error of the command line print its reason only. SGLang would print
    the usage of all of its flags, 431 lines."""
    from dsv4_sglang.srt.launch.error import LaunchError
    from dsv4_sglang.srt.launch.flag_names import reject_unknown

    def error(message: str) -> NoReturn:
        try:
            reject_unknown(sys.argv[1:])
            raise LaunchError(message)
        except LaunchError as rejection:
            rejection.show()
        raise SystemExit(2)

    original(parser)
    if _opts_in():
        parser.error = error  # type: ignore[method-assign]


def before_command_line(_cls: type, args: Namespace) -> None:
    """Check the options and the checkpoint of a server's command line before SGLang resolves it.

    Also show a rejection without a traceback. A program that builds SGLang's engine itself gets the exception.

    Raises:
        LaunchError: the server cannot be started with these options or this model.
    """
    from dsv4_sglang.srt.launch.checkpoint_check import check_checkpoint
    from dsv4_sglang.srt.launch.command import config_of, overrides_given
    from dsv4_sglang.srt.launch.error import without_traceback
    from dsv4_sglang.srt.launch.options import from_override_args

    sys.excepthook = without_traceback(sys.excepthook)
    if _opts_in():
        overrides_given(sys.argv[1:])  # SGLang's parser drops the first of two values
    if from_override_args(args.json_model_override_args) is not None:
        config = config_of(args.model_path, args.json_model_override_args)
        check_checkpoint(args.model_path, config, partial(getattr, args))


class OptIn:
    """The opt-in of this process, of which there is at most one."""

    def __init__(self) -> None:
        self.context: ServerContext | None = None

    def build_model_config(self, original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
        """AROUND `ModelConfig.from_server_args`: install the cache first if the server opts in.

        Raises:
            LaunchError: the server cannot be started, or the config cannot be read.
            ValueError: an earlier model config of this process had other options.
        """
        from huggingface_hub.errors import StrictDataclassError

        from dsv4_sglang.srt.launch.error import LaunchError
        from dsv4_sglang.srt.launch.options import from_override_args

        options = from_override_args(server_args.json_model_override_args)
        if options is None:
            return original(server_args, *args, **kwargs)
        self._install(options, server_args)
        try:
            return original(server_args, *args, **kwargs)
        except (OSError, StrictDataclassError) as error:
            path, reason = kwargs.get("model_path") or server_args.model_path, " ".join(str(error).split())
            expected = "give the folder of a checkpoint, or a hub name OWNER/NAME"
            raise LaunchError(f"the config of --model-path {path} cannot be read; {expected}: {reason}") from error

    def _install(self, options: Options, server_args: Any) -> None:
        if self.context is None:
            from dsv4_sglang.srt.sglang.release import rejecting_other_releases

            with rejecting_other_releases():
                from dsv4_sglang.srt.plugin.activate import activate
                from dsv4_sglang.srt.plugin.server_context import ServerContext

                context = ServerContext(options)
                activate(context, server_args)
            self.context = context
        elif self.context.options != options:
            raise ValueError(f"two servers in one process have different options: {self.context.options} and {options}")
        self.context.begin(server_args)
