"""Turnover of a server: clients that each send one request after the other, all with new prompts."""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from benchmarks import servers
from benchmarks.client import Client
from benchmarks.command_line import load_of
from benchmarks.report import spread

# At least so many requests in all, and of each client.
REQUESTS, OF_A_CLIENT = 8, 2


class Turnover(NamedTuple):
    """A load of `clients` clients whose prompts have `prompt` tokens and whose answers have `answer` tokens."""

    prompt: int
    answer: int
    clients: int

    @classmethod
    def parse(cls, text: str) -> Turnover:
        numbers = load_of(text)
        load = cls(*numbers) if numbers else None
        if load is None or load.prompt < 1 or load.answer < 2 or load.clients < 1:
            raise argparse.ArgumentTypeError(
                f"turnover {text}: expected PROMPT+ANSWERxCLIENTS with at least 1+2x1 (a first and a later token), "
                "as in 8192+1024x64"
            )
        return load

    def __str__(self) -> str:
        return f"{self.prompt}+{self.answer}x{self.clients}"

    def measure(self, url: str, prompt: Callable[[int], list[int]], gpus: int) -> dict[str, Any]:
        """Return the row of the load. Its figures are the columns of SGLang's cookbook: tokens/s of prompts and answers
        per GPU, and p50 of the time to the first token (TTFT) and of the time per later token (TPOT).

        Args:
            url: address of the server.
            prompt: returns a number of random tokens, different ones at each call.
            gpus: GPUs of the server.
        """
        client = Client(url)
        prompts = [array("i", prompt(self.prompt)) for _ in range(max(REQUESTS, OF_A_CLIENT * self.clients))]
        before, start = servers.host_copies(url), time.monotonic()
        with ThreadPoolExecutor(self.clients) as pool:
            answers = list(pool.map(partial(client.generate, count=self.answer), prompts))
        seconds = time.monotonic() - start
        row = {
            "measure": "turnover tokens/s/GPU",
            "load": str(self),
            "value": len(prompts) * (self.prompt + self.answer) / seconds / gpus,
            "requests": len(prompts),
            "seconds": seconds,
            "first_token_ms": spread([one.first_token_s for one in answers]),
            "later_token_ms": spread([(one.total_s - one.first_token_s) / (self.answer - 1) for one in answers]),
        }
        client.generate(array("i", prompt(self.prompt)), 1)  # counters are published when requests start and end
        copies = {name: value - before[name] for name, value in servers.host_copies(url).items()}
        return row | ({"host copies": copies} if copies else {})
