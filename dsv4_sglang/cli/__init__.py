"""The `dsv4-sglang` command."""

from dsv4_sglang.cli.app import app

__all__ = ["app"]
