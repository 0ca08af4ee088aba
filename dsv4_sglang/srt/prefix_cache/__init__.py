"""Prefix cache: choice of snapshots, their storage and eviction, and their place in SGLang's radix tree.

`placement`, `policy` and `tree` do not depend on a server; `benchmarks/prefix_simulation.py` uses only these.
"""
