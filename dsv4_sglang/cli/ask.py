"""`python -m dsv4_sglang.cli.ask URL PROMPT PID`: one completion, printed, as soon as the server of process PID is up.

`serve --ask` starts this beside itself before it becomes the server.
"""

from __future__ import annotations

import os
import sys

from dsv4_sglang.cli.client import complete, wait_ready

READY_SECONDS = 1200.0
MAX_TOKENS = 16


def ask(base_url: str, prompt: str, server: int) -> int:
    """0 after a completion, 1 if there was none. Waits for `server`, the parent process, and ends with it."""
    try:
        wait_ready(base_url, alive=lambda: os.getppid() == server, timeout=READY_SECONDS)
        print(f"dsv4-sglang: {complete(base_url, prompt, MAX_TOKENS)}\ndsv4-sglang: serving at {base_url}", flush=True)
    except (OSError, RuntimeError) as error:
        print(f"dsv4-sglang: no completion: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], sys.argv[2], int(sys.argv[3])))
