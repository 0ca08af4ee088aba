// index_select: the rows of the `top` best visible entries of each token, exactly: of equal scores the first entries,
// in the order of entries, -1 behind (SPEC 4.2, 4.3).
//
// A block, or a cluster of them, a token. Up to 16,384 scores it reads once and holds in registers (`select_held`): the
// bin of a histogram that has the `top`-th largest, all above it, and of that bin the largest. More scores are read
// twice and mostly not kept:
//   1. A thread keeps the largest score of each of its four columns of the row. The `top`-th largest of these 2048
//      maxima (of a cluster's block, its share of `top`, and then the least of the blocks) is a bound that at least
//      `top` scores reach, and few more.
//   2. Scores above it go to a list, in any order, as numbers that hold score and entry and are all different; in a
//      cluster, to one of each block, which then reserves its place in the first block's at once.
//   3. The `top`-th largest of the list, by histograms of eleven bits of what is left of the range, until a bin's
//      numbers are all wanted. Scores that overflow the list are instead read again for each histogram. A list that is
//      too short (many scores are equal) is wanted as a whole, and the first of the scores that equal the bound.
//   4. What reaches it sets a bit; a word of bits is a block of the table, and sums of the bits before it say where
//      rows go.
// Counts in shared memory are atomic and do not depend on the order of the additions. Bytes: 4 a score, a second time
// from L1 or L2.
#include "../launch.cuh"
#include "index.h"
#include "layout.h"
#include "warp.cuh"

namespace dsv4 {
namespace {

constexpr int kThreads = 512;
constexpr int kGroups = 4 * kThreads;  // of scores of which the largest is kept
constexpr int kBins = 2048, kBinBits = 11;
constexpr int kCandidates = 4096;
constexpr int kBatch = 4;  // loads of four scores in flight
constexpr int kMaxCluster = 8;
constexpr int kShare = 4096;  // entries for which another block of the cluster is worth its barriers
constexpr int kTies = 128;    // numbers of a bin of which each counts the larger ones
constexpr unsigned kAllLanes = 0xffffffffu;

struct Found {
  uint32_t bin, above, inside;  // how many lie in higher bins, and in it
};

/// What a block of so many threads counts in.
template <int threads>
struct Histogram {
  uint32_t bins[kBins];
  uint32_t warp_sums[threads / 32];
  Found found;
};

struct Shared : Histogram<kThreads> {
  uint64_t candidates[kCandidates];
  uint32_t bound[kMaxCluster];
  uint32_t low, high;  // of the maxima
  uint32_t count;      // of candidates
  uint32_t peak;       // of candidates
};

/// The same for scores in registers.
template <int threads>
struct SharedHeld : Histogram<threads> {
  uint64_t ties[kTies];
  uint32_t warp_low[threads / 32], warp_high[threads / 32];
  uint32_t chosen[threads];  // bits of a thread's entries
  uint32_t count;            // of ties
};

/// A bit an entry, words spread so that threads may take runs of them without state copy conflicts.
__host__ __device__ __forceinline__ int spread(int word) { return word + word / 32; }
__host__ __device__ __forceinline__ int words_of(int entries) { return (entries + 31) / 32; }
unsigned shared_bytes(int width) { return unsigned(sizeof(Shared) + sizeof(uint32_t) * (spread(words_of(width)) + 1)); }

/// Scores at `at` and the three behind it; those from n on are 0.
__device__ __forceinline__ float4 load_four(const float* row, int at, int n, bool aligned) {
  if (aligned && at + 3 < n) return *reinterpret_cast<const float4*>(row + at);
  return {at < n ? row[at] : 0, at + 1 < n ? row[at + 1] : 0, at + 2 < n ? row[at + 2] : 0,
          at + 3 < n ? row[at + 3] : 0};
}

/// Calls f(entry, order) for this block's entries below n, `ranks` blocks taking turns; f must not assume an order.
template <typename F>
__device__ __forceinline__ void visit_scores(const float* row, int n, bool aligned, int rank, int ranks, F f) {
  const int step = kThreads * ranks;
  for (int quad = kThreads * rank + threadIdx.x; 4 * quad < n; quad += kBatch * step) {
    float4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) v[i] = load_four(row, 4 * (quad + i * step), n, aligned);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = 4 * (quad + i * step);
      const float four[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (at + k < n) f(at + k, order_of(four[k]), k);
      }
    }
  }
}

/// Sum of x over the threads before this one; all threads take part, and a barrier must come before the next call.
template <int threads>
__device__ __forceinline__ uint32_t sum_before(Histogram<threads>& s, uint32_t x) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
    sum += lane >= step ? other : 0;
  }
  if (lane == 31) s.warp_sums[warp] = sum;
  __syncthreads();
  return sum - x + __reduce_add_sync(kAllLanes, lane < warp ? s.warp_sums[lane] : 0);
}

/// The bin, counted from the highest, that has number `wanted` of the numbers in `bins`.
template <int threads>
__device__ __forceinline__ Found find_bin(Histogram<threads>& s, uint32_t wanted) {
  constexpr int own = kBins / threads;
  uint32_t count[own], sum = 0;
  const int highest = kBins - 1 - own * threadIdx.x;
#pragma unroll
  for (int i = 0; i < own; ++i) sum += count[i] = s.bins[highest - i];
  uint32_t above = sum_before(s, sum);
  if (above < wanted && wanted <= above + sum) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < own; ++i) {
      if (!found && wanted <= above + count[i]) {
        s.found = {uint32_t(highest - i), above, count[i]};
        found = true;
      }
      above += found ? 0 : count[i];
    }
  }
  __syncthreads();
  return s.found;
}

/// A number that `wanted` to `wanted` + `slack` of the visited numbers reach, or the `wanted`-th largest itself.
///
/// `visit(f)` calls f of each number; at least `wanted` of them lie between `low` and `high`, and none above `high`.
template <typename Visit>
__device__ __forceinline__ uint64_t reached_by(Shared& s, uint64_t low, uint64_t high, uint32_t wanted, uint32_t slack,
                                               Visit visit) {
  while (low < high) {
    const int bits = 64 - __clzll(high - low), shift = bits > kBinBits ? bits - kBinBits : 0;
    for (int i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
    __syncthreads();
    visit([&](uint64_t x) {
      if (x >= low && x <= high) atomicAdd(&s.bins[(x - low) >> shift], 1u);
    });
    __syncthreads();
    const Found found = find_bin(s, wanted);
    low += uint64_t(found.bin) << shift;
    wanted -= found.above;
    if (shift == 0 || found.inside <= wanted + slack) return low;
    high = min(high, low + ((uint64_t(1) << shift) - 1));
  }
  return low;
}

/// This block's bound, which at least `wanted` of its entries below n reach. Leaves the largest of them in s.high.
__device__ __forceinline__ uint32_t find_bound(Shared& s, const float* row, int n, bool aligned, int rank, int ranks,
                                               uint32_t wanted) {
  uint32_t best[4] = {};  // 0: no entry yet
  visit_scores(row, n, aligned, rank, ranks,
               [&](int, uint32_t order, int column) { best[column] = max(best[column], order); });
  uint32_t low = 0xffffffffu, high = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) low = min(low, best[k] ? best[k] : low), high = max(high, best[k]);
  low = __reduce_min_sync(kAllLanes, low), high = __reduce_max_sync(kAllLanes, high);
  if (threadIdx.x % 32 == 0) {
    atomicMin(&s.low, low);
    atomicMax(&s.high, high);
  }
  __syncthreads();
  // Several blocks have at least kGroups entries each.
  const uint32_t groups = ranks > 1 ? kGroups : min(n, kGroups);
  if (wanted > groups) return 0;
  return uint32_t(reached_by(s, s.low, s.high, wanted, wanted / 8, [&](auto f) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (best[k]) f(best[k]);
    }
  }));
}

/// Sets the bits of the first `wanted` of those entries below n whose score is of this order; there are as many.
__device__ __forceinline__ void choose_first(Shared& s, uint32_t* bitmap, const float* row, int n, bool aligned,
                                             uint32_t order, uint32_t wanted) {
  const int lane = threadIdx.x % 32;
  for (int at = 4 * threadIdx.x; wanted > 0; at += 4 * kThreads) {
    const float4 v = load_four(row, at, n, aligned);
    const float four[4] = {v.x, v.y, v.z, v.w};
    uint32_t equal = 0, chosen = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) equal |= uint32_t(at + k < n && order_of(four[k]) == order) << k;
    uint32_t before = sum_before(s, __popc(equal));
    const uint32_t all = __reduce_add_sync(kAllLanes, lane < kThreads / 32 ? s.warp_sums[lane] : 0);
    for (; equal && before < wanted; equal &= equal - 1, ++before) chosen |= equal & -equal;
    if (chosen) atomicOr(&bitmap[spread(at / 32)], chosen << at % 32);
    wanted -= min(wanted, all);
    __syncthreads();
  }
}

/// Writes the rows of the entries whose bits are set.
__device__ __forceinline__ void write_rows(Shared& s, const uint32_t* bitmap, int n, const int32_t* table,
                                           int32_t* rows) {
  const int words = words_of(n), each = (words + kThreads - 1) / kThreads;
  const int first = min(each * int(threadIdx.x), words), last = min(first + each, words);
  uint32_t sum = 0;
  for (int word = first; word < last; ++word) sum += __popc(bitmap[spread(word)]);
  uint32_t at = sum_before(s, sum);
  if (sum == 0) return;
  for (int word = first; word < last; ++word) {
    uint32_t bits = bitmap[spread(word)];
    if (bits == 0) continue;
    for (const int block = table[word] * kKeysPerBlock; bits; bits &= bits - 1) rows[at++] = block + __ffs(bits) - 1;
  }
}

/// How many bits are set in `flags` before each of this lane's quads, in the order of entries: of a warp's quads i,
/// four bits of each lane from bit 4 i on, first those of quad 0. All threads take part; a barrier must come before the
/// next call.
template <int quads, int threads>
__device__ __forceinline__ void set_before(Histogram<threads>& s, uint32_t flags, uint32_t (&before)[quads]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t total = 0;
#pragma unroll
  for (int first = 0; first < quads; first += 4) {
    uint32_t own = 0;  // a byte a quad: a warp has at most 128 bits of it
#pragma unroll
    for (int i = first; i < first + 4 && i < quads; ++i) own |= __popc(flags >> 4 * i & 15) << 8 * (i - first);
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
      sum += lane >= step ? other : 0;
    }
    const uint32_t all = __shfl_sync(kAllLanes, sum, 31);
#pragma unroll
    for (int i = first; i < first + 4 && i < quads; ++i) {
      before[i] = total + ((sum - own) >> 8 * (i - first) & 0xff);
      total += all >> 8 * (i - first) & 0xff;
    }
  }
  if (lane == 0) s.warp_sums[warp] = total;
  __syncthreads();
  const uint32_t of_warps = __reduce_add_sync(kAllLanes, lane < warp ? s.warp_sums[lane] : 0);
#pragma unroll
  for (int i = 0; i < quads; ++i) before[i] += of_warps;
}

/// What a token of the step is: no kernel of its layers writes that, so it is read before their scores are waited for.
struct Token {
  int n;  // entries that it sees
  const int32_t* table;
  int32_t* rows;
  const float* row;  // of scores

  __device__ __forceinline__ Token(const SelectParams& p, int token)
      : table(p.table + p.request[token] * p.table_stride),
        rows(p.rows + token * p.rows_stride),
        row(p.scores + token * p.scores_stride) {
    const int64_t visible = (p.positions[token] + 1) / kCsaRatio;
    n = int(visible <= p.top ? visible : min(visible, int64_t(p.width)));
  }

  /// Where all are selected.
  __device__ __forceinline__ void write_all(int top) const {
    for (int i = threadIdx.x; i < top; i += blockDim.x)
      rows[i] = i < n ? table[i / kKeysPerBlock] * kKeysPerBlock + i % kKeysPerBlock : -1;
  }
};

/// Writes the rows of the `p.top` best of n entries, p.top < n <= 4 x quads x threads. A warp has 128 x quads entries
/// in a row, a lane four of each 128.
template <int quads, int threads>
__device__ __forceinline__ void select_held(const SelectParams& p, SharedHeld<threads>& s, const Token& t) {
  const int n = t.n;
  static_assert(kTies <= threads && threads / 32 <= 32, "a thread a tie, a lane a warp");
  static_assert(quads <= 8, "a bit of `flags` an entry");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = 128 * quads * warp + 4 * lane;
  if (threadIdx.x == 0) s.count = 0;
  s.chosen[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < kBins; i += threads) s.bins[i] = 0;
  float4 v[quads];
  // Asked for with the scores, unless that takes more registers than there are.
  constexpr bool early = quads <= 4;
  int32_t block[quads];
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    const int at = first + 128 * i;
    v[i] = load_four(t.row, at, n, p.aligned);
    block[i] = early && at < n ? t.table[at / kKeysPerBlock] : 0;
  }
  uint32_t order[quads][4];
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    const float four[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (int k = 0; k < 4; ++k) order[i][k] = first + 128 * i + k < n ? order_of(four[k]) : 0;  // which is below all
  }
  uint32_t low = 1, high = 0xffffffffu;
  // The range of those between the present bounds for which `chosen` holds.
  const auto narrow = [&](auto chosen) {
    uint32_t least = 0xffffffffu, most = 0;
#pragma unroll
    for (int i = 0; i < quads; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t x = order[i][k];
        if (x >= low && x <= high && chosen(x)) least = min(least, x), most = max(most, x);
      }
    }
    least = __reduce_min_sync(kAllLanes, least), most = __reduce_max_sync(kAllLanes, most);
    if (lane == 0) s.warp_low[warp] = least, s.warp_high[warp] = most;
    __syncthreads();
    low = __reduce_min_sync(kAllLanes, lane < threads / 32 ? s.warp_low[lane] : 0xffffffffu);
    high = __reduce_max_sync(kAllLanes, lane < threads / 32 ? s.warp_high[lane] : 0);
  };
  narrow([](uint32_t) { return true; });

  // All above `high` are among the best, and `wanted` of the `inside` ones from `low` to `high`.
  uint32_t wanted = p.top, inside;
  // The bin in which the last of these is. bin_of(order) is monotone and below kBins.
  const auto find = [&](auto bin_of) {
#pragma unroll
    for (int i = 0; i < quads; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (order[i][k] >= low && order[i][k] <= high) atomicAdd(&s.bins[bin_of(order[i][k])], 1u);
      }
    }
    __syncthreads();
    const Found found = find_bin(s, wanted);
    wanted -= found.above, inside = found.inside;
    return found.bin;
  };
  const auto split_bits = [&] {
    const int bits = 32 - __clz(high - low), shift = bits > kBinBits ? bits - kBinBits : 0;
    low += find([&](uint32_t x) { return (x - low) >> shift; }) << shift;
    high = low + min(high - low, (1u << shift) - 1);
  };
  if constexpr (quads <= 4) {
    // Bins of equal width, over which scores of both signs spread as their bits do not: then one round does, for more
    // instructions a score. One bin if the range or a score is not finite.
    const float least = score_of(low), scale = kBins / (score_of(high) - least);
    const auto bin_of = [&](uint32_t x) {
      return uint32_t(min(__float2int_rz((score_of(x) - least) * scale), kBins - 1));
    };
    const uint32_t bin = find(bin_of);
    narrow([&](uint32_t x) { return bin_of(x) == bin; });
  } else {
    split_bits();
  }
  while (inside != wanted && inside > kTies && low < high) {
    for (int i = threadIdx.x; i < kBins; i += threads) s.bins[i] = 0;
    __syncthreads();
    split_bits();
  }

  uint32_t best = 0, ties = 0, before[quads];
#pragma unroll
  for (int i = 0; i < quads; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      best |= uint32_t(order[i][k] > high) << (4 * i + k);
      ties |= uint32_t(order[i][k] >= low && order[i][k] <= high) << (4 * i + k);
    }
  }
  if (inside == wanted) {
    best |= ties;
  } else if (inside <= kTies) {
#pragma unroll
    for (int i = 0; i < quads; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (ties >> (4 * i + k) & 1) s.ties[atomicAdd(&s.count, 1u)] = order_of(order[i][k], first + 128 * i + k);
      }
    }
    __syncthreads();
    if (threadIdx.x < inside) {
      const uint64_t own = s.ties[threadIdx.x];
      uint32_t larger = 0;
      for (uint32_t j = 0; j < inside; ++j) larger += s.ties[j] > own;
      const uint32_t entry = entry_of(own), at = entry % (128 * quads);
      const uint32_t owner = entry / (128 * quads) * 32 + at % 128 / 4;
      if (larger < wanted) atomicOr(&s.chosen[owner], 1u << (4 * (at / 128) + at % 4));
    }
    __syncthreads();
    best |= s.chosen[threadIdx.x];
  } else {  // all of one score: the first ones
    set_before<quads, threads>(s, ties, before);
#pragma unroll
    for (int i = 0; i < quads; ++i) {
      uint32_t at = before[i];
      for (uint32_t four = ties >> 4 * i & 15; four && at < wanted; four &= four - 1, ++at)
        best |= (four & -four) << 4 * i;
    }
    __syncthreads();
  }
  set_before<quads, threads>(s, best, before);
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    uint32_t at = before[i], four = best >> 4 * i & 15;
    if (!early && four) block[i] = t.table[(first + 128 * i) / kKeysPerBlock];
    for (; four; four &= four - 1) t.rows[at++] = block[i] * kKeysPerBlock + 4 * lane % kKeysPerBlock + __ffs(four) - 1;
  }
}

/// Many tokens that see at most 4 x quads x threads entries: small blocks, `resident` of a processor at a time.
template <int threads, int quads, int resident>
__global__ void __launch_bounds__(threads, resident) select_held_kernel(const __grid_constant__ SelectParams p) {
  let_next_kernel_start();
  SharedHeld<threads>& s = *static_cast<SharedHeld<threads>*>(shared_memory());
  const Token t(p, blockIdx.x);
  wait_for_previous_kernel();
  if (t.n <= p.top)
    t.write_all(p.top);
  else if (t.n <= 2 * quads * threads)
    select_held<quads / 2>(p, s, t);
  else
    select_held<quads>(p, s, t);
}

/// `resident`: blocks of a processor at a time.
template <bool clustered, int resident>
__global__ void __launch_bounds__(kThreads, resident) select_kernel(const __grid_constant__ SelectParams p) {
  let_next_kernel_start();
  Shared& s = *static_cast<Shared*>(shared_memory());
  uint32_t* bitmap = reinterpret_cast<uint32_t*>(&s + 1);
  const int token = clustered ? blockIdx.x / p.cluster : blockIdx.x, rank = clustered ? cluster_rank() : 0;
  const Token t(p, token);
  wait_for_previous_kernel();
  const int n = t.n;
  const int32_t* table = t.table;
  int32_t* rows = t.rows;
  const float* row = t.row;
  // Eight quads take more registers than three blocks leave.
  constexpr int most = resident > 2 ? 4 : 8;
  if (n <= max(p.top, 4 * most * kThreads)) {
    if (rank > 0) return;
    SharedHeld<kThreads>& held = *static_cast<SharedHeld<kThreads>*>(shared_memory());
    if (n <= p.top)
      t.write_all(p.top);
    else if (n <= 8 * kThreads)
      select_held<2>(p, held, t);
    else if (n <= 16 * kThreads)
      select_held<4>(p, held, t);
    else if constexpr (most > 4)
      select_held<8>(p, held, t);
    return;
  }
  const int ranks = clustered ? min(p.cluster, (n + kShare - 1) / kShare) : 1;
  if (rank >= ranks) return;
  if (threadIdx.x == 0) s.low = 0xffffffffu, s.high = s.count = s.peak = 0;
  __syncthreads();
  if (ranks > 1) cluster_arrive();

  uint32_t bound = find_bound(s, row, n, p.aligned, rank, ranks, uint32_t((p.top + ranks - 1) / ranks));
  Shared* root = &s;
  if (ranks > 1) {
    cluster_wait();
    if (threadIdx.x < ranks) *of_block(&s.bound[rank], threadIdx.x) = bound;
    cluster_arrive();
    cluster_wait();
    for (int i = 0; i < ranks; ++i) bound = min(bound, s.bound[i]);
    root = of_block(&s, 0);
  }
  if (threadIdx.x == 0) atomicMax(&root->peak, s.high);
  visit_scores(row, n, p.aligned, rank, ranks, [&](int entry, uint32_t order, int) {
    if (order <= bound) return;
    const uint32_t at = atomicAdd(&s.count, 1u);
    if (at < kCandidates) s.candidates[at] = order_of(order, entry);
  });
  if (ranks > 1) {
    if (rank > 0) {
      __syncthreads();
      if (threadIdx.x == 0) s.low = atomicAdd(&root->count, s.count);
      __syncthreads();
      const uint32_t to = s.low;
      for (uint32_t i = threadIdx.x; i < s.count && to + i < kCandidates; i += kThreads)
        root->candidates[to + i] = s.candidates[i];
    }
    cluster_arrive();
    cluster_wait();
    if (rank > 0) return;
  }

  for (int i = threadIdx.x; i < spread(words_of(n)); i += kThreads) bitmap[i] = 0;
  __syncthreads();
  const uint32_t count = s.count;
  const auto choose = [&](uint64_t x) {
    const uint32_t entry = entry_of(x);
    atomicOr(&bitmap[spread(entry / 32)], 1u << entry % 32);
  };
  const auto visit_list = [&](auto f) {
    for (int i = threadIdx.x; i < count; i += kThreads) f(s.candidates[i]);
  };
  const auto choose_top = [&](auto visit) {
    const uint64_t low = order_of(bound, n - 1), high = order_of(s.peak, 0);
    const uint64_t least = reached_by(s, low, high, uint32_t(p.top), 0, visit);
    visit([&](uint64_t x) {
      if (x >= least) choose(x);
    });
  };
  if (count < p.top) {
    visit_list(choose);
    choose_first(s, bitmap, row, n, p.aligned, bound, p.top - count);
  } else if (count <= kCandidates) {
    choose_top(visit_list);
  } else {
    choose_top([&](auto f) {
      visit_scores(row, n, p.aligned, 0, 1, [&](int entry, uint32_t order, int) { f(order_of(order, entry)); });
    });
  }
  __syncthreads();
  write_rows(s, bitmap, n, table, rows);
}

template <int threads, int quads, int resident>
cudaError_t launch_held(const SelectParams& p, bool sm_90, cudaStream_t stream) {
  constexpr unsigned bytes = sizeof(SharedHeld<threads>);
  static_assert(bytes <= 48 << 10, "more must be asked for");
  return launch(select_held_kernel<threads, quads, resident>, {dim3(unsigned(p.tokens)), threads, bytes, 1, sm_90},
                stream, p);
}

}  // namespace

cudaError_t launch_select(SelectParams p, bool sm_90, int processors, cudaStream_t stream) {
  // Where two blocks a processor hold all tokens, a third place would only let some processors take more than others.
  const bool few = p.tokens <= 2 * processors;
  if (!few && p.width <= 4096) return launch_held<256, 4, 6>(p, sm_90, stream);
  if (!few && p.width <= 8192) return launch_held<256, 8, 4>(p, sm_90, stream);
  if (!few && p.width <= 16384) return launch_held<512, 8, 2>(p, sm_90, stream);
  p.cluster = 1;
  while (sm_90 && p.width > 32 * kThreads && p.cluster < kMaxCluster && 2 * p.cluster * p.tokens <= processors &&
         p.cluster * kShare < p.width)
    p.cluster *= 2;
  const unsigned bytes = shared_bytes(p.width);
  const auto kernel = p.cluster > 1 ? select_kernel<true, 2> : few ? select_kernel<false, 2> : select_kernel<false, 3>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  if (error != cudaSuccess) return error;
  return launch(kernel, {dim3(unsigned(p.tokens * p.cluster)), kThreads, bytes, unsigned(p.cluster), sm_90}, stream, p);
}

}  // namespace dsv4
