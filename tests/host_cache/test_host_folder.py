"""Folders of stored pages: permissions, file states, the order of removal, and the command for them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from support.storage import PAGE, VARIABLE, bytes_of, key, name_of, open_storage, put, store, stored
from typer.testing import CliRunner

from dsv4_sglang.cli import app
from dsv4_sglang.srt.host_cache.folder import (
    FORMER_FORMAT,
    FORMER_WEIGHTS,
    PAGE_VERSION,
    STALE_SECONDS,
    TEMPORARY,
    UNUSED,
    USED,
    Cleaning,
    prune,
    stored_files,
)
from dsv4_sglang.srt.host_cache.locks import in_use
from dsv4_sglang.srt.host_cache.storage import FileStorage
from dsv4_sglang.srt.host_cache.used_folder import describe_weights
from dsv4_sglang.srt.launch.error import LaunchError


def orphans(folder: Path, age: float = 2 * STALE_SECONDS) -> dict[str, Path]:
    """Create one file of each kind that no server will read again. Return them by state."""
    former = f"{key(1)}_/models/a_b-dsv4v{PAGE_VERSION - 1}-fp8-mxfp4-{'1' * 16}.bin".replace("/", "-")
    return {
        FORMER_FORMAT: put(folder, former, age),
        FORMER_WEIGHTS: put(folder, f"{key(2)}.deepseek_v4_c4_state_{name_of('w')}-{'2' * 16}.bin", age - 1),
        TEMPORARY: put(folder, f".{'4' * 32}.tmp", age),
    }


def states(folder: Path) -> dict[str, str]:
    return {file.path.name: file.state for file in stored_files(folder)}


# States of files


def test_states_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    left = orphans(folder)
    unused = put(folder, f"{key(5)}_{name_of('n')}.bin", 0)
    put(folder, "another.bin", 0)
    put(folder, f"{key(6)}_another-cache.bin", 0)
    storage = open_storage(folder)
    assert store(storage, 7)
    storage.use_name("0123456789abcdef")
    assert store(storage, 8)
    found = states(folder)
    assert [found.pop(left[kind].name) for kind in left] == [FORMER_FORMAT, FORMER_WEIGHTS, TEMPORARY]
    assert found.pop(unused.name) == UNUSED
    assert found == {f"{key(8)}_{name_of('m')}-0123456789abcdef.bin": USED}, "the update removed the other page"
    assert in_use(folder, f"{name_of('m')}-0123456789abcdef") and not in_use(folder, name_of("m"))


def test_pruning_removes_unreadable_pages(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    left = orphans(folder)
    now = put(folder, f".{'5' * 32}.tmp", 0)
    old = put(folder, f"{key(5)}_{name_of('n')}.bin", 3 * 86400)
    new = put(folder, f"{key(5)}_{name_of('o')}.bin", 0)
    foreign = put(folder, f"{key(6)}_another-cache.bin", 9 * 86400)
    storage = open_storage(folder)
    assert store(storage, 7)
    (folder / f"{name_of('gone')}.lock").touch()
    assert {file.path for file in prune(folder).removed} == set(left.values())
    assert now.exists() and old.exists() and new.exists() and foreign.exists() and stored(storage, 7)
    assert [path.stem for path in folder.glob("*.lock")] == [name_of("m")]
    assert [file.path for file in prune(folder, unused_days=2).removed] == [old]
    assert [file.path for file in prune(folder, names=[name_of("o"), name_of("m")]).removed] == [new]
    assert prune(folder, unused_days=0) == Cleaning() and stored(storage, 7) and foreign.exists()


def test_the_tool(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    orphans(folder)
    put(folder, f"{key(5)}_{name_of('n')}.bin", 3 * 86400)
    run = CliRunner().invoke
    listed = run(app, ["storage", "ls", str(folder)]).output
    for state in (FORMER_FORMAT, FORMER_WEIGHTS, TEMPORARY, UNUSED):
        assert state in listed
    assert run(app, ["storage", "ls"], env={VARIABLE: str(folder)}).output == listed
    removed = run(app, ["storage", "prune", str(folder), "--unused-days", "2"])
    assert removed.exit_code == 0 and removed.output.count("removed") == 4 and bytes_of(folder) == 0
    assert run(app, ["storage", "prune", str(folder)]).output == "nothing to remove\n"
    missing = run(app, ["storage", "ls", str(tmp_path / "nowhere")], env={"COLUMNS": "400"})
    assert missing.exit_code == 2 and "does not exist" in missing.output


def test_tool_lists_owners_and_damaged_pages(tmp_path: Path) -> None:
    folder, run = tmp_path / "pages", CliRunner().invoke
    describe_weights(name_of("m"), "/models/m")
    storage = open_storage(folder)
    assert store(storage, 1) and store(storage, 2)
    foreign = put(folder, f"{key(5)}_{name_of('n')}.bin", 2 * 86400)
    listed = run(app, ["storage", "ls", str(folder)]).output
    assert re.search(rf"{name_of('m')} .*/models/m .* used .* 2 .* {2 * PAGE} ", listed)
    assert re.search(rf"{name_of('n')} .*unknown .* unused .* 1 .* {PAGE} .* 2 d ago", listed)
    only_ours = ["storage", "verify", str(folder), "--name", name_of("m")]
    sound = run(app, only_ours)
    assert sound.exit_code == 0 and sound.output == "2 pages are sound, 0 are damaged, 0 files were not checked\n"
    page = next(path for path in folder.glob("*.bin") if path.name.startswith(key(2)))
    content = bytearray(page.read_bytes())
    content[7] ^= 1
    page.write_bytes(content)
    damaged = run(app, only_ours)
    assert damaged.exit_code == 1 and f"damaged: {page}" in damaged.output and "1 pages are sound, 1" in damaged.output
    swapped = folder / page.name.replace(key(2), key(3))
    swapped.write_bytes((folder / page.name.replace(key(2), key(1))).read_bytes())
    assert f"damaged: {swapped}" in run(app, only_ours).output, "a page under another name"
    assert foreign.exists()


def test_tool_clears_unused_pages(tmp_path: Path) -> None:
    folder, run = tmp_path / "pages", CliRunner().invoke
    storage = open_storage(folder)
    assert store(storage, 1)
    one, two = (put(folder, f"{key(5)}_{name_of(name)}.bin", 0) for name in ("n", "o"))
    (folder / f"{name_of('n')}.lock").touch()
    rejected = run(app, ["storage", "clear", str(folder)], input="n\n")
    assert rejected.exit_code == 1 and one.exists() and two.exists()
    cleared = run(app, ["storage", "clear", str(folder), "--name", name_of("n"), "--yes"])
    assert cleared.exit_code == 0 and not one.exists() and two.exists()
    cleared = run(app, ["storage", "clear", str(folder)], input="y\n")
    assert "kept, in use: 1 files" in cleared.output and not two.exists() and stored(storage, 1)
    assert [path.stem for path in folder.glob("*.lock")] == [name_of("m")]


# Size bounds


def test_the_bound_is_the_folders(tmp_path: Path) -> None:
    """The size bound applies to the whole folder, with the pages of two servers and files of other processes.

    Orphans are removed first, then pages of no running server, then the remaining pages in LRU order.
    """
    folder = tmp_path / "pages"
    left = orphans(folder)
    unused = put(folder, f"{key(5)}_{name_of('n')}.bin", -500)
    for path, age in ((left[FORMER_FORMAT], -1000), (left[FORMER_WEIGHTS], -2000)):
        put(folder, path.name, age)  # newer than any used page
    one, two = (open_storage(folder, model, max_size=10 * PAGE, eviction_ratio=1) for model in ("one", "two"))
    assert not left[TEMPORARY].exists()
    evicted = []
    for at in range(7):
        for storage in (one, two):
            assert store(storage, at)
            assert bytes_of(folder) <= 10 * PAGE
            evicted.append([not path.exists() for path in (left[FORMER_FORMAT], left[FORMER_WEIGHTS], unused)])
    steps = [sorted(step, reverse=True) for step in evicted]
    assert steps == evicted and [sum(step) for step in evicted] == [0] * 7 + [1, 2, 3] + [3] * 4
    assert sum(stored(storage, at) for storage in (one, two) for at in range(7)) == 10
    for at in range(7, 17):
        assert store(two, at) and bytes_of(folder) <= 10 * PAGE
    assert not any(stored(one, at) for at in range(7)), "those of the other server were used longest ago"


def test_pages_that_are_read_stay(tmp_path: Path) -> None:
    """Pages read before a restart stay, too: their file times store the last use."""
    folder = tmp_path / "pages"
    storage = open_storage(folder)
    for at in range(4):
        assert store(storage, at)
        os.utime(folder / f"{key(at)}_{name_of('m')}.bin", (at, at))
    assert stored(open_storage(folder, max_size=4 * PAGE, eviction_ratio=1), 0)
    storage = open_storage(folder, max_size=4 * PAGE, eviction_ratio=1)
    assert store(storage, 9)
    assert [at for at in range(4) if stored(storage, at)] == [0, 2, 3]


# Permissions


GROUP, ALL = "users other than its owner can write it", "every user can write it"
OTHER = "belongs to user .*; expected user .* or root"


@pytest.mark.parametrize(
    ("named", "mode", "mine", "why"),
    [
        *[(True, mode, True, f"has mode {mode:04o}: {ALL}") for mode in (0o777, 0o1777, 0o703)],
        (True, 0o700, False, f"{OTHER}.* {VARIABLE}"),
        (False, 0o775, True, f"has mode 0775: {GROUP}.* {VARIABLE}"),
        (False, 0o755, False, f"{OTHER}.* {VARIABLE}"),
    ],
)
def test_folder_writable_by_others_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool, mode: int, mine: bool, why: str
) -> None:
    """A named folder with the sticky bit, such as /tmp, is rejected too, because other users can add pages there. The
    default folder is in /tmp, where any user can create it first."""
    folder, me = tmp_path / "pages", os.geteuid()
    folder.mkdir()
    folder.chmod(mode)
    if not mine:
        os.chown(folder, 12345, -1) if me == 0 else monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if named:
        monkeypatch.setenv(VARIABLE, str(folder))
    with pytest.raises(LaunchError, match=why):
        open_storage(folder)


def test_folder_of_root_is_used_but_no_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "pages")
    with pytest.raises(LaunchError, match=f"is a link; expected a folder; set {VARIABLE}"):
        open_storage(tmp_path / "link")
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "pages"))
    assert store(open_storage(tmp_path), 1)


def test_page_of_another_user_counts_as_stored(tmp_path: Path) -> None:
    """The server may neither write such a page nor change its mode.

    An error would end SGLang's storage thread and all its saves.
    """
    storage = open_storage(tmp_path / "pages")
    assert store(storage, 1)
    page = next((tmp_path / "pages").glob("*.bin"))
    page.chmod(0o444)
    if os.geteuid() == 0:
        os.chown(page, 12345, -1)
    before = page.stat()
    assert store(storage, 1)
    after = page.stat()
    assert (after.st_mode, after.st_uid, after.st_ino) == (before.st_mode, before.st_uid, before.st_ino)


def modes(storage: FileStorage) -> tuple[int, int]:
    """Return the modes of the folder and of a file stored in it."""
    assert storage.set("key", torch.arange(40, dtype=torch.uint8))
    file = next(Path(storage.file_path).glob("key*.bin"))
    return Path(storage.file_path).stat().st_mode & 0o777, file.stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("before", "folder", "file"),
    [(None, 0o700, 0o600), (0o750, 0o750, 0o640), (0o770, 0o770, 0o660), (0o755, 0o755, 0o644)],
)
def test_a_named_folder_says_who_may_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: int | None, folder: int, file: int
) -> None:
    """A folder that the storage creates is its owner's alone."""
    named = tmp_path / "a" / "named"
    monkeypatch.setenv(VARIABLE, str(named))
    if before is not None:
        named.mkdir(parents=True)
        named.chmod(before)
    assert modes(open_storage(tmp_path / "default")) == (folder, file)
    assert not (tmp_path / "default").exists()


# File names


def test_unwritable_folder_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file system is read-only. Root passes the checks of modes."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(LaunchError, match=f"pages cannot be written by user .*; set {VARIABLE} to a folder"):
        open_storage(tmp_path / "pages")


def test_folder_that_rejects_pages_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The path of the folder is almost as long as the limit."""
    deep = tmp_path
    while len(str(deep)) < 4096 - 120:
        deep = deep / ("d" * min(200, 4096 - 110 - len(str(deep))))
    monkeypatch.setenv(VARIABLE, str(deep))
    with pytest.raises(LaunchError, match=r"cannot hold a page: File name too long.* Set SGLANG_HICACHE_FILE_BACKEND"):
        open_storage(tmp_path)
    assert not list(deep.iterdir())
