"""SGLang plugin of servers under test: it injects faults and records what steps do.

The plugin reads and writes files in the folder that PLUGIN_FOLDER names (fixture `plugin`):

- fault: name of the fault that affects all following steps (faulty_cache.py); missing for none
- drafts: folder with the drafts of each step, if it exists (recorded_drafts.py)
- sizes: sizes of the graphs as which short prefill steps run, if it exists; steps then has a line per step
  (recorded_prefills.py)
- cuda_layers: exists if the server's layers are of SGLang's CUDA classes (cuda_layers.py)
- loads: folder with the loads from the host, one file per process, if it exists (faulty_cache.py)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

PLUGIN_FOLDER = "DSV4_SGLANG_TEST_PLUGIN"


def folder() -> Path:
    """Return the folder of this process's plugin."""
    return Path(os.environ[PLUGIN_FOLDER])


def fault() -> str:
    """Return the current fault; empty if there is none."""
    file = folder() / "fault"
    return file.read_text() if file.exists() else ""


@contextmanager
def plugged(folder: Path) -> Iterator[None]:
    """Context manager: servers that start inside load the plugin, as an installed distribution in `folder`."""
    described = folder / "server_plugin-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: server_plugin\nVersion: 0\n")
    (described / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nserver_plugin = support.server_plugin:register\n"
    )
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, {"PYTHONPATH": path, PLUGIN_FOLDER: str(folder)}):
        yield


@contextmanager
def broken(folder: Path, kind: str) -> Iterator[None]:
    """Context manager: inject the fault `kind` into the servers whose plugin has this folder."""
    (folder / "fault").write_text(kind)
    try:
        yield
    finally:
        (folder / "fault").unlink(missing_ok=True)


def register() -> None:
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterNoop

    from support import cuda_layers, faulty_cache, recorded_drafts, recorded_prefills

    # SGLang's adapter on a CPU releases no memory. The tests run everything else of sleep and wake-up.
    if not torch.cuda.is_available():
        _TorchMemorySaverAdapterNoop.enabled = True

    hooks = dict(faulty_cache.HOOKS)
    if (folder() / "drafts").exists():
        hooks |= recorded_drafts.HOOKS
    if (folder() / "sizes").exists():
        hooks |= recorded_prefills.HOOKS
    if (folder() / "cuda_layers").exists():
        cuda_layers.choose()
        hooks |= cuda_layers.HOOKS
    for target, function in hooks.items():
        HookRegistry.register(target, function, HookType.AROUND)
