"""Watch the two halves of the cache while two requests run: blocks grow with tokens, state slots with requests.

Start a server that publishes its pools at every step, then this script:

    dsv4-sglang serve --model-path DIR --enable-metrics --decode-log-interval 1
    python examples/pools_filling.py --url http://127.0.0.1:30000

A line is printed when something has changed. "used" belongs to running requests. "kept" are blocks of finished requests
in the prefix cache, for requests with the same beginning. A state slot is free again when its request finishes. The
snapshots from which later requests resume have their own pool; the last column counts them, including those of running
requests.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
import urllib.request

POOLS = {"tokens": "kv", "state slots": "mamba"}  # our name: SGLang's name
SNAPSHOTS = re.compile(r"^dsv4_snapshots\{[^}]*\} (\S+)$", re.MULTILINE)
STATES = {"used": "used", "kept": "evictable", "free": "available"}
BAR = 30


def read_pools(url: str) -> tuple[dict[str, dict[str, int]], int]:
    """Return {pool: {used, kept, free}} and the number of snapshots, from the server's Prometheus page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        page = response.read().decode()
    values = dict(re.findall(r"^sglang:(\w+)\{[^}]*\} (\S+)$", page, re.MULTILINE))
    pools = {
        pool: {state: int(float(values[f"{name}_{key}_tokens"])) for state, key in STATES.items()}
        for pool, name in POOLS.items()
    }
    return pools, sum(int(float(held)) for held in SNAPSHOTS.findall(page))


def generate(url: str, api_key: str, prompt_tokens: int, new_tokens: int, seed: int) -> None:
    """Send one request with its own random prompt, and wait for the answer.

    Args:
        url: URL of the server.
        api_key: API key of the server.
        prompt_tokens: length of the prompt.
        new_tokens: length of the answer.
        seed: seed of the prompt.
    """
    prompt = [3 + (seed * 7919 + i * i) % 250 for i in range(prompt_tokens)]
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{url}/generate", body, headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        response.read()


def bar(pool: dict[str, int]) -> str:
    total = sum(pool.values())
    used = -(-BAR * pool["used"] // total)
    kept = min(BAR - used, -(-BAR * pool["kept"] // total))
    return "#" * used + "+" * kept + "." * (BAR - used - kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key", default="none", help="the server's --api-key, if it has one")
    parser.add_argument("--prompt", type=int, nargs=2, default=(900, 300), help="prompt tokens of the two requests")
    parser.add_argument("--new", type=int, default=48, help="tokens that each request generates")
    parser.add_argument("--interval", type=float, default=0.25, help="seconds between samples")
    options = parser.parse_args()
    try:
        read_pools(options.url)
    except (OSError, KeyError) as error:
        print(f"no pools at {options.url}/metrics ({error!r}): start the server with --enable-metrics", file=sys.stderr)
        return 1
    requests = [
        threading.Thread(target=generate, args=(options.url, options.api_key, length, options.new, seed), daemon=True)
        for seed, length in enumerate(options.prompt)
    ]
    start = time.monotonic()
    for request in requests:
        request.start()
    print("   s   " + "".join(f"{pool:<{BAR + 22}}" for pool in POOLS) + "snapshots ('#' used, '+' kept)")
    shown = None
    running = True
    while running:
        running = any(request.is_alive() for request in requests)
        pools, snapshots = read_pools(options.url)
        if (pools, snapshots) != shown:
            line = "  ".join(f"{bar(pool)} {pool['used']:>6} {pool['kept']:>6} kept" for pool in pools.values())
            print(f"{time.monotonic() - start:5.1f}  {line} {snapshots:>6}", flush=True)
            shown = pools, snapshots
        time.sleep(options.interval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
