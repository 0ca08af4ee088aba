// The CSA compressors: the main one (512 channels) and the indexer's (128), four channels per thread (SPEC 3.2, 3.7).
#pragma once

#include "entry_epilogue.cuh"

namespace dsv4 {

constexpr int kCsaCompressorStateWidth = kEntryDim + kIndexDim;
constexpr int kCsaThreads = kCsaCompressorStateWidth / 4;  // four warps for the main compressor, one for the indexer's

/// Rows of a position in a compressor state. The compiler folds it to constants if the sizes of the rings are
/// constants.
struct CompressorStateRows {
  CsaCompressorState rings;

  __device__ __forceinline__ int current_k(int position) const { return position & (rings.current - 1); }
  __device__ __forceinline__ int current_z(int position) const { return rings.current + current_k(position); }
  __device__ __forceinline__ int previous_k(int position) const {
    return 2 * rings.current + (position & (rings.previous - 1));
  }
  __device__ __forceinline__ int previous_z(int position) const { return rings.previous + previous_k(position); }
};

/// Returns the row of a position in the position bias.
__device__ __forceinline__ int bias_row(int position) { return position & (kCsaRatio - 1); }

/// One compressor, with pointers at the channels of a thread.
struct Stream {
  const float* scores;  // [tokens, k_prev | k_cur | z_prev | z_cur]
  int64_t stride;
  const float* ape;  // [4, prev | cur]
  int width;
  int column;  // in a compressor state row

  __device__ __forceinline__ float* compressor_state(const AppendParams& p, int slot) const {
    return p.compressor_state + slot * p.compressor_state_stride + column;
  }
};

__device__ __forceinline__ Stream csa_stream(const AppendParams& p, bool index, int channel) {
  if (index)
    return {p.index_kv_score + channel, p.index_kv_score_stride, p.index_ape + channel, kIndexDim, kEntryDim + channel};
  return {p.kv_score + channel, p.kv_score_stride, p.ape + channel, kEntryDim, channel};
}

/// Returns the compressor and channels of thread 0 .. 159.
__device__ __forceinline__ Stream csa_stream_of_thread(const AppendParams& p, int thread) {
  const bool index = 4 * thread >= kEntryDim;
  return csa_stream(p, index, 4 * thread - (index ? kEntryDim : 0));
}

__device__ __forceinline__ void write_prev_row(const Stream& s, const CompressorStateRows& rows,
                                               float* compressor_state, int64_t token, int position) {
  const float* score = s.scores + token * s.stride;
  store4(compressor_state + rows.previous_k(position) * kCsaCompressorStateWidth, load4(score));
  const float4 z = load4(score + 2 * s.width) + load4(s.ape + bias_row(position) * 2 * s.width);
  store4(compressor_state + rows.previous_z(position) * kCsaCompressorStateWidth, z);
}

/// Writes the previous-stream rows of a token, one of the last four before a snapshot, to the snapshot's compressor
/// state. Executed by `threads` threads, of which this is number `first`.
__device__ inline void track_prev_rows(const AppendParams& p, const CompressorStateRows& rows, int64_t token,
                                       int position, int slot, int first, int threads) {
  for (int thread = first; thread < kCsaThreads; thread += threads) {
    const Stream s = csa_stream_of_thread(p, thread);
    write_prev_row(s, rows, s.compressor_state(p, slot), token, position);
  }
}

/// Pools the eight rows of an entry, oldest first. Row i has k `k(i)`; z is -inf if the row does not exist.
template <typename K>
__device__ __forceinline__ float4 pool_entry(const float4 (&z)[8], const K& k) {
  float4 peak = z[0], sum = splat(0), acc = splat(0);
#pragma unroll
  for (int i = 1; i < 8; ++i) peak = max4(peak, z[i]);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 weight = exp4(z[i] - peak);
    sum = sum + weight, acc = acc + weight * k(i);
  }
  return acc / sum;
}

// Row 0 .. 7 of an entry: four of the previous stream, then four of the current one. They come from the projections of
// its token (the bias row is row % 4, because windows start at multiples of 4) or from the compressor state, at the
// rows of `position`.

__device__ __forceinline__ const float* input_row(const Stream& s, int row, int64_t token) {
  return s.scores + token * s.stride + (row < 4 ? 0 : s.width);
}
__device__ __forceinline__ float4 input_bias(const Stream& s, int row) {
  return load4(s.ape + bias_row(row) * 2 * s.width + (row < 4 ? 0 : s.width));
}
__device__ __forceinline__ const float* state_k(const float* compressor_state, const CompressorStateRows& rows, int row,
                                                int position) {
  return compressor_state + (row < 4 ? rows.previous_k(position) : rows.current_k(position)) * kCsaCompressorStateWidth;
}
__device__ __forceinline__ const float* state_z(const float* compressor_state, const CompressorStateRows& rows, int row,
                                                int position) {
  return compressor_state + (row < 4 ? rows.previous_z(position) : rows.current_z(position)) * kCsaCompressorStateWidth;
}

}  // namespace dsv4
