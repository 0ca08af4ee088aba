// Functions with which one warp loads, packs, stores and copies an entry of a KV buffer (entries.h).
//
// A warp holds an entry as 16 floats per lane: channels 8 lane .. 8 lane + 7 and 256 + 8 lane .. 256 + 8 lane + 7. So
// every format is written in pieces of 8 or 16 bytes, and the rotated channels 448..511 are the second piece of lanes
// 24..31.
#pragma once

#include "entries.h"
#include "numeric.h"

namespace dsv4 {

constexpr int kFirstRopeLane = 24;
constexpr unsigned kAllLanes = 0xffffffffu;

/// Address of an entry. `scale` (8-byte aligned) is used by kFp8 only.
struct RowAddress {
  uint8_t* data;
  uint8_t* scale;
};

__device__ __forceinline__ int row_bytes(int format) {
  return format == kFp8 ? kRowBytes : kEntryDim * (format == kBf16 ? 2 : 4);
}

__device__ __forceinline__ RowAddress row_address(const KVBuffer& table, int64_t block, int row) {
  uint8_t* base = table.base + block * table.block_bytes;
  return {base + int64_t(row) * row_bytes(table.format),
          base + int64_t(table.entries_per_block) * kRowBytes + int64_t(row) * kScaleBytes};
}

/// `row` is counted through all blocks.
__device__ __forceinline__ RowAddress row_address(const KVBuffer& table, int64_t row) {
  const uint32_t block = uint32_t(row) / uint32_t(table.entries_per_block);
  return row_address(table, block, int(uint32_t(row) - block * table.entries_per_block));
}

/// Loads this lane's 16 channels of 512 bf16 or fp32 numbers at `row` (16-byte aligned).
__device__ __forceinline__ void load_row(const void* row, bool is_bf16, int lane, float (&x)[16]) {
  if (is_bf16) {
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const uint4 u = *(static_cast<const uint4*>(row) + 32 * piece + lane);
      const uint32_t pairs[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[8 * piece + 2 * i] = low_bf16(pairs[i]);
        x[8 * piece + 2 * i + 1] = high_bf16(pairs[i]);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 v = *(static_cast<const float4*>(row) + 64 * (i / 2) + 2 * lane + i % 2);
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
  }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

/// Largest x of a warp, or NaN. x must not be negative.
__device__ __forceinline__ float warp_max(float x) { return float_of(__reduce_max_sync(kAllLanes, bits_of(x))); }

/// Largest x in groups of `width` adjacent lanes (a power of two), or NaN. x must not be negative.
template <int width>
__device__ __forceinline__ float group_max(float x) {
#pragma unroll
  for (int step = width / 2; step; step /= 2) x = max_magnitude(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

/// An entry in its final bytes, the part of one lane.
struct PackedRow {
  uint32_t word[16];
  uint32_t exponent;  // kFp8: the biased exponent of the multiplier
};

/// Rounds and quantises the warp's entry (SPEC 2.4).
__device__ __forceinline__ PackedRow pack_row(int format, const float (&x)[16], int lane) {
  PackedRow packed;
  if (format == kFp32) {
#pragma unroll
    for (int i = 0; i < 16; ++i) packed.word[i] = bits_of(x[i]);
    return packed;
  }
  // bf16 pairs: the whole entry in kBf16, in kFp8 the rotated channels and the source of the e4m3 codes.
  uint32_t pair[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) pair[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
  if (format == kBf16) {
#pragma unroll
    for (int i = 0; i < 8; ++i) packed.word[i] = pair[i];
    return packed;
  }
  const bool rotated = lane >= kFirstRopeLane;
  float amax = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < 4 || !rotated) {
      amax = max_magnitude(amax, max_magnitude(low_bf16(pair[i]), high_bf16(pair[i])));
    }
  }
  packed.exponent = row_exponent(warp_max(amax));
  const float inverse = exp2_of_biased(254 - packed.exponent);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    packed.word[i] = e4m3_pair(low_bf16(pair[2 * i]) * inverse, high_bf16(pair[2 * i]) * inverse) |
                     e4m3_pair(low_bf16(pair[2 * i + 1]) * inverse, high_bf16(pair[2 * i + 1]) * inverse) << 16;
    packed.word[4 + i] = pair[4 + i];
  }
  return packed;
}

/// Stores a packed entry. All lanes of the warp take part.
__device__ __forceinline__ void store_row(int format, const PackedRow& packed, const RowAddress& to, int lane) {
  const uint32_t (&w)[16] = packed.word;
  if (format == kFp8) {
    *reinterpret_cast<uint2*>(to.data + 8 * lane) = make_uint2(w[0], w[1]);
    if (lane < kFirstRopeLane) {
      *reinterpret_cast<uint2*>(to.data + 256 + 8 * lane) = make_uint2(w[2], w[3]);
    } else {
      *reinterpret_cast<uint4*>(to.data + kNopeDim + 16 * (lane - kFirstRopeLane)) = make_uint4(w[4], w[5], w[6], w[7]);
    }
    if (lane == 0) {
      const uint32_t repeated = packed.exponent * 0x01010101u;
      *reinterpret_cast<uint2*>(to.scale) = make_uint2(repeated, repeated);
    }
    return;
  }
  uint4* data = reinterpret_cast<uint4*>(to.data);
  if (format == kBf16) {
    data[lane] = make_uint4(w[0], w[1], w[2], w[3]);
    data[32 + lane] = make_uint4(w[4], w[5], w[6], w[7]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    data[64 * (i / 2) + 2 * lane + i % 2] = make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
  }
}

/// Copies an entry between two buffers of the same format. All lanes of the warp take part.
__device__ __forceinline__ void copy_row(int format, const RowAddress& from, const RowAddress& to, int lane) {
  const int pieces = row_bytes(format) / 16;
  for (int i = lane; i < pieces; i += 32) {
    reinterpret_cast<uint4*>(to.data)[i] = reinterpret_cast<const uint4*>(from.data)[i];
  }
  if (format == kFp8 && lane == 0) *reinterpret_cast<uint2*>(to.scale) = *reinterpret_cast<const uint2*>(from.scale);
}

}  // namespace dsv4
