"""Prefix hits: where snapshots are taken, where they lie, which are kept, and how they hang on SGLang's tree.

`placement`, `policy` and `tree` know nothing of a server; `benchmarks/prefix_simulation.py` runs on them alone.
"""
