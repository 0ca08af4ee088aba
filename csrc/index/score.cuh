// Common parts of the kernels of index_score: which entries are scored, and how work is divided.
#pragma once

#include "index.h"

namespace dsv4 {

constexpr int kMaxListedTokens = 1024;  // maximum for kernels that divide the keys of all tokens
constexpr unsigned kAllLanes = 0xffffffffu;

/// Returns the number of entries to score for token t, 0 if all visible entries are selected anyway (SPEC 4.2, 4.3).
__device__ __forceinline__ int scored(const ScoreParams& p, int t) {
  const int64_t visible = (p.positions[t] + 1) / kCsaRatio;
  return visible > p.top ? int(min(visible, int64_t(p.width))) : 0;
}

/// The same in candidate blocks: 0 if all of them are selected anyway.
__device__ __forceinline__ int scored(const CandidateScoreParams& p, int t) {
  const int64_t visible = p.visible(p.positions[t]);
  return p.candidates(visible) > p.top ? int(min(visible, int64_t(p.width))) : 0;
}

/// The same among the entries of a token's list.
__device__ __forceinline__ int scored(const ListedScoreParams& p, int t) {
  const int entries = p.entries(t, p.positions[t]);
  return entries > p.top ? entries : 0;
}

/// Writes the score of an entry below `entries`. The entries of a candidate block are in eight lanes, `apart` lanes
/// from one to the next.
template <int apart>
__device__ __forceinline__ void write_score(const ScoreParams&, float* scores, int entry, int entries, float score) {
  if (entry < entries) scores[entry] = score;
}
template <int apart>
__device__ __forceinline__ void write_score(const CandidateScoreParams& p, float* scores, int entry, int entries,
                                            float score) {
  const float infinity = __int_as_float(0x7f800000);
  float best = entry < entries ? score : -infinity;
#pragma unroll
  for (int step = 1; step < kCandidateEntries; step *= 2)
    best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, apart * step));
  if (entry % kCandidateEntries || entry >= entries) return;
  const int block = entry / kCandidateEntries;
  scores[block] = p.newest && block == (entries - 1) / kCandidateEntries ? infinity : best;
}

__host__ __device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// Returns the beginning of part i of `parts` nearly equal parts of `total`.
__device__ __forceinline__ int part_begin(int total, int i, int parts) {
  const int each = total / parts, more = total - each * parts;
  return i * each + min(i, more);
}

/// Returns 2 max(x, 0), exactly. It uses the adder, which has free capacity, instead of the comparator.
__device__ __forceinline__ float twice_positive(float x) { return x + fabsf(x); }

/// Writes the number of units of tokens 0 .. t to ends[t], t < kMaxListedTokens; units(token) are the units of a token.
/// Called by all threads of a block.
template <int warps, typename Params, typename Units>
__device__ __forceinline__ void count_units(const Params& p, int (&ends)[kMaxListedTokens], int (&warp_sums)[warps],
                                            Units units) {
  constexpr int own_tokens = (kMaxListedTokens - 1) / (32 * warps) + 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int own[own_tokens], sum = 0;
#pragma unroll
  for (int i = 0; i < own_tokens; ++i) {
    const int token = threadIdx.x * own_tokens + i;
    sum += token < p.tokens ? units(token) : 0;
    own[i] = sum;
  }
  int before = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, before, step);
    before += lane >= step ? other : 0;
  }
  if (lane == 31) warp_sums[warp] = before;
  before -= sum;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < warps; ++i) before += i < warp ? warp_sums[i] : 0;
#pragma unroll
  for (int i = 0; i < own_tokens; ++i) {
    const int token = threadIdx.x * own_tokens + i;
    if (token < kMaxListedTokens) ends[token] = before + own[i];
  }
  __syncthreads();
}

/// Returns the first token whose units end after `at`, which is below the number of all units. Called by all lanes of a
/// warp with the same `at`.
__device__ __forceinline__ int token_of_unit(const ScoreParams& p, const int (&ends)[kMaxListedTokens], int at) {
  static_assert(kMaxListedTokens == 32 * 32);
  const int lane = threadIdx.x % 32;
  // Groups of 32 tokens, then the tokens of one. After the last token `ends` stays the same.
  const int group = __popc(__ballot_sync(kAllLanes, 32 * lane < p.tokens && ends[32 * lane + 31] <= at));
  return 32 * group + __popc(__ballot_sync(kAllLanes, ends[32 * group + lane] <= at));
}

}  // namespace dsv4
