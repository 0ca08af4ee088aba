// append_v41: all cache writes of one layer of DeepSeek-V4.1 for the tokens of a step in one launch, except for index
// keys. append_v41_keys computes those from the latents after their matrix product (SPEC 11.3, 11.4).
//
// One thread block per token: four warps for the window entry and, in a layer that writes entries, four warps for the
// compressed entry. In a prefill step further blocks copy ring entries to the workspace, one warp per entry. No block
// waits for another one:
// - A ring entry is copied by the block that overwrites it, thread by thread, or by a copying block if it is not
//   overwritten.
// - The first token of a pair is read from the inputs if it is in the step. Only the step's first token of a request
//   reads the compressor state. In a prefill step its block also writes the compressor state, for the token that waits
//   after the step.
// - In a decode step every waiting token has a row of its own, which no other token of the step reads (pair_rows in
//   dsv4_sglang/model/v41.py).
//
// Bytes per token. Read: kv 1024, kv_score 1024 (ratio 1) or 4096. Written: window entry 528; at ratio 1 compressed
// entry 288 and latent 1024, at ratio 2 half of it and, for every other token, 4096 of compressor state.
#include <cuda_runtime.h>

#include "../append/entry_epilogue.cuh"
#include "append_v41.h"

namespace dsv4 {
namespace {

constexpr int kRowBarrier = 1, kEntryBarrier = 2;

struct V41Address {
  uint8_t *data, *scale;
};

template <int data_bytes, int scale_bytes>
__device__ __forceinline__ V41Address address(const V41Table& table, int64_t block, int row) {
  uint8_t* base = table.base + block * table.block_bytes;
  return {base + int64_t(row) * data_bytes,
          base + int64_t(table.entries_per_block) * data_bytes + int64_t(row) * scale_bytes};
}

__device__ __forceinline__ V41Address ring_address(const AppendV41Params& p, int slot, int position) {
  return address<kV41RowBytes, kV41RowScales>(p.ring, slot, position % p.ring.entries_per_block);
}

__device__ __forceinline__ V41Address window_address(const AppendV41Params& p, int row) {
  return address<kV41RowBytes, kV41RowScales>(p.window, 0, row);
}

/// A request of the step. Its tokens are the input rows `begin` .. `end`, at positions `length` .. `stop`.
struct Request {
  int index, slot, begin, end, length, stop;

  __device__ __forceinline__ Request(const V41Batch& batch, int request)
      : index(request),
        slot(batch.slots[request]),
        begin(batch.query_start[request]),
        end(batch.query_start[request + 1]),
        length(batch.prefix_lens[request]),
        stop(length + end - begin) {}

  /// Returns the workspace index of a position from length - 128.
  __device__ __forceinline__ int window_row(int position) const {
    return begin + kWindow * (index + 1) + position - length;
  }
};

/// RMSNorm of an entry held by 128 threads, rounded to bf16.
__device__ __forceinline__ float4 normalise(float4 x, float4 weight, float eps, float (&scratch)[4], int id,
                                            int thread) {
  const float squares = QuadFinish::warp_sum_of_neighbours(squares4(x.x, x.y, x.z, x.w));
  if (thread % 32 == 0) scratch[thread / 32] = squares;
  barrier(id, kRowThreads);
  return round_quad(x * splat(inverse_rms((scratch[0] + scratch[1]) + (scratch[2] + scratch[3]), eps)) * weight);
}

/// RoPE of the last 64 channels, rounded to bf16.
__device__ __forceinline__ float4 rotate(float4 x, const float* rope, int64_t position, int thread) {
  if (thread < kFirstRopeThread) return x;
  const float4 angle = load4(rope + position * kRopeDim + 4 * (thread - kFirstRopeThread));
  rotate_pair(x.x, x.y, angle.x, angle.y);
  rotate_pair(x.z, x.w, angle.z, angle.w);
  return round_quad(x);
}

__device__ __forceinline__ float largest(float4 x) {
  return max_magnitude(max_magnitude(x.x, x.y), max_magnitude(x.z, x.w));
}

/// Four adjacent channels of a window entry; eight threads share a scale.
struct PackedRowQuad {
  uint32_t codes, exponent;

  __device__ __forceinline__ explicit PackedRowQuad(float4 x) : exponent(row_exponent(group_max<8>(largest(x)))) {
    const float inverse = exp2_of_biased(254 - exponent);
    codes = e4m3_pair(x.x * inverse, x.y * inverse) | e4m3_pair(x.z * inverse, x.w * inverse) << 16;
  }

  __device__ __forceinline__ void store(const V41Address& to, int thread) const {
    reinterpret_cast<uint32_t*>(to.data)[thread] = codes;
    if (thread % 8 == 0) to.scale[thread / 8] = uint8_t(exponent);
  }
};

/// 128 threads: copy an entry from the ring to the workspace. Each thread copies the bytes that PackedRowQuad::store
/// writes.
__device__ __forceinline__ void copy_row(const V41Address& from, const V41Address& to, int thread) {
  reinterpret_cast<uint32_t*>(to.data)[thread] = reinterpret_cast<const uint32_t*>(from.data)[thread];
  if (thread % 8 == 0) to.scale[thread / 8] = from.scale[thread / 8];
}

/// Four warps: write the window entry of an input.
__device__ void write_row(const AppendV41Params& p, const Request& request, int token, float (&scratch)[4]) {
  const int thread = threadIdx.x, position = request.length + token - request.begin;
  const uint16_t* kv = static_cast<const uint16_t*>(p.inputs) + token * p.inputs_stride;
  float4 x = load_quad(kv, true, thread);
  x = normalise(x, load_quad(p.norm, p.norm_bf16, thread), p.eps, scratch, kRowBarrier, thread);
  const PackedRowQuad packed(rotate(x, p.rope, position, thread));
  if (p.staging_slots && p.staging_slots[token] >= 0) {
    packed.store(ring_address(p, p.staging_slots[token], position), thread);
  }
  const V41Address row = ring_address(p, request.slot, position);
  if (p.window.base) {
    packed.store(window_address(p, request.window_row(position)), thread);
    if (position < request.stop - kWindow) return;
    // The last position before the step with this ring index.
    const int rows = p.ring.entries_per_block, before = position - (position - request.length) / rows * rows - rows;
    if (before >= max(0, request.length - kWindow)) {
      copy_row(row, window_address(p, request.window_row(before)), thread);
    }
  }
  packed.store(row, thread);
}

/// One warp: copy one of the 128 entries before a request's chunk to the workspace, if no token of the chunk overwrites
/// it.
__device__ void copy_old_row(const AppendV41Params& p, int task, int lane) {
  if (task >= kWindow * p.batch.requests) return;
  const Request request(p.batch, task / kWindow);
  const int position = request.length - kWindow + task % kWindow;
  if (request.slot < 0 || request.begin == request.end || position < 0) return;
  const int rows = p.ring.entries_per_block, last = min(request.end - request.begin, kWindow);
  // The next positions with this ring index are rows, 2 rows, ... further.
  const int next = position + (request.stop - 1 - position) / rows * rows;
  if (next >= request.stop - last) return;
  const V41Address from = ring_address(p, request.slot, position), to = window_address(p, request.window_row(position));
  reinterpret_cast<uint4*>(to.data)[lane] = reinterpret_cast<const uint4*>(from.data)[lane];
  if (lane == 0) *reinterpret_cast<uint4*>(to.scale) = *reinterpret_cast<const uint4*>(from.scale);
}

/// k and score of a token, at four channels of a thread.
struct Waiting {
  float4 k, score;

  __device__ __forceinline__ static Waiting load(const float* row, int thread) {
    return {load4(row + 4 * thread), load4(row + kEntryDim + 4 * thread)};
  }
  __device__ __forceinline__ void store(float* row, int thread) const {
    store4(row + 4 * thread, k), store4(row + kEntryDim + 4 * thread, score);
  }
};

/// Returns the row of the compressor state that holds the token at an even position. For an odd position, returns its
/// partner's row.
__device__ __forceinline__ float* compressor_state_row(const AppendV41Params& p, int slot, int position) {
  return p.compressor_state + slot * p.compressor_state_stride +
         int64_t(position / 2 % p.compressor_state_rows) * 2 * kEntryDim;
}

/// Adds a token to the compressor state and computes its pair's pooled k. Returns false if the token waits for its
/// partner.
__device__ __forceinline__ bool pool_pair(const AppendV41Params& p, const Request& request, int token, int position,
                                          int thread, float4& pooled) {
  const float* inputs = static_cast<const float*>(p.kv_score);
  const Waiting own = Waiting::load(inputs + token * p.kv_score_stride, thread);
  const bool completes = position % 2, first = position == request.length;
  if (completes) {
    const Waiting partner = Waiting::load(
        first ? compressor_state_row(p, request.slot, position) : inputs + (token - 1) * p.kv_score_stride, thread);
    const float4 peak = max4(own.score, partner.score);
    const float4 weight = exp4(own.score - peak), other = exp4(partner.score - peak);
    pooled = (other * partner.k + weight * own.k) / (weight + other);
  }
  if (!p.window.base) {
    if (!completes) own.store(compressor_state_row(p, request.slot, position), thread);
  } else if (first && request.stop % 2) {
    // A thread reads and writes only its own channels of the compressor state, so it may overwrite what it has read.
    Waiting::load(inputs + (request.end - 1) * p.kv_score_stride, thread)
        .store(compressor_state_row(p, request.slot, request.stop - 1), thread);
  }
  return completes;
}

/// Four warps: write the entry if the input completes one.
template <int ratio>
__device__ void write_entry(const AppendV41Params& p, const Request& request, int token, float (&scratch)[4]) {
  const int thread = threadIdx.x - kRowThreads, position = request.length + token - request.begin;
  float4 x = splat(0);
  if (ratio == 1) {
    x = load_quad(static_cast<const uint16_t*>(p.kv_score) + token * p.kv_score_stride, true, thread);
  } else {
    if (!pool_pair(p, request, token, position, thread, x)) return;
    x = round_quad(x);
  }
  x = normalise(x, load_quad(p.entry_norm, p.entry_norm_bf16, thread), p.eps, scratch, kEntryBarrier, thread);
  reinterpret_cast<uint2*>(p.latents + token * p.latents_stride)[thread] =
      make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
  x = rotate(x, p.rope, position + 1 - ratio, thread);
  const uint32_t scale_code = nvfp4_scale(group_max<4>(largest(x)));
  const float scale = e4m3_value(scale_code);
  const uint32_t codes = e2m1(x.x / scale) | e2m1(x.y / scale) << 4 | e2m1(x.z / scale) << 8 | e2m1(x.w / scale) << 12;
  const uint32_t row = uint32_t(p.batch.out_loc[token] / ratio), block = row / uint32_t(p.entries.entries_per_block);
  const V41Address to =
      address<kV41EntryBytes, kV41EntryScales>(p.entries, block, int(row - block * p.entries.entries_per_block));
  reinterpret_cast<uint16_t*>(to.data)[thread] = uint16_t(codes);
  if (thread % 4 == 0) to.scale[thread / 4] = uint8_t(scale_code);
}

template <int ratio>
constexpr int kThreads = ratio ? 2 * kRowThreads : kRowThreads;

template <int ratio>
__global__ void __launch_bounds__(kThreads<ratio>) append_v41_kernel(const __grid_constant__ AppendV41Params p) {
  __shared__ float scratch[2][4];
  const int token = blockIdx.x, warp = threadIdx.x / 32;
  if (token >= p.batch.tokens) {
    copy_old_row(p, (token - p.batch.tokens) * (kThreads<ratio> / 32) + warp, threadIdx.x % 32);
    return;
  }
  const Request request(p.batch, p.batch.token_request[token]);
  if (request.slot < 0) return;
  if (threadIdx.x < kRowThreads) {
    write_row(p, request, token, scratch[0]);
  } else if constexpr (ratio > 0) {
    write_entry<ratio>(p, request, token, scratch[1]);
  }
}

constexpr int kKeyWarps = 4;

/// One warp per token.
__global__ void __launch_bounds__(32 * kKeyWarps)
    append_v41_keys_kernel(const __grid_constant__ AppendV41KeysParams p) {
  const int token = blockIdx.x * kKeyWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= p.batch.tokens) return;
  const Request request(p.batch, p.batch.token_request[token]);
  const int position = request.length + token - request.begin;
  if (request.slot < 0 || (position + 1) % p.ratio) return;
  float4 x = load_quad(static_cast<const uint16_t*>(p.inputs) + token * p.inputs_stride, true, lane);
  const float squares = warp_sum(squares4(x.x, x.y, x.z, x.w));
  const float4 weight = load_quad(p.norm, p.norm_bf16, lane);
  x = round_quad(x * splat(1.0f / sqrtf(squares * (1.0f / kIndexDim) + p.eps)) * weight);
  if (lane >= kFirstRotatedIndexLane) {
    const float4 angle =
        load4(p.rope + int64_t(position + 1 - p.ratio) * kRopeDim + 4 * (lane - kFirstRotatedIndexLane));
    rotate_pair(x.x, x.y, angle.x, angle.y);
    rotate_pair(x.z, x.w, angle.z, angle.w);
    x = round_quad(x);
  }
  const float channels[4] = {x.x, x.y, x.z, x.w};
  store_key(p.index_keys, channels, p.batch.out_loc[token] / p.ratio, lane);
}

template <int ratio>
cudaError_t launch_ratio(const AppendV41Params& p, cudaStream_t stream) {
  constexpr int warps = kThreads<ratio> / 32;
  const int copies = p.window.base ? (kWindow * p.batch.requests + warps - 1) / warps : 0;
  append_v41_kernel<ratio><<<p.batch.tokens + copies, kThreads<ratio>, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_append_v41(const AppendV41Params& p, int ratio, cudaStream_t stream) {
  return ratio == 0 ? launch_ratio<0>(p, stream) : ratio == 1 ? launch_ratio<1>(p, stream) : launch_ratio<2>(p, stream);
}

cudaError_t launch_append_v41_keys(const AppendV41KeysParams& p, cudaStream_t stream) {
  append_v41_keys_kernel<<<(p.batch.tokens + kKeyWarps - 1) / kKeyWarps, 32 * kKeyWarps, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace dsv4
