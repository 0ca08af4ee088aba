// The arguments of the append kernels, and their launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../entries.h"
#include "../geometry.h"

namespace dsv4 {

struct AppendParams {
  // Projections of the step's tokens; strides in elements, inner stride 1, every row 16-byte aligned.
  const void* kv;               // [tokens, 512] bf16 or fp32
  const float* kv_score;        // [tokens, 2048] CSA, [tokens, 1024] HCA
  const float* index_kv_score;  // [tokens, 512] CSA
  int64_t kv_stride, kv_score_stride, index_kv_score_stride;
  // Weights: norms bf16 or fp32, the rest fp32.
  const void *kv_norm, *entry_norm, *index_norm;
  const float *ape, *index_ape;
  const float* rope;  // [positions, 64]
  float eps;
  bool kv_bf16, kv_norm_bf16, entry_norm_bf16, index_norm_bf16;
  // Batch.
  const int32_t *slots, *prefix_lens, *query_start, *token_request;
  const int64_t* out_loc;
  const int32_t* track_slots;  // or null
  int tokens, requests;
  // Written.
  KVBuffer ring, entries, window;
  uint32_t ring_reciprocal;  // of the ring's rows, times 2^32, rounded up
  KeyTable index_keys;
  float* compressor_state;
  int64_t compressor_state_stride;  // floats of a slot
  CsaCompressorState csa;           // rings of a CSA compressor state
  int hca_state_copies;  // states of an online HCA compressor state, the one after t tokens in state copy t %
                         // hca_state_copies
  int32_t *swa_pos, *swa_head, *tail_len;  // or null
  int64_t swa_pos_stride;
};

enum class LayerKind { kSwa, kCsa, kHcaOnline, kHcaRaw };  // in the order of the launch tables

template <LayerKind kind>
inline constexpr bool is_csa = kind == LayerKind::kCsa;
template <LayerKind kind>
inline constexpr bool is_hca = kind == LayerKind::kHcaOnline || kind == LayerKind::kHcaRaw;
/// Tokens of a compressed entry; 0: a layer of the window alone, which has none.
template <LayerKind kind>
inline constexpr int ratio_of = is_csa<kind>   ? kCsaRatio
                                : is_hca<kind> ? kHcaRatio
                                               : 0;

/// One launch each. Decode: tokens / requests tokens of each request, request by request. `overlap` lets it start while
/// the stream's previous kernel drains (sm_90 and later).
///
/// Decode reads batch, weights and rope before it waits for that kernel, so with `overlap` that kernel must not write
/// them.
cudaError_t launch_append_decode(const AppendParams& params, LayerKind kind, bool overlap, cudaStream_t stream);
cudaError_t launch_append_prefill(const AppendParams& params, LayerKind kind, bool overlap, cudaStream_t stream);

}  // namespace dsv4
