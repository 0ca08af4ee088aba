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
constexpr int kCandidateEntries = 8;        // entries of a candidate block (SPEC 11.6)
constexpr int kCandidateHeads = 32;         // maximum in a selection of two levels
constexpr int kManyTokens = 16;             // tokens per request from which a step counts as a prefill

/// Entries of V4.1: 2^ratio_shift tokens each, 128 >> ratio_shift in a block of the cache. 0 or 1.
struct Ratio {
  int ratio_shift;

  DSV4_HD int64_t visible(int64_t position) const { return (position + 1) >> ratio_shift; }
  /// Number of candidate blocks with some of the entries.
  DSV4_HD static int64_t candidates(int64_t entries) { return (entries + kCandidateEntries - 1) / kCandidateEntries; }
  /// Candidate blocks of a block of the cache, as a power of two.
  DSV4_HD int candidates_shift() const { return 4 - ratio_shift; }
};
static_assert(kBlockTokens == kCandidateEntries << 4);

/// Candidate blocks of each token in ascending order. All have kCandidateEntries entries that the token sees, except
/// for the block with its newest entry.
struct CandidateLists : Ratio {
  const int32_t* blocks;  // [tokens, listed]
  int64_t blocks_stride;
  int listed;

  DSV4_HD const int32_t* of(int token) const { return blocks + token * blocks_stride; }
  /// Number of blocks in the list of a token: all of them, or the best `listed` ones.
  DSV4_HD int count(int64_t position) const {
    const int64_t all = candidates(visible(position));
    return int(all < listed ? all : listed);
  }
  /// Number of entries in the blocks of a token that it sees.
  DSV4_HD int entries(int token, int64_t position) const {
    const int last = count(position) - 1;
    if (last < 0) return 0;
    const int64_t in_last = visible(position) - int64_t(kCandidateEntries) * of(token)[last];
    return kCandidateEntries * last + int(in_last < kCandidateEntries ? in_last : kCandidateEntries);
  }
};

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
  QueryForm form;  // images are in the first bytes of a token's part
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
  QueryForm form;  // of `query`
};

/// Writes the largest score of each candidate block instead. `top`: blocks to select.
struct CandidateScoreParams : ScoreParams, Ratio {
  bool newest;  // the block of the newest entry has the score infinity
};

/// Scores the entries of listed candidate blocks. A list's entries are the columns of the scores.
struct ListedScoreParams : ScoreParams, CandidateLists {};

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

/// Columns are candidate blocks. Writes their numbers.
struct CandidateSelectParams : SelectParams, Ratio {};

/// Columns are the entries of listed candidate blocks.
struct ListedSelectParams : SelectParams, CandidateLists {};

/// `sm_90`: the GPU supports clusters and programmatic dependent launch.
/// `hadamard`: keys have the transform. Without it, queries are MXFP4 with any scales. Images have kIndexHeads heads
/// with the transform, kCandidateHeads without it.
cudaError_t launch_query(const QueryParams& params, bool hadamard, bool sm_90, cudaStream_t stream);
cudaError_t launch_score(const ScoreParams& params, bool fp4, bool sm_90, int processors, cudaStream_t stream);
cudaError_t launch_score(const CandidateScoreParams& params, bool sm_90, int processors, cudaStream_t stream);
cudaError_t launch_score(const ListedScoreParams& params, bool sm_90, int processors, cudaStream_t stream);
/// For sm_90a and FP4 keys, with queries as images; those of candidate blocks for kManyTokens and more per request.
cudaError_t launch_score_hopper(const ScoreParams& params, int processors, cudaStream_t stream);
cudaError_t launch_score_hopper(const CandidateScoreParams& params, int processors, cudaStream_t stream);
/// Sets `cluster`. Params: SelectParams, CandidateSelectParams or ListedSelectParams.
template <typename Params>
cudaError_t launch_select(Params params, bool sm_90, int processors, cudaStream_t stream);

}  // namespace dsv4
