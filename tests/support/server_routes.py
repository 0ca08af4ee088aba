"""Write the routes of SGLang's HTTP server to a file: its path and its class by line.

server_forkserver.py runs this module, because the import of the server takes seconds.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def routes_of(router: Any) -> Iterator[Any]:
    """Yield the routes of an app, including those of the routers that it includes."""
    for route in router.routes:
        included = getattr(route, "original_router", None)
        yield from [route] if included is None else routes_of(included)


if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import app

    lines = [f"{route.path} {type(route).__name__}" for route in routes_of(app)]
    Path(sys.argv[1]).write_text("\n".join(lines))
