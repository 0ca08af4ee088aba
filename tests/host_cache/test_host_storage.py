"""Storages behind the host cache: pages outlive the server, and an unusable page is a miss."""

from __future__ import annotations

import logging
import random
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from support.host_cache import HostCacheServer
from support.prefix_tree import BLOCK, without_a_server
from support.segments import VARIABLE, end, new_folder

from dsv4_sglang.cli.demo import free_port
from dsv4_sglang.srt.features.integrity.audit import audit
from dsv4_sglang.srt.features.integrity.owners import COPIES
from dsv4_sglang.srt.host_cache import storage as storage_module
from dsv4_sglang.srt.host_cache import transfers
from dsv4_sglang.srt.host_cache.folder import USED, stored_files
from dsv4_sglang.srt.host_cache.mooncake import MooncakeStorage
from dsv4_sglang.srt.host_cache.storage import FileStorage
from dsv4_sglang.srt.host_cache.transfers import TransferController, remaining_blocks
from dsv4_sglang.srt.launch.error import LaunchError

ALSO_SHM = pytest.mark.parametrize(
    "storage", ["file", "nixl", pytest.param("shm", marks=pytest.mark.full)], indirect=True
)
PROMPT = [1 + at // BLOCK for at in range(5 * BLOCK + 60)]


@pytest.fixture(params=["file", "nixl"])
def storage(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="NIXL is no dependency: pip install nixl")
    return request.param


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, storage: str) -> Iterator[Path]:
    without_a_server(monkeypatch)
    if storage == "shm":
        with new_folder() as folder:
            monkeypatch.setenv(VARIABLE, str(folder))
            yield folder
        return
    where = {"file": "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "nixl": "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"}
    monkeypatch.setenv(where[storage], str(tmp_path / "pages"))
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_BACKEND_PLUGIN", "POSIX")
    yield tmp_path / "pages"


Start = Callable[..., AbstractContextManager[HostCacheServer]]


@pytest.fixture
def restarted(folder: Path, storage: str) -> Start:
    """Return a function that starts a server on the folder of the previous servers, and checks it at its end."""
    return partial(serving, storage)


@contextmanager
def serving(storage: str, **options: Any) -> Iterator[HostCacheServer]:
    with pytest.MonkeyPatch.context() as patch:
        server = HostCacheServer(patch, seed=0, storage=storage, **options)
        yield server
        server.settle()
        server.check()
        server.check_contents()
        end(server)


def pages_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def test_new_server_finds_stored_pages(folder: Path, restarted: Start) -> None:
    with restarted() as server:
        assert server.serve(PROMPT) == 0
        # `dsv4-sglang storage` lists these names and states.
        files = list(stored_files(folder))
        assert {file.path for file in files} == set(pages_in(folder)) and {file.state for file in files} == {USED}
    assert len(files) == 5 + 2, "five blocks; snapshots at four blocks, the interval, and at five, the end"
    (name,) = {file.name for file in files}
    assert name.startswith("m-dsv4v4-fp32-fp32-")
    with restarted() as server:
        assert server.prefetch(PROMPT) == 5 * BLOCK
        server.check()
        assert server.serve(PROMPT) == 5 * BLOCK
        assert server.component.metrics.total("hit_tokens", "host") == 5 * BLOCK


def test_full_host_still_stores_new_conversations(folder: Path, restarted: Start) -> None:
    """Six conversations run on a device of 40 blocks with a host of 12 blocks, which has room for two of them."""
    lines = [[100 * line + token for token in PROMPT] for line in range(6)]
    with restarted(host_blocks=12, host_snapshots=4) as server:
        for line in lines:
            assert server.serve(line) == 0
            server.check()
        assert server.component.metrics.total("host_saves_skipped") == 0
    assert len(pages_in(folder)) >= 6 * (5 + 1), "all blocks, and each line's last snapshot"
    with restarted() as server:
        for line in lines:
            assert server.prefetch(line) == server.serve(line) == 5 * BLOCK


@pytest.mark.parametrize("host_blocks", [120, 6])
def test_storage_completes_a_prefix_on_the_device(folder: Path, restarted: Start, host_blocks: int) -> None:
    """The rest of a conversation is fetched from the storage after a prefix that only the device has.

    The prefix is saved before the device evicts it. If the host lacks room for both parts, both are lost together.
    """
    longer = PROMPT + [50 + at // BLOCK for at in range(4 * BLOCK)]
    with restarted() as server:
        server.serve(longer)
    with restarted(host_blocks=host_blocks) as server:
        assert server.serve(PROMPT) == 0
        assert server.cache.evict_host(120 * BLOCK) > 0 == server.cache.full_kv_pool_host.used_rows
        server.check()
        assert server.prefetch(longer) > 0 < server.cache.full_kv_pool_host.used_rows
        server.check()
        server._make_room(40)
        server.check()
        found = server.serve(longer)
        assert found == len(longer) // BLOCK * BLOCK if host_blocks > 9 else found < len(longer) // BLOCK * BLOCK


@pytest.mark.parametrize("damage", ["torn", "changed", "of zeros", "another's", "gone"])
@pytest.mark.parametrize("which", ["a block", "a snapshot"])
def test_unusable_page_is_a_miss(
    folder: Path, restarted: Start, caplog: pytest.LogCaptureFixture, damage: str, which: str
) -> None:
    with restarted() as server:
        server.serve(PROMPT)
    of_kind = {p: page for p, page in pages_in(folder).items() if ("c4_state" in p.name) == (which == "a snapshot")}
    others = [*of_kind.values()][1:] + [*of_kind.values()][:1]
    for (path, page), other in zip(of_kind.items(), others):
        if damage == "gone":
            path.unlink()
            continue
        changed = {"torn": page[:-9], "changed": page[:3] + b"!" + page[4:], "of zeros": bytes(len(page))}
        path.write_bytes({**changed, "another's": other}[damage])
    caplog.set_level(logging.WARNING)
    with restarted() as server:
        assert server.prefetch(PROMPT) == server.serve(PROMPT) == 0
        assert damage == "gone" or "cannot be used and is removed" in caplog.text
    with restarted() as server:
        assert server.prefetch(PROMPT) == 5 * BLOCK, "what was removed was stored anew"


def test_a_storage_that_is_cleared_has_nothing(folder: Path, restarted: Start) -> None:
    """New weights clear the storage. Files of other caches stay."""
    with restarted() as server:
        server.serve(PROMPT)
        other = next(iter(pages_in(folder))).parent / "abc_other-dsv4v4-fp32-fp32-0123456789abcdef.bin"
        other.write_bytes(b"123")
        server.cache.invalidate_storage("new")
    assert list(pages_in(folder)) == [other]


def test_a_storage_without_room(
    monkeypatch: pytest.MonkeyPatch, folder: Path, restarted: Start, storage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Files are limited to less than a page. The server continues without leaving partial files and with one line a
    minute, and stores pages again once there is room. NIXL logs its errors too, and does not say why."""
    reason = {"file": "the file system is full", "nixl": "NIXL cannot write pages"}[storage]
    others = [9 + token for token in PROMPT]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    clock = 0.0
    with restarted() as server:
        monkeypatch.setattr(storage_module, "time", SimpleNamespace(monotonic=lambda: clock))
        caplog.clear()
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
        try:
            for minute in (1, 2):
                assert server.serve([50 * minute + token for token in PROMPT]) == 0
                assert server.serve([50 * minute + token for token in PROMPT]) == 5 * BLOCK
                lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
                assert len([line for line in lines if reason in line]) == minute, lines
                assert len(lines) == minute or storage == "nixl"
                clock += 61
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not pages_in(folder)
        assert server.serve(others) == 0
    with restarted() as server:
        assert server.prefetch(PROMPT) == 0 and server.prefetch(others) == 5 * BLOCK


# Fetches: the test runs threads one part at a time

PREFETCH_POLICIES = ("best_effort", "timeout", "wait_complete")
# The prompt has snapshots at 4, 8 and 9 blocks.
LONG = [1 + at // BLOCK for at in range(9 * BLOCK + 60)]
START = LONG[: 4 * BLOCK + 60]


@pytest.fixture
def late(restarted: Start, storage: str, folder: Path) -> Start:
    """Return a function that starts a server whose storage has LONG and whose host has START.

    At its end no fetch may hold memory in the host's pools or the tree, or count against later fetches.
    """

    def store() -> None:
        with restarted() as server:
            server.serve(LONG)

    store()

    @contextmanager
    def start(policy: str, **sizes: int) -> Iterator[HostCacheServer]:
        if storage == "shm":  # its rows are those of the host, which the servers before have used
            rmtree(folder)
            store()
        with restarted(late_threads=True, prefetch_policy=policy, **sizes) as server:
            server.cache.prefetch_timeout_base = 1e9
            assert fetched(server, START) == 4 * BLOCK
            yield server
            server.settle()
            server.cache.check_hicache_events()  # free what was released in the call before
            server.check_contents()
            assert not server.cache.ongoing_prefetch
            assert [pool.counts[COPIES] for pool in audit(server.cache, ()).pools] == [0] * 6
            assert server.controller.prefetch_tokens_occupied == 0
            assert server.flush() and host_held(server) == (0, 0)

    return start


def run_parts(server: HostCacheServer, parts: int) -> bool:
    """Run `parts` parts of the work of threads and streams. Return False if there is less work."""
    for _ in range(parts):
        if not server.streams.run_some(1):
            return False
        server.cache.check_hicache_events()
        server.check()
    return True


def fetched(server: HostCacheServer, tokens: list[int]) -> int:
    """Fetch a prompt that is not aborted. Return the number of tokens from the storage."""
    request = server.begin_prefetch(tokens)
    while run_parts(server, 1):
        pass
    assert server.cache.check_prefetch_progress(request)
    return server.cache.pop_prefetch_loaded_tokens(request)


def host_held(server: HostCacheServer) -> tuple[int, int]:
    return server.cache.full_kv_pool_host.used_rows, server.cache.mamba_pool_host.used_rows


@pytest.mark.parametrize("storage", ["file"], indirect=True)
def test_a_server_without_the_hash_of_pages_does_not_start(monkeypatch: pytest.MonkeyPatch, restarted: Start) -> None:
    """SGLang compiles it at its first use. Threads of the storage must not, since a flush waits for them for 10 s."""

    def without_a_compiler(*_: Any) -> None:
        raise RuntimeError("Failed to load HiCache native hash extension") from OSError("no g++\nin PATH")

    monkeypatch.setattr(transfers, "get_hash_str", without_a_compiler)
    with pytest.raises(LaunchError, match=r"cannot be compiled \(no g\+\+\). Install g\+\+, ninja"), restarted():
        pass


@pytest.mark.parametrize("storage", ["file"], indirect=True)
def test_a_flush_waits_for_the_thread_that_reads(monkeypatch: pytest.MonkeyPatch, restarted: Start) -> None:
    """Otherwise the thread writes to rows that were freed, and that have new contents by then."""
    with restarted() as server:
        server.serve(PROMPT)
    reading, flushed, get = threading.Event(), threading.Event(), FileStorage.get
    read: list[str] = []

    def late(self: FileStorage, key: str, *arguments: Any, **named: Any) -> Any:
        reading.set()
        while not (server.controller.storage_stop_event.is_set() or flushed.is_set()):
            time.sleep(0.001)
        time.sleep(0.05)  # a flush that does not wait is over by then
        found = get(self, key, *arguments, **named)
        read.append(key)
        return found

    with restarted() as server, monkeypatch.context() as patch:
        patch.setattr(FileStorage, "get", late)
        request = server.begin_prefetch(PROMPT)
        while not reading.is_set():
            server.cache.check_hicache_events()
            time.sleep(0.001)
        server.cache.release_aborted_request(request)
        server.cache.reset()
        before = list(read)
        flushed.set()
        assert before and before == read


def test_end_of_a_fetch_frees_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled fetch whose blocks are complete holds its snapshot, although another complete one ends."""
    monkeypatch.setattr(HybridCacheController, "append_host_mem_release", lambda *_: None)
    controller = object.__new__(TransferController)
    one, other = (
        SimpleNamespace(host_indices=torch.arange(3 * BLOCK), completed_tokens=3 * BLOCK, pool_transfers=[])
        for _ in range(2)
    )
    controller.cancelled_fetches = [one]
    for extra_pools in (None, other.pool_transfers):
        controller.append_host_mem_release(remaining_blocks(other), extra_pools)
        assert controller.cancelled_fetches == [one]
    controller.append_host_mem_release(one.host_indices[: one.completed_tokens])
    assert controller.cancelled_fetches == [one]
    controller.append_host_mem_release(remaining_blocks(one))
    assert controller.cancelled_fetches == []


@pytest.mark.full
@ALSO_SHM
@pytest.mark.parametrize("policy", PREFETCH_POLICIES)
@pytest.mark.parametrize("then", ["others", "flush"])
def test_fetch_aborted_at_any_point(late: Start, policy: str, then: str) -> None:
    """Another request takes the freed host rows before the reading thread resumes.

    The thread does not write to them.
    """
    parts, unfinished = 0, True
    while unfinished:
        with late(policy, host_blocks=9, host_snapshots=3) as server:
            request = server.begin_prefetch(LONG)
            unfinished = run_parts(server, parts)
            parts += 1
            server.cache.release_aborted_request(request)
            server.check()
            if then == "flush":
                assert server.flush() and host_held(server) == (0, 0)
            server.streams.stalled = server.controller.prefetch_io_aux_thread
            server.finish(server.start([9 + token for token in PROMPT])["request"])
            server.cache.check_hicache_events()
            while run_parts(server, 1):
                pass
            assert host_held(server)[0] >= 5
    assert parts > 8


def test_blocks_for_an_aborted_fetch_leave_the_host(late: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose snapshot is lost is saved while a fetch continues its path. After an abort, nobody needs it."""
    for parts in range(6):
        with late("wait_complete") as server:
            server.serve(START)
            server.cache.evict_host(120 * BLOCK)
            request = server.begin_prefetch(LONG)
            run_parts(server, parts)
            with monkeypatch.context() as patch:
                patch.setattr(server.cache.saves, "_make_room", lambda plan: False)
                slots = [server.component.allocate_slot(needed=True) for _ in range(server.states.snapshots)]
            server.component.slots.give_back(slots)
            server._make_room(40)
            assert host_held(server)[0] >= 4, "the blocks were not saved"
            server.cache.release_aborted_request(request)
            while run_parts(server, 1):
                pass
            server.cache.check_hicache_events()
            server.check()
            server.cache.evict_host(1)
            assert host_held(server) == (0, 0)


@ALSO_SHM
@pytest.mark.parametrize("policy", PREFETCH_POLICIES)
def test_request_checks_its_fetch_at_any_point(late: Start, policy: str) -> None:
    """best_effort ends the fetch when the request looks for it, timeout after its time, wait_complete when it is
    complete.

    The fetched part is everything or nothing, and the request resumes from it.
    """
    found, complete = [], False
    while not complete:
        with late(policy) as server:
            request = server.begin_prefetch(LONG)
            complete = not run_parts(server, len(found))
            fetch = server.cache.ongoing_prefetch.get(request)  # None if it is complete
            if policy == "timeout" and fetch is not None and not fetch.operation.pool_transfers_done:
                assert not server.cache.check_prefetch_progress(request), "its time has not passed"
                server.cache._storage_prefetch_wait[request].timeout_s = -1
            looks = 1
            while not server.cache.check_prefetch_progress(request):
                assert run_parts(server, 1)
                looks += 1
            assert looks == 1 or policy != "best_effort"
            server.check()
            found.append(server.cache.pop_prefetch_loaded_tokens(request))
            assert server.serve(LONG) == 4 * BLOCK + found[-1]
            assert server.component.metrics.total("hit_tokens", "host") == 4 * BLOCK + found[-1]
    assert len(found) > 8 and found[-1] == 5 * BLOCK
    whole = found.index(5 * BLOCK)
    assert set(found[:whole]) == (set() if policy == "wait_complete" else {0}) and set(found[whole:]) == {5 * BLOCK}


@pytest.mark.parametrize("policy", PREFETCH_POLICIES)
@pytest.mark.parametrize("why", ["one is gone", "the host has no room", "one is damaged"])
def test_missing_page_shortens_the_hit(folder: Path, late: Start, policy: str, why: str) -> None:
    """The request resumes from the last snapshot before the missing page.

    A damaged page is detected only when it is read.
    """
    with late(policy, host_blocks=8 if why == "the host has no room" else 120) as server:
        if why != "the host has no room":
            last = (9).to_bytes(8, "little") * BLOCK
            ((path, page),) = ((path, page) for path, page in pages_in(folder).items() if last in page)
            path.unlink() if why == "one is gone" else path.write_bytes(b"!" + page[1:])
        part = 0 if why == "one is damaged" else 4 * BLOCK
        assert fetched(server, LONG) == part
        server.check()
        assert server.serve(LONG) == 4 * BLOCK + part


def ways_of(storage: str) -> list[tuple[type, str, Any]]:
    """Return the methods that transfer pages, each with its result on failure."""
    if storage == "file":
        return [(FileStorage, "set", False), (FileStorage, "get", None)]
    from dsv4_sglang.srt.host_cache.nixl import NixlStorage

    return [(NixlStorage, "_xfer_and_wait", False)]


@pytest.mark.parametrize("raises", [False, True])
def test_requests_beside_a_storage_that_fails(
    monkeypatch: pytest.MonkeyPatch, storage: str, restarted: Start, raises: bool
) -> None:
    """One of five transfers fails in each direction.

    Each fetch returns whole snapshots or nothing, and a restarted server computes the rest.
    """
    if raises and storage == "file":
        pytest.skip("SGLang catches what its files raise; a folder that is gone: the test below")
    rng, found = random.Random(0), 0
    with monkeypatch.context() as patch:
        for kind, method, failed in ways_of(storage):
            original = getattr(kind, method)

            def sometimes(self: Any, *args: Any, original: Any = original, failed: Any = failed, **named: Any) -> Any:
                if rng.random() >= 0.2:
                    return original(self, *args, **named)
                if raises:
                    raise RuntimeError("the storage failed")
                return failed

            patch.setattr(kind, method, sometimes)
        for visit in range(3):
            with restarted() as server:
                for line in range(6):
                    prompt = [100 * line + token for token in PROMPT]
                    found += (there := server.prefetch(prompt))
                    assert server.serve(prompt) == there in (0, 4 * BLOCK, 5 * BLOCK), (visit, line)
                    server.check()
                assert not server.wrong and server.flush()
    assert 0 < found < 12 * 5 * BLOCK


@pytest.mark.parametrize("at_once", [False, True])
def test_tenants_share_nothing_in_a_storage(folder: Path, restarted: Start, at_once: bool) -> None:
    """Three tenants and a request without a tenant have the same prompt.

    After a restart each finds only its own pages, independent of the pages that others have brought to the host. A
    fourth tenant finds none.
    """
    tenants, stored = [None, "a", "b", ""], 0
    for tenant in tenants:
        with restarted() as server:
            assert server.prefetch(PROMPT, tenant) == server.serve(PROMPT, tenant) == 0, "another's pages"
            assert len(pages_in(folder)) == stored + 5 + 2
            stored += 5 + 2
    with restarted() as server:
        for tenant in tenants:
            if not at_once:
                server.flush()
            assert server.prefetch(PROMPT, tenant) == 5 * BLOCK
            server.check()
            assert server.serve(PROMPT, tenant) == 5 * BLOCK
        assert server.prefetch(PROMPT, "c") == server.serve(PROMPT, "c") == 0
        # The tree has the first part of this prompt.
        longer = PROMPT + [50 + at // BLOCK for at in range(4 * BLOCK)]
        server.prefetch(longer, "a")
        assert server.serve(longer, "a") == 5 * BLOCK
    with restarted() as server:
        assert server.prefetch(longer, "b") == 5 * BLOCK
        assert server.serve(PROMPT, "a") == 0
        assert server.prefetch(longer, "a") == 4 * BLOCK and server.serve(longer, "a") == 9 * BLOCK


def test_keys_of_tenants_are_those_of_newer_releases(folder: Path, restarted: Start) -> None:
    """An update of SGLang finds the stored pages."""
    with restarted() as server:
        server.serve([1] * (BLOCK + 1), "a")
    tenant = sha256(b"sglang-cache-namespace-v1\x01" + (1).to_bytes(8, "little") + b"a\x00").digest()
    first_page = sha256(tenant + (1).to_bytes(4, "little") * BLOCK).hexdigest()
    assert {path.name[:64] for path in pages_in(folder)} == {first_page}


def lines_about(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


@pytest.mark.parametrize("extra", [{}, {"enable_metadata_cache": True, "max_size": "1G"}])
def test_a_folder_that_is_gone(
    folder: Path, restarted: Start, caplog: pytest.LogCaptureFixture, extra: dict[str, Any]
) -> None:
    """The folder was removed. One log line reports it, look-ups miss, and no request waits for it.

    Once the folder exists again it is used, unless other users can write to it.
    """
    prompts = [[100 * line + token for token in PROMPT] for line in range(6)]
    with restarted(extra_config=extra) as server:
        assert server.serve(prompts[0]) == 0
        rmtree(folder)
        caplog.clear()
        for prompt in prompts[1:3]:
            assert server.prefetch(prompt) == server.serve(prompt) == 0
        assert len(lines_about(caplog, "is gone")) == 1 and not lines_about(caplog, "ailed")
        assert not folder.exists(), "it may be where a disk was mounted"
        folder.mkdir(mode=0o700)
        folder.chmod(0o777)
        assert server.prefetch(prompts[3]) == server.serve(prompts[3]) == 0
        assert not pages_in(folder)
        folder.chmod(0o700)
        assert server.prefetch(prompts[4]) == server.serve(prompts[4]) == 0
        assert len(lines_about(caplog, "in use again")) == 1
        assert len(pages_in(folder)) == 5 + 2
        assert server.flush() and server.prefetch(prompts[4]) == 5 * BLOCK
        assert server.flush()


@pytest.mark.parametrize("storage", ["file"], indirect=True)
def test_failed_lookup_is_a_miss(monkeypatch: pytest.MonkeyPatch, restarted: Start) -> None:
    """After any error SGLang's thread continues, and the next look-up finds the stored pages."""

    def fails(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("the storage failed")

    with restarted() as server:
        server.serve(PROMPT)
    with restarted() as server:
        with monkeypatch.context() as patch:
            patch.setattr(HiCacheFile, "batch_exists_v2", fails)
            assert server.prefetch(PROMPT) == 0
        assert server.prefetch(PROMPT) == 5 * BLOCK


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Start Mooncake's master and a client that provides memory for pages, over TCP."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        pytest.skip(f"Mooncake is no dependency: {error}")
    without_a_server(monkeypatch)
    master = f"127.0.0.1:{free_port()}"
    program = Path(find_spec("mooncake").submodule_search_locations[0], "mooncake_master")
    flags = [f"-rpc_port={master.split(':')[1]}", f"-metrics_port={free_port()}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([str(program), *flags], stdout=log, stderr=log)
    settings = {"MASTER": master, "PROTOCOL": "tcp", "TE_META_DATA_SERVER": "P2PHANDSHAKE", "GLOBAL_SEGMENT_SIZE": "0"}
    for name, value in {**settings, "LOCAL_HOSTNAME": "127.0.0.1"}.items():
        monkeypatch.setenv(f"MOONCAKE_{name}", value)
    store = MooncakeDistributedStore()
    try:
        while store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", master, None):
            assert process.poll() is None, (tmp_path / "log").read_text()
        yield store
    finally:
        store.close()
        process.kill()
        process.wait()


def test_pages_in_mooncakes_store(
    monkeypatch: pytest.MonkeyPatch, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages outlive the server, and each tenant finds only its own.

    A changed page is a miss and is stored again. Clearing keeps the pages of others.
    """
    keys: list[str] = []
    put = MooncakeStorage._put_batch_zero_copy_impl

    def noted(self: Any, names: list[str], *args: Any, **named: Any) -> Any:
        keys.extend(names)
        return put(self, names, *args, **named)

    monkeypatch.setattr(MooncakeStorage, "_put_batch_zero_copy_impl", noted)

    def found(serve: bool = True, tenant: str | None = None) -> int:
        with serving("mooncake") as server:
            there = server.prefetch(PROMPT, tenant)
            assert not serve or server.serve(PROMPT, tenant) == there
            if not serve:
                server.cache.invalidate_storage("new")
            return there

    assert found() == 0
    assert len(keys) == 5 + 2 and all("-dsv4v4-fp32-fp32-" in key for key in keys)
    assert found() == 5 * BLOCK
    for tenant in ("a", "b"):
        assert found(tenant=tenant) == 0 and found(tenant=tenant) == 5 * BLOCK
    for kind in ("_k", "c4_state"):
        for key in {key for key in keys if kind in key}:
            page = store.get(key)
            store.remove(key, True)
            store.put(key, page[:3] + b"!" + page[4:])
        assert found() == 0 and "cannot be used and is removed" in caplog.text
        assert found() == 5 * BLOCK, "what was removed was stored anew"
        caplog.clear()
    store.put("another's", b"page")
    assert found(serve=False) == 5 * BLOCK
    assert found() == 0
    assert store.is_exist("another's") == 1
