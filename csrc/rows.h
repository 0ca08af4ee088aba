// Tables of 512-d rows and of index keys: where their bytes lie.
//
// Row tables (window ring, window workspace, CSA and HCA entries) are [blocks, rows_per_block, width]:
//   kFp8   584 B a row: a block holds rows_per_block x (448 e4m3 | 64 bf16) of 576 B, then rows_per_block x 8 equal
//   ue8m0 bytes; kBf16  1024 B; kFp32  2048 B: plain.
// Key tables are [blocks, keys_per_block, width]: 64 B of e2m1 pairs a key, then 8 e4m3 scales a key; or 128 plain
// floats.
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

enum RowFormat : int { kFp8, kBf16, kFp32 };
enum KeyFormat : int { kMxfp4, kNvfp4, kKeyFp32 };

struct RowTable {
  uint8_t* base;
  int64_t block_bytes;
  int rows_per_block;
  int format;
};

struct KeyTable {
  uint8_t* base;
  int64_t block_bytes;
  int keys_per_block;
  int format;
};

}  // namespace dsv4
