"""`dsv4-sglang storage`: list, verify and remove the pages in a storage folder."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dsv4_sglang.srt.host_cache.folder import Cleaning, StoredFile

storage = typer.Typer(help="The pages in a folder of the storages `file`, `shm` and `nixl`.", no_args_is_help=True)
FOLDER_VARIABLES = [
    "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
    "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR",
    "SGLANG_HICACHE_SHM_BACKEND_STORAGE_DIR",
]
Folder = Annotated[
    Path, typer.Argument(help="The folder of the pages.", envvar=FOLDER_VARIABLES, exists=True, file_okay=False)
]
Names = Annotated[list[str] | None, typer.Option("--name", help="Pages of this model, as `ls` names it; repeatable.")]
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@storage.command("ls")
def ls(folder: Folder) -> None:
    """List pages by model: weights, state, number of pages, bytes, and the times since the oldest and the last use.

    The bytes of `shm` are those of the host memory that has the pages.

    The state is "used" if a server uses the pages. Pages of former weights and formats, and temporary files of killed
    processes, are never read again.
    """
    from rich.console import Console
    from rich.table import Table

    by_name = _by_name(_files(folder))
    if not by_name:
        typer.echo(f"{folder} has no pages")
        return
    table = Table("model", "weights", "state", "pages", "bytes", "GB", "oldest use", "last use")
    for (name, state), files in sorted(by_name.items()):
        size, ages = sum(file.bytes for file in files), [_age(file) for file in files]
        weights = next(filter(None, (file.weights for file in files)), "unknown")
        times = _text_of(max(ages)), _text_of(min(ages))
        table.add_row(
            name, weights, state, str(sum(file.pages for file in files)), str(size), f"{size / 1e9:.2f}", *times
        )
    Console(soft_wrap=True, width=240).print(table)


@storage.command("verify")
def verify(folder: Folder, name: Names = None) -> None:
    """Compare each page with its checksum. Reads the whole folder.

    Pages of former formats and temporary files are left out. Exit code 1 if a page is damaged or cannot be read; a
    server that reads it treats it as a miss and removes it.
    """
    from dsv4_sglang.srt.host_cache.folder import FORMER_FORMAT, TEMPORARY

    counts = dict.fromkeys(("sound", "damaged", "unreadable", "left out"), 0)
    for file in _files(folder, name or ()):
        if file.state in (FORMER_FORMAT, TEMPORARY):
            counts["left out"] += 1
            continue
        try:
            damaged = file.damaged()
        except FileNotFoundError:  # evicted since the folder was listed
            continue
        except OSError as error:
            counts["unreadable"] += 1
            typer.echo(f"cannot be read: {file.path}: {error.strerror}")
            continue
        for page in damaged:
            typer.echo(f"damaged: {page}")
        counts["sound"] += file.pages - len(damaged)
        counts["damaged"] += len(damaged)
    unreadable = f"{counts['unreadable']} cannot be read, " if counts["unreadable"] else ""
    typer.echo(
        f"{counts['sound']} pages are sound, {counts['damaged']} are damaged, {unreadable}"
        f"{counts['left out']} files were not checked"
    )
    if counts["damaged"] or counts["unreadable"]:
        raise typer.Exit(1)


@storage.command("prune")
def prune(
    folder: Folder,
    name: Names = None,
    unused_days: Annotated[
        float | None, typer.Option(min=0, help="Also remove pages that no server has used for N days.")
    ] = None,
) -> None:
    """Remove pages of former weights and former formats, and temporary files of killed processes.

    Pages of a model that a server uses stay. Exit code 1 if a file could not be removed.
    """
    from dsv4_sglang.srt.host_cache.folder import prune as remove_orphans
    from dsv4_sglang.srt.host_cache.stored_segments import prune_segments

    with _readable(folder):
        done = remove_orphans(folder, name or (), unused_days)
        done.add(prune_segments(folder, name or (), unused_days))
    _tell(done)


@storage.command("clear")
def clear(
    folder: Folder,
    name: Names = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove all pages that no server uses, or those of the models of --name.

    Exit code 1 if a file could not be removed.
    """
    from dsv4_sglang.srt.host_cache.folder import clear as remove_unused
    from dsv4_sglang.srt.host_cache.stored_segments import clear_segments

    files = _files(folder, name or ())
    if files and not yes:
        size = sum(file.bytes for file in files)
        typer.confirm(f"Remove {len(files)} files, {size} bytes, but for those in use?", abort=True)
    with _readable(folder):
        done = remove_unused(folder, name or ())
        done.add(clear_segments(folder, name or ()))
    _tell(done)


def _tell(done: Cleaning) -> None:
    """Report removed, kept and failed files by model. Exit with code 1 if any failed."""
    _count("removed", done.removed)
    if not done.removed and not done.failed:
        typer.echo("nothing to remove")
    _count("kept, in use:", done.kept)
    for reason in sorted(set(done.failed.values())):
        _count(f"cannot be removed, {reason}:", [file for file, why in done.failed.items() if why == reason])
    if done.failed:
        raise typer.Exit(1)


def _count(verb: str, files: Iterable[StoredFile]) -> None:
    for (of, state), some in sorted(_by_name(files).items()):
        typer.echo(f"{verb} {len(some)} files, {sum(f.bytes for f in some)} bytes: {of or 'no model'}, {state}")


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Report file system errors as one line that names the folder."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be read: {error.strerror}") from None


def _files(folder: Path, names: Sequence[str] = ()) -> list[StoredFile]:
    from dsv4_sglang.srt.host_cache.folder import stored_files
    from dsv4_sglang.srt.host_cache.stored_segments import stored_segments

    with _readable(folder):
        return [*stored_files(folder, names), *stored_segments(folder, names)]


def _age(file: StoredFile) -> float:
    return max(0.0, time.time() - file.used_at)  # noqa: TID251  (a file outlives a server)


def _text_of(seconds: float) -> str:
    """Format an age in the largest unit in which it is at least 1."""
    size, unit = next((pair for pair in UNITS if seconds >= pair[0]), UNITS[-1])
    return f"{seconds / size:.0f} {unit} ago"


def _by_name(files: Iterable[StoredFile]) -> dict[tuple[str, str], list[StoredFile]]:
    found: dict[tuple[str, str], list[StoredFile]] = defaultdict(list)
    for file in files:
        found[file.name, file.state].append(file)
    return found
