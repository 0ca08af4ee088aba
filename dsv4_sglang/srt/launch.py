"""The command, flags and environment of a launch: the only place that knows what SGLang needs without a GPU.

Importing it imports neither torch nor SGLang, so that it can run before the environment is set.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

OPT_IN_FLAG = "--json-model-override-args"
OPT_IN_KEY = "dsv4_sglang"
CONFIG_FLAG = "--config"
MODEL_FLAGS = ("--model-path", "--model")
CPU_SHIM = Path(__file__).parent / "cpu_shim"

# SGLang sizes its pools by free GPU memory. On a CPU it would take most of the machine's, so give sizes for trying
# things out; a user's own flag replaces each.
CPU_FLAGS: dict[str, str] = {
    "--device": "cpu",
    "--max-total-tokens": "65536",
    "--max-running-requests": "16",
    "--chunked-prefill-size": "512",
}

# The flags that are looked at before SGLang reads them, and the shortest abbreviation that its parser takes for each.
ABBREVIATED = {
    OPT_IN_FLAG: "--j",
    CONFIG_FLAG: "--conf",
    "--model-path": "--model-p",
    "--host": "--ho",
    "--port": "--po",
    "--api-key": "--ap",
    "--ssl-certfile": "--ssl-ce",
    "--ssl-ca-certs": "--ssl-ca",
    "--device": "--dev",
    "--max-total-tokens": "--max-t",
    "--max-running-requests": "--max-r",
    "--chunked-prefill-size": "--chu",
}


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


def _whole(name: str) -> str:
    """The flag that argparse takes `name` for, if it is one of those that matter here."""
    for flag, shortest in ABBREVIATED.items():
        if flag.startswith(name) and len(name) >= len(shortest):
            return flag
    return name


def spelled_out(flags: Sequence[str]) -> list[str]:
    """`flags` with abbreviations of those that matter here written out, and `--config FILE` in two words: SGLang reads
    the file only if it finds that very word."""
    words: list[str] = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        name = _whole(name)
        words += [name, value] if equals and name == CONFIG_FLAG else [name + equals + value]
    return words


def _with_file(flags: Sequence[str]) -> list[str]:
    """Spelled out flags, those of the file of `--config` first, as SGLang puts them. Lists are left out."""
    words = spelled_out(flags)
    if CONFIG_FLAG not in words:
        return words
    path = Path(*words[words.index(CONFIG_FLAG) + 1 :][:1])
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{CONFIG_FLAG} {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{CONFIG_FLAG} {path}: expected flags and their values, found {values!r}")
    texts = {key: json.dumps(value) if isinstance(value, dict) else str(value) for key, value in values.items()}
    return [*spelled_out([f"--{key.replace('_', '-')}={text}" for key, text in texts.items()]), *words]


def flag_value(flags: Sequence[str], *names: str) -> str | None:
    """The last value of a flag given as `--name value` or `--name=value`, there or in the file of `--config`; None if
    it is not there. An abbreviation that SGLang would take for the flag counts.

    Raises ValueError if there is a file that cannot be read.
    """
    found = None
    words = _with_file(flags)
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else (words[i + 1] if i + 1 < len(words) else "")
    return found


def _without(flags: Sequence[str], name: str) -> list[str]:
    """`flags` without every `name value` and `name=value`."""
    kept: list[str] = []
    skip = False
    for flag in flags:
        if skip:
            skip = False
        elif flag == name:
            skip = True
        elif not flag.startswith(f"{name}="):
            kept.append(flag)
    return kept


def opt_in(overrides: str | None) -> str:
    """The value of --json-model-override-args that opts in, keeping what the user overrides besides.

    Raises ValueError if `overrides` is not a JSON object.
    """
    try:
        values = json.loads(overrides or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"{OPT_IN_FLAG} {overrides!r} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{OPT_IN_FLAG} {overrides!r}: expected a JSON object")
    return json.dumps({OPT_IN_KEY: {}, **values})


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
    SGLang's parser lets those of the command line replace them. Raises ValueError if the overrides are not JSON or the
    file cannot be read.
    """
    overrides = opt_in(flag_value(flags, OPT_IN_FLAG))
    rest = _without(spelled_out(flags), OPT_IN_FLAG)
    argv = [python, "-m", "sglang.launch_server", "--model-path", model_path, OPT_IN_FLAG, overrides]
    if cpu:
        for flag, value in CPU_FLAGS.items():
            if flag_value(rest, flag) is None:
                argv += [flag, value]
    return Command([*argv, *rest], cpu_environment() if cpu else {})
