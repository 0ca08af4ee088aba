"""Storage formats of the cache, one per module: names, bytes, offsets, views, quantisers. Depends only on torch.

- `kv_entries`: 512-dim KV entries (window, CSA and HCA entries).
- `index_keys`: 128-dim keys of the indexer.
- `v41_entries`: KV entries of DeepSeek-V4.1.

`csrc/entries.h` has the same constants for the device; `tests/test_numeric.py` checks that both are equal.
"""

from dsv4_sglang.formats.index_keys import KeyFormat, KeyTable, make_key_table
from dsv4_sglang.formats.kv_entries import EntryFormat, KVBuffer, KVFormat, make_kv_buffers

__all__ = ["EntryFormat", "KVBuffer", "KVFormat", "KeyFormat", "KeyTable", "make_key_table", "make_kv_buffers"]
