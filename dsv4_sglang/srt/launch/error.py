"""Error of a server that cannot be started, and its output on the command line."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class LaunchError(ValueError):
    """Rejection of a server's flags or environment.

    Each argument is one reason. It names what was given, what was expected, and what to do. Commands print the reasons
    only, one per line, without a traceback.
    """

    def __str__(self) -> str:
        return "\n".join(self.args)

    def show(self) -> None:
        """Print the reasons to stderr, one per line."""
        print("\n".join(f"dsv4_sglang: {reason}" for reason in self.args), file=sys.stderr, flush=True)


def without_traceback(original: ExceptHook) -> ExceptHook:
    """Return a `sys.excepthook` that prints only the reasons of a LaunchError, and passes other errors to
    `original`."""

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, LaunchError):
            error.show()
        else:
            original(kind, error, traceback)

    return hook


@contextmanager
def ending_with_the_reason() -> Iterator[None]:
    """Context manager in a scheduler process: if the server is rejected inside, print the reason as the last line.

    SGLang would log a traceback, and its launcher more before it kills itself. SGLang's subprocesses end with the
    launcher.
    """
    try:
        yield
    except LaunchError as error:
        if (launcher := multiprocessing.parent_process()) is None or launcher.pid is None:
            raise
        error.show()
        os.kill(launcher.pid, signal.SIGKILL)
        raise SystemExit(1) from None
