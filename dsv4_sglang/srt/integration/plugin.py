"""Entry point of the group `sglang.srt.plugins`: runs in the launcher and in every scheduler process.

Without the opt-in `--json-model-override-args '{"dsv4_sglang": {...}}'` it wraps two functions that look for the opt-in
and does nothing else. With it, the model config being built is the moment at which everything else is put in place: in
the launcher while the flags are resolved, in a scheduler process before weights and pools exist.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_sglang.srt.integration.server_context import Launch

COMMAND_LINE = "sglang.srt.server_args.prepare_server_args"
OPT_IN = "sglang.srt.configs.model_config.ModelConfig.from_server_args"


def register() -> None:
    """SGLang logs an exception of a plugin and serves on with its own pools, so a launch that opted in ends here
    instead.
    """
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(COMMAND_LINE, before_command_line, HookType.BEFORE)
        HookRegistry.register(OPT_IN, OptIn().before_model_config, HookType.BEFORE)
    except Exception as error:
        if any("dsv4_sglang" in argument for argument in sys.argv):
            raise SystemExit(f"dsv4_sglang cannot hook into SGLang: {error!r}") from error
        raise


def before_command_line(argv: list[str]) -> None:
    """Check the options and the model of a server's command line before SGLang parses it, and show a rejection of this
    launch without a traceback. A program that builds SGLang's engine itself gets the exception.

    Raises:
        LaunchError: The launch cannot be served.
    """
    from dsv4_sglang.srt.integration.launch_command import MODEL_FLAGS, OPT_IN_FLAG, config_of, flag_value
    from dsv4_sglang.srt.integration.launch_error import without_traceback
    from dsv4_sglang.srt.integration.options import from_override_args

    sys.excepthook = without_traceback(sys.excepthook)
    if from_override_args(flag_value(argv, OPT_IN_FLAG)) is not None and (path := flag_value(argv, *MODEL_FLAGS)):
        config_of(path)


class OptIn:
    """Waits for a launch that opts in; there is at most one in a process."""

    def __init__(self) -> None:
        self.launch: Launch | None = None

    def before_model_config(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        """Put the cache in place if the launch asks for it; a second model config must agree with the first."""
        from dsv4_sglang.srt.integration.options import from_override_args

        options = from_override_args(server_args.json_model_override_args)
        if options is None:
            return
        if self.launch is None:
            from dsv4_sglang.srt.integration.activate import activate
            from dsv4_sglang.srt.integration.server_context import Launch

            launch = Launch(options)
            activate(launch, server_args)
            self.launch = launch
        elif self.launch.options != options:
            raise ValueError(f"two launches in one process with different options: {self.launch.options} and {options}")
        self.launch.begin(server_args)
