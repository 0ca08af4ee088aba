"""Start of a server: without the opt-in the package is inactive, and unsupported launches are rejected."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import server_forkserver

from dsv4_sglang.srt.integration import launch_command

pytestmark = pytest.mark.server

# Run in a new process, because installed hooks cannot be removed.
INERT = """
import sys
from importlib.metadata import entry_points
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
from sglang.srt.server_args import ServerArgs
assert [e.value for e in entry_points(group="sglang.srt.plugins", name="dsv4_sglang")]
arguments = ServerArgs(model_path=sys.argv[1], device="cpu")
from dsv4_sglang.srt.integration import compat
flags = compat.resolve_flags(arguments)
looking = {"server_args.ServerArgs.from_cli_args", "configs.model_config.ModelConfig.from_server_args"}
assert HookRegistry._patched == {"sglang.srt." + name for name in looking}, HookRegistry._patched
assert flags.page_size == 256 and flags.attention_backend == "dsv4"
from sglang.srt.configs.model_config import ModelConfig
assert ModelConfig.from_server_args(arguments).is_hybrid_swa
assert not [name for name in sys.modules if name.startswith("dsv4_sglang.srt.integration.hooks")]
"""

ACTIVE = """
import os
import sys
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
from sglang.srt.server_args import ServerArgs
arguments = ServerArgs(model_path=sys.argv[1], device="cpu", json_model_override_args='{"dsv4_sglang": {}}')
from dsv4_sglang.srt.integration import compat
resolved = compat.resolve_flags(arguments)
from dsv4_sglang.srt.integration.server_context import ServerContext
from dsv4_sglang.srt.integration.hooks import hooks_of
from dsv4_sglang.srt.integration.options import Options
hooks = hooks_of(ServerContext(Options()), on_cpu=True)
assert {hook.target for hook in hooks} < HookRegistry._patched
assert resolved.page_size == 128 and resolved.attention_backend == "dsv4_sglang"
from sglang.srt.configs.model_config import ModelConfig
assert not ModelConfig.from_server_args(arguments).is_hybrid_swa
assert resolved.mamba_radix_cache_strategy == "extra_buffer"
assert resolved.mamba_track_interval == 128
assert os.environ["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "0"

# Flags that cannot be served and options that do not exist end the launch while its flags are read.
def rejected(words, options="{}", **flags):
    try:
        overrides = '{"dsv4_sglang": %s}' % options
        given = ServerArgs(model_path=sys.argv[1], device="cpu", json_model_override_args=overrides, **flags)
        compat.resolve_flags(given)
        given.check_server_args()
    except LaunchError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"not rejected: {flags} {options}")

from dsv4_sglang.srt.integration.launch_error import LaunchError
lines = ("--enable-mixed-chunk is not supported: ", "--page-size 64 is not supported: ")
rejected(lines, enable_mixed_chunk=True, page_size=64)
os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
rejected(("--context-length 40000 is not supported: ", "positions for 32768 tokens"), context_length=40000)
rejected(('unknown dsv4_sglang option "hca_state"; ', "valid options: "), options='{"hca_state": "raw"}')

# So does what only follows from flags, when SGLang resolves them late, and in a scheduler, which gets them resolved.
if compat.IS_0_5_23:
    from sglang.srt.arg_groups import cuda_graph_hook
    place, name = cuda_graph_hook, "finalize_cuda_graph_prefill_max_context"
else:
    place, name = ServerArgs, "_handle_debug_utils"
late = getattr(place, name)
setattr(place, name, lambda arguments: compat.set_flags(arguments, enable_eplb=True))
rejected(("--enable-eplb is not supported: ",))
setattr(place, name, late)
ModelConfig.from_server_args(arguments)
if compat.IS_0_5_23:
    compat.set_flags(arguments, enable_lora=True)
else:
    arguments.override("test", enable_lora=True)
try:
    ModelConfig.from_server_args(arguments)
except ValueError as error:
    assert "--enable-lora is not supported: " in str(error), error
else:
    raise AssertionError("a scheduler took a flag that is rejected")

# A hook whose target is gone stops the launch and is named.
from dsv4_sglang.srt.integration import activate
from dsv4_sglang.srt.integration.hooks import Hook
gone = Hook("sglang.srt.server_args.ServerArgs.gone", print, "to be missed")
try:
    activate._apply((gone,))
except LaunchError as error:
    assert "ServerArgs.gone: to be missed" in str(error) and "validated: 0.5.17" in str(error), error
else:
    raise AssertionError("a missing hook target went unnoticed")

# SGLang's own classes in a scheduler are rejected, every one of them named.
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from dsv4_sglang.srt.integration.startup_check import check_started
model = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(self_attn=None)]))
runner = SimpleNamespace(
    req_to_token_pool=ReqToTokenPool(4, 128, "cpu", False), token_to_kv_pool=None,
    attn_backend=None, model=model, model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="deepseek_v4")),
)
scheduler = SimpleNamespace(
    tp_worker=SimpleNamespace(model_runner=runner), draft_worker=None, tree_cache=None,
    disaggregation_mode=None,
    server_args=SimpleNamespace(disable_radix_cache=False, enable_hierarchical_cache=False),
)
try:
    check_started(scheduler)
except RuntimeError as error:
    words = ["request pool", "ReqToTokenPool", "KV pool", "prefix cache", "blocks of the tree", "attention of layer 0"]
    assert all(word in str(error) for word in words), error
else:
    raise AssertionError("SGLang's own classes went unnoticed")
"""


@pytest.mark.parametrize("script", [INERT, ACTIVE], ids=["inert", "active"])
def test_plugin(tiny: Callable[..., Path], tmp_path: Path, script: str) -> None:
    (tmp_path / "script.py").write_text(script)
    environment = launch_command.cpu_environment()
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    server_forkserver.run(
        launch_command.Command([sys.executable, "-m", "script", str(tiny())], environment), tmp_path / "log"
    )
