"""Check of a checkpoint's files before anything is loaded: it reads the index and the headers of the weight files.

It imports neither torch nor SGLang. A model that SGLang downloads is not checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsv4_sglang.srt.launch.error import LaunchError

INDEX = "model.safetensors.index.json"
# SGLang serves without the second one, but then it knows neither the chat template nor the end of an answer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# Values of --load-format that read safetensors files.
SAFETENSORS_FORMATS = ("auto", "safetensors", "fastsafetensors", "runai_streamer")
# Files that SGLang loads with "auto" if there is no safetensors file.
OTHER_WEIGHTS = ("*.bin", "*.pt")
# The library's own limit.
MOST_HEADER_BYTES = 100_000_000
AGAIN = "complete the download of the checkpoint"


def check_checkpoint(model_path: str, config: Mapping[str, Any], flag: Callable[[str], Any]) -> None:
    """Raise LaunchError if files of the checkpoint are missing, incomplete or damaged.

    Args:
        model_path: folder or hub name of the model.
        config: config of the model.
        flag: returns the value of a flag, None if it is not given, by the name of the field of ServerArgs.
    """
    model = Path(model_path)
    tokenizer = Path(flag("tokenizer_path") or model_path)
    if tokenizer.is_dir() and not _is_on(flag("skip_tokenizer_init")):
        _check_tokenizer(tokenizer)
    load_format = flag("load_format") or "auto"
    names = _weight_names(model, load_format) if model.is_dir() else None
    algorithm = flag("speculative_algorithm")
    drafts = Path(flag("speculative_draft_model_path") or model_path)
    if algorithm is None or not drafts.is_dir():
        return
    if drafts.resolve() != model.resolve():
        config = _read_json(drafts / "config.json", "the config of the draft model")
        names = _weight_names(drafts, flag("speculative_draft_load_format") or load_format)
    if names is not None:
        _check_drafts(drafts, algorithm, config, names)


def _is_on(value: Any) -> bool:
    """Return True if a flag without a value is given, on the command line or as true in a file."""
    return value not in (None, False, "False", "false")


def _check_tokenizer(folder: Path) -> None:
    for name in TOKENIZER_FILES:
        _read_json(folder / name, "the tokenizer")


def _read_json(file: Path, what: str) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise LaunchError(f"{file} ({what}) cannot be read: {error.strerror}; {AGAIN}") from None
    except ValueError as error:
        raise LaunchError(f"{file} ({what}) is not JSON: {error}; {AGAIN}") from None
    if not isinstance(values, dict):
        raise LaunchError(f"{file} ({what}) holds {type(values).__name__}; expected an object; {AGAIN}")
    return values


def _weight_names(folder: Path, load_format: str) -> set[str] | None:
    """Return the names of all weights, or None if SGLang does not load safetensors files.

    Raises:
        LaunchError: a file is missing, or its size differs from its header.
    """
    if load_format not in SAFETENSORS_FORMATS:
        return None
    listed = _read_index(folder / INDEX) if (folder / INDEX).exists() else {}
    wanted = set(listed.values()) or {file.name for file in folder.glob("*.safetensors")}
    if not wanted:
        if load_format == "auto" and any(any(folder.glob(pattern)) for pattern in OTHER_WEIGHTS):
            return None
        raise LaunchError(f"{folder} has no weights (*.safetensors); {AGAIN}, or give --load-format dummy")
    if absent := sorted(name for name in wanted if not (folder / name).is_file()):
        of = f"{len(absent)} of the {len(wanted)} files that {INDEX} lists are"
        raise LaunchError(f"{folder / absent[0]} is missing ({of}); {AGAIN}")
    headers = {name: _header(folder / name) for name in sorted(wanted)}
    if lost := [(name, file) for name, file in listed.items() if name not in headers[file]]:
        raise LaunchError(f"{folder / lost[0][1]} lacks the weight {lost[0][0]}, which {INDEX} lists; {AGAIN}")
    return {name for header in headers.values() for name in header}


def _read_index(file: Path) -> dict[str, str]:
    """Return the file of each weight."""
    files = _read_json(file, "the index of the weights").get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise LaunchError(f"{file} has no valid weight_map; {AGAIN}")
    return files


def _header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: the tensors by name. Raise LaunchError if the file is not complete."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(MOST_HEADER_BYTES, size - 8):
                raise LaunchError(f"{path} ({size} bytes) is not a safetensors file, or only its beginning; {AGAIN}")
            header = json.loads(file.read(length))
            tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
            expected = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(f"{path} has a damaged header; {AGAIN}") from None
    if size != expected:
        raise LaunchError(f"{path} has {size} bytes, and its header says {expected}; {AGAIN}")
    return tensors


def _check_drafts(folder: Path, algorithm: str, config: Mapping[str, Any], names: set[str]) -> None:
    """Raise LaunchError if no weight belongs to a draft layer: SGLang would leave it as it is allocated, and serve."""
    layers: list[tuple[str, ...]]
    if algorithm == "DSPARK":
        layers = [(f"mtp.{stage}.",) for stage in range(len(config.get("dspark_target_layer_ids") or ()))]
    else:  # released checkpoints name the NextN layer mtp.0, others number it after the last layer
        after = config.get("num_hidden_layers")
        layers = [("mtp.0.", f"layers.{after}.", f"model.layers.{after}.")]
    for prefixes in layers:
        if not any(name.startswith(prefixes) for name in names):
            raise LaunchError(
                f"--speculative-algorithm {algorithm}: {folder} has no weights of the draft layer ({prefixes[0]}*); "
                "give a checkpoint that has them, or leave the flag out"
            )
