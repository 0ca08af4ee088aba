"""Benchmarks: `python benchmarks/run.py` runs them, `python -m benchmarks.NAME --help` describes one."""
