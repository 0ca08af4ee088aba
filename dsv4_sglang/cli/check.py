"""`dsv4-sglang check`: has everything in a running server's cache one owner, and do warm answers equal cold ones?"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from dsv4_sglang.cli.client import Scored, Server
from dsv4_sglang.srt.integration.launch_command import OPT_IN_FLAG, OPT_IN_KEY

OFF = (
    "the integrity check of this server is off. Start it with "
    f"{OPT_IN_FLAG} '" + json.dumps({OPT_IN_KEY: {"integrity_check": True}}) + "'"
)
PROMPT_TOKENS, ANSWER_TOKENS = 300, 16
# Ids that are ordinary tokens of every vocabulary, the tiny checkpoint's included.
TOKENS = range(3, 384)
# What warm answers of compute in 16 bits may be off: so many times what cold ones are, and a bit. A spoilt entry moves
# log p by 0.07 and more.
NOISE, FLOOR = 3.0, 0.02


@dataclass(frozen=True)
class Distance:
    """|log p - log p of the same tokens computed cold, as a prompt|, of an answer that resumed from `cached` tokens, on
    the mean and in the worst place, and on the mean of one from an empty cache: the noise to compare with."""

    cached: int
    warm: float
    worst: float
    cold: float


def too_far(distance: Distance, noise: float, tolerance: float | None = None) -> bool:
    """Whether an answer is further from cold than rounding makes it; `noise`: the mean of `cold` of several answers.
    `tolerance`: of the worst token, where compute is exact."""
    near = distance.warm <= NOISE * noise + FLOOR  # false for nan, too
    return not near or (tolerance is not None and not distance.worst <= tolerance)


def distance_to_cold(server: Server, ids: Sequence[int], **fields: Any) -> Distance:
    """Ask a prompt as it comes, which hits what is cached, and twice in name spaces where nothing is. `fields` of the
    requests, such as a rank. Raises what the server's requests raise.
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
    """Warm and cold answers to random prompts, a rank of DP attention after the other; how many are wrong."""
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
            f"prompt {i + 1}: {distance.cached} of {PROMPT_TOKENS} tokens cached, log p off by {distance.warm:.4f} on "
            f"the mean, {distance.worst:.4f} at most; from an empty cache {distance.cold:.4f}: "
            + ("WRONG" if far else "right" if distance.cached else "no prefix hit")
        )
    return wrong


def check(
    url: Annotated[str, typer.Argument(help="Of the server, such as http://127.0.0.1:30000.")],
    prompts: Annotated[int, typer.Option(min=0, help="Compare warm and cold answers to so many random prompts.")] = 0,
    api_key: Annotated[str | None, typer.Option(help="The server's --api-key.")] = None,
) -> None:
    """Check the cache of a running server: every block, slot and row has one owner, and tree, locks and lists agree.

    The server needs the option integrity_check. It may be busy. Exit code 1 if something is wrong, or cannot be asked.
    """
    server = Server.at(url, api_key)
    try:
        reports = server.integrity()
        if not reports:
            raise RuntimeError(OFF)
        ranks = len({report["dp_rank"] for report in reports})
        wrong = _compare(server, prompts, ranks)
        reports = server.integrity() if prompts else reports
    except (OSError, ValueError, RuntimeError) as error:
        reason = f"no server answers at {server.url}: {error}" if isinstance(error, OSError) else str(error)
        typer.echo(f"dsv4-sglang check: {reason}", err=True)
        raise typer.Exit(1) from None
    _show_reports(reports)
    found = sum(report["wrong"] for report in reports)
    if found or wrong:
        typer.echo(f"{found} things are wrong with the cache" + (f", {wrong} answers" if prompts else ""))
        raise typer.Exit(1)
    typer.echo("the cache is sound" + (f", and {prompts} warm answers are those of an empty cache" if prompts else ""))
