// Parameters and launches of the three kernels of index_topk. Strides in elements unless a name says bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../entries.h"
#include "../geometry.h"
#include "layout.h"

namespace dsv4 {

constexpr int kKeysPerBlock = kBlockTokens / kCsaRatio;
constexpr int kIndexHeads = 64;             // maximum
constexpr int64_t kIndexEntries = 1 << 20;  // maximum per token: one bit each in shared memory

struct QueryParams {
  const void* q;  // [tokens, heads, 128] bf16 or fp32
  int64_t token_stride, head_stride;
  const int64_t* positions;
  const float* rope;     // [positions, 64]
  const float* weights;  // [tokens, heads]
  int64_t weights_stride;
  void* out;           // [tokens, heads, 128] fp16 in `form`; fp32 in order if `format` is kKeyFp32
  float* out_weights;  // [tokens, heads], including the scale of the query's form
  int tokens, heads, format;
  bool q_bf16;
  QueryForm form;  // images have kIndexHeads heads, in the first bytes of a token's part
};

struct ScoreParams {
  const void* query;     // prepared by index_query, like its weights
  const float* weights;  // [tokens, heads]
  const uint8_t* keys;
  int64_t block_bytes;
  const int32_t* table;
  int64_t table_stride;
  const int32_t* request;
  const int64_t* positions;
  float* scores;
  int64_t scores_stride;
  int tokens, heads, top, width;
  int requests;
};

struct SelectParams {
  const float* scores;
  int64_t scores_stride;
  const int32_t* table;
  int64_t table_stride;
  const int32_t* request;
  const int64_t* positions;
  int32_t* rows;
  int64_t rows_stride;
  int tokens, top, width;
  int cluster;   // thread blocks per token
  bool aligned;  // every row of scores starts at a multiple of 16 bytes
};

/// `sm_90`: the GPU supports clusters and programmatic dependent launch.
cudaError_t launch_query(const QueryParams& params, bool sm_90, cudaStream_t stream);
cudaError_t launch_score(const ScoreParams& params, bool fp4, bool sm_90, int processors, cudaStream_t stream);
/// For sm_90a and FP4 keys, with queries as images of `form`.
cudaError_t launch_score_hopper(const ScoreParams& params, QueryForm form, int processors, cudaStream_t stream);
/// Sets `cluster`.
cudaError_t launch_select(SelectParams params, bool sm_90, int processors, cudaStream_t stream);

}  // namespace dsv4
