// index_score: for each token that sees more entries than it selects, score of each visible entry = sum over heads of
// weight x ReLU(query . key), fp32 (SPEC 4.1). For any GPU. score_hopper.cu does the same faster on sm_90a, for FP4
// keys and 64 heads, and for candidate blocks and 32 heads in a prefill. Both sum over heads in the same order.
//
// Each warp works independently. It holds the query of one token, 64 heads x 128 channels of fp16, in 128 registers per
// lane as the A operands of m16n8k16. It iterates over blocks of 32 keys, decodes them from their 2304 bytes directly
// into B operands while the next block is loaded, and reduces weighted, rectified products over heads in registers. A
// score does not depend on what else is scored.
//
// In a selection of two levels (SPEC 11.6) a tile of eight keys is a candidate block. One launch writes the best score
// of every block, the other the scores of the entries of listed blocks. They have at most 32 heads, whose query takes
// half the registers.
//
// Decode: the blocks of all tokens form one list, divided equally among the warps. Prefill: the warps of a thread block
// process eight consecutive tokens over the same keys, which they find in L1. Bytes: 72 per key, 4 per score; decode
// reads a query once per warp (mostly from L1).
#include "../launch.cuh"
#include "index.h"
#include "layout.h"
#include "score.cuh"
#include "warp.cuh"

namespace dsv4 {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

__device__ __forceinline__ int blocks_of(int entries) { return ceil_div(entries, kKeysPerBlock); }

/// A lane's part of a block of 32 keys: channels 32 (lane % 4) and up of key 8 j + lane / 4, and their two scales.
struct PackedKeys {
  uint4 codes[4];
  uint16_t scales[4];

  __device__ __forceinline__ void load(const uint8_t* block, int lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      codes[j] = *reinterpret_cast<const uint4*>(block + 512 * j + 16 * lane);
      scales[j] = *reinterpret_cast<const uint16_t*>(block + kKeysPerBlock * kKeyBytes + 64 * j + 2 * lane);
    }
  }

  /// Loads keys 8 j .. 8 j + 7 from the codes of a candidate block, 512 bytes, and its scales, 64 bytes.
  __device__ __forceinline__ void load_candidate(int j, const uint8_t* codes_at, const uint8_t* scales_at, int lane) {
    codes[j] = *reinterpret_cast<const uint4*>(codes_at + 16 * lane);
    scales[j] = *reinterpret_cast<const uint16_t*>(scales_at + 2 * lane);
  }
};

/// Finds the keys of a token's units of 32. `at(unit)` returns their place, long before `load` uses it.
template <typename Params>
struct KeySource;

template <>
struct KeySource<ScoreParams> {
  using Place = int;
  const int32_t* table;

  __device__ __forceinline__ KeySource(const ScoreParams& p, int token)
      : table(p.table + p.request[token] * p.table_stride) {}
  __device__ __forceinline__ Place at(int unit, int) const { return table[unit]; }
  __device__ __forceinline__ void load(PackedKeys& keys, const ScoreParams& p, Place block, int, int lane) const {
    keys.load(p.keys + block * p.block_bytes, lane);
  }
};

template <>
struct KeySource<CandidateScoreParams> {
  using Place = int;  // block of the cache
  const int32_t* table;
  int units_shift;  // units of a block of the cache, as a power of two

  __device__ __forceinline__ KeySource(const CandidateScoreParams& p, int token)
      : table(p.table + p.request[token] * p.table_stride), units_shift(p.candidates_shift() - 2) {}
  __device__ __forceinline__ Place at(int unit, int) const { return table[unit >> units_shift]; }
  __device__ __forceinline__ void load(PackedKeys& keys, const CandidateScoreParams& p, Place block, int unit,
                                       int lane) const {
    const uint8_t* codes = p.keys + block * p.block_bytes;
    const uint8_t* scales = codes + (kKeysPerBlock << units_shift) * kKeyBytes;
    const int inside = 4 * (unit & ((1 << units_shift) - 1));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      keys.load_candidate(j, codes + 512 * (inside + j), scales + 64 * (inside + j), lane);
    }
  }
};

template <>
struct KeySource<ListedScoreParams> {
  struct Place {  // of candidate block lane % 4 of the unit
    int block, inside;
  };
  const int32_t* table;
  const int32_t* list;
  int last, shift;  // last block of the list; candidate blocks of a block of the cache, as a power of two

  __device__ __forceinline__ KeySource(const ListedScoreParams& p, int token)
      : table(p.table + p.request[token] * p.table_stride),
        list(p.of(token)),
        last(p.count(p.positions[token]) - 1),
        shift(p.candidates_shift()) {}
  __device__ __forceinline__ Place at(int unit, int lane) const {
    const int number = list[min(4 * unit + lane % 4, last)];
    return {table[number >> shift], number & ((1 << shift) - 1)};
  }
  __device__ __forceinline__ void load(PackedKeys& keys, const ListedScoreParams& p, const Place& place, int,
                                       int lane) const {
    // The address of candidate block lane % 4, and the distance from its codes to its scales.
    const auto own = reinterpret_cast<uint64_t>(p.keys + place.block * p.block_bytes + 512 * place.inside);
    const int own_distance = (kCandidateEntries << shift) * kKeyBytes + (64 - 512) * place.inside;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto codes = reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, own, j));
      keys.load_candidate(j, codes, codes + __shfl_sync(kAllLanes, own_distance, j), lane);
    }
  }
};

/// Tiles of 16 heads.
template <typename Params>
constexpr int kTiles = kCandidateHeads / 16;
template <>
constexpr int kTiles<ScoreParams> = kIndexHeads / 16;
/// Thread blocks per SM.
template <typename Params>
constexpr int kResident = kIndexHeads / 16 / kTiles<Params>;

/// A lane's part of a token's query: rows lane / 4 and lane / 4 + 8 of each 16 heads, and the weights of these heads.
template <int tiles>
struct Query {
  uint32_t a[tiles][8][4];
  float weight[2 * tiles];

  __device__ __forceinline__ void load(const ScoreParams& p, int token, int lane) {
    if (tiles == kCandidateHeads / 16 && p.form == QueryForm::kHalfImage) return load_image(p, token, lane);
#pragma unroll
    for (int row = 0; row < 2 * tiles; ++row) {
      const int head = 8 * row + lane / 4;
      const bool is_head = head < p.heads;
      const int64_t at = (int64_t(token) * p.heads + head) * kIndexDim + 32 * (lane % 4);
      const uint4* from = reinterpret_cast<const uint4*>(static_cast<const __half*>(p.query) + at);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const uint4 v = is_head ? from[word] : make_uint4(0, 0, 0, 0);
        a[row / 2][2 * word][row % 2] = v.x, a[row / 2][2 * word][2 + row % 2] = v.y;
        a[row / 2][2 * word + 1][row % 2] = v.z, a[row / 2][2 * word + 1][2 + row % 2] = v.w;
      }
      // Half the weight, because `twice_positive` doubles.
      weight[row] = is_head ? p.weights[token * p.heads + head] * (kKeyGain / 2) : 0;
    }
  }

  /// The same for an image, which has all heads.
  __device__ __forceinline__ void load_image(const ScoreParams& p, int token, int lane) {
    constexpr int heads = 16 * tiles;
    const uint32_t* image = static_cast<const uint32_t*>(p.query) + int64_t(token) * (heads * kIndexDim / 2);
#pragma unroll
    for (int row = 0; row < 2 * tiles; ++row) {
      const int head = 8 * row + lane / 4;
#pragma unroll
      for (int step = 0; step < 8; ++step) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper)
          a[row / 2][step][2 * upper + row % 2] = image[word_in_image(heads, head, lane % 4, step, upper)];
      }
      weight[row] = p.weights[token * heads + head] * (kKeyGain / 2);
    }
  }
};

/// Scores of keys 8 j + 2 (lane % 4) + {0, 1}, summed over this lane's heads.
template <int tiles>
__device__ __forceinline__ void score_eight(const Query<tiles>& query, uint4 codes, uint32_t scales, float& first,
                                            float& second) {
  float d[tiles][4] = {};
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const __half2 both = decode_scales(scales);
  const __half2 scale[2] = {__low2half2(both), __high2half2(both)};
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const __half2 s = scale[word / 2];
    __half2 pairs[4];
    decode_codes(words[word], pairs);
    uint32_t b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = bits_of_half2(__hmul2(pairs[i], s));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int m = 0; m < tiles; ++m) multiply_add(d[m], query.a[m][2 * word + half], b[2 * half], b[2 * half + 1]);
    }
  }
  first = second = 0;
#pragma unroll
  for (int m = 0; m < tiles; ++m) {
    first = fmaf(twice_positive(d[m][0]), query.weight[2 * m], first);
    second = fmaf(twice_positive(d[m][1]), query.weight[2 * m], second);
    first = fmaf(twice_positive(d[m][2]), query.weight[2 * m + 1], first);
    second = fmaf(twice_positive(d[m][3]), query.weight[2 * m + 1], second);
  }
}

/// Sums x[i] over the eight lanes with equal lane % 4, in the order of score_hopper.cu. The lane with lane / 4 = i gets
/// sum i.
__device__ __forceinline__ float sum_over_heads(const float (&x)[8], int lane) {
  const auto add = [&](float even, float odd, int step) {
    return (lane & step ? odd : even) + __shfl_xor_sync(kAllLanes, lane & step ? even : odd, step);
  };
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = add(x[2 * i], x[2 * i + 1], 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) two[i] = add(four[2 * i], four[2 * i + 1], 8);
  return add(two[0], two[1], 16);
}

/// One warp: scores units first .. last - 1 of a token, which has `entries` to score.
template <typename Params>
__device__ __forceinline__ void score_blocks(const Params& p, int token, int entries, int first, int last, int lane) {
  const KeySource<Params> source(p, token);
  PackedKeys next;
  source.load(next, p, source.at(first, lane), first, lane);
  typename KeySource<Params>::Place ahead{};
  if (first + 1 < last) ahead = source.at(first + 1, lane);
  Query<kTiles<Params>> query;
  query.load(p, token, lane);
  float* scores = p.scores + token * p.scores_stride;
  for (int block = first; block < last; ++block) {
    const PackedKeys keys = next;
    if (block + 1 < last) {
      source.load(next, p, ahead, block + 1, lane);
      if (block + 2 < last) ahead = source.at(block + 2, lane);
    }
    float sums[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) score_eight(query, keys.codes[j], keys.scales[j], sums[2 * j], sums[2 * j + 1]);
    const float score = sum_over_heads(sums, lane);
    // This lane's sum, number lane / 4, belongs to `first` or `second` of tile lane / 8.
    const int entry = kKeysPerBlock * block + 8 * (lane / 8) + 2 * (lane % 4) + lane / 4 % 2;
    write_score<1>(p, scores, entry, entries, score);
  }
}

/// Grid: any number of thread blocks. At most kMaxListedTokens tokens.
template <typename Params>
__global__ void __launch_bounds__(kThreads, kResident<Params>) decode_kernel(const __grid_constant__ Params p) {
  __shared__ int ends[kMaxListedTokens], warp_sums[kWarps];
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  count_units(p, ends, warp_sums, [&](int token) { return ceil_div(scored(p, token), kKeysPerBlock); });
  const int total = ends[kMaxListedTokens - 1], parts = gridDim.x * kWarps, part = blockIdx.x * kWarps + warp;
  int at = part_begin(total, part, parts);
  const int stop = part_begin(total, part + 1, parts);
  if (at == stop) return;
  int token = token_of_unit(p, ends, at);
  while (at < stop) {
    while (ends[token] <= at) ++token;
    const int begin = token ? ends[token - 1] : 0, until = min(ends[token], stop);
    score_blocks(p, token, scored(p, token), at - begin, until - begin, lane);
    at = until;
  }
}

/// Grid (groups of eight tokens, parts of their keys).
template <typename Params>
__global__ void __launch_bounds__(kThreads, kResident<Params>) prefill_kernel(const __grid_constant__ Params p) {
  wait_for_previous_kernel();
  const int token = blockIdx.x * kWarps + threadIdx.x / 32;
  if (token >= p.tokens) return;
  const int entries = scored(p, token), blocks = blocks_of(entries);
  const int first = part_begin(blocks, blockIdx.y, gridDim.y), last = part_begin(blocks, blockIdx.y + 1, gridDim.y);
  if (first < last) score_blocks(p, token, entries, first, last, threadIdx.x % 32);
}

/// Unquantised keys and queries. Grid (tokens, parts of their keys), one thread per key. For exact tests, not
/// optimised.
__global__ void __launch_bounds__(kThreads) exact_kernel(const __grid_constant__ ScoreParams p) {
  wait_for_previous_kernel();
  const int token = blockIdx.x, entries = scored(p, token);
  const int32_t* table = p.table + p.request[token] * p.table_stride;
  for (int entry = blockIdx.y * kThreads + threadIdx.x; entry < entries; entry += gridDim.y * kThreads) {
    const uint8_t* block = p.keys + table[entry / kKeysPerBlock] * p.block_bytes;
    const float4* key = reinterpret_cast<const float4*>(block) + entry % kKeysPerBlock * (kIndexDim / 4);
    const float4* query = static_cast<const float4*>(p.query) + int64_t(token) * p.heads * (kIndexDim / 4);
    float score = 0;
    for (int head = 0; head < p.heads; ++head, query += kIndexDim / 4) {
      float product = 0;
      for (int i = 0; i < kIndexDim / 4; ++i) {
        const float4 q = query[i], k = key[i];
        product = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, product))));
      }
      score = fmaf(fmaxf(product, 0.0f), p.weights[token * p.heads + head], score);
    }
    p.scores[token * p.scores_stride + entry] = score;
  }
}

unsigned divide_up(int64_t a, int64_t b) { return unsigned((a + b - 1) / b); }

/// For FP4 keys.
template <typename Params>
cudaError_t launch_packed(const Params& p, bool sm_90, int processors, cudaStream_t stream) {
  const int64_t blocks = divide_up(p.width, kKeysPerBlock);
  if (p.tokens <= kMaxListedTokens && p.tokens * 4 <= processors * kWarps) {
    const unsigned grid = min(unsigned(kResident<Params> * processors), divide_up(p.tokens * blocks, kWarps));
    return launch(decode_kernel<Params>, {dim3(grid), kThreads, 0, 1, sm_90}, stream, p);
  }
  // A few waves of thread blocks, so that the last one costs little, but enough keys per block to amortise the load of
  // a query.
  const unsigned groups = divide_up(p.tokens, kWarps);
  const unsigned parts = min(divide_up(6 * processors, groups), divide_up(blocks, 16));
  return launch(prefill_kernel<Params>, {dim3(groups, parts), kThreads, 0, 1, sm_90}, stream, p);
}

}  // namespace

cudaError_t launch_score(const ScoreParams& p, bool fp4, bool sm_90, int processors, cudaStream_t stream) {
  if (fp4) return launch_packed(p, sm_90, processors, stream);
  const unsigned parts = min(divide_up(p.width, kThreads), 64u);
  return launch(exact_kernel, {dim3(unsigned(p.tokens), parts), kThreads, 0, 1, sm_90}, stream, p);
}

cudaError_t launch_score(const CandidateScoreParams& p, bool sm_90, int processors, cudaStream_t stream) {
  return launch_packed(p, sm_90, processors, stream);
}

cudaError_t launch_score(const ListedScoreParams& p, bool sm_90, int processors, cudaStream_t stream) {
  return launch_packed(p, sm_90, processors, stream);
}

}  // namespace dsv4
