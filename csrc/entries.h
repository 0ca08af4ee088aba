// Byte layout of KV buffers and index key buffers.
//
// KV buffers (window ring, window workspace, CSA and HCA entries) are [blocks, entries_per_block, width]:
// - kFp8: 584 B per entry. A block holds 576 B (448 e4m3 | 64 bf16) for each entry, then 8 equal ue8m0 bytes for each.
// - kBf16, kFp32: 1024 and 2048 B per entry, unquantised.
//
// Key buffers are [blocks, keys_per_block, width]: a block holds 64 B of e2m1 pairs for each key, then 8 e4m3 scales
// for each; or 128 floats per key.
//
// dsv4_sglang/formats has the same constants; tests/formats/test_numeric.py checks that both are equal.
#pragma once

#include <cstdint>

namespace dsv4 {

constexpr int kEntryDim = 512;
constexpr int kRopeDim = 64;
constexpr int kNopeDim = kEntryDim - kRopeDim;
constexpr int kRowBytes = kNopeDim + 2 * kRopeDim;  // 576
constexpr int kScaleBytes = 8;
constexpr int kIndexDim = 128;
constexpr int kKeyBytes = kIndexDim / 2;
constexpr int kKeyScales = kIndexDim / 16;

// Entries of DeepSeek-V4.1 (formats/v41_entries.py): window entries of e4m3 with a ue8m0 scale per 32, compressed
// entries of e2m1 pairs with an e4m3 scale per 16. A block holds the data of all its entries, then their scales.
constexpr int kV41RowBytes = kEntryDim;
constexpr int kV41RowScales = kEntryDim / 32;
constexpr int kV41EntryBytes = kEntryDim / 2;
constexpr int kV41EntryScales = kEntryDim / 16;

// Codes of kv_format and key_format in the ops.
enum KVFormat : int { kFp8, kBf16, kFp32 };
enum KeyFormat : int { kMxfp4, kNvfp4, kKeyFp32 };

/// Size of the last dimension of a buffer, in elements.
constexpr int row_width(KVFormat format) { return format == kFp8 ? kRowBytes + kScaleBytes : kEntryDim; }
constexpr int key_width(KeyFormat format) { return format == kKeyFp32 ? kIndexDim : kKeyBytes + kKeyScales; }

struct KVBuffer {
  uint8_t* base;
  int64_t block_bytes;
  int entries_per_block;
  int format;
};

struct KeyTable {
  uint8_t* base;
  int64_t block_bytes;
  int keys_per_block;
  int format;
};

}  // namespace dsv4
