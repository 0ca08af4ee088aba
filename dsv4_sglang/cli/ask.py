"""Print a conversation once a server is up: `python -m dsv4_sglang.cli.ask PID MODEL QUESTION FLAGS...`.

`serve --ask` starts this process and then becomes the server with these flags, process PID.
"""

from __future__ import annotations

import os
import sys

from dsv4_sglang.cli.client import Server
from dsv4_sglang.cli.conversation import converse
from dsv4_sglang.cli.server import wait_ready

READY_SECONDS = 1200.0
MAX_TOKENS = 16


def ask(process: int, model_path: str, question: str, flags: list[str]) -> int:
    """Wait for the server and print a conversation.

    Args:
        process: id of the server, which is the parent. The wait ends with it.
        model_path: model path of the server.
        question: question of the first conversation turn.
        flags: flags of the server.

    Returns:
        The exit code: 0 after the conversation, 1 if there was none.
    """
    try:
        server = Server.of(flags)
        wait_ready(server, alive=lambda: os.getppid() == process, timeout=READY_SECONDS)
        converse(server, model_path, question, MAX_TOKENS)
    except (OSError, RuntimeError) as error:
        print(f"dsv4-sglang: no conversation: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"dsv4-sglang: serving at {server.url}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(ask(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
