"""Folders of stored pages: permissions, file states, the order of removal, and the command for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from typer.testing import CliRunner

from dsv4_sglang.cli import app
from dsv4_sglang.srt.host_cache.folder import (
    FOLDERS,
    FORMER_FORMAT,
    FORMER_WEIGHTS,
    PAGE_VERSION,
    STALE_SECONDS,
    TEMPORARY,
    UNUSED,
    USED,
    describe_weights,
    in_use,
    prune,
    stored_files,
)
from dsv4_sglang.srt.host_cache.storage import FileStorage
from dsv4_sglang.srt.integration.launch_error import LaunchError

VARIABLE, DEFAULT_FOLDER = FOLDERS["file"]
# Bytes.
PAGE = 1000


def name_of(model: str) -> str:
    return f"{model}-dsv4v{PAGE_VERSION}-fp8-mxfp4-{'0' * 32}"


def open_storage(folder: Path, model: str = "m", **extra: Any) -> FileStorage:
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=True,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=name_of(model),
        extra_config=extra,
    )
    return FileStorage(config, str(folder))


def key(at: int) -> str:
    return f"{at:064x}"


def store(storage: FileStorage, at: int) -> bool:
    return storage.set(key(at), torch.full([PAGE], at % 256, dtype=torch.uint8))


def stored(storage: FileStorage, at: int) -> bool:
    return storage.get(key(at), torch.zeros(PAGE, dtype=torch.uint8)) is not None


def put(folder: Path, name: str, age: float, size: int = PAGE) -> Path:
    """Create a file of another process with the given age in seconds."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / name).write_bytes(bytes(size))
    now = (folder / name).stat().st_mtime
    os.utime(folder / name, (now - age, now - age))
    return folder / name


def orphans(folder: Path, age: float = 2 * STALE_SECONDS) -> dict[str, Path]:
    """Create one file of each kind that no server will read again. Return them by state."""
    former = f"{key(1)}_/models/a_b-dsv4v{PAGE_VERSION - 1}-fp8-mxfp4-{'1' * 16}.bin".replace("/", "-")
    return {
        FORMER_FORMAT: put(folder, former, age),
        FORMER_WEIGHTS: put(folder, f"{key(2)}.deepseek_v4_c4_state_{name_of('w')}-{'2' * 16}.bin", age - 1),
        "of 0.5.17": put(folder, f"{key(3)}_{name_of('t')}.bin.tmp.12.34.{'3' * 32}", age),
        "of 0.5.23": put(folder, f".{'4' * 32}.tmp", age),
    }


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


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
    assert [found.pop(left[kind].name) for kind in left] == [FORMER_FORMAT, FORMER_WEIGHTS, TEMPORARY, TEMPORARY]
    assert found.pop(unused.name) == UNUSED
    ours = {name: state for name, state in found.items() if name_of("m") in name}
    assert sorted(ours.values()) == [UNUSED, USED] and ours == found
    assert in_use(folder, f"{name_of('m')}-0123456789abcdef") and not in_use(folder, name_of("m"))


def test_pages_of_a_killed_server_are_not_in_use(tmp_path: Path) -> None:
    """Another process holds the lock while it lives."""
    code = "from test_host_folder import *; s = open_storage(Path(sys.argv[1])); print(store(s, 1)); sys.stdin.read()"
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "pages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        assert list(states(tmp_path / "pages").values()) == [USED]
        process.kill()
    assert list(states(tmp_path / "pages").values()) == [UNUSED]


def test_pruning_removes_what_no_server_reads_again(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    left = orphans(folder)
    now = put(folder, f".{'5' * 32}.tmp", 0)
    old = put(folder, f"{key(5)}_{name_of('n')}.bin", 3 * 86400)
    new = put(folder, f"{key(5)}_{name_of('o')}.bin", 0)
    foreign = put(folder, f"{key(6)}_another-cache.bin", 9 * 86400)
    storage = open_storage(folder)
    assert store(storage, 7)
    (folder / f"{name_of('gone')}.lock").touch()
    assert {file.path for file in prune(folder)} == set(left.values())
    assert now.exists() and old.exists() and new.exists() and foreign.exists() and stored(storage, 7)
    assert [path.stem for path in folder.glob("*.lock")] == [name_of("m")]
    assert [file.path for file in prune(folder, unused_days=2)] == [old]
    assert [file.path for file in prune(folder, names=[name_of("o"), name_of("m")])] == [new]
    assert prune(folder, unused_days=0) == [] and stored(storage, 7) and foreign.exists()


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
    assert removed.exit_code == 0 and removed.output.count("removed") == 5 and bytes_of(folder) == 0
    assert run(app, ["storage", "prune", str(folder)]).output == "nothing to remove\n"
    missing = run(app, ["storage", "ls", str(tmp_path / "nowhere")], env={"COLUMNS": "400"})
    assert missing.exit_code == 2 and "does not exist" in missing.output


def test_the_tool_says_whose_pages_there_are_and_which_are_damaged(tmp_path: Path) -> None:
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


def test_the_tool_clears_what_nobody_uses(tmp_path: Path) -> None:
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
    assert not any(left[kind].exists() for kind in ("of 0.5.17", "of 0.5.23"))
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


def test_new_weights_are_stored_within_the_bound(tmp_path: Path) -> None:
    """Pages of new weights have another name.

    Pages of the old weights that were written in the meantime are orphans.
    """
    folder = tmp_path / "pages"
    storage = open_storage(folder, max_size=4 * PAGE, eviction_ratio=1)
    assert all(store(storage, at) for at in range(4))
    storage.clear()
    storage.use_name("0123456789abcdef")
    for at in range(9):
        assert store(storage, at) and bytes_of(folder) <= 4 * PAGE
    assert [at for at in range(9) if stored(storage, at)] == [5, 6, 7, 8]


# Permissions


@pytest.mark.parametrize("owner", ["root", "me", "another"])
def test_a_named_folder_of_another_user_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, owner: str
) -> None:
    folder = tmp_path / "named"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(VARIABLE, str(folder))
    me = os.geteuid()
    if owner == "another":
        os.chown(folder, 12345, -1) if me == 0 else monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(LaunchError, match=f"belongs to user .*; expected user .* or root.* {VARIABLE}"):
            open_storage(tmp_path)
        return
    if owner == "root" and me == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert store(open_storage(tmp_path), 1)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o703])
def test_a_named_folder_that_everybody_can_write_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    """This includes folders with the sticky bit, such as /tmp, because other users can add pages there."""
    folder = tmp_path / "named"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv(VARIABLE, str(folder))
    with pytest.raises(LaunchError, match=rf"has mode {mode:04o}: every user can write it"):
        open_storage(tmp_path)


def test_a_page_that_another_user_has_stored_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server may not change the mode of such a page.

    An error would end SGLang's storage thread and all its saves.
    """

    def rejected(self: Path, mode: int) -> None:
        raise PermissionError(f"{self} belongs to another user")

    storage = open_storage(tmp_path / "pages")
    monkeypatch.setattr(Path, "chmod", rejected)
    assert storage.set("key", torch.arange(40, dtype=torch.uint8))
    assert storage.set("key", torch.arange(40, dtype=torch.uint8))


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


def test_a_default_folder_is_its_owners_alone(tmp_path: Path) -> None:
    assert modes(open_storage(tmp_path / "default")) == (0o700, 0o600)


@pytest.mark.parametrize("what", ["group", "owner", "link"])
def test_a_default_folder_of_others_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    """The default folder is in /tmp, where any user can create it first."""
    monkeypatch.delenv(VARIABLE, raising=False)
    default = tmp_path / "hicache"
    if what == "link":
        (tmp_path / "theirs").mkdir()
        default.symlink_to(tmp_path / "theirs")
    else:
        default.mkdir()
        default.chmod(0o775 if what == "group" else 0o755)
    if what == "owner":
        me = os.geteuid()
        os.chown(default, 12345, -1) if me == 0 else monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    why = {"group": "has mode 0775: users other than its owner", "owner": "belongs to user", "link": "is a link"}[what]
    with pytest.raises(LaunchError, match=f"{why}.* SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"):
        open_storage(default)


def test_the_default_folder_is_sglangs() -> None:
    assert signature(HiCacheFile).parameters["file_path"].default == DEFAULT_FOLDER


# File names


def test_a_folder_that_takes_no_page_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The path of the folder is almost as long as the limit."""
    deep = tmp_path
    while len(str(deep)) < 4096 - 120:
        deep = deep / ("d" * min(200, 4096 - 110 - len(str(deep))))
    monkeypatch.setenv(VARIABLE, str(deep))
    with pytest.raises(LaunchError, match=r"cannot hold a page: File name too long.* Set SGLANG_HICACHE_FILE_BACKEND"):
        open_storage(tmp_path)
    assert not list(deep.iterdir())
