"""SGLang servers as benchmarks need them: started with bounded waits, asked over HTTP, always stopped, logs read."""

from __future__ import annotations

import contextlib
import importlib.metadata
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
from dsv4_sglang.srt.integration.launch_command import Command

GPU_ENVIRONMENT = {
    # A GPU without FP4 runs FP8 experts; kernels are compiled when they are needed, not all at the start.
    "SGLANG_DSV4_FP4_EXPERTS": "0",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    "HF_HUB_OFFLINE": "1",
}
GPU_FLAGS = ("--skip-tokenizer-init", "--sampling-backend", "pytorch", "--grammar-backend", "none")
PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN = "dsv4_sglang.srt.integration.plugin:register"

# The prefix in brackets has the time and, with data parallelism, the rank: "[2026-11-21 10:00:00 DP1 TP1]".
# With speculation it has the mean of tokens that a request kept of a turn.
DECODE_LINE = re.compile(
    r"\[\S+ \S+?(?: DP(\d+))?(?: [^\]]*)?\] Decode batch.*?#running-req: (\d+)(?:.*?accept len: ([\d.]+))?"
    r".*?gen throughput \(token/s\): ([\d.]+)"
)
IN_TREE_SIZES = re.compile(
    r"bytes_per_full_token=([\d.]+), available_bytes=([\d.]+) GB, c128_state_fixed=([\d.]+) GB, full_token=(\d+)"
)
OUR_SIZES = re.compile(
    r"dsv4_sglang cache: (\d+) tokens in (\d+) blocks, ([\d.]+) bytes a token; (\d+) state slots of (\d+)"
)


def plugin_path(folder: Path) -> list[str]:
    """What PYTHONPATH needs for a server to find this package's plugin: nothing where the package is installed.

    Elsewhere the tree, and a folder with the two metadata files that make it look installed.
    """
    found = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    if any(entry.value == PLUGIN for entry in found):
        return []
    info = folder / f"dsv4_sglang-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dsv4-sglang\nVersion: {__version__}\n")
    (info / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\ndsv4_sglang = {PLUGIN}\n")
    return [str(folder), str(ROOT)]


def command(model: Path, flags: Sequence[str], ours: bool, cpu: bool) -> tuple[list[str], dict[str, str]]:
    """(argv, environment beside the caller's) of a server on this machine; `ours` selects this package's cache."""
    from dsv4_sglang.srt.integration import compat, launch_command

    if cpu:
        if not ours:
            raise ValueError("SGLang's own DeepSeek-V4 needs a GPU")
        made = launch_command.server_command(str(model), [*flags, "--skip-tokenizer-init"], cpu=True)
        return made.argv, dict(made.environment)
    environment = dict(GPU_ENVIRONMENT)
    if compat.IS_0_5_23:
        # As with real widths. flashshape's are too small for this kernel to be right (`srt.activate`), but its weights
        # are random anyway.
        environment["SGLANG_OPT_FUSE_MHC_POST_PRE"] = "1"
    if "quantization_config" not in json.loads((model / "config.json").read_text()):
        environment["SGLANG_OPT_FP8_WO_A_GEMM"] = "0"
    given = [*GPU_FLAGS, *flags]
    if ours:
        return launch_command.server_command(str(model), given, cpu=False).argv, environment
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *given], environment


class Server(Endpoint):
    """One server process. `log` gets all it prints. `launch` gives it a port."""

    def __init__(self, name: str, argv: list[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__("")
        self.name, self.argv, self.environment, self.log = name, argv, environment, log
        self.port, self.start_seconds = 0, 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self._held = contextlib.ExitStack()

    def launch(self) -> None:
        """Start it without waiting, on ports of its own until `stop`."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # The server imports from it: nobody else may be able to write it, or to make it first.
        folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="dsv4_sglang_plugin_"))
        self.port = self._held.enter_context(ports.reserved())
        self.url = f"http://127.0.0.1:{self.port}"
        inherited = self.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        paths = [*plugin_path(Path(folder)), *filter(None, inherited.split(os.pathsep))]
        environment = dict(self.environment)
        if paths:
            environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        made = Command([*self.argv, *ports.flags(self.port), "--host", "127.0.0.1"], environment)
        with self.log.open("wb") as out:
            out.write((shlex.join(made.argv) + "\n").encode())
            out.flush()
            self.process = start(made, out)
        self._began = time.monotonic()

    def wait(self, timeout: float) -> None:
        """Until it answers; RuntimeError with the end of its log if it ends or does not answer in `timeout` seconds."""
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
        """One prompt or a list of prompts, greedy, exactly `tokens` tokens each."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": input_ids, "sampling_params": sampling, **more}
        return self.request("/generate", body, timeout)

    def flush(self, seconds: float = 5) -> None:
        """Empty the prefix cache; rejected while the last request is being cleaned up, so try for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(RequestError, OSError):
                self.request("/flush_cache", {})
                return
            time.sleep(0.05)

    def lines(self, start: int = 0) -> str:
        """The log from byte `start` on."""
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def mark(self) -> int:
        """Where the log ends now."""
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
    """Tokens a second of a burst: the median, the slowest and the fastest of `lines` of the log. `step_ms`: the median
    time of a step, or of a turn of speculation, whatever it was that was drawn as accepted."""

    value: float
    low: float
    high: float
    lines: int
    step_ms: float


class DecodeLine(NamedTuple):
    """Requests of a step, tokens a second, and milliseconds a step, or a turn."""

    requests: int
    rate: float
    step_ms: float


def decode_lines(log: str) -> dict[int, list[DecodeLine]]:
    """The log's decode lines, by rank of data parallelism; 0 where there is one."""
    found: dict[int, list[DecodeLine]] = {}
    for rank, count, accepted, rate in DECODE_LINE.findall(log):
        step_ms = 1e3 * int(count) * float(accepted or 1) / float(rate) if float(rate) else float("inf")
        found.setdefault(int(rank or 0), []).append(DecodeLine(int(count), float(rate), step_ms))
    return found


def decode_rate(log: str, running_requests: int) -> DecodeRate | None:
    """Of the decode lines of a burst of that many requests, when all of them ran; None if there are none.

    With data parallelism a line speaks of one rank's requests and tokens, so rates are added over the ranks: those
    lines count in which a rank has its most requests, and these must be all requests of the burst.
    """
    ranks = [(lines, max(line.requests for line in lines)) for lines in decode_lines(log).values()]
    busy = [(lines, most) for lines, most in ranks if most]
    if len(busy) == 1:
        busy = [(busy[0][0], running_requests)]
    if not busy or sum(most for _, most in busy) != running_requests:
        return None
    # The first line of a burst counts the time since the line before it.
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
    """Requests in the last decode step that was logged, over all ranks."""
    return sum(lines[-1].requests for lines in decode_lines(log).values())


def most_running(log: str) -> int:
    """Most requests in a decode step, added over the ranks. A prefill line's count may hold requests that are over."""
    return sum(max(line.requests for line in lines) for lines in decode_lines(log).values())


def cache_tokens(info: Mapping[str, Any], ranks: int) -> list[int]:
    """Tokens in the cache of each rank of data parallelism, of the answer to /server_info.

    `max_total_num_tokens` there is the first rank's. Each rank's own stands in its internal state; where not every rank
    has sent one, the first rank's is taken for all.
    """
    states = info.get("internal_states") or []
    of_ranks = [(state.get("memory_usage") or {}).get("token_capacity") for state in states]
    if len(of_ranks) == ranks and all(of_ranks):
        return [int(tokens) for tokens in of_ranks]
    return [info.get("max_total_num_tokens") or 0] * ranks


def max_total_tokens(url: str) -> int:
    """Tokens that the cache of a server that runs has room for on its devices, over all ranks of data parallelism."""
    info = Endpoint(url).request("/server_info", timeout=30)
    return sum(cache_tokens(info, info.get("dp_size") or 1))


def sizes(log: str) -> dict[str, float]:
    """What the log says about the cache: bytes a token and fixed bytes, in either server's words."""
    if found := OUR_SIZES.search(log):
        tokens, blocks, token_bytes, slots, slot_bytes = found.groups()
        return {
            "tokens": int(tokens),
            "bytes_a_token": float(token_bytes),
            "state_slots": int(slots),
            "fixed_gib": int(slots) * int(slot_bytes) / 2**30,
            "gib": (int(slots) * int(slot_bytes) + int(blocks) * 128 * float(token_bytes)) / 2**30,
        }
    if found := IN_TREE_SIZES.findall(log):
        token_bytes, available, fixed, tokens = found[-1]
        return {
            "tokens": int(tokens),
            "bytes_a_token": float(token_bytes),
            "fixed_gib": float(fixed),
            "gib": float(available),
        }
    return {}


def metrics(url: str) -> dict[str, float]:
    """Return this package's metrics of a server, added over the ranks; {} if it has none.

    Names are without `dsv4_`, `_total` and, for the sum of a histogram, `_sum`. A metric with a label has a value for
    each value of the label, such as `hit_tokens_host`, and their sum.
    """
    from dsv4_sglang.cli.client import samples
    from dsv4_sglang.srt.integration.metrics import PREFIX

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
    """What a host cache has done since its start: `saved_bytes`, `load_seconds` and so on; {} without --enable-metrics
    or without the tier."""
    found = metrics(url)
    return {name.removeprefix("host_"): value for name, value in found.items() if name.startswith("host_")}


def random_prompt(tokens: int, vocab: int, seed: int) -> list[int]:
    """Distinct for every seed, so that no prefix cache helps."""
    chosen = random.Random(seed)
    return [chosen.randrange(3, vocab) for _ in range(tokens)]
