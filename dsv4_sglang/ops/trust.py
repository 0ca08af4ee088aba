"""Whose files may be loaded into this process: a library runs its code at once."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def require_owner(path: Path, remedy: str) -> None:
    """RuntimeError unless this user or root owns `path`.

    Root is trusted because it can change this process and its Python anyway, and because images and shared
    installations are filled by root. `remedy` ends the message: what to do.
    """
    owner, me = path.stat().st_uid, os.geteuid()
    if owner not in (me, 0):
        raise RuntimeError(
            f"{path} belongs to user {owner}; expected user {me}, who runs this process, or root. {remedy}"
        )


def require_own(path: Path, remedy: str) -> None:
    """RuntimeError unless only this user and root can write `path` (a file or a folder), and one of them owns it;
    `remedy` as above."""
    require_owner(path, remedy)
    status = path.stat()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"{path} has mode {_mode(status)}: others than its owner can write it. `chmod go-w {path}` if nobody has "
            f"touched it. {remedy}"
        )


def reject_writable_by_all(path: Path, *, adding: bool = False) -> None:
    """RuntimeError if every user of the machine can change `path` or put another file in its place; with `adding`, also
    if every user can add files to a folder.

    For a path that the user names: its group is the user's choice. In a folder with the sticky bit, as /tmp, all may
    write, but only the owner of a file can replace it.
    """
    real = path.resolve()
    for place in (real, real.parent):
        status = place.stat()
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX and not (adding and place == real)
        if status.st_mode & stat.S_IWOTH and not sticky:
            raise RuntimeError(
                f"{place} has mode {_mode(status)}: every user can write it. `chmod o-w {place}` if nobody has touched "
                "it, else name another place"
            )


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"
