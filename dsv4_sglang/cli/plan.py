"""`dsv4-sglang plan`: compute the capacity of a server configuration and its alternatives, and recommend one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from dsv4_sglang.planner.choice import Choice
    from dsv4_sglang.planner.gpus import Gpu
    from dsv4_sglang.planner.plan import Plan

Goal = Literal["latency", "throughput", "long-context"]
# Options that --goal decides.
CHOSEN_BY_GOAL = ("tp", "dp", "max_running_requests", "mem_fraction_static", "speculative_num_draft_tokens")

# Characters of a table at most, and of the label of a choice in a table of 80 characters.
WIDEST, LABEL = 1000, 30


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


def holds(made: Plan) -> str:
    """Return a summary in one line, which docs/guides/serving.md quotes."""
    loaded = sum(part.bytes for part in made.parts if part.group == "weights")
    return (
        f"{made.total_tokens:,} tokens; {made.requests:,} requests of {made.choice.request:,} ({made.at_once:,} at "
        f"once); {made.snapshots:,} snapshots; weights {loaded / 2**30:.1f} of "
        f"{made.choice.gpu.memory / 2**30:.1f} GiB a GPU"
    )


def _table(*headings: str, numbers: range) -> Any:
    """Return a table without lines, whose columns `numbers` are aligned to the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, no_wrap=True, justify="right" if place in numbers else "left")
    return table


def _memory_table(made: Plan) -> Any:
    table = _table("one GPU", "", "GiB", "%", "", numbers=range(2, 4))
    total, shown = made.choice.gpu.memory, ""
    for part in made.parts:
        group, shown = part.group if part.group != shown else "", part.group
        share = f"{100 * part.bytes / total:.1f}"
        table.add_row(group, part.name, f"{part.bytes / 2**30:.2f}", share, part.known)
    table.add_row("all", "", f"{total / 2**30:.2f}", "", made.choice.gpu.source)
    return table


def _others_table(plans: dict[str, Plan | str]) -> Any:
    table = _table("choices", "tokens", "requests", "at once", "snapshots", "SGLang's\nown", numbers=range(1, 6))
    for change, found in plans.items():
        label = change if len(change) <= LABEL else change.replace(" ", "\n")
        if isinstance(found, str):
            table.add_row(label, "no room")
        else:
            counts = (found.total_tokens, found.requests, found.at_once, found.snapshots)
            in_tree = "rejected" if found.in_tree_tokens is None else f"{found.in_tree_tokens:,}"
            table.add_row(label, *(f"{count:,}" for count in counts), in_tree)
    return table


def _notes(plans: dict[str, Plan | str]) -> Iterator[str]:
    """Yield the disadvantages of each choice."""
    for change, found in plans.items():
        for note in [found] if isinstance(found, str) else found.notes():
            yield f"{change}: {note}"


def _check_goal(command: typer.Context, goal: str) -> None:
    """Raise ValueError if an option is given that the goal decides."""
    for name in CHOSEN_BY_GOAL:
        if (source := command.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag}: --goal {goal} chooses it; give one of the two")


def _show(made: Plan, goal: Goal | None) -> None:
    from rich.console import Console

    from dsv4_sglang.planner.plan import attempt
    from dsv4_sglang.planner.recommend import GOALS, neighbours

    choice = made.choice
    plans: dict[str, Plan | str] = {"as given": made}
    plans.update((change, attempt(other)) for change, other in neighbours(choice))
    console = Console(markup=False, highlight=False)
    wide = console.options.update(width=WIDEST)
    console.print(_title(choice), style="bold")
    console.print(holds(made), soft_wrap=True)
    console.print(_in_tree(made), soft_wrap=True)
    if choice.host_gb:
        console.print(_on_host(made), soft_wrap=True)
    if goal is not None:
        console.print(f"recommended for {goal}: {GOALS[goal]}", soft_wrap=True)
    for table in (_memory_table(made), _others_table(plans)):
        console.print()
        # A line that is too long for the terminal, rather than one without a figure or the name of an option.
        console.width = max(console.width, console.measure(table, options=wide).maximum)
        console.print(table)
    console.print()
    for note in _notes(plans):
        console.print(note, style="yellow", soft_wrap=True)
    console.print()
    if choice.count > choice.tp:
        console.print(f"{choice.count // choice.tp} servers, each on {choice.tp} of the GPUs with its own --port:")
    typer.echo(choice.command())


def _title(choice: Choice) -> str:
    servers = "" if choice.tp == choice.count else f", {choice.count // choice.tp} servers"
    replicas = f", --dp {choice.dp}" if choice.dp > 1 else ""
    drafts = f", --speculative-num-draft-tokens {choice.draft_tokens}" if choice.draft_tokens else ""
    name = f"{choice.model.name}, {choice.count} x {choice.gpu.name}"
    return f"{name}, --tp {choice.tp}{replicas}{servers}{drafts}"


def _in_tree(made: Plan) -> str:
    from dsv4_sglang.srt.sglang import release

    name = f"SGLang {release.sglang_version()}'s own cache with the same flags"
    if made.in_tree_tokens is None:
        return f"{name}: SGLang rejects them"
    return f"{name}: {made.in_tree_tokens:,} tokens; here {made.total_tokens / made.in_tree_tokens:.2f} times as many"


def _on_host(made: Plan) -> str:
    caches = f" ({made.replicas} caches of {made.choice.host_gb})" if made.replicas > 1 else ""
    copies = ", one copy for all processes of a machine" if made.choice.tp > made.choice.dp else ""
    found = "; with --hicache-storage-backend shm the next start and other servers of the machine find them"
    return f"host cache: {made.host_tokens:,} tokens in {made.host_gb} GB{caches}{copies}{found}"


def plan(
    context_of_command: typer.Context,
    model: Annotated[str, typer.Option(help="flash, pro, their hub names, or a config.json or its folder.")],
    gpu: Annotated[str, typer.Option(help="h100, h200, b200, or GiB of memory as torch reports them.")],
    count: Annotated[int, typer.Option(min=1, help="Number of GPUs.")],
    tp: Annotated[int | None, typer.Option("--tp", "--tp-size", min=1, help="GPUs per server; default: all.")] = None,
    dp: Annotated[int, typer.Option("--dp", "--dp-size", min=1, help="Replicas of the cache under DP attention.")] = 1,
    experts: Annotated[
        Literal["fp4", "fp8", "bf16"] | None, typer.Option(help="Default: fp4, bf16 if the model is not quantised.")
    ] = None,
    max_running_requests: Annotated[
        int, typer.Option(min=1, help="Per server; the default is SGLang's for this model.")
    ] = 256,
    mem_fraction_static: Annotated[float, typer.Option(help="Memory share for weights and cache.")] = 0.85,
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8_e4m3", "bfloat16"], typer.Option(help="KV entries; auto is FP8.")
    ] = "auto",
    max_snapshots: Annotated[
        int | None, typer.Option(min=0, help="Per cache; default: a twelfth of its memory.")
    ] = None,
    chunked_prefill_size: Annotated[int, typer.Option(min=1, help="Tokens of a prefill step.")] = 8192,
    speculative_num_draft_tokens: Annotated[
        int, typer.Option(help="Tokens of a verify step with EAGLE or, if the model has its head, DSPARK; 0: none.")
    ] = 0,
    context_length: Annotated[int | None, typer.Option(help="Longest request; default: the model's.")] = None,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens per request for the number of requests that fit.")
    ] = 32768,
    hicache_size: Annotated[int, typer.Option(min=0, help="Host cache: GB (10^9 bytes) per cache; 0: none.")] = 0,
    goal: Annotated[Goal | None, typer.Option(help="Recommend a configuration for this goal.")] = None,
) -> None:
    """Show the memory of weights, state slots, snapshots and blocks on given GPUs, alternatives, and the command.

    Weights are counted with SGLang's constructors. The cache is sized by the functions that size a server's pools.
    docs/guides/planning.md compares both with measurements. SGLang's own cache is computed by the installed release.
    """
    from dsv4_sglang.planner import ask_sglang
    from dsv4_sglang.planner.choice import Choice
    from dsv4_sglang.planner.models import Format, Model
    from dsv4_sglang.planner.plan import plan as make
    from dsv4_sglang.planner.recommend import recommend
    from dsv4_sglang.srt.launch.options import Options

    try:
        if goal is not None:
            _check_goal(context_of_command, goal)
        described = Model.of(model)
        wanted = Choice(
            model=described,
            gpu=_gpu(gpu),
            count=count,
            tp=tp if tp is not None else count if goal is None else 1,
            dp=dp,
            experts=described.experts if experts is None else Format(experts),
            running=max_running_requests,
            mem_fraction=mem_fraction_static,
            kv_cache_dtype=kv_cache_dtype,
            options=Options(max_snapshots=max_snapshots),
            chunk=chunked_prefill_size,
            context_length=context_length,
            request=context,
            draft_tokens=speculative_num_draft_tokens,
            host_gb=hicache_size,
        )
        ask_sglang.import_sglang()
        made = make(wanted) if goal is None else recommend(wanted, goal)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _show(made, goal)
