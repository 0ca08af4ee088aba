"""The little HTTP that the commands need: wait for a server, ask for one completion."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Completion:
    prompt: str
    text: str
    tokens: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.prompt!r} -> {self.text!r} ({self.tokens} tokens in {self.seconds:.1f} s)"


def wait_ready(base_url: str, alive: Callable[[], bool], timeout: float) -> None:
    """Return when `base_url` answers /health.

    Raises RuntimeError when `alive` turns false before, TimeoutError after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while alive():
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=10) as response:
                if response.status == 200:
                    return
        except OSError:  # not listening yet, or 503 while it starts
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"no server answered at {base_url} within {timeout:.0f} s")
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the server at {base_url} ended before it was ready")


def complete(base_url: str, prompt: str, max_tokens: int, timeout: float = 300) -> Completion:
    """One greedy completion over the OpenAI route. Raises RuntimeError with the server's words when it refuses."""
    body = {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"the server answered {error.code}: {error.read().decode(errors='replace')}") from None
    return Completion(
        prompt=prompt,
        text=answer["choices"][0]["text"],
        tokens=answer["usage"]["completion_tokens"],
        seconds=time.monotonic() - start,
    )
