// index_score for FP4 keys and 64 heads on sm_90a, whose warpgroup products take one operand from registers (see
// score.cu for the op). A prefill also takes candidate blocks, with 32 heads in fp16.
//
// A warpgroup decodes 64 keys (4608 bytes) from packed words directly into the registers of operand A. Operand B is the
// query of a token, 64 heads x 128 channels in shared memory, loaded with its head weights by bulk copies in the layout
// that index_query has written. Each lane then weights and rectifies 32 of the 64 x 64 sums, and four lanes add theirs.
// A score does not depend on what else is scored.
//
// With MXFP4 scales, which are powers of two, both operands are exact in e4m3, and products take half the time of the
// fp16 products that NVFP4's scales need. The tensor cores align the summands of an e4m3 product to the largest one and
// are known to truncate them at 2^-13 of it.
//
// Decode: the tiles of all tokens form one list, divided into equal runs for the SMs. The four warpgroups of an SM take
// the tiles of a run in turn, while the next tile and the next token's query are loaded. If a request has several
// tokens in the step (drafts), up to four share a tile: it is decoded once, and the products of the next token overlap
// with the sums of the last one.
//
// Prefill: every SM processes items of 576 keys (fp16: 384) and 32 tokens. Each of three warpgroups keeps three (two)
// tiles of keys in registers, while the queries pass through a ring buffer that a fourth warpgroup fills. The products
// of the next tile, or of the next token with the first one, overlap with the sums of the last one.
//
// In a selection of two levels, a product has the heads of two consecutive tokens of a request. Each lane has 16 sums
// of each token, and the eight lanes with the keys of a candidate block find its best score. A token without a partner
// takes both places.
//
// Bytes: 72 per key, 4 per score. A token's query, 8 KiB (16 in fp16), is read from L2 once per run in decode and once
// per item in prefill.
#include "../launch.cuh"
#include "hopper.cuh"
#include "index.h"
#include "layout.h"
#include "score.cuh"
#include "warp.cuh"

namespace dsv4 {
namespace {

constexpr int kTileKeys = 64;  // keys per warpgroup

/// Tokens of a product: their queries have kIndexHeads heads together.
template <typename Params>
constexpr int kProductTokens = 1;
template <>
constexpr int kProductTokens<CandidateScoreParams> = kIndexHeads / kCandidateHeads;

/// Products in fp16, for any scales, or in e4m3, for powers of two: bytes of a query, and the number of tiles that a
/// warpgroup keeps in a prefill.
struct Halves {
  static constexpr int kQueryBytes = kIndexHeads * kIndexDim * 2, kPrefillTiles = 2;
};
struct Bytes {
  static constexpr int kQueryBytes = kIndexHeads * kIndexDim, kPrefillTiles = 3;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kTokenBytes = kIndexHeads * kIndexDim * 2;  // stride between the queries of two tokens of V4
constexpr int kWeightBytes = kIndexHeads * 4;             // head weights of a product

/// Keys of a block of the cache, as a power of two.
__device__ __forceinline__ int keys_shift(const ScoreParams&) { return 5; }
static_assert(kKeysPerBlock == 1 << 5);
__device__ __forceinline__ int keys_shift(const CandidateScoreParams& p) { return p.candidates_shift() + 3; }

/// A lane's part of a warp's 16 keys: channels 32 (lane % 4) and up of keys lane / 4 and lane / 4 + 8, and their two
/// scales.
struct PackedKeys {
  uint4 codes[2];
  uint16_t scales[2];

  /// A lane's addresses in keys 16 `part` and up of a block of the cache with `keys` keys.
  struct Place {
    const uint8_t *codes, *scales;

    __device__ __forceinline__ Place(const uint8_t* block, int keys, int part, int lane)
        : codes(block + 1024 * part + 16 * lane), scales(block + keys * kKeyBytes + 128 * part + 2 * lane) {}

    /// Keeps the addresses in registers.
    __device__ __forceinline__ void keep() {
      asm volatile("" : "+l"(codes), "+l"(scales));
      __builtin_assume(__isGlobal(codes) && __isGlobal(scales));
    }

    /// Returns the place in a later block.
    __device__ __forceinline__ Place after(int blocks, uint32_t block_bytes) const {
      Place later = *this;
      asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(later.codes) : "r"(blocks), "r"(block_bytes), "l"(codes));
      asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(later.scales) : "r"(blocks), "r"(block_bytes), "l"(scales));
      __builtin_assume(__isGlobal(later.codes) && __isGlobal(later.scales));
      return later;
    }
  };

  __device__ __forceinline__ void load(const Place& place) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      codes[row] = *reinterpret_cast<const uint4*>(place.codes + 512 * row);
      scales[row] = *reinterpret_cast<const uint16_t*>(place.scales + 64 * row);
    }
  }

  /// Calls f(word, eight codes) for the four words of a row.
  template <typename F>
  __device__ __forceinline__ void visit(int row, F f) const {
    f(0, codes[row].x), f(1, codes[row].y), f(2, codes[row].z), f(3, codes[row].w);
  }
};

/// A warp's 16 decoded keys, as operand A of each step.
template <typename Numbers>
struct Keys;

template <>
struct Keys<Halves> {
  static constexpr int kSteps = 8;
  static constexpr bool kKeepsAddresses = false;  // in registers, in a decode step
  uint32_t a[kSteps][4];

  /// Half the factor of the score that the lane writes: `twice_positive` has the other half.
  static constexpr float half_gain = kKeyGain / 2;

  __device__ __forceinline__ void decode(const PackedKeys& packed, int) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const __half2 both = decode_scales(packed.scales[row]);
      packed.visit(row, [&](int word, uint32_t codes) {
        const __half2 scale = word < 2 ? __low2half2(both) : __high2half2(both);
        __half2 pairs[4];
        decode_codes(codes, pairs);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[2 * word + i / 2][2 * (i % 2) + row] = bits_of_half2(__hmul2(pairs[i], scale));
      });
    }
  }

  /// Starts d = keys x heads of the query with this descriptor.
  __device__ __forceinline__ void begin_products(float (&d)[32], uint64_t query) const {
    products_begin();
    multiply_halves<false>(d, a[0], query);
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
      multiply_halves<true>(d, a[step], after(query, step / 4 * (Halves::kQueryBytes / 2) + step % 4 * 32));
    }
    products_commit();
  }
};

template <>
struct Keys<Bytes> {
  static constexpr int kSteps = 4;
  static constexpr bool kKeepsAddresses = true;
  uint32_t a[kSteps][4];
  float half_gain;

  __device__ __forceinline__ void decode(const PackedKeys& packed, int lane) {
    int largest[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // The exponent of the lane's block of 32 channels, from its scale times 2^7 in fp16, and the largest one of the
      // key's four blocks.
      const int exponent = int(bits_of_half2(decode_scales(packed.scales[row] & 0x7f)) >> 10);
      int most = max(exponent, __shfl_xor_sync(kAllLanes, exponent, 1));
      most = max(most, __shfl_xor_sync(kAllLanes, most, 2));
      const ByteCodes bytes = byte_codes(most - exponent);
      packed.visit(row, [&](int word, uint32_t codes) {
        uint32_t decoded[2];
        eight_bytes(codes, bytes, decoded);
        a[word][row] = decoded[0], a[word][2 + row] = decoded[1];
      });
      largest[row] = most;
    }
    half_gain = exp2_of_biased(uint32_t(127 - 1 - 15 - 7 - kByteShift + (lane % 2 ? largest[1] : largest[0])));
  }

  __device__ __forceinline__ void begin_products(float (&d)[32], uint64_t query) const {
    products_begin();
    multiply_bytes<false>(d, a[0], query);
#pragma unroll
    for (int step = 1; step < kSteps; ++step) multiply_bytes<true>(d, a[step], after(query, 32 * step));
    products_commit();
  }
};

/// Loads the head weights of a product that a lane needs: columns 8 j + 2 (lane % 4) and the next one.
__device__ __forceinline__ void load_weights(float2 (&weights)[8], const float* of_product, int lane) {
#pragma unroll
  for (int j = 0; j < 8; ++j) weights[j] = reinterpret_cast<const float2*>(of_product)[4 * j + lane % 4];
}

/// Number of a lane's key in a tile whose scores it writes.
__device__ __forceinline__ int own_key_of(int warp, int lane) { return 16 * warp + lane / 4 + 8 * (lane % 2); }

/// Computes weighted, rectified sums over heads and writes the scores of the warp's entries below `entries`. The lane
/// writes that of `entry`. `scores` and `entries` belong to the first token of a product in lanes with lane % 4 < 2, to
/// the last one in the others.
template <typename Params>
__device__ __forceinline__ void write_scores(const Params& p, const float (&d)[32], float half_gain,
                                             const float2 (&weights)[8], float* scores, int entry, int entries,
                                             int lane) {
  constexpr int tokens = kProductTokens<Params>;
  float sums[tokens][2][2] = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float (&sum)[2] = sums[j * tokens / 8][row];
      sum[0] = fmaf(twice_positive(d[4 * j + 2 * row]), weights[j].x, sum[0]);
      sum[1] = fmaf(twice_positive(d[4 * j + 2 * row + 1]), weights[j].y, sum[1]);
    }
  }
  // Odd lanes take the second row, lanes with lane % 4 >= 2 the last token.
  const bool odd = lane % 2, upper = lane & 2;
  float of_token[tokens];
#pragma unroll
  for (int i = 0; i < tokens; ++i) {
    const float first = sums[i][0][0] + sums[i][0][1], second = sums[i][1][0] + sums[i][1][1];
    of_token[i] = (odd ? second : first) + __shfl_xor_sync(kAllLanes, odd ? first : second, 1);
  }
  const float first = of_token[0], last = of_token[tokens - 1];
  const float sum = (upper ? last : first) + __shfl_xor_sync(kAllLanes, upper ? first : last, 2);
  write_score<4>(p, scores, entry, tokens == 1 && upper ? 0 : entries, sum * half_gain);
}

#endif

constexpr int kDecodeGroups = 4, kDecodeThreads = 128 * kDecodeGroups;  // warpgroups of a block
constexpr int kPieceStages = 3;  // queries of the current, next and previous piece; a group may still use the last

template <int tokens, int query_bytes>
struct DecodeShared {
  uint8_t query[kPieceStages][tokens][query_bytes];
  float weights[kPieceStages][tokens][kIndexHeads];
  uint64_t loaded[kPieceStages], used[kPieceStages];
  int warp_sums[4 * kDecodeGroups];
  // For each token: entries to score, request, and whether it leads a group of tokens that share keys. For a leading
  // token also the largest number of entries in its group and the end of the group's tiles.
  int entries[kMaxListedTokens], request[kMaxListedTokens], most[kMaxListedTokens], ends[kMaxListedTokens];
  bool leads[kMaxListedTokens];
};

/// Tokens that share keys: at most `tokens` consecutive tokens of one request, from the leading token on.
template <int tokens>
struct Sharers {
  int count, entries[tokens], most;  // entries of each (0 after `count`) and their maximum

  template <typename Shared>
  __device__ __forceinline__ Sharers(const Shared& s, int first, int all) : count(0), most(0) {
#pragma unroll
    for (int i = 0; i < tokens; ++i) {
      const int token = first + i;
      const bool shares = count == i && token < all && (i == 0 || !s.leads[token]);
      entries[i] = shares ? s.entries[token] : 0;
      count += shares;
      most = max(most, entries[i]);
    }
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Reads the lengths and requests of the step's tokens once, and divides the list of their tiles. Called by all threads
/// of a block.
template <int tokens, int query_bytes>
__device__ __forceinline__ void list_tokens(const ScoreParams& p, DecodeShared<tokens, query_bytes>& s) {
  constexpr int threads = kDecodeThreads;
  // Groups of sharers start at the request's first token, if all requests have the same number of tokens.
  const int each = p.tokens / p.requests;
#pragma unroll
  for (int i = 0; i < ceil_div(kMaxListedTokens, threads); ++i) {
    const int token = threadIdx.x + i * threads;
    if (token >= p.tokens) continue;
    const int request = p.request[token];
    s.request[token] = request;
    s.entries[token] = scored(p, token);
    s.leads[token] = tokens == 1 || token % each % tokens == 0 || request != p.request[token - 1];
  }
  __syncthreads();
  count_units(p, s.ends, s.warp_sums, [&](int token) {
    if (!s.leads[token]) return 0;
    const int most = Sharers<tokens>(s, token, p.tokens).most;
    s.most[token] = most;
    return ceil_div(most, kTileKeys);
  });
}

/// The tiles of tokens that share keys, `begin` .. `end` - 1 in the list of all tiles.
struct Piece {
  int token, begin, end;  // token: the leading token
  int last_block;         // last block to score
  const int32_t* table;

  template <typename Shared>
  __device__ __forceinline__ Piece(const ScoreParams& p, const Shared& s, int token)
      : token(token),
        begin(token ? s.ends[token - 1] : 0),
        end(s.ends[token]),
        last_block(ceil_div(s.most[token], kKeysPerBlock) - 1),
        table(p.table + s.request[token] * p.table_stride) {}

  /// Returns the group with tile `at` of the list, this one or a later one.
  template <typename Shared>
  __device__ __forceinline__ Piece with(const ScoreParams& p, const Shared& s, int at) const {
    if (at < end) return *this;
    int owner = token;
    while (s.ends[owner] <= at) ++owner;
    return {p, s, owner};
  }

  /// Returns the first or second block of tile `at`.
  __device__ __forceinline__ int block(int at, int second) const {
    return __ldg(table + min(2 * (at - begin) + second, last_block));
  }
};

/// Scores a warpgroup's tiles `at`, `at` + groups and so on below `stop` of a piece, which `count` tokens share. When
/// called, `packed` has the keys of tile `at`, `next` is the block of the next tile, and the queries are complete when
/// `loaded` is.
template <int count, typename Numbers, int tokens, typename BlockOf>
__device__ __forceinline__ void score_tiles(const ScoreParams& p, const Sharers<tokens>& sharers, const Piece& piece,
                                            int& at, int stop, const uint8_t* query, const float* of_heads,
                                            uint64_t& loaded, int parity, PackedKeys& packed,
                                            const PackedKeys::Place& place, int& next, int warp, int lane,
                                            BlockOf block_of) {
  // The compiler overlaps products with sums only if there is no branch between them, hence `count` is a constant.
  constexpr int groups = kDecodeGroups;
  float* scores = p.scores + piece.token * p.scores_stride;
  int own_key = own_key_of(warp, lane) - kTileKeys * piece.begin;
  if constexpr (Keys<Numbers>::kKeepsAddresses) {  // otherwise the compiler computes them again for each tile
    asm volatile("" : "+l"(scores), "+r"(own_key));
    __builtin_assume(__isGlobal(scores));
  }
  const uint64_t queries = operand_in_shared(shared_address(query));
  const uint32_t block_bytes = uint32_t(p.block_bytes);
  wait(&loaded, parity);
  float2 weights[8];
  if constexpr (count == 1) load_weights(weights, of_heads, lane);
  for (; at < stop; at += groups) {
    Keys<Numbers> keys;
    float d[2][32];
    keys.decode(packed, lane);
    packed.load(place.after(next, block_bytes));
    next = block_of(at + 2 * groups);
    keys.begin_products(d[0], queries);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      float (&sums)[32] = d[i % 2];
      if constexpr (count > 1) load_weights(weights, of_heads + i * kIndexHeads, lane);
      if (i + 1 < count) {
        keys.begin_products(d[(i + 1) % 2], after(queries, (i + 1) * Numbers::kQueryBytes));
        products_wait<1>(sums);
      } else {
        products_wait<0>(sums);
      }
      write_scores(p, sums, keys.half_gain, weights, scores + i * p.scores_stride, own_key + kTileKeys * at,
                   sharers.entries[i], lane);
    }
  }
}

#endif

/// Grid: any number of thread blocks. At most kMaxListedTokens tokens.
template <typename Numbers, int tokens>
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_kernel(const __grid_constant__ ScoreParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int groups = kDecodeGroups;
  auto& s = *static_cast<DecodeShared<tokens, Numbers::kQueryBytes>*>(shared_memory_1024());
  // Uniform over the lanes, which the shuffle tells the compiler, so that descriptors stay in uniform registers.
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x < kPieceStages) {
    init_barrier(&s.loaded[threadIdx.x], 1);
    init_barrier(&s.used[threadIdx.x], 4 * groups);
  }
  publish_barriers();
  // No kernel of a step's layers writes the properties of its tokens, so they are read before the wait.
  let_next_kernel_start();
  list_tokens(p, s);

  // The thread block has a run of the list, whose tiles its groups take in turn.
  const int total = s.ends[kMaxListedTokens - 1];
  const int begin = part_begin(total, blockIdx.x, gridDim.x), stop = part_begin(total, blockIdx.x + 1, gridDim.x);
  if (begin == stop) {
    wait_for_previous_kernel();
    return;
  }
  Piece piece(p, s, token_of_unit(p, s.ends, begin));
  const auto block_of = [&](int at) {
    const int tile = min(at, stop - 1);
    return piece.with(p, s, tile).block(tile, warp / 2);
  };
  int at = begin + group, next = block_of(at + groups);
  const int first_block = block_of(at);
  wait_for_previous_kernel();
  const auto copy_queries = [&](const Piece& of, int stage) {
    if (lane > 0) return;
    const int count = Sharers<tokens>(s, of.token, p.tokens).count;
    arrive_and_expect(&s.loaded[stage], count * (Numbers::kQueryBytes + kWeightBytes));
    for (int i = 0; i < count; ++i) {
      bulk_copy(s.query[stage][i], static_cast<const uint8_t*>(p.query) + int64_t(of.token + i) * kTokenBytes,
                Numbers::kQueryBytes, &s.loaded[stage]);
      bulk_copy(s.weights[stage][i], p.weights + int64_t(of.token + i) * kIndexHeads, kWeightBytes, &s.loaded[stage]);
    }
  };
  // Done by a warp of the last group, which has the fewest tiles.
  const bool copies = threadIdx.x / 32 == 4 * (groups - 1);
  if (copies) copy_queries(piece, 0);

  PackedKeys packed;
  PackedKeys::Place place(p.keys, kKeysPerBlock, warp % 2, lane);
  if constexpr (Keys<Numbers>::kKeepsAddresses) place.keep();
  packed.load(place.after(first_block, uint32_t(p.block_bytes)));
  for (int number = 0;; ++number) {
    const int stage = number % kPieceStages;
    const bool more = piece.end < stop;
    if (copies && more) {
      const int following = number + 1, before = following - kPieceStages;  // the previous user of the same stage
      if (before >= 0) wait(&s.used[following % kPieceStages], before / kPieceStages & 1);
      copy_queries(piece.with(p, s, piece.end), following % kPieceStages);
    }
    const Sharers<tokens> sharers(s, piece.token, p.tokens);
    const auto score = [&](auto counted) {
      score_tiles<decltype(counted)::value, Numbers>(p, sharers, piece, at, min(piece.end, stop), s.query[stage][0],
                                                     s.weights[stage][0], s.loaded[stage], number / kPieceStages & 1,
                                                     packed, place, next, warp, lane, block_of);
    };
    if constexpr (tokens == 1) {
      score(Count<1>());
    } else {
      static_assert(tokens == 4);
      switch (__shfl_sync(kAllLanes, sharers.count, 0)) {
        case 1:
          score(Count<1>());
          break;
        case 2:
          score(Count<2>());
          break;
        case 3:
          score(Count<3>());
          break;
        default:
          score(Count<4>());
      }
    }
    if (!more) break;
    __syncwarp();
    if (lane == 0) arrive(&s.used[stage]);
    piece = piece.with(p, s, piece.end);
  }
#endif
}

constexpr int kPrefillGroups = 3;  // scoring warpgroups; one more copies
constexpr int kPrefillThreads = 128 * (kPrefillGroups + 1);
constexpr int kPrefillTokens = 32;  // per item of work, one per lane
constexpr int kStages = 8;          // queries in the ring buffer

/// Keys per item of work.
template <typename Numbers>
constexpr int kPrefillKeys = kTileKeys * Numbers::kPrefillTiles * kPrefillGroups;

__host__ __device__ __forceinline__ int items_of(const ScoreParams& p, int keys) {
  return ceil_div(p.tokens, kPrefillTokens) * ceil_div(p.width, keys);
}

template <int query_bytes>
struct PrefillShared {
  uint8_t query[kStages][query_bytes];
  float weights[kStages][kIndexHeads];
  uint64_t loaded[kStages], used[kStages];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kAtOnce = 4;  // products that a warpgroup scores without a pause of the tensor cores

/// An item of work as a warp sees it: `keys` keys of kPrefillTokens tokens, one per lane.
template <typename Params, int keys>
struct Item {
  int first_token, first_key, own_request, own_entries;
  unsigned products;  // the first token of each product, in the order of use; all see at least one of the keys
  unsigned joined;    // those that share their product with the next one: both have the same keys

  __device__ __forceinline__ Item(const Params& p, int number, int lane) {
    const int stripes = ceil_div(p.width, keys);
    first_token = number / stripes * kPrefillTokens, first_key = number % stripes * keys;
    const int own = first_token + lane;
    own_entries = own < p.tokens ? scored(p, own) : 0;
    own_request = own < p.tokens ? p.request[own] : -1;
    products = __ballot_sync(kAllLanes, own_entries > first_key), joined = 0;
    if constexpr (kProductTokens<Params> == 2) {
      const int next = __shfl_down_sync(kAllLanes, own_request, 1);
      joined = __ballot_sync(kAllLanes, own_request == next) & products & products >> 1;
      for (unsigned rest = products; rest; rest &= rest - 1) {  // the second token of a product begins none
        const unsigned first = rest & -rest;
        if (joined & first) products &= ~(first << 1), joined &= ~(first << 1), rest &= ~(first << 1);
      }
    }
  }

  /// Returns the last token of the product that begins with token `first`.
  __device__ __forceinline__ int last_of(int first) const { return first + (joined >> first & 1); }
};

/// A stage of the ring buffer and the parity of its current use.
struct Stage {
  int index = 0, parity = 0;

  __device__ __forceinline__ void next() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

/// Starts the copies of a product's queries, into operand B, and head weights.
template <int query_bytes>
__device__ __forceinline__ void copy_product(const ScoreParams& p, PrefillShared<query_bytes>& s, int stage,
                                             int64_t token, int64_t) {
  uint64_t* loaded = &s.loaded[stage];
  bulk_copy(s.query[stage], static_cast<const uint8_t*>(p.query) + token * kTokenBytes, query_bytes, loaded);
  bulk_copy(s.weights[stage], p.weights + token * kIndexHeads, kWeightBytes, loaded);
}
template <int query_bytes>
__device__ __forceinline__ void copy_product(const CandidateScoreParams& p, PrefillShared<query_bytes>& s, int stage,
                                             int64_t first, int64_t last) {
  // Operand B has rows of channels 0 .. 63 for the heads of both tokens, then those of the other channels.
  constexpr int rows_bytes = query_bytes / 4;
  static_assert(query_bytes == Halves::kQueryBytes);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint8_t* of_token = static_cast<const uint8_t*>(p.query) + (i % 2 ? last : first) * (query_bytes / 2);
    bulk_copy(s.query[stage] + i * rows_bytes, of_token + i / 2 * rows_bytes, rows_bytes, &s.loaded[stage]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    bulk_copy(s.weights[stage] + i * kCandidateHeads, p.weights + (i ? last : first) * kCandidateHeads,
              kWeightBytes / 2, &s.loaded[stage]);
  }
}

/// One warp: loads the queries that the block's items need, in the order of use.
template <int keys, typename Params, int query_bytes>
__device__ __forceinline__ void copy_queries(const Params& p, PrefillShared<query_bytes>& s, int lane) {
  Stage stage;
  for (int number = blockIdx.x; number < items_of(p, keys); number += gridDim.x) {
    const Item<Params, keys> item(p, number, lane);
    for (unsigned rest = item.products; rest; rest &= rest - 1) {
      const int first = __ffs(rest) - 1;
      wait(&s.used[stage.index], stage.parity ^ 1);
      if (lane == 0) {
        arrive_and_expect(&s.loaded[stage.index], query_bytes + kWeightBytes);
        copy_product(p, s, stage.index, item.first_token + first, item.first_token + item.last_of(first));
      }
      __syncwarp();
      stage.next();
    }
  }
}

/// One warpgroup: scores its tiles of the block's items. While it sums one, the products of the next one run, which is
/// the next tile or the first tile of the next product.
template <typename Numbers, typename Params>
__device__ __forceinline__ void score_items(const Params& p, PrefillShared<Numbers::kQueryBytes>& s, int group,
                                            int warp, int lane) {
  constexpr int tiles = Numbers::kPrefillTiles, item_keys = kPrefillKeys<Numbers>;
  const uint64_t queries = operand_in_shared(shared_address(s.query[0]));
  // `write_scores` expects the first or the last token of a product in this lane.
  const bool of_last = kProductTokens<Params> == 2 && lane % 4 >= 2;
  Stage stage;
  Keys<Numbers> keys[tiles];
  const auto wait_for = [&](const Stage& of) { wait(&s.loaded[of.index], of.parity); };
  const auto release = [&](const Stage& of) {
    __syncwarp();
    if (lane == 0) arrive(&s.used[of.index]);
  };
  for (int number = blockIdx.x; number < items_of(p, item_keys); number += gridDim.x) {
    const Item<Params, item_keys> item(p, number, lane);
    const int own_key = item.first_key + group * tiles * kTileKeys;
    const unsigned seeing = __ballot_sync(kAllLanes, item.own_entries > own_key);
    int held = -1;  // request whose keys are in registers
    for (unsigned rest = item.products; rest;) {
      const int first = __ffs(rest) - 1;
      const int request = __shfl_sync(kAllLanes, item.own_request, first);
      // The next products of the request that see one of the keys.
      const unsigned same = __ballot_sync(kAllLanes, item.own_request == request);
      const unsigned ends = rest & ~((seeing | (item.joined & seeing >> 1)) & same);
      unsigned left = ends ? rest & ((ends & -ends) - 1) : rest;
      if (!left) {
        wait_for(stage);
        release(stage);
        stage.next();
        rest &= rest - 1;
        continue;
      }
      rest &= ~left;
      if (request != held) {
        held = request;
        const int most = __reduce_max_sync(kAllLanes, item.own_request == request ? item.own_entries : 0);
        const int32_t* table = p.table + request * p.table_stride;
        const int shift = keys_shift(p);
        PackedKeys packed[tiles];
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
          const int key = own_key + kTileKeys * tile + 16 * warp;
          packed[tile].load({p.keys + table[min(key, most - 1) >> shift] * p.block_bytes, 1 << shift,
                             (key & ((1 << shift) - 1)) / 16, lane});
        }
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) keys[tile].decode(packed[tile], lane);
      }
      float d[2][32];
      float2 weights[8];
      const auto begin = [&](float (&sums)[32], int tile, const Stage& of) {
        keys[tile].begin_products(sums, after(queries, of.index * Numbers::kQueryBytes));
      };
      // Scores the next `count` products. The compiler overlaps products with sums only within code without loops.
      const auto score = [&](auto counted) {
        constexpr int count = decltype(counted)::value;
        wait_for(stage);
        begin(d[0], 0, stage);
#pragma unroll
        for (int i = 0; i < count; ++i) {
          const int token = __ffs(left) - 1, own = of_last ? item.last_of(token) : token;
          left &= left - 1;
          load_weights(weights, s.weights[stage.index], lane);
          const int entries = __shfl_sync(kAllLanes, item.own_entries, own);
          float* scores = p.scores + (item.first_token + own) * p.scores_stride;
          Stage following = stage;
          following.next();
#pragma unroll
          for (int tile = 0; tile < tiles; ++tile) {
            const int k = i * tiles + tile;
            float (&sums)[32] = d[k % 2], (&later)[32] = d[(k + 1) % 2];
            if (tile + 1 < tiles) {
              begin(later, tile + 1, stage);
            } else if (i + 1 < count) {
              wait_for(following);
              begin(later, 0, following);
            }
            if (k + 1 < count * tiles) {
              products_wait<1>(sums);
            } else {
              products_wait<0>(sums);
            }
            write_scores(p, sums, keys[tile].half_gain, weights, scores,
                         own_key + kTileKeys * tile + own_key_of(warp, lane), entries, lane);
          }
          release(stage);
          stage = following;
        }
      };
      while (__popc(left) >= kAtOnce) score(Count<kAtOnce>());
      while (left) score(Count<1>());
    }
  }
}

#endif

/// Grid: any number of thread blocks.
template <typename Numbers, typename Params>
__global__ void __launch_bounds__(kPrefillThreads, 1) prefill_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  auto& s = *static_cast<PrefillShared<Numbers::kQueryBytes>*>(shared_memory_1024());
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
    if (warp == 0) copy_queries<kPrefillKeys<Numbers>>(p, s, lane);
  } else {
    extend_registers<160>();
    score_items<Numbers>(p, s, group, warp, lane);
  }
#endif
}

template <typename Params>
cudaError_t launch_here(void (*kernel)(Params), int grid, int threads, int bytes, const Params& p,
                        cudaStream_t stream) {
  const unsigned shared = unsigned(bytes + 1024);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  if (error == cudaSuccess) error = prefer_shared_memory(kernel);
  if (error != cudaSuccess) return error;
  return launch(kernel, {dim3(unsigned(grid)), unsigned(threads), shared, 1, true}, stream, p);
}

template <typename Numbers, int tokens>
cudaError_t launch_decode(const ScoreParams& p, int processors, cudaStream_t stream) {
  const int64_t tiles = int64_t(p.tokens) * ceil_div(p.width, kTileKeys);
  return launch_here(decode_kernel<Numbers, tokens>, int(min(tiles, int64_t(processors))), kDecodeThreads,
                     sizeof(DecodeShared<tokens, Numbers::kQueryBytes>), p, stream);
}

template <typename Numbers, typename Params>
cudaError_t launch_prefill(const Params& p, int processors, cudaStream_t stream) {
  const int items = items_of(p, kPrefillKeys<Numbers>);
  return launch_here(prefill_kernel<Numbers, Params>, min(items, processors), kPrefillThreads,
                     sizeof(PrefillShared<Numbers::kQueryBytes>), p, stream);
}

template <typename Numbers>
cudaError_t launch_numbers(const ScoreParams& p, int processors, cudaStream_t stream) {
  if (p.tokens <= kMaxListedTokens && p.tokens < kManyTokens * p.requests) {
    const bool shared = p.tokens >= 2 * p.requests;
    return shared ? launch_decode<Numbers, 4>(p, processors, stream) : launch_decode<Numbers, 1>(p, processors, stream);
  }
  return launch_prefill<Numbers>(p, processors, stream);
}

}  // namespace

cudaError_t launch_score_hopper(const ScoreParams& p, int processors, cudaStream_t stream) {
  return p.form == QueryForm::kByteImage ? launch_numbers<Bytes>(p, processors, stream)
                                         : launch_numbers<Halves>(p, processors, stream);
}

cudaError_t launch_score_hopper(const CandidateScoreParams& p, int processors, cudaStream_t stream) {
  return launch_prefill<Halves>(p, processors, stream);
}

}  // namespace dsv4
