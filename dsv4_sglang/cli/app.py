"""The commands of `dsv4-sglang`, one module each. Commands import heavy packages only when they run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import dsv4_sglang
from dsv4_sglang.cli.check import check
from dsv4_sglang.cli.demo import demo
from dsv4_sglang.cli.doctor import doctor
from dsv4_sglang.cli.make_tiny import make_tiny
from dsv4_sglang.cli.plan import plan
from dsv4_sglang.cli.serve import SGLANG_FLAGS, serve
from dsv4_sglang.cli.storage import storage
from dsv4_sglang.cli.top import top
from dsv4_sglang.requirements import advice_after


class Commands(TyperGroup):
    """The commands. A package that a command needs and that is not installed is an error in one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if (line := advice_after(error)) is None:
                raise
            typer.echo(f"dsv4-sglang {ctx.invoked_subcommand}: {line}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    name="dsv4-sglang",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    # Rich cuts the names of options at 80 columns.
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dsv4-sglang {dsv4_sglang.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """DeepSeek-V4's hybrid KV cache for SGLang."""


# Short enough for the list of commands at 80 columns, which would cut the first sentence of their help.
app.command("serve", context_settings=SGLANG_FLAGS, short_help="Serve with this cache and any of SGLang's flags.")(
    serve
)
app.command("demo", context_settings=SGLANG_FLAGS, short_help="Start a server, print a conversation, stop it.")(demo)
app.command("doctor", short_help="Check versions, GPU, extension, hooks and ops.")(doctor)
app.command("check", short_help="Audit the cache of a running server.")(check)
app.command("top", short_help="Show the cache of a running server.")(top)
app.command("make-tiny", short_help="Write a small model with random weights.")(make_tiny)
app.command("plan", short_help="Compute what a server on given GPUs would hold.")(plan)
app.add_typer(storage, name="storage")
