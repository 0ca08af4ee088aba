"""Prefix cache: choice of snapshots, their storage, eviction and metrics, and their place in SGLang's radix tree.

`placement`, `registry`, `policy`, `reuse` and `path_hash` do not depend on a server. The simulations in `benchmarks/`
use them with a tree of their own (`benchmarks/prefix_tree.py`).
"""
