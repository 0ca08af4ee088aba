"""Entry point of the command `dsv4-sglang` and of `python -m dsv4_sglang`."""

from __future__ import annotations

import sys

from dsv4_sglang.requirements import advice_after


def main() -> None:
    """Run the command. A package that the commands themselves need and that is not installed is named in one line."""
    try:
        from dsv4_sglang.cli.app import app
    except ModuleNotFoundError as error:
        if (line := advice_after(error)) is None:
            raise
        sys.exit(f"dsv4-sglang: {line}")
    app(prog_name="dsv4-sglang")


if __name__ == "__main__":
    main()
