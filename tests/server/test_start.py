"""Start of a server: without the opt-in the package is inactive, and unsupported launches are rejected.

The last lines of the output of a rejected launch are the reasons, one line each.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import server_forkserver
from support.liveness import run, wait
from support.server import launched

from dsv4_sglang.srt.launch.command import OPT_IN_FLAG, Command, cpu_environment

pytestmark = [pytest.mark.server, pytest.mark.full]

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
from dsv4_sglang.srt.sglang.flags import resolve_flags
flags = resolve_flags(arguments)
looking = {
    "server_args.ServerArgs.add_cli_args",
    "server_args.ServerArgs.from_cli_args",
    "configs.model_config.ModelConfig.from_server_args",
}
assert HookRegistry._patched == {"sglang.srt." + name for name in looking}, HookRegistry._patched
assert flags.page_size == 256 and flags.attention_backend == "dsv4"
from sglang.srt.configs.model_config import ModelConfig
assert ModelConfig.from_server_args(arguments).is_hybrid_swa
assert not [name for name in sys.modules if name.startswith("dsv4_sglang.srt.plugin.hooks")]
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
from dsv4_sglang.srt.sglang.flags import resolve_flags, set_flags
resolved = resolve_flags(arguments)
from dsv4_sglang.srt.plugin.server_context import ServerContext
from dsv4_sglang.srt.plugin.hooks import hooks_of
from dsv4_sglang.srt.launch.options import Options
hooks = hooks_of(ServerContext(Options()), on_cpu=True)
assert {hook.target for hook in hooks} < HookRegistry._patched
assert resolved.page_size == 128 and resolved.attention_backend == "dsv4_sglang"
from sglang.srt.configs.model_config import ModelConfig
assert not ModelConfig.from_server_args(arguments).is_hybrid_swa
assert resolved.mamba_radix_cache_strategy == "extra_buffer"
assert resolved.mamba_track_interval == 128
assert os.environ["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "0"

# A flag that cannot be served ends the launch, also when SGLang resolves it late, and in a scheduler.
from dsv4_sglang.srt.launch.error import LaunchError
from sglang.srt.arg_groups import cuda_graph_hook
late = cuda_graph_hook.finalize_cuda_graph_prefill_max_context
cuda_graph_hook.finalize_cuda_graph_prefill_max_context = lambda given: set_flags(given, enable_eplb=True)
try:
    given = ServerArgs(model_path=sys.argv[1], device="cpu", json_model_override_args='{"dsv4_sglang": {}}')
    resolve_flags(given)
    given.check_server_args()
except LaunchError as error:
    assert "--enable-eplb is not supported: " in str(error), error
else:
    raise AssertionError("a flag that SGLang resolves late was served")
cuda_graph_hook.finalize_cuda_graph_prefill_max_context = late
ModelConfig.from_server_args(arguments)
set_flags(arguments, enable_lora=True)
try:
    ModelConfig.from_server_args(arguments)
except ValueError as error:
    assert "--enable-lora is not supported: " in str(error), error
else:
    raise AssertionError("a scheduler took a flag that is rejected")

# SGLang's own classes in a scheduler are rejected, every one of them named.
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from dsv4_sglang.srt.plugin.startup_check import check_started
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
    environment = cpu_environment()
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    server_forkserver.run(Command([sys.executable, "-m", "script", str(tiny())], environment), tmp_path / "log")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-running-requests", "1000000"], "the state slots do not fit: 1000004 slots of "),
        (
            ["--enable-hierarchical-cache", "--hicache-ratio", "0.00001"],
            "the host cache would have 0 blocks and 0 snap",
        ),
    ],
)
def test_scheduler_rejects_a_launch_in_one_line(
    tiny: Callable[..., Path], tmp_path: Path, flags: list[str], said: str
) -> None:
    log = tmp_path / "log"
    with launched(tiny(), log, flags, {}) as process:
        assert wait(process, log) != 0
    text = log.read_text(errors="replace")
    assert "Traceback" not in text
    assert text.splitlines()[-1].startswith(f"dsv4_sglang: {said}"), text


def _command(model: Path, *flags: str) -> Command:
    server = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu", *flags]
    return Command(server, cpu_environment())


def _forked(command: Command, log: Path) -> tuple[int, str]:
    """Start a server that ends by itself. Return its exit code and its output."""
    code = wait(server_forkserver.start(command, log), log)
    return code, log.read_text(errors="replace")


def _in_new_process(command: Command, log: Path) -> tuple[int, str]:
    """Do the same as users do. The imports take 10 s of CPU time."""
    done = run(command.argv, env=command.full_environment())
    return done.returncode, done.stdout + done.stderr


OPT_IN = [OPT_IN_FLAG, '{"dsv4_sglang": {}}']


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([*OPT_IN, "--tp-sise", "2"], "unknown flag --tp-sise; did you mean --tp-size?"),
        ([*OPT_IN, "--tp-size", "two"], "argument --tp-size/--tensor-parallel-size: invalid int value: 'two'"),
        ([*OPT_IN, OPT_IN_FLAG, "{}"], "--json-model-override-args is given 2 times; put all keys into"),
        (
            [*OPT_IN, "--speculative-algorithm", "EAGLE"],
            "--speculative-algorithm EAGLE: .* has no weights of the draft",
        ),
    ],
)
def test_sglangs_command_rejects_in_one_line(
    tiny: Callable[..., Path], tmp_path: Path, flags: list[str], said: str
) -> None:
    code, text = _forked(_command(tiny(), *flags), tmp_path / "log")
    assert code != 0 and "usage:" not in text and "Traceback" not in text
    assert re.match(f"dsv4_sglang: {said}", text.splitlines()[-1]), text


def test_without_the_opt_in_sglang_shows_its_usage(tiny: Callable[..., Path], tmp_path: Path) -> None:
    code, text = _forked(_command(tiny(), "--tp-sise", "2"), tmp_path / "log")
    assert code == 2 and text.splitlines()[-1].startswith("sglang serve: error: unrecognized"), text


@pytest.mark.parametrize(
    ("launch", "override", "said"),
    [
        # A misspelt opt-in key is rejected; SGLang would serve its own cache.
        (_forked, '{"dsv4_sgalng": {}}', ['"dsv4_sgalng" in --json-model-override-args is not a known key; ']),
        (
            _in_new_process,
            '{"dsv4_sglang": {}}',
            ["--max-running-requests -4 is not supported: ", "--page-size 64 is not supported: "],
        ),
    ],
)
def test_launcher_rejects_a_launch_in_its_last_lines(
    tiny: Callable[..., Path],
    tmp_path: Path,
    launch: Callable[[Command, Path], tuple[int, str]],
    override: str,
    said: list[str],
) -> None:
    """A launch ends with one line per reason."""
    flags = ["--page-size", "64", "--max-running-requests", "-4", OPT_IN_FLAG, override]
    code, text = launch(_command(tiny(), *flags), tmp_path / "log")
    assert code == 1 and "Traceback" not in text
    last = text.splitlines()[-len(said) :]
    assert all(line.startswith(f"dsv4_sglang: {words}") for line, words in zip(last, said, strict=True)), text
