"""Get SGLang's resolved flags and its model config without starting a server."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from dsv4_sglang.srt.integration import compat, launch_command


def prepare_this_process() -> None:
    """Import SGLang in a process that only plans: no visible GPU, no logging."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    launch_command.prepare_this_process(cpu=True)
    warnings.filterwarnings("ignore", module="sglang")
    # SGLang and its dependencies print warnings about what a machine without a GPU lacks.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        import sglang.srt.models.deepseek_v4  # noqa: F401
    for name in ("sglang", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def resolved_flags(config_json: str, **given: Any) -> tuple[Any, Any, Any]:
    """Resolve the flags of a server on GPUs.

    Args:
        config_json: Text of the model's config.json.
        given: Fields of SGLang's ServerArgs.

    Returns:
        The ServerArgs, their flags as resolved, and SGLang's config of the model.

    Raises:
        ValueError: SGLang rejects a flag.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config_json)
        server_args = ServerArgs(
            **{"model_path": folder, "skip_tokenizer_init": True, "load_format": "dummy", "device": "cuda", **given}
        )
        flags = compat.resolve_flags(server_args)
        return server_args, flags, ModelConfig.from_server_args(server_args)
