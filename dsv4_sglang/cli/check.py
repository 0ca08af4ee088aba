"""`dsv4-sglang check`: audit a running server's cache, and compare answers from the cache with cold answers."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from dsv4_sglang.cli.client import Scored, Server, errors_in_one_line
from dsv4_sglang.srt.launch.command import OPT_IN_FLAG, OPT_IN_KEY

OFF = (
    "the integrity check of this server is off. Start it with "
    f"{OPT_IN_FLAG} '" + json.dumps({OPT_IN_KEY: {"integrity_check": True}}) + "'"
)
PROMPT_TOKENS, ANSWER_TOKENS = 300, 16
# Ids of ordinary tokens in every vocabulary, including that of the tiny model.
TOKENS = range(3, 384)
# Allowed distance of warm answers of 16-bit compute: NOISE times the distance of cold answers, plus FLOOR. A corrupted
# entry changes log p by at least 0.07.
NOISE, FLOOR = 3.0, 0.02


@dataclass(frozen=True)
class Distance:
    """Differences of log p between an answer and its tokens scored cold as part of a prompt.

    Attributes:
        cached: tokens from which the warm answer resumed.
        warm: mean difference of the warm answer.
        worst: largest difference of the warm answer.
        cold: mean difference of an answer from an empty cache: the noise.
    """

    cached: int
    warm: float
    worst: float
    cold: float


def too_far(distance: Distance, noise: float, tolerance: float | None = None) -> bool:
    """Return True if a warm answer differs from cold by more than rounding explains.

    Args:
        distance: distance of the answer from cold.
        noise: mean of `cold` over several answers.
        tolerance: limit of `worst`, for servers whose compute is exact.
    """
    near = distance.warm <= NOISE * noise + FLOOR  # False for nan, too
    return not near or (tolerance is not None and not distance.worst <= tolerance)


def distance_to_cold(server: Server, ids: Sequence[int], **fields: Any) -> Distance:
    """Compare a warm and a cold answer to a prompt with their tokens scored cold.

    The warm request may hit the cache. All other requests use fresh name spaces, where nothing is cached.

    Args:
        server: running server. Errors of its requests propagate.
        ids: token ids of the prompt.
        **fields: fields of the requests, such as a DP rank.
    """
    warm = server.answer(ids, ANSWER_TOKENS, **fields)
    cold = server.answer(ids, ANSWER_TOKENS, extra_key=uuid.uuid4().hex, **fields)
    off = [_off(server, ids, got, fields) for got in (warm, cold)]
    mean_warm, mean_cold = (sum(distances) / len(distances) for distances in off)
    return Distance(warm.cached, mean_warm, max(off[0]), mean_cold)


def _off(server: Server, ids: Sequence[int], got: Scored, fields: dict[str, Any]) -> list[float]:
    judge = server.score(ids, got.tokens, extra_key=uuid.uuid4().hex, **fields)
    return [abs(one - other) for one, other in zip(got.logprobs, judge.logprobs, strict=True)]


def _show_reports(reports: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    table = Table()
    for column in ("rank", "pool", "size", "free", "cached", "requests", "copies"):
        table.add_column(column, justify="left" if column in ("rank", "pool") else "right")
    for report in reports:
        rank = f"DP{report['dp_rank']} TP{report['tp_rank']}"
        for pool in report["pools"]:
            table.add_row(rank, pool["of"], *(str(pool[c]) for c in ("size", "free", "cached", "requests", "copies")))
        table.add_section()
    console.print(table)
    for report in reports:
        rank = f"DP{report['dp_rank']} TP{report['tp_rank']}"
        for finding in report["findings"]:
            console.print(f"[bold red]{rank}[/]  {finding['what']}: {finding['wrong']}", highlight=False)
        if (more := report["wrong"] - len(report["findings"])) > 0:
            console.print(f"[bold red]{rank}[/]  and {more} more", highlight=False)
        requests = report["requests"]
        busy = f"busy with {requests} requests" if requests else "no requests, finishing earlier work"
        state = "idle" if report["idle"] else busy
        console.print(f"{rank}: {state}, {report['wrong']} wrong, {1e3 * report['seconds']:.0f} ms", highlight=False)


def _compare(server: Server, prompts: int, ranks: int) -> int:
    """Compare warm and cold answers to random prompts, alternating between DP ranks. Return the number of failures."""
    distances = []
    for i in range(prompts):
        ids = random.choices(TOKENS, k=PROMPT_TOKENS)
        fields = {"routed_dp_rank": i % ranks} if ranks > 1 else {}
        server.answer(ids, 1, **fields)
        distances.append(distance_to_cold(server, ids, **fields))
    wrong = 0
    for i, distance in enumerate(distances):
        far = too_far(distance, sum(other.cold for other in distances) / prompts)
        wrong += far or not distance.cached
        typer.echo(
            f"prompt {i + 1}: {distance.cached} of {PROMPT_TOKENS} tokens cached, log p differs by {distance.warm:.4f} "
            f"on average, {distance.worst:.4f} at most; from an empty cache {distance.cold:.4f}: "
            + ("WRONG" if far else "right" if distance.cached else "no prefix hit")
        )
    return wrong


def check(
    url: Annotated[str, typer.Argument(help="URL of the server, such as http://127.0.0.1:30000.")],
    prompts: Annotated[int, typer.Option(min=0, help="Compare warm and cold answers to N random prompts.")] = 0,
    api_key: Annotated[str | None, typer.Option(help="The server's --api-key.")] = None,
) -> None:
    """Audit the cache of a running server: every block, slot and host row has one owner, and all its tables agree.

    The server needs the option integrity_check. It may be busy. The exit code is 1 if the audit finds an error or the
    server cannot be reached.
    """
    with errors_in_one_line("check", url):
        server = Server.at(url, api_key)
        reports = server.integrity()
        if not reports:
            raise RuntimeError(OFF)
        ranks = len({report["dp_rank"] for report in reports})
        wrong = _compare(server, prompts, ranks)
        reports = server.integrity() if prompts else reports
    _show_reports(reports)
    found = sum(report["wrong"] for report in reports)
    if found or wrong:
        typer.echo(f"{found} errors in the cache" + (f", {wrong} wrong answers" if prompts else ""))
        raise typer.Exit(1)
    typer.echo("the cache is sound" + (f", and {prompts} warm answers match cold answers" if prompts else ""))
