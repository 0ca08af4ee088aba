// Parameters and launches of the append kernels of DeepSeek-V4.1.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../entries.h"

namespace dsv4 {

/// KV buffer of V4.1. Its format follows from its role.
struct V41Table {
  uint8_t* base;
  int64_t block_bytes;
  int entries_per_block;
};

struct V41Batch {
  const int32_t *slots, *prefix_lens, *query_start, *token_request;
  const int64_t* out_loc;
  int tokens, requests;
};

/// A batch and its inputs, which are normalised, rotated and written. Strides in elements, inner stride 1, every row
/// 16-byte aligned. Norms are bf16 or fp32.
struct V41Inputs {
  const void* inputs;  // [tokens, width] bf16
  int64_t inputs_stride;
  const void* norm;  // [width]
  bool norm_bf16;
  const float* rope;  // [positions, 64]
  float eps;
  V41Batch batch;
};

/// Inputs are kv, of width 512.
struct AppendV41Params : V41Inputs {
  const void* kv_score;  // [tokens, 512] bf16 at ratio 1, [tokens, 1024] fp32 = [k | score] at ratio 2
  int64_t kv_score_stride;
  const void* entry_norm;
  bool entry_norm_bf16;
  const int32_t* staging_slots;  // or null
  // Written.
  V41Table ring, window, entries;  // window.base: null in a decode step
  float* compressor_state;
  int64_t compressor_state_stride;  // floats per slot
  int compressor_state_rows;
  uint16_t* latents;  // [tokens, 512] bf16
  int64_t latents_stride;
};

/// Inputs are index keys, of width 128.
struct AppendV41KeysParams : V41Inputs {
  int ratio;
  KeyTable index_keys;
};

/// One launch each. `ratio`: tokens per entry that the layer writes, 0, 1 or 2. A decode step (no window) has tokens /
/// requests tokens of each request.
cudaError_t launch_append_v41(const AppendV41Params& params, int ratio, cudaStream_t stream);
cudaError_t launch_append_v41_keys(const AppendV41KeysParams& params, cudaStream_t stream);

}  // namespace dsv4
