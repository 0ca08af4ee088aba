// Epilogue of an entry: normalise, rotate, round, quantise, store (SPEC 2.1, 2.4, 2.5, 3.4).
//
// Operands that do not depend on the entry (norm weights, cos and sin) are loaded in a separate step, so that their
// latency overlaps with the load or the pooling of the entry.
#pragma once

#include "../index_vector.cuh"
#include "append.h"
#include "softmax_pool.cuh"

namespace dsv4 {

/// Sum of squares for an RMSNorm. Its leaves are four adjacent channels each, which are then added pairwise
/// (neighbours, then pairs of neighbours, and so on). So the result is equal to the bit however an entry is spread over
/// threads.
__device__ __forceinline__ float squares4(float a, float b, float c, float d) {
  return __fmaf_rn(d, d, __fmaf_rn(c, c, __fmaf_rn(b, b, a * a)));
}

__device__ __forceinline__ float inverse_rms(float squares, float eps) {
  return 1.0f / sqrtf(squares * (1.0f / kEntryDim) + eps);
}

// ---- One warp per entry (entries.cuh): least work, for many entries ----

/// cos and sin of the rotated channels 448..511, in the lanes that hold them.
struct RowAngle {
  float4 first, second;

  __device__ __forceinline__ void load(const AppendParams& p, int64_t position, int lane) {
    if (lane < kFirstRopeLane) return;
    const float* rope = p.rope + position * kRopeDim + 8 * (lane - kFirstRopeLane);
    first = load4(rope), second = load4(rope + 4);
  }
};

/// RMSNorm with the lanes' `weight`, then RoPE, each rounded to bf16 if `round`.
__device__ __forceinline__ void normalise_and_rotate(float (&x)[16], const float (&weight)[16], const RowAngle& angle,
                                                     float eps, bool round, int lane) {
  float low = squares4(x[0], x[1], x[2], x[3]) + squares4(x[4], x[5], x[6], x[7]);
  float high = squares4(x[8], x[9], x[10], x[11]) + squares4(x[12], x[13], x[14], x[15]);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    low += __shfl_xor_sync(kAllLanes, low, step);
    high += __shfl_xor_sync(kAllLanes, high, step);
  }
  const float scale = inverse_rms(low + high, eps);
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    x[i] = x[i] * scale * weight[i], x[i + 1] = x[i + 1] * scale * weight[i + 1];
    if (round) round_pair(x[i], x[i + 1]);
  }
  if (lane < kFirstRopeLane) return;
  rotate_pair(x[8], x[9], angle.first.x, angle.first.y);
  rotate_pair(x[10], x[11], angle.first.z, angle.first.w);
  rotate_pair(x[12], x[13], angle.second.x, angle.second.y);
  rotate_pair(x[14], x[15], angle.second.z, angle.second.w);
#pragma unroll
  for (int i = 8; i < 16; i += 2) {
    if (round) round_pair(x[i], x[i + 1]);
  }
}

// ---- Four warps per entry, four channels per thread: shortest latency ----

constexpr int kRowThreads = kEntryDim / 4;
constexpr int kFirstRopeThread = kNopeDim / 4;

__device__ __forceinline__ void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Shared memory of the four warps of an entry. Consecutive entries alternate between two of them.
struct RowScratch {
  float squares[4], peak[4];
};

/// Loads four numbers of a row of bf16 or fp32.
__device__ __forceinline__ float4 load_quad(const void* row, bool is_bf16, int thread) {
  if (!is_bf16) return static_cast<const float4*>(row)[thread];
  const uint2 u = static_cast<const uint2*>(row)[thread];
  return make_float4(low_bf16(u.x), high_bf16(u.x), low_bf16(u.y), high_bf16(u.y));
}

__device__ __forceinline__ float4 round_quad(float4 x) {
  round_pair(x.x, x.y), round_pair(x.z, x.w);
  return x;
}

/// A thread's part of an entry in its final bytes.
struct PackedQuad {
  uint32_t word[4];
  uint32_t exponent;  // kFp8: biased exponent of the multiplier

  __device__ __forceinline__ void store(int format, const RowAddress& to, int thread) const {
    if (format == kFp8) {
      if (thread < kFirstRopeThread) {
        reinterpret_cast<uint32_t*>(to.data)[thread] = word[0];
      } else {
        reinterpret_cast<uint2*>(to.data + kNopeDim)[thread - kFirstRopeThread] = make_uint2(word[0], word[1]);
      }
      const uint32_t repeated = exponent * 0x01010101u;
      if (thread == 0) *reinterpret_cast<uint2*>(to.scale) = make_uint2(repeated, repeated);
    } else if (format == kBf16) {
      reinterpret_cast<uint2*>(to.data)[thread] = make_uint2(word[0], word[1]);
    } else {
      reinterpret_cast<uint4*>(to.data)[thread] = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
};

/// Operands of the epilogue of an entry: norm weights, cos and sin of a thread's channels.
struct QuadFinish {
  float4 weight, angle;

  __device__ __forceinline__ void load(const AppendParams& p, const void* norm, bool is_bf16, int64_t position,
                                       int thread) {
    weight = load_quad(norm, is_bf16, thread);
    if (thread >= kFirstRopeThread) angle = load4(p.rope + position * kRopeDim + 4 * (thread - kFirstRopeThread));
  }

  /// Applies RMSNorm, RoPE, rounding and quantisation to an entry held by 128 threads, which use barrier `id`.
  __device__ __forceinline__ PackedQuad apply(float4 x, int format, float eps, bool round, RowScratch& scratch, int id,
                                              int thread) const {
    const int warp = thread / 32, lane = thread % 32;
    const float squares = warp_sum_of_neighbours(squares4(x.x, x.y, x.z, x.w));
    if (lane == 0) scratch.squares[warp] = squares;
    barrier(id, kRowThreads);
    const float* s = scratch.squares;
    const float scale = inverse_rms((s[0] + s[1]) + (s[2] + s[3]), eps);
    x = x * splat(scale) * weight;
    if (round) x = round_quad(x);
    if (thread >= kFirstRopeThread) {
      rotate_pair(x.x, x.y, angle.x, angle.y);
      rotate_pair(x.z, x.w, angle.z, angle.w);
      if (round) x = round_quad(x);
    }
    PackedQuad packed{{bits_of(x.x), bits_of(x.y), bits_of(x.z), bits_of(x.w)}, 0};
    if (format == kFp32) return packed;
    const uint32_t low = pack_bf16(x.x, x.y), high = pack_bf16(x.z, x.w);
    packed.word[0] = low, packed.word[1] = high;
    if (format == kBf16) return packed;
    x = make_float4(low_bf16(low), high_bf16(low), low_bf16(high), high_bf16(high));
    const float largest = max_magnitude(max_magnitude(x.x, x.y), max_magnitude(x.z, x.w));
    const float peak = warp_max(thread < kFirstRopeThread ? largest : 0);
    if (lane == 0) scratch.peak[warp] = peak;
    barrier(id, kRowThreads);
    const float* m = scratch.peak;
    packed.exponent = row_exponent(max_magnitude(max_magnitude(m[0], m[1]), max_magnitude(m[2], m[3])));
    if (thread < kFirstRopeThread) {
      const float inverse = exp2_of_biased(254 - packed.exponent);
      packed.word[0] = e4m3_pair(x.x * inverse, x.y * inverse) | e4m3_pair(x.z * inverse, x.w * inverse) << 16;
    }
    return packed;
  }

  __device__ __forceinline__ static float warp_sum_of_neighbours(float x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
  }
};

/// The 128 threads of a main compressor: finish a pooled entry and store it at index `row` of the entry buffer.
__device__ __forceinline__ void store_entry(const AppendParams& p, float4 pooled, const QuadFinish& finish,
                                            RowScratch& scratch, int64_t row, int thread) {
  if (p.kv_bf16) pooled = round_quad(pooled);
  const int format = p.entries.format;
  finish.apply(pooled, format, p.eps, p.kv_bf16, scratch, 2, thread).store(format, row_address(p.entries, row), thread);
}

// ---- One warp per index key ----

/// One warp: store a finished key, channels 4 lane .. 4 lane + 3 in `x`, at index `row` of the key buffer.
__device__ __forceinline__ void store_key(const KeyTable& keys, const float (&x)[4], int64_t row, int lane) {
  const uint32_t block = uint32_t(row) / uint32_t(keys.keys_per_block),
                 key = uint32_t(row) - block * keys.keys_per_block;
  uint8_t* base = keys.base + block * keys.block_bytes;
  if (keys.format == kKeyFp32) {
    store4(reinterpret_cast<float*>(base) + key * kIndexDim + 4 * lane, make_float4(x[0], x[1], x[2], x[3]));
    return;
  }
  const Fp4 fp4 = quantise(x, keys.format);
  const uint32_t codes = fp4.code[0] | fp4.code[1] << 4 | fp4.code[2] << 8 | fp4.code[3] << 12;
  reinterpret_cast<uint16_t*>(base + key * kKeyBytes)[lane] = uint16_t(codes);
  if (lane % 4 == 0) base[keys.keys_per_block * kKeyBytes + key * kScaleBytes + lane / 4] = uint8_t(fp4.scale_code);
}

/// Operands of the epilogue of a key, four channels per lane.
struct KeyFinish {
  float4 weight, angle;

  __device__ __forceinline__ void load(const AppendParams& p, int64_t position, int lane) {
    weight = load_quad(p.index_norm, p.index_norm_bf16, lane);
    if (lane >= kFirstRotatedIndexLane)
      angle = load4(p.rope + position * kRopeDim + 4 * (lane - kFirstRotatedIndexLane));
  }

  /// One warp: finish a pooled index key, channels 4 lane .. 4 lane + 3 in `pooled`, and store it at index `row`.
  __device__ __forceinline__ void store(const AppendParams& p, float4 pooled, int64_t row, int lane) const {
    if (p.kv_bf16) pooled = round_quad(pooled);
    float squares = pooled.x * pooled.x;
    squares += pooled.y * pooled.y, squares += pooled.z * pooled.z, squares += pooled.w * pooled.w;
    pooled = pooled * splat(1.0f / sqrtf(warp_sum(squares) * (1.0f / kIndexDim) + p.eps)) * weight;
    if (p.kv_bf16) pooled = round_quad(pooled);
    if (lane >= kFirstRotatedIndexLane) {
      rotate_pair(pooled.x, pooled.y, angle.x, angle.y);
      rotate_pair(pooled.z, pooled.w, angle.z, angle.w);
      if (p.kv_bf16) pooled = round_quad(pooled);
    }
    float x[4] = {pooled.x, pooled.y, pooled.z, pooled.w};
    hadamard(x, lane);

    store_key(p.index_keys, x, row, lane);
  }
};

}  // namespace dsv4
