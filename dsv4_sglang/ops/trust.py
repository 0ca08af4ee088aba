"""Checks of file ownership and permissions. Loading a library runs its code, so only trusted files may be loaded."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def require_owner(path: Path, remedy: str) -> None:
    """Raise RuntimeError unless this user or root owns `path`. `remedy` is the last sentence of the message.

    Root is trusted because it can change this process and its Python anyway, and because images and shared
    installations belong to root.
    """
    owner, me = path.stat().st_uid, os.geteuid()
    if owner not in (me, 0):
        raise RuntimeError(
            f"{path} belongs to user {owner}; expected user {me}, who runs this process, or root. {remedy}"
        )


def require_own(path: Path, remedy: str) -> None:
    """Raise RuntimeError unless this user or root owns `path` (a file or a folder) and nobody else can write it.

    `remedy` is the last sentence of the message.
    """
    require_owner(path, remedy)
    status = path.stat()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"{path} has mode {_mode(status)}: users other than its owner can write it. `chmod go-w {path}` if nobody "
            f"has touched it. {remedy}"
        )


def reject_writable_by_all(path: Path, *, adding: bool = False) -> None:
    """Raise RuntimeError if every user of the machine can change or replace `path`.

    With `adding` also if every user can add files to the folder. This check is for paths that the user names: access of
    a group is the user's choice. A folder with the sticky bit, like /tmp, passes: all users may write to it, but only
    the owner of a file can replace it.
    """
    real = path.resolve()
    for place in (real, real.parent):
        status = place.stat()
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX and not (adding and place == real)
        if status.st_mode & stat.S_IWOTH and not sticky:
            raise RuntimeError(
                f"{place} has mode {_mode(status)}: every user can write it. `chmod o-w {place}` if nobody has touched "
                "it, otherwise use another place"
            )


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"
