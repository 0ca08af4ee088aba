"""Folders of stored pages that several processes use: planted files, locks, weight updates and full disks."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.storage import PAGE, VARIABLE, bytes_of, key, name_of, open_storage, put, store, stored
from typer.testing import CliRunner

from dsv4_sglang.cli import app
from dsv4_sglang.srt.host_cache import locks, used_folder
from dsv4_sglang.srt.host_cache import storage as storage_module
from dsv4_sglang.srt.host_cache.folder import clear, own_folder, prune
from dsv4_sglang.srt.host_cache.locks import in_use, weights_of
from dsv4_sglang.srt.host_cache.storage import LONGEST_KEY, LONGEST_UPDATE, FileStorage
from dsv4_sglang.srt.host_cache.used_folder import UsedFolder, describe_weights
from dsv4_sglang.srt.launch.error import LaunchError

CONTENT, UPDATE = b"a file of this user that is no page", "0123456789abcdef"
ROOT = os.geteuid() == 0


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that a group may write."""
    path = tmp_path / "pages"
    path.mkdir()
    path.chmod(0o770)
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def locked(folder: Path) -> list[str]:
    """Return the names of the locks whose files are in the folder."""
    return sorted(path.name.removesuffix(locks.SUFFIX) for path in folder.glob(f"*{locks.SUFFIX}"))


# Planted files


def longest_name() -> str:
    return f"{LONGEST_KEY}.deepseek_v4_c4_state_{name_of('m')}{LONGEST_UPDATE}.bin"


PLANTED = {
    "lock": f"{name_of('m')}.lock",
    "lock after an update": f"{name_of('m')}-{UPDATE}.lock",
    "page": f"{key(1)}_{name_of('m')}.bin",
    "page after an update": f"{key(1)}_{name_of('m')}-{UPDATE}.bin",
    "longest name": longest_name(),
}


def use_all(folder: Path) -> None:
    """Call every function that opens or changes files of a storage's folder."""
    try:
        storage = open_storage(folder, max_size=9 * PAGE)
    except LaunchError:
        return
    for name in (None, UPDATE):
        if name:
            storage.use_name(name)
        for _ in range(2):
            store(storage, 1)
            stored(storage, 1)
        storage.available()
    weights_of(folder, name_of("m"))
    run = CliRunner().invoke
    for command in (["ls"], ["verify"], ["prune", "--unused-days", "0"], ["clear", "--yes"]):
        assert run(app, ["storage", command[0], str(folder), *command[1:]]).exit_code in (0, 1)
    storage.clear()


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_a_planted_link_changes_no_other_file(
    tmp_path: Path, folder: Path, plant: Callable[..., None], planted: str
) -> None:
    """A member of the folder's group plants a link to a file of the server's user. A second name counts only where the
    file is written: a page is replaced, not written."""
    victim = tmp_path / "victim"
    victim.write_bytes(CONTENT)
    victim.chmod(0o600)
    os.utime(victim, (1, 1))
    plant(victim, folder / PLANTED[planted])
    use_all(folder)
    status = victim.stat()
    assert victim.read_bytes() == CONTENT and status.st_mode & 0o777 == 0o600
    assert status.st_mtime == 1 or plant is os.link, "the time of a page is its last use"


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_link_creates_no_file(tmp_path: Path, folder: Path, planted: str) -> None:
    (folder / PLANTED[planted]).symlink_to(tmp_path / "created")
    use_all(folder)
    assert not (tmp_path / "created").exists()


def test_a_page_is_read_through_no_link(tmp_path: Path, folder: Path) -> None:
    """Another folder's page under the same name would have the right checksum."""
    storage = open_storage(folder)
    assert store(storage, 1)
    page = folder / PLANTED["page"]
    page.rename(tmp_path / "page")
    page.symlink_to(tmp_path / "page")
    assert not stored(storage, 1) and not page.is_symlink(), "it is removed"
    assert store(storage, 1) and stored(storage, 1)


def in_time(call: Callable[[], Any]) -> Any:
    """Return the result of a call that could hang. The limit only ends a test that fails."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert found, "the call hangs"
    return found[0]


@pytest.mark.parametrize("planted", ["page", "lock"])
def test_fifo_does_not_block(folder: Path, planted: str) -> None:
    """The open of a FIFO waits until another process writes to it."""
    storage = open_storage(folder)
    (folder / PLANTED[planted]).unlink(missing_ok=True)
    os.mkfifo(folder / PLANTED[planted])
    verify = ["storage", "verify", str(folder)]
    found = in_time(lambda: CliRunner().invoke(app, verify))
    assert found.exit_code == (planted == "page") and ("damaged: " in found.output) == (planted == "page")
    assert planted == "page" or in_time(lambda: weights_of(folder, name_of("m"))) == ""
    assert in_time(lambda: stored(storage, 1)) is False
    assert in_time(lambda: store(storage, 1)) and in_time(lambda: stored(storage, 1))


def test_nixl_uses_no_folder_of_a_group(tmp_path: Path) -> None:
    """NIXL opens files by path and follows links."""
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages").chmod(0o770)
    own_folder(str(tmp_path / "pages"), "", "VARIABLE")
    with pytest.raises(LaunchError, match=r"has mode 0770: users other than its owner can write it.* VARIABLE"):
        own_folder(str(tmp_path / "pages"), "", "VARIABLE", by_group=False)


def test_linked_bucket_is_not_entered(tmp_path: Path, folder: Path) -> None:
    """NIXL's pages are in subfolders. One of them is replaced after the folder was listed."""
    from dsv4_sglang.srt.host_cache.folder import stored_files

    (folder / "ab").mkdir()
    put(folder / "ab", PLANTED["page"], 0)
    (file,) = stored_files(folder)
    (folder / "ab").rename(tmp_path / "elsewhere")
    (folder / "ab").symlink_to(tmp_path / "elsewhere")
    for use in (file.remove, file.damaged):
        with pytest.raises(OSError, match=r"Not a directory|symbolic"):
            use()
    assert (tmp_path / "elsewhere" / PLANTED["page"]).exists()
    assert list(stored_files(folder)) == []


# Locks


def test_server_starts_while_its_lock_is_removed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """`prune` has seen that nobody uses a name. A server begins to use it before the lock's file is gone."""
    name, unlink = name_of("m"), os.unlink
    (folder / f"{name}.lock").touch()
    storages: list[FileStorage] = []
    tried = threading.Event()
    acquire = locks.acquire

    def noted(*arguments: Any, **named: Any) -> int | None:
        found = acquire(*arguments, **named)
        if threading.current_thread() is not threading.main_thread():
            tried.set()
        return found

    server = threading.Thread(target=lambda: storages.append(open_storage(folder)), daemon=True)

    def late(path: Any, **named: Any) -> None:
        if str(path).endswith(".lock") and threading.current_thread() is threading.main_thread():
            server.start()
            assert tried.wait(60)
        unlink(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(locks, "acquire", noted)
        patch.setattr(os, "unlink", late)
        prune(folder)
    server.join(60)
    assert storages and in_use(folder, name) and locked(folder) == [name]
    assert store(storages[0], 1) and clear(folder).removed == [] and stored(storages[0], 1)


def test_a_server_that_starts_before_its_pages_are_removed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """`clear` has found unused pages. A server begins to use them before the name is locked."""
    page = put(folder, f"{key(1)}_{name_of('m')}.bin", 0)
    storages, held_alone = list[FileStorage](), locks.held_alone

    def late(path: Path, name: str) -> Any:
        if not storages:  # the storage locks its name itself, and that calls this function again
            storages.append(open_storage(folder))
        return held_alone(path, name)

    monkeypatch.setattr(locks, "held_alone", late)
    done = clear(folder, [name_of("m")])
    assert [file.path for file in done.kept] == [page] and done.removed == [] and page.exists()
    assert locked(folder) == [name_of("m")] and storages[0].available()


def test_lock_removed_after_open_is_made_again(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    flock, removed = fcntl.flock, list[int]()

    def late(file: int, kind: int) -> None:
        if kind & fcntl.LOCK_SH and not removed:
            removed.append(os.fstat(file).st_ino)
            prune(folder)
            assert locked(folder) == []
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    storage = open_storage(folder)
    assert removed and in_use(folder, name_of("m")) and locked(folder) == [name_of("m")]
    assert storage.available()


@pytest.mark.parametrize("noticed", [False, True])
def test_recreated_folder_is_locked_again(tmp_path: Path, folder: Path, noticed: bool) -> None:
    storage = open_storage(folder)
    assert store(storage, 1)
    folder.rename(tmp_path / "elsewhere")
    if noticed:
        assert not storage.available()
    folder.mkdir(mode=0o700)
    assert store(storage, 2) and in_use(folder, name_of("m"))
    assert clear(folder).removed == [] and stored(storage, 2) and not stored(storage, 1)
    assert not in_use(tmp_path / "elsewhere", name_of("m"))


def test_a_folder_that_is_replaced_is_checked(tmp_path: Path, folder: Path) -> None:
    """Nobody looked while it was gone."""
    storage = open_storage(folder)
    folder.rename(tmp_path / "elsewhere")
    folder.mkdir()
    folder.chmod(0o777)
    assert not storage.available() and not store(storage, 1) and bytes_of(folder) == 0
    folder.chmod(0o700)
    assert store(storage, 1)


def test_removed_lock_is_taken_again(folder: Path) -> None:
    describe_weights(name_of("m"), "/models/m")
    storage = open_storage(folder)
    (folder / f"{name_of('m')}.lock").unlink()
    assert not in_use(folder, name_of("m"))
    assert storage.available() and in_use(folder, name_of("m")) and weights_of(folder, name_of("m")) == "/models/m"


def test_failed_lock_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / f"{name_of('m')}.lock").symlink_to("elsewhere")
    storage = open_storage(folder)
    assert store(storage, 1) and stored(storage, 1)
    (line,) = [record.getMessage() for record in caplog.records if "cannot lock" in record.getMessage()]
    assert line.endswith(".lock: a link; expected a regular file. Other processes see its pages as unused")


def test_the_locks_of_other_models_stay(folder: Path) -> None:
    """They describe the weights of pages that nobody uses."""
    for model in ("n", "o"):
        put(folder, f"{key(1)}_{name_of(model)}.bin", 0)
        (folder / f"{name_of(model)}.lock").write_text('{"weights": "/models/x"}')
    assert len(clear(folder, [name_of("n")]).removed) == 1
    assert locked(folder) == [name_of("o")] and weights_of(folder, name_of("o")) == "/models/x"
    assert prune(folder).removed == [] and locked(folder) == [name_of("o")]


def test_page_name_is_checked_during_start(folder: Path) -> None:
    """`dsv4-sglang storage ls` holds the exclusive lock for a moment."""
    with locks.held_alone(folder, name_of("m")) as alone:
        assert alone
        server = threading.Thread(target=lambda: storages.append(open_storage(folder)))
        storages: list[FileStorage] = []
        server.start()
    server.join()
    assert in_use(folder, name_of("m"))


def test_two_threads_close_a_lock_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler changes the name while the thread of the storage finds that the lock's file is gone.

    A descriptor that is closed twice may be another file of the process by then.
    """
    used = UsedFolder(folder, True, lambda: None)
    close, closed, opened, errors = os.close, list[int](), set[int](), list[BaseException]()
    acquire = locks.acquire

    def noted(*arguments: Any, **named: Any) -> int | None:
        if (file := acquire(*arguments, **named)) is not None:
            opened.add(file)
        return file

    def closing(file: int) -> None:
        if file in opened:
            closed.append(file)
            opened.discard(file)
        close(file)

    def run(work: Callable[[int], Any]) -> None:
        try:
            for i in range(300):
                work(i)
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(locks, "acquire", noted)
    monkeypatch.setattr(os, "close", closing)
    monkeypatch.setattr(used_folder, "clear", lambda *_: None)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        work = [lambda i: used.use(f"n{i % 2}"), lambda i: used.use(f"o{i % 2}"), lambda i: used.available()]
        threads = [threading.Thread(target=run, args=(one,)) for one in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors, errors
    used._release()
    assert not opened


# Weight updates


def test_weight_updates_leave_one_lock(folder: Path) -> None:
    storage = open_storage(folder)
    for update in range(5):
        assert store(storage, update)
        storage.use_name(f"{update:016x}")
        assert locked(folder) == [f"{name_of('m')}-{update:016x}"] and bytes_of(folder) == 0
    assert not stored(storage, 4)


def test_rolling_update_keeps_pages_of_other_servers(folder: Path) -> None:
    """Three servers share pages. Each gets new weights, one after another; the last one that leaves removes them."""
    servers = [open_storage(folder) for _ in range(3)]
    assert all(store(servers[0], at) for at in range(4))
    for number, server in enumerate(servers, 1):
        server.use_name(f"{number:016x}")
        assert not stored(server, 0)
        assert all(stored(other, at) for other in servers[number:] for at in range(4))
        assert store(server, number)
    assert bytes_of(folder) == 3 * PAGE, "one page of each server's new weights"
    assert locked(folder) == [f"{name_of('m')}-{number:016x}" for number in (1, 2, 3)]


def test_processes_of_one_server_remove_their_pages_together(folder: Path) -> None:
    """All processes of a server hold the lock of its name. The last one removes the pages."""
    ranks = [open_storage(folder) for _ in range(2)]
    assert store(ranks[0], 1)
    for rank in ranks:
        rank.use_name(UPDATE)
    assert bytes_of(folder) == 0 and locked(folder) == [f"{name_of('m')}-{UPDATE}"]


def test_a_storage_that_is_cleared_keeps_other_models(folder: Path) -> None:
    """The endpoint /clear_hicache_storage_backend."""
    one, two = open_storage(folder, "one"), open_storage(folder, "two")
    assert store(one, 1) and store(two, 1)
    assert one.clear() and not stored(one, 1) and stored(two, 1)
    assert store(one, 1) and stored(one, 1)


# Full disks


@contextmanager
def disk_of(folder: Path, size: int) -> Iterator[None]:
    """Context manager: mount a file system of `size` bytes on a folder."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    if not ROOT or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield
    finally:
        # The storage keeps its lock open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line a minute says so. A page that is stored already is found. Once there is space pages are stored again."""
    clock = [0.0]
    with disk_of(folder, 64 << 10):
        monkeypatch.setattr(storage_module.time, "monotonic", lambda: clock[0])
        storage = open_storage(folder)
        full = 0
        while not full:
            try:
                assert store(storage, clock[0] == 0 and len(list(folder.iterdir())))
            except storage_module.StorageFull:
                full = len(list(folder.glob("*.bin")))
        assert full > 2

        def rejected(at: int) -> None:
            with pytest.raises(storage_module.StorageFull):
                store(storage, at)

        for minute in range(3):
            for at in range(50):
                rejected(1000 + at)
            lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            lines = [line for line in lines if "already registered" not in line]
            assert len(lines) == minute + 1, lines
            assert "the file system is full, free some space: No space left on device" in lines[-1]
            clock[0] += 61
        assert store(storage, 1) and stored(storage, 1), "it is there"
        assert not list(folder.glob("*.tmp"))
        for path in list(folder.glob("*.bin"))[:2]:
            path.unlink()
        assert store(storage, 1000) and stored(storage, 1000)


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), OSError(errno.EIO, "broken")])
def test_pages_that_could_not_be_written_take_no_space(
    monkeypatch: pytest.MonkeyPatch, folder: Path, error: OSError
) -> None:
    """The limit of four pages counts the pages in the folder only."""
    storage = open_storage(folder, max_size=4 * PAGE, eviction_ratio=1)
    with monkeypatch.context() as patch:
        patch.setattr(storage_module, "write_file", Mock(side_effect=error))
        patch.setattr(storage_module, "PAUSE_SECONDS", 0.0)
        for at in range(9):
            with suppress(storage_module.StorageFull):
                assert not store(storage, at)
    for at in range(4):
        assert store(storage, at)
    assert all(stored(storage, at) for at in range(4))


def test_the_folder_is_scanned_now_and_then(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A storage scans its folder each time that it has written a part of the limit, not with every page."""
    pages = 8 * storage_module.LOOKS
    storage = open_storage(folder, max_size=pages * PAGE, eviction_ratio=1)
    scans = Mock(wraps=storage_module.stored_files)
    monkeypatch.setattr(storage_module, "stored_files", scans)
    for at in range(pages):
        assert store(storage, at)
    assert storage_module.LOOKS / 2 <= scans.call_count <= storage_module.LOOKS


def test_limits_without_space_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(folder, min_free_space=1 << 60)
    for at in range(3):
        with pytest.raises(storage_module.StorageFull):
            store(storage, at)
    lines = [line for line in caplog.messages if "no pages are stored" in line]
    assert len(lines) == 1 and lines[0].endswith("its limits max_size and min_free_space leave no space")


# The command, without permission


@contextmanager
def another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context manager in a folder, as a user without permission to write it or to read the files with mode 0."""
    monkeypatch.chdir(folder)
    folder.chmod(0o755 if ROOT else 0o555)
    if ROOT:
        os.seteuid(65534)
    try:
        yield
    finally:
        if ROOT:
            os.seteuid(0)
        folder.chmod(0o700)


def test_the_tool_without_permission(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    run = CliRunner().invoke
    page, other = (put(folder, f"{key(at)}_{name_of('n')}.bin", 0) for at in (1, 2))
    former = put(folder, f"{key(3)}_{name_of('o')}-{UPDATE}.bin", 0)
    page.chmod(0)
    run(app, ["storage", "ls", str(folder)])  # imports as root
    with another_user(folder, monkeypatch):
        verified = run(app, ["storage", "verify", "."])
        cleared = run(app, ["storage", "clear", ".", "--yes"])
        pruned = run(app, ["storage", "prune", "."])
    assert verified.exit_code == 1 and f"cannot be read: {page.name}: Permission denied\n" in verified.output
    assert "0 pages are sound, 2 are damaged, 1 cannot be read, 0 files were not checked\n" in verified.output
    assert cleared.exit_code == pruned.exit_code == 1
    files = f"2 files, {2 * PAGE} bytes: {name_of('n')}, unused"
    assert f"cannot be removed, Permission denied: {files}\n" in cleared.output and "removed 2" not in cleared.output
    assert pruned.output.startswith(f"cannot be removed, Permission denied: 1 files, {PAGE} bytes: {name_of('o')}")
    assert page.exists() and other.exists() and former.exists() and locked(folder) == []


def test_an_empty_folder_is_said_to_be_empty(folder: Path) -> None:
    listed = CliRunner().invoke(app, ["storage", "ls", str(folder)])
    assert listed.exit_code == 0 and listed.output == f"{folder} has no pages\n"
