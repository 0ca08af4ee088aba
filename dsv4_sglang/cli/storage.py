"""`dsv4-sglang storage`: what lies in a folder of stored pages, and what of it can be removed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dsv4_sglang.srt.host_cache.folder import StoredFile

storage = typer.Typer(help="The pages in a folder of the storages `file` and `nixl`.", no_args_is_help=True)
FOLDER_VARIABLES = ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"]
Folder = Annotated[
    Path, typer.Argument(help="The folder of the pages.", envvar=FOLDER_VARIABLES, exists=True, file_okay=False)
]


@storage.command("ls")
def ls(folder: Folder) -> None:
    """List pages by model: how many, their bytes, when one was last read or written, and whether a server uses them.

    No server reads pages of former weights and former formats again, nor temporary files of killed processes.
    """
    from rich.console import Console
    from rich.table import Table

    from dsv4_sglang.srt.host_cache.folder import stored_files

    table = Table("model", "state", "files", "bytes", "last used")
    with _readable(folder):
        found = _by_name(stored_files(folder))
    for (name, state), files in sorted(found.items()):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(file.used_at for file in files)))
        table.add_row(name, state, str(len(files)), str(sum(file.bytes for file in files)), used)
    Console(soft_wrap=True, width=160).print(table)


@storage.command("prune")
def prune(
    folder: Folder,
    name: Annotated[
        list[str] | None, typer.Option(help="Remove the pages of this model too, as `ls` names it; may be repeated.")
    ] = None,
    unused_days: Annotated[
        float | None, typer.Option(min=0, help="Remove pages too that no server uses, nor has for so many days.")
    ] = None,
) -> None:
    """Remove pages of former weights and former formats, and temporary files of killed processes.

    Pages of a model that a server uses stay.
    """
    from dsv4_sglang.srt.host_cache.folder import prune as remove_orphans

    with _readable(folder):
        removed = remove_orphans(folder, name or (), unused_days)
    for (of, state), files in sorted(_by_name(removed).items()):
        typer.echo(f"removed {len(files)} files, {sum(f.bytes for f in files)} bytes: {of or 'no model'}, {state}")
    if not removed:
        typer.echo("nothing to remove")


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Show an error of the file system as one line that names the folder."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be read: {error.strerror}") from None


def _by_name(files: Iterable[StoredFile]) -> dict[tuple[str, str], list[StoredFile]]:
    found: dict[tuple[str, str], list[StoredFile]] = defaultdict(list)
    for file in files:
        found[file.name, file.state].append(file)
    return found
