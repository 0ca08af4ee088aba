"""Behaviour of a server on weight updates, failing steps and killed processes.

The server has a host cache with a storage of files. The restarted server uses the same storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_cache import LAUNCH_ERROR, LAUNCH_FAULT, STUCK, broken
from safetensors.torch import load_file
from server_harness import BROKEN_OFF, Generated, Server, assert_same, ends, prompt, running, wait_for_pages
from sglang.srt.utils.common import MultiprocessingSerializer, init_custom_process_group

from benchmarks import ports
from dsv4_sglang.cli.server import RequestError
from dsv4_sglang.srt.integration import compat

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("fault", "pages")]

FLAGS = ("--dtype", "float32", "--context-length", "1024", "--max-running-requests", "4", "--enable-metrics")
FLAGS += ("--max-total-tokens", "4096", "--chunked-prefill-size", "256")
FLAGS += ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-storage-backend", "file")
FLAGS += ("--hicache-storage-prefetch-policy", "wait_complete")
OPTIONS = {"entry_format": "fp32", "indexer_format": "fp32", "max_snapshots": 12}
MODEL = {"seed": 0, "ratios": (0, 4, 128), "index_topk": 1536}
TOLERANCE = 2e-3
STORED = prompt(400)
# Full blocks of STORED. Its pages are these and one snapshot.
BLOCKS = 3


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the storage folder. SGLang's 5 s pause for diagnostics before exit is disabled."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(folder))
        patch.setenv("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0")
        yield folder


# Server failures


def to_storage_alone(server: Server, pages: Path) -> Generated:
    """Return the answer to STORED. Afterwards its pages are only in the storage."""
    got = server.generate(STORED)
    wait_for_pages(server, pages, BLOCKS + 1)
    server.wait_idle()
    server.flush()
    return got


@pytest.fixture(scope="module")
def crashed(server: Server, pages: Path) -> Generated:
    """Return the answer to STORED of the server that a later test crashes."""
    return to_storage_alone(server, pages)


def test_a_kernel_that_fails_ends_the_server(server: Server, fault: Path, crashed: Generated) -> None:
    """A failing kernel ends the server and its requests with an error, and the log names the op in one line."""
    # A stream that breaks off after some tokens does not count as an answer.
    streams = [server.begin(prompt(30, seed=seed), 900, 5) for seed in range(2)]
    with ends(server), broken(fault, LAUNCH_FAULT):
        for request in (*streams, lambda: server.generate(prompt(200))):
            with pytest.raises(BROKEN_OFF):
                request()
    named = [line for line in server.log_text().splitlines() if "append: the launch" in line]
    assert named == [f"RuntimeError: {LAUNCH_ERROR}"]


def test_a_load_that_does_not_end_ends_the_server(fault: Path, model: Path, tmp_path: Path) -> None:
    """A load that exceeds its timeout ends the server; the waiting request receives the error that the log has."""
    flags = [flag for flag in FLAGS if "storage" not in flag and flag not in ("file", "wait_complete")]
    with running(model, tmp_path / "log", *flags, **OPTIONS, host_load_timeout_seconds=2) as server:
        server.generate(STORED)
        server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
        server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        other = server.begin(prompt(30), 900, 2)
        with ends(server), broken(fault, STUCK):
            with pytest.raises(RequestError) as failed:
                server.generate(STORED, rid="waits")
            with pytest.raises(BROKEN_OFF):
                other()
        said = failed.value.text
        assert failed.value.code == 500
        assert f"not ended in 2 s: {BLOCKS} blocks and 1 snapshots for the requests waits. " in said
        assert "a load from host memory has not ended" in server.log_text()
        assert "option host_load_timeout_seconds" in said


@pytest.fixture(scope="module")
def restarted(crashed: Generated, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(model, tmp_path_factory.mktemp("restarted") / "log", *FLAGS, **OPTIONS) as server:
        yield server


def test_the_next_server_finds_what_was_stored(restarted: Server, crashed: Generated) -> None:
    got = restarted.generate(STORED)
    assert got.cached == BLOCKS * 128
    assert_same(got, crashed, TOLERANCE)
    assert restarted.published()["hit_tokens_storage"] == BLOCKS * 128


# Weight updates


@contextmanager
def session(server: Server) -> Iterator[None]:
    """Context manager: open the weight update session that SGLang 0.5.23 requires."""
    if compat.IS_0_5_23:
        assert server.post("/begin_weight_update", {})["success"]
    yield
    if compat.IS_0_5_23:
        assert server.post("/end_weight_update", {})["success"]


def by_tensors(server: Server, weights: dict[str, torch.Tensor]) -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # by name, so that a different process can open it
    try:
        tensors = MultiprocessingSerializer.serialize(list(weights.items()), output_str=True)
        body = {"serialized_named_tensors": [tensors], "flush_cache": False}
        assert server.post("/update_weights_from_tensor", body)["success"]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def by_broadcast(server: Server, weights: dict[str, torch.Tensor]) -> None:
    """Broadcast the weights from this process, which is rank 0 of the group."""
    name = "new weights"
    with ports.reserved() as port, ThreadPoolExecutor(1) as pool:
        at = {"master_address": "127.0.0.1", "master_port": port, "group_name": name, "backend": "gloo"}
        joined = pool.submit(server.post, "/init_weights_update_group", {**at, "rank_offset": 1, "world_size": 2})
        address = f"tcp://127.0.0.1:{port}"
        group = init_custom_process_group("gloo", address, world_size=2, rank=0, group_name=name)
        assert joined.result()["success"]
        body: dict[str, Any] = {"names": list(weights), "group_name": name, "flush_cache": False}
        body["dtypes"] = [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()]
        body["shapes"] = [list(tensor.shape) for tensor in weights.values()]
        updated = pool.submit(server.post, "/update_weights_from_distributed", body)
        for tensor in weights.values():
            torch.distributed.broadcast(tensor, src=0, group=group)
        assert updated.result()["success"]
        left = pool.submit(server.post, "/destroy_weights_update_group", {"group_name": name})
        torch.distributed.destroy_process_group(group)
        assert left.result()["success"]


def test_new_weights_over_http_leave_nothing(
    restarted: Server, crashed: Generated, pages: Path, tiny: Callable[..., Path]
) -> None:
    """After a weight update without a flush, a prompt cached on device, host and storage is recomputed.

    The second update restores the original weights by a different route.
    """
    for send, seed in ((by_tensors, 9), (by_broadcast, 0)):
        before = to_storage_alone(restarted, pages)
        found = restarted.generate(STORED)
        assert found.cached == restarted.generate(STORED).cached == BLOCKS * 128
        assert_same(found, before, TOLERANCE)
        old = set(pages.glob("*.bin"))
        with session(restarted):
            send(restarted, load_file(tiny(**{**MODEL, "seed": seed}) / "model.safetensors"))
        assert not old & set(pages.glob("*.bin")), "files of the old weights"
        got = restarted.generate(STORED)
        assert got.cached == 0, send
        apart = max(abs(a - b) for a, b in zip(got.logprobs, crashed.logprobs))
        assert (got.tokens != crashed.tokens or apart > 1) == (seed != 0), send
    assert_same(got, crashed, TOLERANCE)
    restarted.wait_idle()


# Process failures


def test_a_process_that_ends_takes_the_server_along(restarted: Server) -> None:
    """If the scheduler is killed, running requests fail and the server exits."""
    answer = restarted.begin(prompt(30), 900, 2)
    with ends(restarted) as processes:
        schedulers = [process for process in processes if any("scheduler" in word for word in process.cmdline())]
        assert len(schedulers) == 1
        schedulers[0].kill()
        with pytest.raises(BROKEN_OFF):
            answer()
