"""The command, flags and environment of a launch: the only place that knows what SGLang needs without a GPU.

Importing it imports neither torch nor SGLang, so that it can run before the environment is set.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dsv4_sglang.model.v41 import MODEL_TYPES as V41_MODEL_TYPES
from dsv4_sglang.srt.integration.launch_error import LaunchError
from dsv4_sglang.srt.integration.options import FLAG as OPT_IN_FLAG
from dsv4_sglang.srt.integration.options import KEY as OPT_IN_KEY
from dsv4_sglang.srt.integration.options import from_override_args, overrides_of

CONFIG_FLAG = "--config"
CPU_SHIM = Path(__file__).parents[1] / "cpu" / "cpu_shim"

# SGLang sizes its pools by free GPU memory. On a CPU it would take most of the machine's, so give sizes for trying
# things out; a user's own flag replaces each.
CPU_FLAGS: dict[str, str] = {
    "--device": "cpu",
    "--max-total-tokens": "65536",
    "--max-running-requests": "16",
    "--chunked-prefill-size": "512",
}
MODEL_TYPES = ("deepseek_v4", *V41_MODEL_TYPES)
"""Of a config.json that this cache serves."""
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+|\w+://.*")
"""Of a model that SGLang downloads: OWNER/NAME on a hub, or the address of another storage."""


@dataclass(frozen=True)
class Command:
    """`argv` runs the server; `environment` is what it needs on top of the caller's."""

    argv: list[str]
    environment: dict[str, str]

    def shell(self) -> str:
        """One line that can be pasted into a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*words, *map(shlex.quote, self.argv)])

    def full_environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _take(flags: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Return the last value of a flag, None if it is not there, "" if it has none; and the other flags.

    An abbreviation counts: SGLang's parser, whose import takes 5 s, takes it for the same flag or calls it ambiguous.
    """
    parser = ArgumentParser(add_help=False)
    parser.add_argument(name, dest="value", nargs="?", const="")
    found, rest = parser.parse_known_args(list(flags))
    return found.value, rest


def _with_file(flags: Sequence[str]) -> list[str]:
    """Flags with those of the file of `--config` first, as SGLang puts them. Lists are left out."""
    file, rest = _take(flags, CONFIG_FLAG)
    if file is None:
        return rest
    try:
        values = yaml.safe_load(Path(file).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise LaunchError(f"{CONFIG_FLAG} {file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise LaunchError(f"{CONFIG_FLAG} {file}: expected flags and their values, found {values!r}")
    texts = {key: json.dumps(value) if isinstance(value, dict) else str(value) for key, value in values.items()}
    return [*(f"--{key.replace('_', '-')}={text}" for key, text in texts.items()), *rest]


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The last value of a flag given as `--name value` or `--name=value`, there or in the file of `--config`; None if
    it is not there.

    Raises:
        LaunchError: The file cannot be read.
    """
    return _take(_with_file(flags), name)[0]


def config_of(model_path: str) -> dict[str, Any]:
    """The config.json of a checkpoint folder; nothing of a model that is still on a hub or in another storage.

    Raises:
        LaunchError: There is no such folder or no such file, or it is not the config of a model that is served.
    """
    file = Path(model_path) / "config.json"
    if not file.parent.is_dir():
        if HUB_NAME.fullmatch(model_path):
            return {}
        raise LaunchError(f"--model-path {model_path}: no such folder; give a checkpoint's, or a hub name OWNER/NAME")
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise LaunchError(f"{file} cannot be read ({error.strerror}); give the folder of a checkpoint") from None
    except ValueError as error:
        raise LaunchError(f"{file} is not JSON: {error}") from None
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type not in MODEL_TYPES:
        raise LaunchError(f"{file} has the model_type {model_type!r}; expected one of {', '.join(MODEL_TYPES)}")
    return config


def opt_in(overrides: str | None) -> str:
    """The value of --json-model-override-args that opts in, keeping what the user overrides besides.

    Raises:
        LaunchError: `overrides` is not a JSON object, or an option in it is invalid.
    """
    from_override_args(overrides)
    return json.dumps({OPT_IN_KEY: {}, **overrides_of(overrides)})


def cpu_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What SGLang needs where there is no GPU: its CPU engine, Triton's interpreter, a stand-in for `sgl_kernel`, and
    to find no NCCL, which a CUDA build of torch has."""
    paths = [str(CPU_SHIM), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TRITON_INTERPRET": "1",
        # A prefill server would send what a prefix hit found before the step behind a CUDA event.
        "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
        "SGLANG_NCCL_SO_PATH": os.devnull,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }


def prepare_this_process(cpu: bool) -> None:
    """Set the environment for SGLang in this process and its children. Call it before the first import of SGLang."""
    if not cpu:
        return
    if "sglang.srt" in sys.modules:
        raise RuntimeError("SGLang is already imported: prepare the process first")
    os.environ.update(cpu_environment())
    if str(CPU_SHIM) not in sys.path:
        sys.path.insert(0, str(CPU_SHIM))


def engine_arguments(
    model_path: str, cpu: bool, overrides: str | None = None, **arguments: object
) -> dict[str, object]:
    """Keyword arguments for `sglang.Engine` that select this cache; `arguments` win over the defaults for a CPU."""
    defaults: dict[str, object] = {}
    if cpu:
        for flag, value in CPU_FLAGS.items():
            defaults[flag.removeprefix("--").replace("-", "_")] = int(value) if value.isdigit() else value
    return {
        "model_path": model_path,
        "json_model_override_args": opt_in(overrides),
        **defaults,
        **arguments,
    }


def server_command(model_path: str, flags: Sequence[str], cpu: bool, python: str = sys.executable) -> Command:
    """`python -m sglang.launch_server` with this cache selected.

    `flags` are any of SGLang's; they win over the defaults for a CPU. Overrides in a file of `--config` are kept, where
    SGLang's parser lets those of the command line replace them.

    Raises:
        LaunchError: The overrides are invalid, or the file cannot be read.
    """
    overrides = opt_in(flag_value(flags, OPT_IN_FLAG))
    _, rest = _take(flags, OPT_IN_FLAG)
    argv = [python, "-m", "sglang.launch_server", "--model-path", model_path, OPT_IN_FLAG, overrides]
    if cpu:
        for flag, value in CPU_FLAGS.items():
            if flag_value(rest, flag) is None:
                argv += [flag, value]
    file, rest = _take(rest, CONFIG_FLAG)
    # SGLang reads the file only if it finds that very word.
    from_file = [] if file is None else [CONFIG_FLAG, file]
    return Command([*argv, *from_file, *rest], cpu_environment() if cpu else {})
