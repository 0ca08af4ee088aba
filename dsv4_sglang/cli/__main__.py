"""`python -m dsv4_sglang.cli` is `dsv4-sglang`."""

from dsv4_sglang.cli import app

app()
