"""Storage formats of the cache, one per module: names, bytes, offsets, views, quantisers. Depends only on torch.

- `buffers`: what all formats have in common.
- `quantise`: e4m3 and e2m1 codes with their scales.
- `kv_entries`: 512-dim KV entries (window entries and compressed entries).
- `index_keys`: 128-dim keys of the indexer.

`csrc/entries.h` has the same constants for the device; `tests/formats/test_numeric.py` checks that both are equal.
"""

from dsv4_sglang.formats.buffers import KVBuffer, StorageFormat
from dsv4_sglang.formats.index_keys import KeyFormat
from dsv4_sglang.formats.kv_entries import V4_KV_FORMATS, KVFormat, make_kv_buffers

__all__ = ["V4_KV_FORMATS", "KVBuffer", "KVFormat", "KeyFormat", "StorageFormat", "make_kv_buffers"]
