"""Prefix cache: choice of snapshots, their storage, eviction and metrics, and their place in SGLang's radix tree.

`placement`, `policy` and `path_hash` do not depend on a server. The simulations in `benchmarks/` use `placement` and
`policy` with a tree of their own (`benchmarks/prefix_tree.py`).
"""
