"""Entry point of `python -m dsv4_sglang.cli`, the same as `dsv4-sglang`."""

from dsv4_sglang.cli import app

app()
