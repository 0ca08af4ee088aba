"""The error of a launch that cannot be served, and how a command shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class LaunchError(ValueError):
    """A launch that is rejected. Each argument is one reason: it names what was given, what was expected, what to do.

    Commands print the reasons alone, one line each, without a traceback.
    """

    def __str__(self) -> str:
        return "\n".join(self.args)

    def show(self) -> None:
        """Print the reasons to stderr, one line each."""
        print("\n".join(f"dsv4_sglang: {reason}" for reason in self.args), file=sys.stderr, flush=True)


def without_traceback(original: ExceptHook) -> ExceptHook:
    """Return a `sys.excepthook` that shows a LaunchError as its reasons alone and gives `original` all else."""

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, LaunchError):
            error.show()
        else:
            original(kind, error, traceback)

    return hook
