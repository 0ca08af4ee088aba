// Parameters and launches of the append kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../entries.h"
#include "../geometry.h"

namespace dsv4 {

struct AppendParams {
  // Projections of the step's tokens. Strides in elements, inner stride 1, every row 16-byte aligned.
  const void* kv;               // [tokens, 512] bf16 or fp32
  const float* kv_score;        // [tokens, 2048] CSA, [tokens, 1024] HCA
  const float* index_kv_score;  // [tokens, 512] CSA
  int64_t kv_stride, kv_score_stride, index_kv_score_stride;
  // Weights: norms bf16 or fp32, others fp32.
  const void *kv_norm, *entry_norm, *index_norm;
  const float *ape, *index_ape;
  const float* rope;  // [positions, 64]
  float eps;
  bool kv_bf16, kv_norm_bf16, entry_norm_bf16, index_norm_bf16;
  // Batch.
  const int32_t *slots, *prefix_lens, *query_start, *token_request;
  const int64_t* out_loc;
  const int32_t* staging_slots;  // or null
  int tokens, requests;
  // Written.
  KVBuffer ring, entries, window;
  uint32_t ring_reciprocal;  // 2^32 / rows of the ring, rounded up
  KeyTable index_keys;
  float* compressor_state;
  int64_t compressor_state_stride;  // floats per slot
  CsaCompressorState csa;           // rings of a CSA compressor state
  int hca_state_copies;             // of an online HCA state; the state after t tokens is copy t % hca_state_copies
  int32_t *swa_pos, *swa_head, *tail_len;  // or null
  int64_t swa_pos_stride;
};

enum class LayerKind { kSwa, kCsa, kHcaOnline, kHcaRaw };  // in the order of the launch tables

template <LayerKind kind>
inline constexpr bool is_csa = kind == LayerKind::kCsa;
template <LayerKind kind>
inline constexpr bool is_hca = kind == LayerKind::kHcaOnline || kind == LayerKind::kHcaRaw;
/// Tokens per compressed entry; 0 for a layer with a window only.
template <LayerKind kind>
inline constexpr int ratio_of = is_csa<kind>   ? kCsaRatio
                                : is_hca<kind> ? kHcaRatio
                                               : 0;

/// One launch each. A decode step has tokens / requests tokens of each request, request by request. With `overlap` the
/// kernel starts while the stream's previous kernel drains (sm_90 and later).
///
/// Decode reads batch, weights and rope before it waits for the previous kernel. With `overlap` that kernel must not
/// write them.
cudaError_t launch_append_decode(const AppendParams& params, LayerKind kind, bool overlap, cudaStream_t stream);
cudaError_t launch_append_prefill(const AppendParams& params, LayerKind kind, bool overlap, cudaStream_t stream);

}  // namespace dsv4
