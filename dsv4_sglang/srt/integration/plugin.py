"""Entry point of the group `sglang.srt.plugins`. It runs in the launcher and in every scheduler process.

Without the opt-in `--json-model-override-args '{"dsv4_sglang": {...}}'` it only wraps two functions that check for the
opt-in. With the opt-in, everything else is installed when SGLang builds its model config: in the launcher while the
flags are resolved, in a scheduler process before weights and pools exist.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_sglang.srt.integration.options import Options
    from dsv4_sglang.srt.integration.server_context import ServerContext

COMMAND_LINE = "sglang.srt.server_args.ServerArgs.from_cli_args"
OPT_IN = "sglang.srt.configs.model_config.ModelConfig.from_server_args"


def register() -> None:
    """Register the two functions that check for the opt-in.

    SGLang only logs an exception of a plugin and continues with its own pools. So this function ends a process that
    opted in.
    """
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(COMMAND_LINE, before_command_line, HookType.BEFORE)
        HookRegistry.register(OPT_IN, OptIn().build_model_config, HookType.AROUND)
    except Exception as error:
        if any("dsv4_sglang" in argument for argument in sys.argv):
            raise SystemExit(f"dsv4_sglang cannot hook into SGLang: {error!r}") from error
        raise


def before_command_line(_cls: type, args: Namespace) -> None:
    """Check the options and the model of a server's command line before SGLang resolves it.

    Also show a rejection without a traceback. A program that builds SGLang's engine itself gets the exception.

    Raises:
        LaunchError: the server cannot be started with these options or this model.
    """
    from dsv4_sglang.srt.integration.launch_command import config_of
    from dsv4_sglang.srt.integration.launch_error import without_traceback
    from dsv4_sglang.srt.integration.options import from_override_args

    sys.excepthook = without_traceback(sys.excepthook)
    if from_override_args(args.json_model_override_args) is not None:
        config_of(args.model_path, args.json_model_override_args)


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

        from dsv4_sglang.srt.integration.launch_error import LaunchError
        from dsv4_sglang.srt.integration.options import from_override_args

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
            from dsv4_sglang.srt.integration.compat import rejecting_other_releases

            with rejecting_other_releases():
                from dsv4_sglang.srt.integration.activate import activate
                from dsv4_sglang.srt.integration.server_context import ServerContext

                context = ServerContext(options)
                activate(context, server_args)
            self.context = context
        elif self.context.options != options:
            raise ValueError(f"two servers in one process have different options: {self.context.options} and {options}")
        self.context.begin(server_args)
