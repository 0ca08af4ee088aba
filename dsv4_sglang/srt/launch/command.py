"""Command, flags and environment of a server, including all that SGLang needs without a GPU.

It imports neither torch nor SGLang, so that it can run before the environment is set.
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

from dsv4_sglang.model.config import LAYER_COUNTS, Fields
from dsv4_sglang.model.supported import CONFIGS
from dsv4_sglang.srt.launch.error import LaunchError
from dsv4_sglang.srt.launch.options import FLAG as OPT_IN_FLAG
from dsv4_sglang.srt.launch.options import KEY as OPT_IN_KEY
from dsv4_sglang.srt.launch.options import from_override_args, model_overrides, overrides_of

CONFIG_FLAG = "--config"
# Module that runs a server which Ctrl-C ends quietly while it starts.
INTERRUPTIBLE = "dsv4_sglang.srt.launch.interruptible"
CPU_SHIM = Path(__file__).parents[1] / "cpu" / "cpu_shim"

# SGLang sizes its pools by free GPU memory. On a CPU it would take most of the machine's memory, so these are small
# sizes for experiments. A flag of the user replaces each.
CPU_FLAGS: dict[str, str] = {
    "--device": "cpu",
    "--max-total-tokens": "65536",
    "--max-running-requests": "16",
    "--chunked-prefill-size": "512",
}
# A model that SGLang downloads: OWNER/NAME on a hub, or the address of another storage.
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+|\w+://.*")


@dataclass(frozen=True)
class Command:
    """A command line (`argv`), and the variables that it needs in addition to the caller's (`environment`)."""

    argv: list[str]
    environment: dict[str, str]

    def shell(self) -> str:
        """Return one line that can be pasted into a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*words, *map(shlex.quote, self.argv)])

    def full_environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _take_all(flags: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """Return the values of a flag, "" where it has none, and the other flags.

    An abbreviation counts: SGLang's parser accepts it as the same flag or rejects it as ambiguous. That parser is not
    used here, because its import takes 5 s.
    """
    parser = ArgumentParser(add_help=False)
    parser.add_argument(name, dest="values", nargs="?", const="", action="append", default=[])
    found, rest = parser.parse_known_args(list(flags))
    return found.values, rest


def _take(flags: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Return the last value of a flag, None if it is not there, and the other flags."""
    values, rest = _take_all(flags, name)
    return (values[-1] if values else None), rest


def with_file(flags: Sequence[str]) -> list[str]:
    """Return the flags, preceded by those of the `--config` file, as SGLang orders them.

    Raises:
        LaunchError: the file cannot be read.
    """
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
    """Return the last value of a flag, from the command line or the file of `--config`, or None if it is not set.

    Raises:
        LaunchError: the file cannot be read.
    """
    return _take(with_file(flags), name)[0]


def model_path_of(given: str | None, flags: Sequence[str]) -> str:
    """Return the model path, as given on the command line or in the file of `--config`.

    Raises:
        LaunchError: there is none, or the file cannot be read.
    """
    path = given or flag_value(flags, "--model-path")
    if not path:
        raise LaunchError("--model-path is missing; give a checkpoint's folder, or a hub name OWNER/NAME")
    return path


def overrides_given(flags: Sequence[str]) -> str | None:
    """Return the value of --json-model-override-args, from the command line or the file of `--config`.

    Raises:
        LaunchError: the command line has the flag twice, of which SGLang would drop the first, or without a value.
    """
    values, _ = _take_all(flags, OPT_IN_FLAG)
    if len(values) > 1:
        raise LaunchError(f"{OPT_IN_FLAG} is given {len(values)} times; put all keys into one JSON object")
    if values == [""]:
        example = json.dumps({OPT_IN_KEY: {"max_snapshots": 1000}})
        raise LaunchError(f"{OPT_IN_FLAG} has no value; give a JSON object such as '{example}', or leave it out")
    return flag_value(flags, OPT_IN_FLAG)


def config_of(model_path: str, overrides: str | None) -> dict[str, Any]:
    """Return the config.json of a model folder, or {} for a model on a hub or in another storage.

    Args:
        model_path: folder or hub name of the model.
        overrides: value of --json-model-override-args, which replaces fields of the file.

    Raises:
        LaunchError: the folder or the file does not exist, or it is not the config of a supported model.
    """
    file = Path(model_path) / "config.json"
    if not file.parent.is_dir():
        # A folder in an existing folder is not taken for the owner of a model on a hub.
        if HUB_NAME.fullmatch(model_path) and not file.parent.parent.is_dir():
            return {}
        raise LaunchError(f"--model-path {model_path}: no such folder; give a checkpoint's, or a hub name OWNER/NAME")
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise LaunchError(f"{file} cannot be read ({error.strerror}); give the folder of a checkpoint") from None
    except ValueError as error:
        raise LaunchError(f"{file} is not JSON: {error}") from None
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type not in CONFIGS:
        raise LaunchError(f"{file} has the model_type {model_type!r}; expected one of {', '.join(CONFIGS)}")
    config |= model_overrides(overrides)
    try:
        CONFIGS[model_type].from_hf(config)
        Fields(config).sequence("architectures")
        for name in LAYER_COUNTS:
            Fields(config.get("text_config", config)).integer(name)
    except (KeyError, TypeError, ValueError) as error:
        raise LaunchError(f"{file}: {error.args[0]}; restore the file of the checkpoint") from None
    return config


def opt_in(overrides: str | None) -> str:
    """Return the value of --json-model-override-args that opts in, with the user's other overrides.

    Raises:
        LaunchError: `overrides` is not a JSON object, or an option in it is invalid.
    """
    from_override_args(overrides)
    return json.dumps({OPT_IN_KEY: {}, **overrides_of(overrides)})


def cpu_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that SGLang needs without a GPU: its CPU engine, Triton's interpreter, a replacement of
    `sgl_kernel`, and no NCCL, which a CUDA build of torch contains."""
    paths = [str(CPU_SHIM), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TRITON_INTERPRET": "1",
        # A prefill server would send the hit part of a prefix early, after a CUDA event.
        "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
        "SGLANG_NCCL_SO_PATH": os.devnull,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }


def prepare_this_process(cpu: bool) -> None:
    """Set the environment for SGLang in this process and its children.

    Call it before the first import of SGLang. Otherwise it raises RuntimeError on a CPU.
    """
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
    """Return keyword arguments for `sglang.Engine` that select this cache.

    Args:
        model_path: folder or hub name of the model.
        cpu: add defaults for a CPU.
        overrides: value of --json-model-override-args, with options of this package.
        arguments: other arguments, which replace the defaults for a CPU.

    Raises:
        LaunchError: the overrides are invalid.
    """
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
    """Return `python -m sglang.launch_server` with this cache selected.

    Overrides in a `--config` file are kept. SGLang's parser would replace them by those of the command line.

    Args:
        model_path: folder or hub name of the model.
        flags: flags of SGLang, which replace the defaults for a CPU.
        cpu: add defaults for a CPU.
        python: interpreter.

    Raises:
        LaunchError: the overrides are invalid, or the file cannot be read.
    """
    overrides = opt_in(overrides_given(flags))
    _, rest = _take(flags, OPT_IN_FLAG)
    argv = [python, "-m", "sglang.launch_server", "--model-path", model_path, OPT_IN_FLAG, overrides]
    if cpu:
        for flag, value in CPU_FLAGS.items():
            if flag_value(rest, flag) is None:
                argv += [flag, value]
    file, rest = _take(rest, CONFIG_FLAG)
    # SGLang reads the file only if the argument is exactly `--config`.
    from_file = [] if file is None else [CONFIG_FLAG, file]
    return Command([*argv, *from_file, *rest], cpu_environment() if cpu else {})
