// index_score of FP4 keys and 64 heads on sm_90a, where warpgroups multiply with one operand in registers (see score.cu for what it is).
//
// A warpgroup decodes 64 keys (4608 bytes) from packed words straight into the registers of operand A; operand B is the query of a token,
// 64 heads x 128 channels in shared memory, which a bulk copy brings as index_query has laid it out. Each lane then weights and rectifies
// 32 of the 64 x 64 sums, and four lanes add theirs. A score does not depend on what else is scored.
//
// Decode: the tiles of all tokens in one line, an equal stretch of it for each of the four warpgroups of every processor; the next tile is
// on its way. Prefill: every processor takes 384 keys of 32 tokens in turn, two tiles for each of three warpgroups, which stay in registers
// while the queries pass through a ring that a fourth fills. Bytes: 72 a key, 4 a score; a token's query, 16 KiB, comes from L2 once a
// stretch in decode, once for 384 keys in prefill.
#include "../launch.cuh"
#include "hopper.cuh"
#include "index.h"
#include "layout.h"
#include "score.cuh"
#include "warp.cuh"

namespace dsv4 {
namespace {

constexpr int kTileKeys = 64;  // of a warpgroup
constexpr int kQueryBytes = kIndexHeads * kIndexDim * 2;
constexpr int kManyTokens = 8;  // of a request: enough to share its decoded keys

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// A lane's part of a warp's 16 keys: of keys lane / 4 and lane / 4 + 8, channels 32 (lane % 4) and up, and their two scales.
struct PackedKeys {
  uint4 codes[2];
  uint16_t scales[2];

  /// `half`: which 16 keys of the block.
  __device__ __forceinline__ void load(const uint8_t* block, int half, int lane) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      codes[row] = *reinterpret_cast<const uint4*>(block + 1024 * half + 512 * row + 16 * lane);
      scales[row] = *reinterpret_cast<const uint16_t*>(block + kKeysPerBlock * kKeyBytes + 128 * half + 64 * row + 2 * lane);
    }
  }

  /// As operand A of eight steps of 16 channels.
  __device__ __forceinline__ void decode(uint32_t (&a)[8][4]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t words[4] = {codes[row].x, codes[row].y, codes[row].z, codes[row].w};
      const __half2 both = decode_scales(scales[row]);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const __half2 scale = word < 2 ? __low2half2(both) : __high2half2(both);
        __half2 pairs[4];
        decode_codes(words[word], pairs);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[2 * word + i / 2][2 * (i % 2) + row] = bits_of_half2(__hmul2(pairs[i], scale));
      }
    }
  }
};

/// Begins d = keys x heads of the query at a shared address.
__device__ __forceinline__ void begin_products(float (&d)[32], const uint32_t (&a)[8][4], uint32_t query) {
  products_begin();
  multiply_64x64<false>(d, a[0], operand_in_shared(query));
#pragma unroll
  for (int step = 1; step < 8; ++step) multiply_64x64<true>(d, a[step], operand_in_shared(query + step / 4 * (kQueryBytes / 2) + step % 4 * 32));
  products_commit();
}

/// The head weights that a lane needs of a token: of heads 8 j + 2 (lane % 4) and the next.
__device__ __forceinline__ void load_weights(float2 (&weights)[8], const ScoreParams& p, int token, int lane) {
  const float* of_token = p.weights + token * p.weights_stride + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < 8; ++j) weights[j] = make_float2(of_token[8 * j], of_token[8 * j + 1]);
}

/// Weighted, rectified sums over heads. Writes those of the warp's entries below `entries`.
__device__ __forceinline__ void write_scores(const float (&d)[32], const float2 (&weights)[8], float* scores, int entry, int entries, int lane) {
  float sums[2][2] = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sums[row][0] = fmaf(twice_positive(d[4 * j + 2 * row]), weights[j].x, sums[row][0]);
      sums[row][1] = fmaf(twice_positive(d[4 * j + 2 * row + 1]), weights[j].y, sums[row][1]);
    }
  }
  const bool odd = lane % 2;
  const float first = sums[0][0] + sums[0][1], second = sums[1][0] + sums[1][1];
  float sum = (odd ? second : first) + __shfl_xor_sync(kAllLanes, odd ? first : second, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);
  const int at = entry + lane / 4 + 8 * odd;
  if (lane % 4 < 2 && at < entries) scores[at] = sum * (kKeyGain / 2);
}

#endif

constexpr int kDecodeGroups = 4, kDecodeThreads = 128 * kDecodeGroups;

struct DecodeShared {
  uint8_t query[kDecodeGroups][kQueryBytes];
  uint64_t loaded[kDecodeGroups];
  int ends[kStretchTokens], warp_sums[kDecodeThreads / 32];
};

/// Any number of blocks; at most kStretchTokens tokens.
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_kernel(const __grid_constant__ ScoreParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  DecodeShared& s = *static_cast<DecodeShared*>(shared_memory_1024());
  // The same for all lanes, as the compiler sees from the shuffle: descriptors stay in uniform registers.
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x < kDecodeGroups) init_barrier(&s.loaded[threadIdx.x], 1);
  publish_barriers();
  wait_for_previous_kernel();
  count_units(p, kTileKeys, s.ends, s.warp_sums);

  const int total = s.ends[kStretchTokens - 1], parts = gridDim.x * kDecodeGroups, part = group * gridDim.x + blockIdx.x;
  int at = part_begin(total, part, parts);
  const int stop = part_begin(total, part + 1, parts);
  int token = token_of_unit(s.ends, at);
  const uint32_t query = shared_address(s.query[group]);
  for (int parity = 0; at < stop; parity ^= 1) {
    while (s.ends[token] <= at) ++token;
    const int begin = token ? s.ends[token - 1] : 0, first = at - begin, last = min(s.ends[token], stop) - begin;
    at = begin + last;
    const int entries = scored(p, token);
    if (threadIdx.x % 128 == 0) {
      arrive_and_expect(&s.loaded[group], kQueryBytes);
      bulk_copy(s.query[group], static_cast<const uint8_t*>(p.query) + int64_t(token) * kQueryBytes, kQueryBytes, &s.loaded[group]);
    }
    const int32_t* table = p.table + p.request[token] * p.table_stride;
    const int last_block = min(2 * last, ceil_div(entries, kKeysPerBlock)) - 1;
    const auto block_of = [&](int tile) { return table[min(2 * tile + warp / 2, last_block)]; };
    PackedKeys keys;
    keys.load(p.keys + block_of(first) * p.block_bytes, warp % 2, lane);
    int next = block_of(first + 1);
    float2 weights[8];
    load_weights(weights, p, token, lane);
    float* scores = p.scores + token * p.scores_stride;
    wait(&s.loaded[group], parity);
    for (int tile = first; tile < last; ++tile) {
      uint32_t a[8][4];
      float d[32];
      keys.decode(a);
      keys.load(p.keys + next * p.block_bytes, warp % 2, lane);
      next = block_of(tile + 2);
      begin_products(d, a, query);
      products_wait<0>(d);
      write_scores(d, weights, scores, kTileKeys * tile + 16 * warp, entries, lane);
    }
    warpgroup_barrier(group);  // all have used the query
  }
#endif
}

constexpr int kPrefillTiles = 2;   // of a warpgroup
constexpr int kPrefillGroups = 3;  // that score; one more copies
constexpr int kPrefillKeys = kTileKeys * kPrefillTiles * kPrefillGroups;
constexpr int kPrefillThreads = 128 * (kPrefillGroups + 1);
constexpr int kPrefillTokens = 32;  // of an item of work: a lane knows one
constexpr int kStages = 8;          // queries in the ring

__host__ __device__ __forceinline__ int items_of(const ScoreParams& p) {
  return ceil_div(p.tokens, kPrefillTokens) * ceil_div(p.width, kPrefillKeys);
}

struct PrefillShared {
  uint8_t query[kStages][kQueryBytes];
  uint64_t loaded[kStages], used[kStages];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// What a warp knows of an item of work: kPrefillKeys keys of kPrefillTokens tokens, of which a lane knows one.
struct Item {
  int first_token, first_key, own, own_entries;
  unsigned active;  // tokens that see some of the keys

  __device__ __forceinline__ Item(const ScoreParams& p, int number, int lane) {
    const int stripes = ceil_div(p.width, kPrefillKeys);
    first_token = number / stripes * kPrefillTokens, first_key = number % stripes * kPrefillKeys, own = first_token + lane;
    own_entries = own < p.tokens ? scored(p, own) : 0;
    active = __ballot_sync(kAllLanes, own_entries > first_key);
  }
};

/// A place in the ring, and the parity of its present use.
struct Turn {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

/// A warp brings the queries that the block's items need, in the order in which they are used.
__device__ __forceinline__ void copy_queries(const ScoreParams& p, PrefillShared& s, int lane) {
  Turn turn;
  for (int number = blockIdx.x; number < items_of(p); number += gridDim.x) {
    const Item item(p, number, lane);
    for (unsigned active = item.active; active; active &= active - 1) {
      const int64_t token = item.first_token + __ffs(active) - 1;
      wait(&s.used[turn.stage], turn.parity ^ 1);
      if (lane == 0) {
        arrive_and_expect(&s.loaded[turn.stage], kQueryBytes);
        bulk_copy(s.query[turn.stage], static_cast<const uint8_t*>(p.query) + token * kQueryBytes, kQueryBytes, &s.loaded[turn.stage]);
      }
      __syncwarp();
      turn.next();
    }
  }
}

/// A warpgroup scores its tiles of the block's items.
__device__ __forceinline__ void score_items(const ScoreParams& p, PrefillShared& s, int group, int warp, int lane) {
  Turn turn;
  uint32_t a[kPrefillTiles][8][4];
  for (int number = blockIdx.x; number < items_of(p); number += gridDim.x) {
    const Item item(p, number, lane);
    const int own_request = item.own < p.tokens ? p.request[item.own] : -1, own_key = item.first_key + group * kPrefillTiles * kTileKeys;
    int held = -1;  // the request whose keys are in registers
    for (unsigned active = item.active; active; active &= active - 1) {
      const int i = __ffs(active) - 1, token = item.first_token + i;
      const int request = __shfl_sync(kAllLanes, own_request, i), entries = __shfl_sync(kAllLanes, item.own_entries, i);
      if (request != held) {
        held = request;
        const int most = __reduce_max_sync(kAllLanes, own_request == request ? item.own_entries : 0);
        const int32_t* table = p.table + request * p.table_stride;
        PackedKeys keys[kPrefillTiles];
#pragma unroll
        for (int tile = 0; tile < kPrefillTiles; ++tile) {
          const int block = own_key / kKeysPerBlock + 2 * tile + warp / 2;
          keys[tile].load(p.keys + table[min(block, (most - 1) / kKeysPerBlock)] * p.block_bytes, warp % 2, lane);
        }
#pragma unroll
        for (int tile = 0; tile < kPrefillTiles; ++tile) keys[tile].decode(a[tile]);
      }
      wait(&s.loaded[turn.stage], turn.parity);
      if (own_key < entries) {
        const uint32_t query = shared_address(s.query[turn.stage]);
        float* scores = p.scores + token * p.scores_stride;
        float d[kPrefillTiles][32];
        float2 weights[8];
#pragma unroll
        for (int tile = 0; tile < kPrefillTiles; ++tile) begin_products(d[tile], a[tile], query);
        load_weights(weights, p, token, lane);
        products_wait<1>(d[0]);
        write_scores(d[0], weights, scores, own_key + 16 * warp, entries, lane);
        products_wait<0>(d[1]);
        write_scores(d[1], weights, scores, own_key + kTileKeys + 16 * warp, entries, lane);
      }
      __syncwarp();
      if (lane == 0) arrive(&s.used[turn.stage]);
      turn.next();
    }
  }
}

#endif

/// Any number of blocks.
__global__ void __launch_bounds__(kPrefillThreads, 1) prefill_kernel(const __grid_constant__ ScoreParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  PrefillShared& s = *static_cast<PrefillShared*>(shared_memory_1024());
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x < kStages) {
    init_barrier(&s.loaded[threadIdx.x], 1);
    init_barrier(&s.used[threadIdx.x], 4 * kPrefillGroups);
  }
  publish_barriers();
  wait_for_previous_kernel();
  __syncthreads();
  if (group == kPrefillGroups) {
    limit_registers<24>();
    if (warp == 0) copy_queries(p, s, lane);
  } else {
    extend_registers<160>();
    score_items(p, s, group, warp, lane);
  }
#endif
}

template <typename Kernel>
cudaError_t launch_here(Kernel kernel, int grid, int threads, int bytes, const ScoreParams& p, cudaStream_t stream) {
  const unsigned shared = unsigned(bytes + 1024);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  if (error != cudaSuccess) return error;
  return launch(kernel, {dim3(unsigned(grid)), unsigned(threads), shared, 1, true}, stream, p);
}

}  // namespace

cudaError_t launch_score_hopper(const ScoreParams& p, int processors, cudaStream_t stream) {
  if (p.tokens <= kStretchTokens && p.tokens < kManyTokens * p.requests) {
    const int64_t tiles = int64_t(p.tokens) * ceil_div(p.width, kTileKeys);
    return launch_here(decode_kernel, int(min(tiles, int64_t(processors))), kDecodeThreads, sizeof(DecodeShared), p, stream);
  }
  return launch_here(prefill_kernel, min(items_of(p), processors), kPrefillThreads, sizeof(PrefillShared), p, stream);
}

}  // namespace dsv4
