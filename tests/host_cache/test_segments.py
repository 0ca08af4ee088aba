"""Segments of host rows without a server: two owners, killed ones, damage, sizes and states.

Nothing that is found may be other than what was stored under its name.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import multiprocessing
import os
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support.prefix_tree import TIMES
from support.ranks import run_ranks
from support.segments import VARIABLE, new_folder
from support.storage import name_of
from typer.testing import CliRunner

from dsv4_sglang.cache.host_memory import HostMemory
from dsv4_sglang.cache.host_sharing import HostSharing
from dsv4_sglang.cli import app
from dsv4_sglang.srt.host_cache import stored_segments as stored_module
from dsv4_sglang.srt.host_cache.folder import CHECKSUM_BYTES, FORMER_FORMAT, FORMER_WEIGHTS, TEMPORARY, UNUSED, USED
from dsv4_sglang.srt.host_cache.pools import SNAPSHOTS, HostRows
from dsv4_sglang.srt.host_cache.segment import BLOCKS
from dsv4_sglang.srt.host_cache.segment import SNAPSHOTS as SNAPSHOT_ROWS
from dsv4_sglang.srt.host_cache.segment_index import HEADER_BYTES, Header, PoolSize
from dsv4_sglang.srt.host_cache.shared_memory import PoolName, SharedMemoryStorage, SharedSegment
from dsv4_sglang.srt.host_cache.stored_segments import require_memory, stored_segments
from dsv4_sglang.srt.host_cache.used_folder import describe_weights
from dsv4_sglang.srt.launch.error import LaunchError

ROW = 4096
CPU = torch.device("cpu")


class Rows(HostRows):
    """Host rows whose contents the test writes."""

    def begins(self, layer: int, count: int) -> bool:
        raise NotImplementedError

    def save(self, device_indices: Any, rows: Any) -> None:
        raise NotImplementedError

    load: Any = save


class Owner:
    """Operations of a server on a segment."""

    def __init__(self, rows: int, name: str = name_of("m"), sharing: HostSharing | None = None) -> None:
        self.size, self.sharing = rows, sharing or HostSharing()
        sizes = {BLOCKS: PoolSize(rows, ROW), SNAPSHOT_ROWS: PoolSize(rows, ROW)}
        self.shared = SharedSegment(self.sharing, name, sizes)
        self.memory = {
            pool: HostMemory(rows * ROW, CPU, sharing=self.sharing, file=self.shared.file(pool)) for pool in sizes
        }
        self.rows, self.snapshots = (
            Rows(SimpleNamespace(rows=self.memory[pool].bytes.view(rows, ROW)), 1, self.shared, pool) for pool in sizes
        )
        self.storage = SharedMemoryStorage(SimpleNamespace(model_name=name), self.rows)
        self.storage.register_mem_host_pool_v2(self.rows, PoolName.KV)
        self.storage.register_mem_host_pool_v2(self.snapshots, SNAPSHOTS)
        # Rows in use, by page. False until they are published.
        self.held: dict[str, tuple[torch.Tensor, str]] = {}
        self.published: set[str] = set()

    def kill(self) -> None:
        """Leave the segment as it is."""
        assert self.shared.segment is not None
        self.shared.segment.release()

    def content(self, page: str) -> torch.Tensor:
        return content(page, self.storage.name)

    def save(self, page: str) -> bool:
        """Copy a page to a row, without publishing it. Return False if there is no row."""
        rows = self.rows.alloc(1)
        if rows is None:
            return False
        self.rows.kv_buffer[int(rows), :-CHECKSUM_BYTES] = self.content(page)
        self.rows.name(rows, [page])
        self.held[page] = rows, self.storage.name
        return True

    def publish(self, page: str) -> None:
        assert self.storage.publish_blocks([page], self.held[page][0])
        self.published.add(page)

    def store(self, page: str) -> None:
        assert self.save(page)
        self.publish(page)

    def free(self, page: str) -> None:
        rows, _ = self.held.pop(page)
        self.published.discard(page)
        self.rows.free(rows)

    def fetch(self, page: str) -> bool:
        """Fetch a page and hold it."""
        if not self.storage.exists(page) or (rows := self.rows.alloc_for([page])) is None:
            return False
        if not self.storage.read_blocks(None, [page], rows):
            self.rows.free(rows)
            return False
        assert self.has(rows, page), "a wrong page was found"
        self.held[page] = rows, self.storage.name
        self.published.add(page)
        return True

    def has(self, rows: torch.Tensor, page: str) -> bool:
        return torch.equal(self.rows.kv_buffer[int(rows), :-CHECKSUM_BYTES], self.content(page))


def content(page: str, name: str) -> torch.Tensor:
    digest = hashlib.sha256(f"{page} {name}".encode()).digest()
    return torch.frombuffer(bytearray((digest * (ROW // 32))[:-CHECKSUM_BYTES]), dtype=torch.uint8)


def hashed(at: int) -> str:
    return hashlib.sha256(str(at).encode()).hexdigest()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with new_folder() as folder:
        monkeypatch.setenv(VARIABLE, str(folder))
        yield folder


# Any operations of two servers

PAGES = [hashed(at) for at in range(16)]
PAGE = st.sampled_from(PAGES[:8])
WHO = st.integers(0, 1)


class TwoOwners(RuleBasedStateMachine):
    """Two servers on one folder. Each may be killed at any point, and starts again with any size."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = new_folder()
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv(VARIABLE, str(self.folder.__enter__()))
        self.patch.setattr(stored_module, "ATTEMPTS", 1)
        self.owners: list[Owner | None] = [None, None]
        self.updates = 0

    def teardown(self) -> None:
        for owner in self.owners:
            if owner is not None:
                owner.kill()
        self.patch.undo()
        self.folder.__exit__(None, None, None)

    def owner(self, who: int) -> Owner:
        """Return a server, which is started if it does not run."""
        if (owner := self.owners[who]) is None:
            owner = self.owners[who] = Owner(6)
        return owner

    @rule(who=WHO, rows=st.sampled_from([3, 6, 6, 11]))
    def start(self, who: int, rows: int) -> None:
        if self.owners[who] is None:
            self.owners[who] = Owner(rows)

    @rule(who=WHO, page=PAGE)
    def save(self, who: int, page: str) -> None:
        owner = self.owner(who)
        if page not in owner.held and not owner.save(page):
            owner.free(next(iter(owner.held)))
            assert owner.save(page)

    @rule(who=WHO, page=PAGE)
    def publish(self, who: int, page: str) -> None:
        owner, other = self.owner(who), self.owners[1 - who]
        if page in owner.held and owner.held[page][1] == owner.storage.name:
            owner.publish(page)
            if other is not None and other.storage.name == owner.storage.name:
                assert other.storage.exists(page)

    @rule(who=WHO, page=PAGE)
    def fetch(self, who: int, page: str) -> None:
        owner = self.owner(who)
        if page not in owner.held:
            owner.fetch(page)

    @rule(who=WHO, page=PAGE)
    def store(self, who: int, page: str) -> None:
        self.save(who, page)
        self.publish(who, page)

    @rule(who=WHO)
    def look_for_all(self, who: int) -> None:
        owner = self.owner(who)
        for page in PAGES:
            if page not in owner.held and owner.fetch(page):
                owner.free(page)

    @rule(who=WHO, page=PAGE)
    def free(self, who: int, page: str) -> None:
        if page in self.owner(who).held:
            self.owner(who).free(page)

    @rule(who=WHO)
    def flush(self, who: int) -> None:
        owner = self.owner(who)
        owner.held.clear()
        owner.published.clear()
        owner.rows.clear()

    @rule(who=WHO)
    def new_weights(self, who: int) -> None:
        self.flush(who)
        self.updates += 1
        self.owner(who).storage.use_name(f"{self.updates:016x}")

    @rule(who=WHO, page=PAGE, written=st.integers(0, ROW))
    def kill(self, who: int, page: str, written: int) -> None:
        """A server is killed, and a row has a part of a page then. What it has published is found by the next one."""
        if (owner := self.owners[who]) is None:
            return
        if written and (rows := owner.rows.alloc(1)) is not None:
            owner.rows.kv_buffer[int(rows), :written] = owner.content(page).repeat(2)[:written]
        owner.kill()
        again = self.owners[who] = Owner(owner.size, owner.storage.name)
        assert again.storage.name == owner.storage.name
        assert all(again.storage.exists(page) for page in owner.published)
        again.kill()
        self.owners[who] = None

    @rule(who=WHO, page=PAGE, at=st.integers(0, ROW - 1))
    def damage(self, who: int, page: str, at: int) -> None:
        """A byte of a free row changes, and both servers look for its page."""
        owner = self.owner(who)
        row = owner.shared.kept[BLOCKS].row_with(bytes.fromhex(page))
        if row is not None and page not in owner.held:
            owner.rows.kv_buffer[row, at] ^= 1
            self.fetch(1 - who, page)
            self.fetch(who, page)

    @invariant()
    def rows_in_use_stay(self) -> None:
        for owner in self.owners:
            if owner is not None:
                assert owner.rows.used_rows == len(owner.held)
                for page, (rows, name) in owner.held.items():
                    assert torch.equal(owner.rows.kv_buffer[int(rows), :-CHECKSUM_BYTES], content(page, name))


@pytest.mark.full
def test_any_operations_of_two_servers() -> None:
    """Each step is an operation of one of two servers; DSV4_SGLANG_TEST_TIMES=100 runs 10^5 of them."""
    run_state_machine_as_test(
        TwoOwners, settings=settings(max_examples=10 * TIMES, stateful_step_count=100, deadline=None)
    )


# Restarts


def test_next_owner_finds_published_pages(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The least recently used pages are overwritten first, also after a restart."""
    owner = Owner(4)
    for page in PAGES[:4]:
        owner.store(page)
    for page in (PAGES[2], PAGES[0], PAGES[1]):
        owner.free(page)
    owner.kill()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    caplog.set_level(logging.INFO)
    again = Owner(4)
    assert "resumed the rows of an earlier server" in caplog.text and "4 blocks, 0 snapshots" in caplog.text
    assert again.rows.available_size() == 4 and again.save(PAGES[9]) and again.save(PAGES[10])
    assert [again.storage.exists(page) for page in PAGES[:4]] == [True, True, False, False]
    assert again.fetch(PAGES[0]) and again.fetch(PAGES[1]) and not again.save(PAGES[11])


@pytest.mark.parametrize("rows", [2, 3, 9])
def test_other_size_keeps_what_fits(folder: Path, rows: int) -> None:
    owner = Owner(4)
    for page in PAGES[:4]:
        owner.store(page)
    owner.kill()
    again = Owner(rows)
    found = [page for page in PAGES[:4] if again.storage.exists(page)]
    assert found == PAGES[: min(rows, 4)]
    assert all(again.fetch(page) for page in found)
    assert sum(path.stat().st_size for path in folder.glob("*.blocks")) == rows * ROW
    again.kill()
    assert [segment.pages for segment in stored_segments(folder)] == [len(found)]


def test_many_pages_are_found_by_others(folder: Path) -> None:
    owner, other = Owner(1000), Owner(1)
    for at in range(1000):
        owner.store(hashed(at))
    assert all(other.storage.exists(hashed(at)) for at in range(1000))
    assert not any(other.storage.exists(hashed(at)) for at in range(1000, 2000))
    assert other.fetch(hashed(500))
    other.free(hashed(500))
    owner.kill()
    assert other.fetch(hashed(501)), "a segment without an owner is read, too"
    assert Owner(1000).fetch(hashed(502))


def test_snapshots_end_the_prefix(folder: Path) -> None:
    """A prefix ends where a snapshot is, of this or another owner."""
    owner, other = Owner(8), Owner(8)
    keys = [hashed(at) for at in range(5)]
    for page in keys[:4]:
        (owner if page != keys[1] else other).store(page)
    assert owner.storage.batch_exists_v2(keys).kv_hit_pages == 0
    for at, who in ((1, owner), (2, other), (4, owner)):
        rows = who.snapshots.alloc(1)
        transfer = SimpleNamespace(name=SNAPSHOTS, keys=[keys[at]], host_indices=rows)
        assert who.storage.batch_set_v2([transfer]) == {SNAPSHOTS: [True]}
        who.snapshots.name(rows, [keys[at]])
    for who in (owner, other):
        found = who.storage.batch_exists_v2(keys)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [2, 3])


# Killed processes

STAGES = {
    # What the process was about to do: function that kills it, and the pages that the next owner finds.
    "create the index": ("os.posix_fallocate", 0),
    "set the header": (f"{Header.__module__}.Header.encode", 0),
    "write a checksum": (f"{SharedMemoryStorage.__module__}.checksum", 2),
    "publish a row": ("dsv4_sglang.srt.host_cache.segment_index.RowIndex.set", 2),
    "write a record": ("numpy.frombuffer", 2),
    "free a row": ("dsv4_sglang.srt.host_cache.segment_index.RowIndex.mark_used", 3),
    "use a free row": ("dsv4_sglang.srt.host_cache.segment_index.RowIndex.clear", 3),
    "use new weights": ("dsv4_sglang.srt.host_cache.segment.OwnSegment.use_name", 3),
}


def killed_at(stage: str, target: str) -> None:
    """Own a segment, store pages and end at a stage."""

    def kill(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def now(at: str) -> None:
        if stage == at:
            pytest.MonkeyPatch().setattr(target, kill)

    now("create the index")
    now("set the header")
    owner = Owner(3)
    owner.store(PAGES[0])
    owner.store(PAGES[1])
    for at in ("write a checksum", "publish a row", "write a record"):
        now(at)
    owner.store(PAGES[2])
    now("free a row")
    owner.free(PAGES[0])
    now("use a free row")
    if stage == "use a free row":
        owner.save(PAGES[3])
    now("use new weights")
    owner.storage.use_name("0" * 16)


@pytest.mark.parametrize("stage", STAGES)
def test_killed_process_leaves_a_usable_segment(folder: Path, stage: str) -> None:
    """The next server takes over at once, finds what was published, and nothing that was not."""
    target, count = STAGES[stage]
    process = multiprocessing.get_context("fork").Process(target=killed_at, args=(stage, target))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    owner, other = Owner(3), Owner(1)
    assert len(list(stored_segments(folder))) == 2, "an incomplete segment is removed"
    for who in (other, owner):
        found = [page for page in PAGES if who.storage.exists(page)]
        assert found == PAGES[:count]
    for page in found:
        assert owner.fetch(page)
    assert not any(segment.damaged() for segment in stored_segments(folder))
    for page in found:
        owner.free(page)
    for page in PAGES[8:11]:
        owner.store(page)
    assert other.fetch(PAGES[8])


def two_processes(rank: int, folder: str) -> list[int]:
    """The first process is killed. The second one holds the rows until it has seen that."""
    os.environ[VARIABLE] = folder
    sharing = HostSharing(dist.group.WORLD)
    owner = Owner(4, sharing=sharing)
    if rank == 0:
        owner.store(PAGES[0])
    else:
        owner.rows.name(owner.rows.alloc(1), [PAGES[0]])
        assert owner.storage.exists(PAGES[3]), "this process finds all, the first one decides"
    sharing.wait()
    assert owner.has(torch.tensor([0]), PAGES[0])
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        sharing.wait()
    (segment,) = stored_segments(Path(folder))
    assert segment.state == USED
    with pytest.raises(OSError, match="in use"):
        segment.remove()
    other = Owner(2)
    return [len(list(stored_segments(Path(folder)))), int(other.fetch(PAGES[0]))]


def test_segment_is_used_until_all_its_processes_end(folder: Path) -> None:
    first, second = run_ranks(2, two_processes, str(folder))
    assert first.code == -signal.SIGKILL
    assert second.value == [2, 1], second.error
    assert [segment.state for segment in stored_segments(folder)] == [UNUSED] * 2
    assert Owner(4).fetch(PAGES[0])


# Damage, sizes and states


def test_damaged_rows_are_misses(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A changed byte in a row of this or another owner is found by its checksum, and by `dsv4-sglang storage`."""
    owner, other = Owner(4), Owner(4)
    for page in PAGES[:2]:
        owner.store(page)
        owner.free(page)
    owner.rows.kv_buffer[0, 5] ^= 1
    ran = CliRunner().invoke(app, ["storage", "verify", str(folder)])
    assert ran.exit_code == 1 and "1 pages are sound, 1 are damaged" in ran.output
    assert re.search(r"damaged: .*segment-\w+\.index, row 0 of blocks", ran.output)
    assert not other.fetch(PAGES[0]) and other.fetch(PAGES[1])
    assert not owner.fetch(PAGES[0]) and "row 0 of blocks is damaged" in caplog.text
    assert not owner.storage.exists(PAGES[0]) and owner.fetch(PAGES[1])
    owner.store(PAGES[0])
    assert other.fetch(PAGES[0])


def left_segment(folder: Path, name: str, page: str = PAGES[0]) -> Path:
    """Leave a segment without an owner. Return the path of its index."""
    before = set(folder.glob("*.index"))
    owner = Owner(2, name)
    owner.store(page)
    owner.kill()
    (path,) = set(folder.glob("*.index")) - before
    return path


def states(folder: Path) -> dict[Path, str]:
    return {segment.path: segment.state for segment in stored_segments(folder)}


def change(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def test_states_of_segments(folder: Path) -> None:
    """The next start removes what no server can read, and keeps other models. `storage` lists and removes them."""
    describe_weights(name_of("b"), "/models/b")
    other, version, torn = (left_segment(folder, name_of(model)) for model in "bcd")
    former = left_segment(folder, f"{name_of('a')}-{'1' * 16}")
    found = Header.decode(version.read_bytes()[:HEADER_BYTES])
    assert found is not None
    change(version, 0, Header(found.name, found.weights, found.pools, found.version + 1).encode())
    change(torn, 0, bytes(HEADER_BYTES))
    expected = {former: FORMER_WEIGHTS, other: UNUSED, version: FORMER_FORMAT, torn: TEMPORARY}
    assert states(folder) == expected
    output = CliRunner().invoke(app, ["storage", "ls", str(folder)]).output
    assert re.search(rf"{name_of('b')} +│ /models/b +│ unused +│ +1 ", output), output
    owner = Owner(2)
    assert set(states(folder).values()) == {USED, UNUSED} and other in states(folder)
    for command, left in ((["prune", "--name", name_of("x")], 2), (["prune", "--name", name_of("b")], 1)):
        assert CliRunner().invoke(app, ["storage", *command, str(folder)]).exit_code == 0
        assert len(states(folder)) == left
    owner.store(PAGES[0])
    assert owner.storage.clear() and not owner.storage.exists(PAGES[0])
    assert [segment.pages for segment in stored_segments(folder)] == [0]


def test_room_is_made_for_a_new_segment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of other models go if there is no memory left, the least recently used first. Too little is an error,
    which leaves nothing and removes nothing."""
    first, second = left_segment(folder, name_of("a")), left_segment(folder, name_of("b"))
    used = sum(segment.bytes for segment in stored_segments(folder))
    owners = [Owner(1, name_of("c"))]
    size = used + sum(segment.bytes for segment in stored_segments(folder) if segment.state == USED)
    monkeypatch.setattr(
        stored_module, "free_bytes", lambda of: size - sum(segment.bytes for segment in stored_segments(of))
    )
    assert first in states(folder) and second in states(folder)
    owners.append(Owner(1, name_of("d")))
    assert first not in states(folder) and second in states(folder)
    before = states(folder)
    with pytest.raises(RuntimeError, match=rf"bytes requested in {folder}, \d+ are available; give it a larger file"):
        Owner(1000, name_of("e"))
    assert states(folder) == before and second in before
    monkeypatch.setattr(stored_module, "free_bytes", lambda of: 0 if second in states(of) else 1)
    with pytest.raises(RuntimeError, match=rf"bytes requested in {folder}, 1 are available"):
        Owner(1, name_of("e"))
    assert set(states(folder)) == set(before) - {second}
    assert all(owner.rows.available_size() == 1 for owner in owners)


def test_full_file_system_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Owner(1)
    before = sorted(folder.iterdir())
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RuntimeError, match="No space left"):
        Owner(3)
    assert sorted(folder.iterdir()) == before


def test_changed_index_is_not_resumed(folder: Path) -> None:
    path = left_segment(folder, name_of("m"))
    os.truncate(path, HEADER_BYTES + 9)
    owner = Owner(2)
    assert not owner.storage.exists(PAGES[0])
    owner.store(PAGES[0])
    assert states(folder) == {path: USED}


def test_folder_must_be_in_memory(folder: Path) -> None:
    with pytest.raises(
        LaunchError, match=f"/proc is in a file system of type proc; expected one in memory .* set {VARIABLE} to"
    ):
        require_memory(Path("/proc"), VARIABLE)
