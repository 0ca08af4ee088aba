"""The commands of `dsv4-sglang`, one module each. Commands import heavy packages only when they run."""

from __future__ import annotations

import typer

from dsv4_sglang.cli.check import check
from dsv4_sglang.cli.demo import demo
from dsv4_sglang.cli.doctor import doctor
from dsv4_sglang.cli.make_tiny import make_tiny
from dsv4_sglang.cli.plan import plan
from dsv4_sglang.cli.serve import SGLANG_FLAGS, serve
from dsv4_sglang.cli.storage import storage
from dsv4_sglang.cli.top import top

app = typer.Typer(
    name="dsv4-sglang",
    help="DeepSeek-V4's hybrid KV cache for SGLang.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("serve", context_settings=SGLANG_FLAGS)(serve)
app.command("demo", context_settings=SGLANG_FLAGS)(demo)
app.command("doctor")(doctor)
app.command("check")(check)
app.command("top")(top)
app.command("make-tiny")(make_tiny)
app.command("plan")(plan)
app.add_typer(storage, name="storage")
