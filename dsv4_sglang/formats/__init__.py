"""Formats of what the cache stores, each in a module of its own: names, bytes, offsets, views, quantisers.

`kv_entries`: 512-dim entries (window, CSA, HCA). `index_keys`: 128-dim keys of the indexer. `v41_entries`: entries of
DeepSeek-V4.1. Knows only torch.
The device's side of the same facts is `csrc/entries.h`; `tests/test_numeric.py` holds both equal.
"""

from dsv4_sglang.formats.index_keys import KeyFormat, KeyTable, make_key_table
from dsv4_sglang.formats.kv_entries import EntryFormat, KVBuffer, KVFormat, make_kv_buffers

__all__ = ["EntryFormat", "KVBuffer", "KVFormat", "KeyFormat", "KeyTable", "make_key_table", "make_kv_buffers"]
