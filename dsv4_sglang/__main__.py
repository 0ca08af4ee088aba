"""Entry point of the command `dsv4-sglang` and of `python -m dsv4_sglang`."""

from __future__ import annotations

import signal
import sys

from dsv4_sglang.requirements import advice_after


def main() -> None:
    """Run the command.

    Ctrl-C ends it at once, without a traceback of its imports. A command that cleans up sets Python's handler. A
    package that all commands need and that is not installed is named in one line.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from dsv4_sglang.cli.app import app
    except ModuleNotFoundError as error:
        if (line := advice_after(error)) is None:
            raise
        sys.exit(f"dsv4-sglang: {line}")
    app(prog_name="dsv4-sglang")


if __name__ == "__main__":
    main()
