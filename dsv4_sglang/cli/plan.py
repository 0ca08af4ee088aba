"""`dsv4-sglang plan`: compute the capacity of a server configuration and its alternatives, and recommend one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dsv4_sglang.planner.choice import Choice
    from dsv4_sglang.planner.gpus import Gpu
    from dsv4_sglang.planner.models import Format, Model
    from dsv4_sglang.planner.plan import Plan

# Options that --goal decides.
CHOSEN_BY_GOAL = (
    *("tp", "dp", "max_running_requests", "mem_fraction_static", "speculative_algorithm"),
    *("speculative_num_draft_tokens", "speculative_dspark_block_size"),
)


def _model(given: str) -> Model:
    from dsv4_sglang.planner.models import Model

    known = {"flash": Model.flash, "pro": Model.pro}
    if given in known:
        return known[given]()
    path = Path(given)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"--model {given!r} is no file; expected flash, pro, or a config.json or its folder")
    try:
        return Model.from_file(path)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error.args[0]}") from None


def _gpu(given: str) -> Gpu:
    from dsv4_sglang.planner.gpus import GPUS, Gpu
    from dsv4_sglang.srt.memory.sizing import GIB

    if given.lower() in GPUS:
        return GPUS[given.lower()]
    try:
        gib = float(given)
    except ValueError:
        gib = 0.0
    if not 0 < gib < 1e6:
        raise ValueError(f"--gpu is {given!r}; expected {', '.join(GPUS)}, or GiB of memory as torch reports them")
    return Gpu(f"GPU of {gib:g} GiB", int(gib * GIB), "--gpu")


def _draft_tokens(model: Model, algorithm: str | None, tokens: int, block: int | None) -> int:
    """Return the tokens of a verify step, 0 without speculation. A model has either a NextN layer or a DSPARK head.

    Args:
        model: model that is planned.
        algorithm: --speculative-algorithm.
        tokens: --speculative-num-draft-tokens, 0 if not given.
        block: --speculative-dspark-block-size.

    Raises:
        ValueError: the options do not fit together or do not fit the model.
    """
    if algorithm is None and block is not None:
        raise ValueError(f"--speculative-dspark-block-size {block}: give --speculative-algorithm DSPARK with it")
    if algorithm not in (None, "EAGLE", "DSPARK"):
        raise ValueError(f"--speculative-algorithm is {algorithm!r}; expected EAGLE or DSPARK")
    if algorithm != "DSPARK":
        if model.dspark is not None and (algorithm or tokens):
            raise ValueError(f"{model.name} has a DSPARK head and no NextN layer; give --speculative-algorithm DSPARK")
        if block is not None:
            raise ValueError(f"--speculative-dspark-block-size {block} is for DSPARK, not for {algorithm}")
        if algorithm and not tokens:
            raise ValueError(f"--speculative-algorithm {algorithm}: give --speculative-num-draft-tokens, such as 4")
        return tokens
    if model.dspark is None:
        raise ValueError(
            f"--speculative-algorithm DSPARK: {model.name} has no DSPARK head (dspark_target_layer_ids in its "
            "config.json); give EAGLE, or --model the config.json of a checkpoint that has one"
        )
    wanted = (model.dspark.block if block is None else block) + 1
    if wanted < 2:
        raise ValueError(f"--speculative-dspark-block-size {wanted - 1}: expected at least 1, the tokens of a block")
    if tokens not in (0, wanted):
        raise ValueError(
            f"--speculative-num-draft-tokens {tokens}: a block of {wanted - 1} is verified with the token before it; "
            f"leave it out, or give {wanted}"
        )
    return wanted


def holds(made: Plan) -> str:
    """Return a summary in one line, which docs/guides/serving.md quotes."""
    loaded = sum(part.bytes for part in made.parts if part.group == "weights")
    return (
        f"{made.total_tokens:,} tokens; {made.requests:,} requests of {made.choice.request:,} ({made.at_once:,} at "
        f"once); {made.snapshots:,} snapshots; weights {loaded / 2**30:.1f} of "
        f"{made.choice.gpu.memory / 2**30:.1f} GiB a GPU"
    )


def compared(choice: Choice) -> Iterator[tuple[str, Plan | str]]:
    """Yield each neighbouring choice with its plan, or with the reason why it does not fit."""
    from dsv4_sglang.planner.neighbours import others
    from dsv4_sglang.planner.plan import plan as make

    for change, other in others(choice):
        try:
            yield change, make(other)
        except ValueError as error:
            yield change, str(error)


def _memory_table(made: Plan) -> Any:
    from rich.table import Table

    table = Table("one GPU", "", "GiB", "%", "", box=None, pad_edge=False)
    total = made.choice.gpu.memory
    for group, members in groupby(made.parts, key=lambda part: part.group):
        parts = list(members)
        size = sum(part.bytes for part in parts)
        only = parts[0] if len(parts) == 1 else None
        share = f"{100 * size / total:.1f}"
        table.add_row(group, only.name if only else "", f"{size / 2**30:.2f}", share, only.known if only else "")
        for part in parts if only is None else ():
            table.add_row("", part.name, f"{part.bytes / 2**30:.2f}", "", part.known, style="dim")
    table.add_row("all", "", f"{total / 2**30:.2f}", "", made.choice.gpu.source)
    return _aligned(table, slice(2, 4))


def _others_table(made: Plan, other: dict[str, Plan | str]) -> Any:
    from rich.table import Table

    headings = ("other choices", "tokens", "requests", "at once", "snapshots", "SGLang's own")
    table = Table(*headings, box=None, pad_edge=False)
    for change, found in {"as given": made, **other}.items():
        if isinstance(found, str):
            table.add_row(change, "does not fit")
        else:
            counts = (found.total_tokens, found.requests, found.at_once, found.snapshots)
            in_tree = "rejected" if found.in_tree_tokens is None else f"{found.in_tree_tokens:,}"
            table.add_row(change, *(f"{count:,}" for count in counts), in_tree)
    return _aligned(table, slice(1, 6))


def _aligned(table: Any, numbers: slice) -> Any:
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[numbers]:
        column.justify = "right"
    return table


def _notes(made: Plan, other: dict[str, Plan | str]) -> Iterator[str]:
    """Yield the disadvantages of each choice."""
    for change, found in {"as given": made, **other}.items():
        for note in [found] if isinstance(found, str) else found.notes():
            yield f"{change}: {note}"


def _experts(model: Model, given: str | None) -> Format:
    from dsv4_sglang.planner.models import Format

    if given is None:
        return model.experts
    if given not in (known := [form.value for form in Format]):
        raise ValueError(f"--experts is {given!r}; expected one of {', '.join(known)}")
    return Format(given)


def _check_goal(command: typer.Context, goal: str) -> None:
    """Check --goal.

    Raises:
        ValueError: the goal is unknown, or an option is given that the goal decides.
    """
    from dsv4_sglang.planner.recommend import GOALS

    if goal not in GOALS:
        raise ValueError(f"--goal is {goal!r}; expected one of {', '.join(GOALS)}")
    for name in CHOSEN_BY_GOAL:
        if (source := command.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag}: --goal {goal} chooses it; give one of the two")


def _show(made: Plan, other: dict[str, Plan | str], goal: str | None) -> None:
    from rich.console import Console

    from dsv4_sglang.planner.recommend import GOALS

    choice = made.choice
    console = Console(markup=False, highlight=False)
    console.print(_title(choice), style="bold")
    console.print(holds(made), soft_wrap=True)
    console.print(_in_tree(made), soft_wrap=True)
    if (stored := _snapshot(choice)) is not None:
        console.print(stored, soft_wrap=True)
    if goal is not None:
        console.print(f"recommended for {goal}: {GOALS[goal]}", soft_wrap=True)
    for table in (_memory_table(made), _others_table(made, other)):
        console.print()
        console.print(table)
    console.print()
    for note in _notes(made, other):
        console.print(note, style="yellow", soft_wrap=True)
    console.print()
    if choice.count > choice.tp:
        console.print(f"{choice.count // choice.tp} servers, each on {choice.tp} of the GPUs with its own --port:")
    typer.echo(choice.command())


def _title(choice: Choice) -> str:
    servers = "" if choice.tp == choice.count else f", {choice.count // choice.tp} servers"
    replicas = f", --dp {choice.dp}" if choice.dp > 1 else ""
    drafts = ""
    if choice.draft_tokens and choice.model.dspark:
        drafts = f", --speculative-algorithm DSPARK, blocks of {choice.draft_tokens - 1}"
    elif choice.draft_tokens:
        drafts = f", --speculative-num-draft-tokens {choice.draft_tokens}"
    name = f"{choice.model.name}, {choice.count} x {choice.gpu.name}"
    return f"{name}, --tp {choice.tp}{replicas}{servers}{drafts}"


def _snapshot(choice: Choice) -> str | None:
    """Return the bytes of weights in the model's folder beside the computed bytes, or None without weights."""
    from dsv4_sglang.planner.stored_weights import stored_bytes
    from dsv4_sglang.planner.weights import Split, count_weights

    if (stored := stored_bytes(Path(choice.model.path))) is None:
        return None
    counted = count_weights(choice.model, Split(1), choice.experts)
    size = counted.bytes + (counted.draft.layer if counted.draft else 0)
    return f"checkpoint: {stored / 2**30:.2f} GiB in its files, {size / 2**30:.2f} counted"


def _in_tree(made: Plan) -> str:
    from dsv4_sglang.srt.integration import compat

    name = f"SGLang {compat.sglang_version()}'s own cache with the same flags"
    if made.in_tree_tokens is None:
        return f"{name}: SGLang rejects them"
    return f"{name}: {made.in_tree_tokens:,} tokens; here {made.total_tokens / made.in_tree_tokens:.2f} times as many"


def plan(
    context_of_command: typer.Context,
    model: Annotated[str, typer.Option(help="flash, pro, or a config.json or its folder.")],
    gpu: Annotated[str, typer.Option(help="h100, h200, b200, or GiB of memory as torch reports them.")],
    count: Annotated[int, typer.Option(help="Number of GPUs.")],
    tp: Annotated[int | None, typer.Option("--tp", "--tp-size", help="GPUs per server; default: all.")] = None,
    dp: Annotated[int, typer.Option("--dp", "--dp-size", help="Replicas of the cache under DP attention.")] = 1,
    experts: Annotated[str | None, typer.Option(help="fp4, fp8 or bf16; default: fp4, bf16 if not quantised.")] = None,
    max_running_requests: Annotated[
        int, typer.Option(help="Per server; the default is SGLang's for this model.")
    ] = 256,
    mem_fraction_static: Annotated[float, typer.Option(help="Memory share for weights and cache.")] = 0.85,
    kv_cache_dtype: Annotated[str, typer.Option(help="KV entries: auto (FP8), fp8_e4m3 or bfloat16.")] = "auto",
    indexer_format: Annotated[str, typer.Option(help="Index keys: mxfp4, nvfp4 or fp32.")] = "mxfp4",
    max_snapshots: Annotated[int | None, typer.Option(help="Per cache; default: a twelfth of its memory.")] = None,
    chunked_prefill_size: Annotated[int, typer.Option(help="Tokens of a prefill step.")] = 8192,
    speculative_algorithm: Annotated[str | None, typer.Option(help="EAGLE or DSPARK; default: none.")] = None,
    speculative_num_draft_tokens: Annotated[int, typer.Option(help="For EAGLE, 2 to 9; 0: no speculation.")] = 0,
    speculative_dspark_block_size: Annotated[
        int | None, typer.Option(help="For DSPARK, 1 to 8; default: the model's.")
    ] = None,
    context_length: Annotated[int | None, typer.Option(help="Longest request; default: the model's.")] = None,
    context: Annotated[int, typer.Option(help="Tokens per request for the number of requests that fit.")] = 32768,
    hicache_size: Annotated[int, typer.Option(help="Host cache: GB (10^9 bytes) per process; 0: none.")] = 0,
    goal: Annotated[
        str | None, typer.Option(help="Recommend a configuration for: latency, throughput or long-context.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the memory into this file (.png, .svg, .pdf).")] = None,
) -> None:
    """Show the memory of weights, state slots, snapshots and blocks on given GPUs, alternatives, and the command.

    Weights are counted with SGLang's constructors. The cache is sized by the functions that size a server's pools.
    docs/guides/planning.md compares both with measurements. SGLang's own cache is computed by the installed release.
    """
    from dsv4_sglang.planner import ask_sglang
    from dsv4_sglang.planner.choice import Choice
    from dsv4_sglang.planner.plan import plan as make
    from dsv4_sglang.planner.plot import check_file, draw
    from dsv4_sglang.planner.recommend import recommend
    from dsv4_sglang.srt.integration import options

    try:
        if plot is not None:
            check_file(plot)
        if goal is not None:
            _check_goal(context_of_command, goal)
        described = _model(model)
        given = {"indexer_format": indexer_format, "max_snapshots": max_snapshots}
        wanted = Choice(
            model=described,
            gpu=_gpu(gpu),
            count=count,
            tp=tp if tp is not None else count if goal is None else 1,
            dp=dp,
            experts=_experts(described, experts),
            running=max_running_requests,
            mem_fraction=mem_fraction_static,
            kv_cache_dtype=kv_cache_dtype,
            options=options.parse(given),
            chunk=chunked_prefill_size,
            context_length=context_length,
            request=context,
            draft_tokens=_draft_tokens(
                described, speculative_algorithm, speculative_num_draft_tokens, speculative_dspark_block_size
            ),
            host_gb=hicache_size,
        )
        ask_sglang.prepare_this_process()
        made = make(wanted) if goal is None else recommend(wanted, goal)
        other = dict(compared(made.choice))
        if plot is not None:
            draw(plot, {"as given": made, **{change: o for change, o in other.items() if not isinstance(o, str)}})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _show(made, other, goal)
