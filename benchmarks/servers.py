"""SGLang servers for benchmarks: start with a timeout, send requests, stop, and parse the log."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ports
from benchmarks.environment import ROOT
from dsv4_sglang import __version__
from dsv4_sglang.cli.server import Endpoint, RequestError, start, stop, wait_ready
from dsv4_sglang.requirements import PLUGIN, PLUGIN_GROUP, has_entry_point
from dsv4_sglang.srt.launch.command import Command

GPU_ENVIRONMENT = {
    # GPUs without FP4 run FP8 experts. Kernels are compiled on first use instead of all at start.
    "SGLANG_DSV4_FP4_EXPERTS": "0",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    "HF_HUB_OFFLINE": "1",
}
# With the small tensors of a dry run, threads mostly wait for each other and compiling takes longer than it saves.
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
GPU_FLAGS = ("--skip-tokenizer-init", "--sampling-backend", "pytorch", "--grammar-backend", "none")
REGISTER = "dsv4_sglang.srt.plugin.entry_point:register"

# The prefix in brackets has the time and, with data parallelism, the rank: "[2026-11-21 10:00:00 DP1 TP1]". With
# speculation, "accept len" is the mean number of accepted tokens per request and verify step.
DECODE_LINE = re.compile(
    r"\[\S+ \S+?(?: DP(\d+))?(?: [^\]]*)?\] Decode batch.*?#running-req: (\d+)(?:.*?accept len: ([\d.]+))?"
    r".*?gen throughput \(token/s\): ([\d.]+)"
)
OUR_SIZES = re.compile(
    r"dsv4_sglang cache: (\d+) tokens in \d+ blocks, ([\d.]+) bytes a token; (\d+) state slots .*?; ([\d.]+) GiB in all"
)
# Each process writes this line, also those that share a host cache.
OUR_HOST_CACHE = re.compile(r"dsv4_sglang host cache of (\w+) process(?:es)?: .*?; ([\d.]+) GiB of host memory")
# SGLang's GB are 2^30 bytes on the GPU and 10^9 bytes on the host.
IN_TREE_TOKEN = re.compile(r"DSV4 memory calculation: .*?bytes_per_full_token=([\d.]+), (.*)")
IN_TREE_FIXED = re.compile(r"_fixed=([\d.]+) GB")
IN_TREE_TOKENS = re.compile(r"DSV4 pool sizes: full=(\d+)")
IN_TREE_HOST_POOL = re.compile(r"Allocating ([\d.]+) GB host memory for V4 \w+ pool")


def plugin_path(folder: Path) -> list[str]:
    """Return the PYTHONPATH entries with which a server finds this package's plugin.

    The list is empty if the package is installed. Otherwise it has the source tree and `folder`, where this function
    writes the two metadata files of an installed distribution.
    """
    if has_entry_point():
        return []
    info = folder / f"dsv4_sglang-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dsv4-sglang\nVersion: {__version__}\n")
    (info / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\n{PLUGIN} = {REGISTER}\n")
    return [str(folder), str(ROOT)]


def command(model: Path, flags: Sequence[str], ours: bool, cpu: bool) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a server and its additional environment variables.

    Args:
        model: Folder of the checkpoint.
        flags: Flags of the server.
        ours: Use this package's cache, else SGLang's own.
        cpu: Serve on the CPU.

    Returns:
        (argv, environment).

    Raises:
        ValueError: SGLang's own cache is requested on the CPU.
    """
    from dsv4_sglang.srt.launch.command import server_command

    if cpu:
        if not ours:
            raise ValueError("SGLang's own DeepSeek-V4 needs a GPU")
        made = server_command(str(model), [*flags, "--skip-tokenizer-init"], cpu=True)
        return made.argv, {**made.environment, **CPU_ENVIRONMENT}
    # As with the released widths. flashshape's widths are too small for this kernel to be correct
    # (`srt.plugin.activate`), but its weights are random.
    environment = {**GPU_ENVIRONMENT, "SGLANG_OPT_FUSE_MHC_POST_PRE": "1"}
    if "quantization_config" not in json.loads((model / "config.json").read_text()):
        environment["SGLANG_OPT_FP8_WO_A_GEMM"] = "0"
    given = [*GPU_FLAGS, *flags]
    if ours:
        return server_command(str(model), given, cpu=False).argv, environment
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *given], environment


def one_core_each(processes: int) -> str:
    """Return SGLANG_CPU_OMP_THREADS_BIND for this number of processes.

    On a CPU SGLang needs the cores of each process.
    """
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[i * len(cores) // processes]) for i in range(processes))


class Server(Endpoint):
    """One server process. Its output goes to the file `log`. `launch` assigns the port."""

    def __init__(self, name: str, argv: list[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__("")
        self.name, self.argv, self.environment, self.log = name, argv, environment, log
        self.port, self.start_seconds = 0, 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self._held = contextlib.ExitStack()

    def launch(self) -> None:
        """Start the server on reserved ports without waiting for it. `stop` releases the ports."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # The server imports from this folder, so its name must be unpredictable and only this user may write to it.
        folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="dsv4_sglang_plugin_"))
        self.port = self._held.enter_context(ports.reserved())
        self.url = f"http://127.0.0.1:{self.port}"
        inherited = self.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        paths = [*plugin_path(Path(folder)), *filter(None, inherited.split(os.pathsep))]
        environment = dict(self.environment)
        if allowed := os.environ.get("SGLANG_PLUGINS"):
            # Without the plugin, SGLang ignores the opt-in and serves with its own cache.
            environment["SGLANG_PLUGINS"] = f"{allowed},{PLUGIN}"
        if paths:
            environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        made = Command([*self.argv, *ports.flags(self.port), "--host", "127.0.0.1"], environment)
        with self.log.open("wb") as out:
            out.write((shlex.join(made.argv) + "\n").encode())
            out.flush()
            self.process = start(made, out)
        self._began = time.monotonic()

    def wait(self, timeout: float) -> None:
        """Wait until the server answers.

        Args:
            timeout: Seconds since the start of the process.

        Raises:
            RuntimeError: The server ended or was not ready in time. The message has the end of its log.
        """
        process = self.process
        assert process is not None, "launch() first"
        try:
            wait_ready(self, lambda: process.poll() is None, self._began + timeout - time.monotonic())
        except (RuntimeError, TimeoutError) as error:
            ended = "" if process.poll() is None else f" with {process.returncode}"
            raise RuntimeError(f"{self.name}: {error}{ended}: {self.tail()}") from None
        self.start_seconds = time.monotonic() - self._began

    def stop(self) -> None:
        if self.process is not None:
            stop(self.process)
            self.process = None
        self._held.close()

    def generate(self, input_ids: Sequence[Any], tokens: int, timeout: float = 300, **more: Any) -> Any:
        """Generate exactly `tokens` tokens greedily for one prompt or for each prompt of a list."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": input_ids, "sampling_params": sampling, **more}
        return self.request("/generate", body, timeout)

    def flush(self, seconds: float = 5) -> None:
        """Clear the prefix cache. SGLang rejects this until the last request is cleaned up, so retry for `seconds`
        seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(RequestError, OSError):
                self.request("/flush_cache", {})
                return
            time.sleep(0.05)

    def lines(self, start: int = 0) -> str:
        """Return the log from byte `start`."""
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def mark(self) -> int:
        """Return the current size of the log in bytes."""
        return self.log.stat().st_size

    def tail(self, count: int = 12) -> str:
        wanted = [line for line in self.lines().splitlines() if line.strip()]
        errors = [line for line in wanted if "Error" in line or "rejects" in line or "not supported" in line]
        return " | ".join([*errors[-4:], *wanted[-count:]])[-1500:]


@contextlib.contextmanager
def running(server: Server, timeout: float) -> Iterator[Server]:
    try:
        server.launch()
        server.wait(timeout)
        yield server
    finally:
        server.stop()


@dataclass(frozen=True)
class DecodeRate:
    """Decode throughput of a burst.

    Attributes:
        value: Median, in tokens/s.
        low: Minimum, in tokens/s.
        high: Maximum, in tokens/s.
        lines: Number of log lines that were used.
        step_ms: Median time of a step or speculative round. It does not depend on the random acceptance length.
    """

    value: float
    low: float
    high: float
    lines: int
    step_ms: float


class DecodeLine(NamedTuple):
    """Decode line of the log: running requests, tokens/s, and milliseconds per step or speculative round."""

    requests: int
    rate: float
    step_ms: float


def decode_lines(log: str) -> dict[int, list[DecodeLine]]:
    """Return the decode lines of a log by data parallel rank (0 if there is only one)."""
    found: dict[int, list[DecodeLine]] = {}
    for rank, count, accepted, rate in DECODE_LINE.findall(log):
        step_ms = 1e3 * int(count) * float(accepted or 1) / float(rate) if float(rate) else float("inf")
        found.setdefault(int(rank or 0), []).append(DecodeLine(int(count), float(rate), step_ms))
    return found


def decode_rate(log: str, running_requests: int) -> DecodeRate | None:
    """Return the decode throughput of a burst of `running_requests` requests while all of them ran; None if unknown.

    With data parallelism each line covers one rank, so rates are summed over ranks. Only lines in which a rank has its
    maximum number of requests count, and these maxima must add up to `running_requests`.
    """
    ranks = [(lines, max(line.requests for line in lines)) for lines in decode_lines(log).values()]
    busy = [(lines, most) for lines, most in ranks if most]
    if len(busy) == 1:
        busy = [(busy[0][0], running_requests)]
    if not busy or sum(most for _, most in busy) != running_requests:
        return None
    # The first line of a burst includes the idle time since the previous line.
    counted = [[line for line in lines if line.requests == most][1:] for lines, most in busy]
    if not all(counted):
        return None
    rates = [[line.rate for line in of_rank] for of_rank in counted]
    return DecodeRate(
        sum(statistics.median(of_rank) for of_rank in rates),
        sum(min(of_rank) for of_rank in rates),
        sum(max(of_rank) for of_rank in rates),
        min(len(of_rank) for of_rank in rates),
        statistics.median(line.step_ms for of_rank in counted for line in of_rank),
    )


def running_now(log: str) -> int:
    """Return the number of requests in the last logged decode step, over all ranks."""
    return sum(lines[-1].requests for lines in decode_lines(log).values())


def cache_tokens(info: Mapping[str, Any], ranks: int) -> list[int]:
    """Return the cache's tokens on each data parallel rank.

    `max_total_num_tokens` is the value of the first rank only. The value of each rank is in its internal state. If some
    ranks did not send theirs, the first rank's value is used for all.

    Args:
        info: Response to /server_info.
        ranks: Number of data parallel ranks.
    """
    states = info.get("internal_states") or []
    of_ranks = [(state.get("memory_usage") or {}).get("token_capacity") for state in states]
    if len(of_ranks) == ranks and all(of_ranks):
        return [int(tokens) for tokens in of_ranks]
    return [info.get("max_total_num_tokens") or 0] * ranks


def max_total_tokens(url: str) -> int:
    """Return the capacity of a running server's device cache in tokens, summed over data parallel ranks."""
    info = Endpoint(url).request("/server_info", timeout=30)
    # SGLang 0.5.23 moves --dp-size to this field with DP attention.
    return sum(cache_tokens(info, info.get("attn_dp_size") or 1))


def sizes(log: str) -> dict[str, float]:
    """Return the sizes of one process's cache according to the log of either server: tokens, bytes per token, fixed
    GiB, total GiB; and if there is one, the host cache of all processes in GB (10^9 bytes)."""
    host = [float(gib) * 2**30 / 1e9 / (1 if of == "this" else int(of)) for of, gib in OUR_HOST_CACHE.findall(log)]
    host += [float(gb) for gb in IN_TREE_HOST_POOL.findall(log)]
    host_gb = {"host_gb": round(sum(host), 3)} if host else {}
    if found := OUR_SIZES.search(log):
        tokens, token_bytes, slots, gib = int(found[1]), float(found[2]), int(found[3]), float(found[4])
        return {
            "tokens": tokens,
            "bytes_a_token": token_bytes,
            "state_slots": slots,
            "fixed_gib": round(gib - tokens * token_bytes / 2**30, 3),
            "gib": gib,
            **host_gb,
        }
    if lines := IN_TREE_TOKEN.findall(log):
        # The last sizes are those after --max-total-tokens.
        tokens, token_bytes = int(IN_TREE_TOKENS.findall(log)[-1]), float(lines[-1][0])
        fixed = sum(map(float, IN_TREE_FIXED.findall(lines[-1][1])))
        return {
            "tokens": tokens,
            "bytes_a_token": token_bytes,
            "fixed_gib": fixed,
            "gib": round(tokens * token_bytes / 2**30 + fixed, 3),
            **host_gb,
        }
    return {}


def metrics(url: str) -> dict[str, float]:
    """Return this package's metrics of a server, summed over ranks; {} if it has none.

    Names omit `dsv4_`, `_total` and, for the sum of a histogram, `_sum`. A metric with a label has one entry for each
    value of the label, such as `hit_tokens_host`, and one for their sum.
    """
    from dsv4_sglang.cli.client import samples
    from dsv4_sglang.srt.prefix_cache.metrics import PREFIX

    try:
        text = Endpoint(url).request("/metrics", timeout=30)
    except (RequestError, OSError):
        return {}
    found: dict[str, float] = {}
    for sample in samples(text, PREFIX):
        labels = {label: value for label, value in sample.labels.items() if label != "dp_rank"}
        if "le" not in labels:
            name = sample.name.removeprefix(PREFIX).removesuffix("_total").removesuffix("_sum")
            for key in (name, *(f"{name}_{value}" for value in labels.values())):
                found[key] = found.get(key, 0) + sample.value
    return found


def host_copies(url: str) -> dict[str, float]:
    """Return the host cache's metrics, such as `saved_bytes` and `load_seconds`; {} without --enable-metrics or without
    a host cache."""
    found = metrics(url)
    return {name.removeprefix("host_"): value for name, value in found.items() if name.startswith("host_")}


def random_prompt(tokens: int, vocab: int, seed: int) -> list[int]:
    """Return random token ids. Each seed gives a different prompt, so no prefix cache can hit."""
    chosen = random.Random(seed)
    return [chosen.randrange(3, vocab) for _ in range(tokens)]
