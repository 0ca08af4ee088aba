// Tables of 512-d rows and of index keys: where their bytes lie.
//
// Row tables (window ring, window workspace, CSA and HCA entries) are [blocks, entries_per_block, width]:
//   kFp8   584 B a row: a block holds entries_per_block x (448 e4m3 | 64 bf16) of 576 B, then entries_per_block x 8
//   equal
//          ue8m0 bytes;
//   kBf16, kFp32   1024 and 2048 B a row: plain.
// Key tables are [blocks, keys_per_block, width]: 64 B of e2m1 pairs a key, then 8 e4m3 scales a key; or 128 plain
// floats.
//
// dsv4_sglang/formats has the same; tests/test_numeric.py holds both equal.
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

// Rows of DeepSeek-V4.1 (formats/v41_entries.py): window rows of e4m3 with a ue8m0 scale per 32, entries of e2m1 pairs
// with an e4m3 scale per 16. Behind the rows of a block lie the scales of all its rows.
constexpr int kV41RowBytes = kEntryDim;
constexpr int kV41RowScales = kEntryDim / 32;
constexpr int kV41EntryBytes = kEntryDim / 2;
constexpr int kV41EntryScales = kEntryDim / 16;

// The codes that the ops take as kv_format and key_format.
enum KVFormat : int { kFp8, kBf16, kFp32 };
enum KeyFormat : int { kMxfp4, kNvfp4, kKeyFp32 };

/// Size of a table's last dimension, in elements.
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
