"""Formats of what the cache stores, each in a module of its own: names, bytes, offsets, views, quantisers.

`rows`: 512-dim rows (window rows, CSA and HCA entries). `index_keys`: 128-dim keys of the indexer. `v41_rows`: rows of
DeepSeek-V4.1. Knows only torch.
The device's side of the same facts is `csrc/entries.h`; `tests/test_numeric.py` holds both equal.
"""

from dsv4_sglang.formats.index_keys import KeyFormat, KeyTable, make_key_table
from dsv4_sglang.formats.kv_entries import KVBuffer, KVFormat, make_kv_buffers

__all__ = ["KVBuffer", "KVFormat", "KeyFormat", "KeyTable", "make_key_table", "make_kv_buffers"]
