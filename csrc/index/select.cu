// index_select: buffer indices of the `top` best visible entries of each token, in ascending order of entries, then -1.
// Exact: of equal scores the first entries are selected (SPEC 4.2, 4.3). In a selection of two levels (SPEC 11.6), also
// the numbers of the best candidate blocks, and the best of the entries of listed blocks.
//
// One thread block or cluster per token. Up to 16,384 scores per block are read once and held in registers
// (`select_held`): it finds the histogram bin that contains the `top`-th largest score, takes everything above it, and
// the largest of that bin. In a cluster each block has consecutive entries. The blocks write what all must know (range,
// histogram, numbers of the bin) to each other's shared memory, so each finds and writes its own part of the result.
// With 32 scores per thread, in a cluster 16, blocks first try to reduce them to a list of those that reach a threshold
// as in 1. below (`select_listed`). Blocks with too many such scores read all of them again.
//
// More scores are read twice and mostly not stored:
//
// 1. Each thread keeps the largest score of each of its four columns of the row. The `top`-th largest of these 2048
//    maxima (for a block of a cluster its share of `top`, then the minimum over the blocks) is a threshold that at
//    least `top` scores reach, and few more.
//    A block of its own first reads one score in eight and takes a threshold that twice the share of those reach. It
//    finds the other one only if too few or too many scores then reach this one.
// 2. Scores above the threshold are appended to a list, in any order, as distinct numbers that contain score and entry.
//    In a cluster each block has a list and then reserves space in the list of the first block at once.
// 3. The `top`-th largest number of the list is found by histograms of eleven bits of the remaining range, until all
//    numbers of a bin are selected. If the list overflows, the scores are read again for each histogram. If fewer than
//    `top` scores exceed the threshold (many ties), all of them are taken, and the first entries whose score equals the
//    threshold fill up the rest.
// 4. Each selected entry sets a bit. A word of bits is a block of the block table, and prefix sums of the bits give the
//    output positions.
//
// Counts in shared memory are atomic and do not depend on the order of the additions. Bytes: 4 per score, read a second
// time from L1 or L2.
#include <algorithm>
#include <type_traits>

#include "../launch.cuh"
#include "index.h"
#include "layout.h"
#include "warp.cuh"

namespace dsv4 {
namespace {

constexpr int kThreads = 512;
constexpr int kGroups = 4 * kThreads;  // groups of scores whose maximum is kept
constexpr int kBins = 2048, kBinBits = 11;
constexpr int kCandidates = 4096;
constexpr int kBatch = 4;  // loads of four scores in flight
constexpr int kMaxCluster = 16;
constexpr int kHeld = 32 * kThreads;  // scores that a block holds
constexpr int kSampled = 8;           // one score of these is read for a first threshold
constexpr int kShare = 4096;          // entries that justify the barriers of one more block in the cluster
constexpr int kTies = 128;            // largest bin whose numbers are ranked directly
constexpr int kListed = 2048;         // scores of a list in shared memory
constexpr int kClusterBins = 512, kClusterBinBits = 9;  // of a cluster that holds its scores
constexpr unsigned kAllLanes = 0xffffffffu;

/// Aligned, because it is read as a vector, which must not contain what other threads write.
struct alignas(16) Found {
  uint32_t bin, above, inside;  // numbers in higher bins, and in this bin
};

/// Shared memory of the histograms of a thread block.
template <int threads>
struct Histogram {
  alignas(16) uint32_t bins[kBins + 1];  // the last one counts what is in none
  uint32_t warp_sums[threads / 32];
  Found found;
};

struct Shared : Histogram<kThreads> {
  uint64_t candidates[kCandidates];
  uint32_t bound[kMaxCluster];
  uint32_t low, high;  // range of the maxima
  uint32_t count;      // candidates
  uint32_t equal;      // scores that equal the threshold
  uint32_t peak;       // largest candidate
};

/// Shared memory for scores in registers.
template <int threads, bool clustered = false>
struct SharedHeld : Histogram<threads> {
  static constexpr bool kClustered = clustered;
  static constexpr int kWarps = threads / 32, kAllWarps = clustered ? kMaxCluster * kWarps : kWarps;
  uint64_t ties[kTies];
  uint32_t warp_low[kAllWarps], warp_high[kAllWarps];
  uint32_t chosen[threads];  // selected bits of a thread's entries
  uint32_t count;            // number of ties
  struct List {
    uint2 scores[kListed];  // bits of a score and its entry
    uint32_t quad_sums[8 * kWarps];
  } list;  // last, because blocks with few scores do not use it
};

/// The same in a cluster.
template <int threads>
struct SharedHeldByCluster : SharedHeld<threads, true> {
  alignas(16) uint16_t counts[kMaxCluster][kClusterBins];  // histogram of each block
  uint32_t bound[kMaxCluster], high[kMaxCluster];          // of each block's scores
  uint32_t listed[kMaxCluster];                            // scores of each block in the first block's list
  bool done;                                               // the first block selects from it
  uint32_t lower_ties;                                     // numbers of the bin in lower blocks
  uint32_t lower_best;                                     // numbers of higher bins in lower blocks
};

/// One bit per entry. Words are spread so that threads can process runs of them without bank conflicts.
__host__ __device__ __forceinline__ int spread(int word) { return word + word / 32; }
__host__ __device__ __forceinline__ int words_of(int entries) { return (entries + 31) / 32; }
unsigned shared_bytes(int width) {
  return std::max(unsigned(sizeof(Shared) + sizeof(uint32_t) * (spread(words_of(width)) + 1)),
                  unsigned(sizeof(SharedHeldByCluster<kThreads>)));
}

/// Loads the scores at `at` and the three after it, -infinity from n on.
__device__ __forceinline__ float4 load_four(const float* row, int at, int n, bool aligned) {
  if (aligned && at + 3 < n) return *reinterpret_cast<const float4*>(row + at);
  const auto load = [=](int i) { return i < n ? row[i] : -INFINITY; };
  return {load(at), load(at + 1), load(at + 2), load(at + 3)};
}

/// The same for `quads` fours, `step` apart.
template <int quads>
__device__ __forceinline__ void load_fours(float4 (&v)[quads], const float* row, int at, int step, int n,
                                           bool aligned) {
  if (aligned && at + step * (quads - 1) + 3 < n) {  // the usual case: all loads follow one branch
#pragma unroll
    for (int i = 0; i < quads; ++i) v[i] = *reinterpret_cast<const float4*>(row + at + step * i);
  } else {
#pragma unroll
    for (int i = 0; i < quads; ++i) v[i] = load_four(row, at + step * i, n, aligned);
  }
}

/// Fours of a row that a thread visits: `first`, and others `step` apart.
struct Quads {
  int first, step;

  /// Those of this block, of `ranks` blocks that alternate.
  static __device__ __forceinline__ Quads of_block(int rank, int ranks) {
    return {int(kThreads * rank + threadIdx.x), kThreads * ranks};
  }
  /// Every kSampled-th run of 128 entries.
  static __device__ __forceinline__ Quads sample() {
    return {int(kSampled * (threadIdx.x & ~31) + threadIdx.x % 32), kSampled * kThreads};
  }
};

/// Calls f(entry, order) for the entries below n of a thread's quads. f must not assume an order.
template <typename F>
__device__ __forceinline__ void visit_scores(const float* row, int n, bool aligned, Quads quads, F f) {
  for (int quad = quads.first; 4 * quad < n; quad += kBatch * quads.step) {
    float4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) v[i] = load_four(row, 4 * (quad + i * quads.step), n, aligned);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = 4 * (quad + i * quads.step);
      const float four[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (at + k < n) f(at + k, order_of(four[k]), k);
      }
    }
  }
}

template <int bins = kBins, int threads>
__device__ __forceinline__ void clear_bins(Histogram<threads>& s) {
#pragma unroll
  for (int i = 0; i < bins; i += threads) s.bins[i + threadIdx.x] = 0;
}

/// Returns the sum of x over the threads before this one. All threads take part; a barrier must precede the next call.
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

/// Returns the bin that contains the `wanted`-th largest number in `bins`.
template <int threads>
__device__ __forceinline__ Found find_bin(Histogram<threads>& s, uint32_t wanted) {
  constexpr int own = kBins / threads;
  struct alignas(own < 4 ? 4 * own : 16) Own {
    uint32_t count[own];
  };
  const int lowest = kBins - own - own * threadIdx.x;
  const auto [count] = *reinterpret_cast<const Own*>(&s.bins[lowest]);
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < own; ++i) sum += count[i];
  uint32_t above = sum_before(s, sum);
  if (above < wanted && wanted <= above + sum) {
    Found found{uint32_t(lowest + own - 1), above, count[own - 1]};
#pragma unroll
    for (int i = own - 2; i >= 0; --i) {
      above += count[i + 1];
      if (above < wanted) found = {uint32_t(lowest + i), above, count[i]};
    }
    s.found = found;
  }
  __syncthreads();
  return s.found;
}

/// Returns a number that `wanted` to `wanted` + `slack` of the visited numbers reach, or the `wanted`-th largest
/// itself.
///
/// `visit(f)` calls f for each number. At least `wanted` of them are between `low` and `high`, and none above `high`.
template <typename Visit>
__device__ __forceinline__ uint64_t reached_by(Shared& s, uint64_t low, uint64_t high, uint32_t wanted, uint32_t slack,
                                               Visit visit) {
  while (low < high) {
    const int bits = 64 - __clzll(high - low), shift = bits > kBinBits ? bits - kBinBits : 0;
    clear_bins(s);
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

/// Returns a threshold that at least `wanted` of the entries below n in the threads' quads reach. There are at least
/// `groups` of them, at most kGroups.
__device__ __forceinline__ uint32_t find_bound(Shared& s, const float* row, int n, bool aligned, Quads quads,
                                               uint32_t groups, uint32_t wanted) {
  uint32_t best[4] = {};  // 0: no entry so far
  if (threadIdx.x == 0) s.low = 0xffffffffu, s.high = 0;
  __syncthreads();
  visit_scores(row, n, aligned, quads,
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
  if (wanted > groups) return 0;
  return uint32_t(reached_by(s, s.low, s.high, wanted, wanted / 8, [&](auto f) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (best[k]) f(best[k]);
    }
  }));
}

/// Sets the bits of the first `wanted` of the entries below n whose score has this order; there are at least that many.
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

/// Writes the buffer indices of the entries whose bits are set.
template <typename Columns>
__device__ __forceinline__ void write_rows(Shared& s, const uint32_t* bitmap, const Columns& t) {
  const int n = t.n;
  int32_t* rows = t.rows;
  const int words = words_of(n), each = (words + kThreads - 1) / kThreads;
  const int first = min(each * int(threadIdx.x), words), last = min(first + each, words);
  uint32_t sum = 0;
  for (int word = first; word < last; ++word) sum += __popc(bitmap[spread(word)]);
  uint32_t at = sum_before(s, sum);
  if (sum == 0) return;
  for (int word = first; word < last; ++word) {
    const uint32_t set = bitmap[spread(word)];
    if (set == 0) continue;
#pragma unroll
    for (int run = 0; run < 32; run += Columns::run) {
      uint32_t bits = set >> run & 0xffffffffu >> (32 - Columns::run);
      if (Columns::run < 32 && bits == 0) continue;
      for (const int row = t.row(t.place(32 * word + run), 0); bits; bits &= bits - 1)
        rows[at++] = row + __ffs(bits) - 1;
    }
  }
}

/// Counts the bits set in `flags`, four of each quad i of a lane from bit 4 i on: in quad i of the lanes before this
/// one, and of all lanes of the warp.
template <int quads>
__device__ __forceinline__ void count_in_warp(uint32_t flags, uint32_t (&before)[quads], uint32_t (&all)[quads]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < quads; first += 4) {
    uint32_t own = 0;  // one byte per quad: a warp has at most 128 bits of it
#pragma unroll
    for (int i = first; i < first + 4 && i < quads; ++i) own |= __popc(flags >> 4 * i & 15) << 8 * (i - first);
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
      sum += lane >= step ? other : 0;
    }
    const uint32_t last = __shfl_sync(kAllLanes, sum, 31);
#pragma unroll
    for (int i = first; i < first + 4 && i < quads; ++i) {
      before[i] = (sum - own) >> 8 * (i - first) & 0xff;
      all[i] = last >> 8 * (i - first) & 0xff;
    }
  }
}

/// Returns the number of bits set in `flags` before each of this lane's quads, in the order of entries: warp after
/// warp, then quad after quad of all lanes, then lane after lane. All threads take part; a barrier must precede the
/// next call.
template <int quads, int threads>
__device__ __forceinline__ void set_before(Histogram<threads>& s, uint32_t flags, uint32_t (&before)[quads]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t total = 0, all[quads];
  count_in_warp(flags, before, all);
#pragma unroll
  for (int i = 0; i < quads; ++i) before[i] += total, total += all[i];
  if (lane == 0) s.warp_sums[warp] = total;
  __syncthreads();
  const uint32_t of_warps = __reduce_add_sync(kAllLanes, lane < warp ? s.warp_sums[lane] : 0);
#pragma unroll
  for (int i = 0; i < quads; ++i) before[i] += of_warps;
}

/// The same if the entries of quad i of all warps precede those of quad i + 1. Returns the number of all bits.
/// `sums`: shared memory for a number per quad and warp.
template <int quads, int threads>
__device__ __forceinline__ uint32_t set_before_by_quad(uint32_t* sums, uint32_t flags, uint32_t (&before)[quads]) {
  constexpr int warps = threads / 32, each = quads * warps / 32;  // sums of a lane
  static_assert(each > 0 && warps % each == 0, "the sums of a warp have the same place in all lanes");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t all[quads];
  count_in_warp(flags, before, all);
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    if (lane == i) sums[warps * i + warp] = all[i];
  }
  __syncthreads();
  uint32_t own = 0, lower = 0;  // sums of the lane, and those before its sum of this warp
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const uint32_t x = sums[each * lane + i];
    own += x, lower += i < warp % each ? x : 0;
  }
  uint32_t sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
    sum += lane >= step ? other : 0;
  }
  lower += sum - own;
#pragma unroll
  for (int i = 0; i < quads; ++i) before[i] += __shfl_sync(kAllLanes, lower, (warps * i + warp) / each);
  return __shfl_sync(kAllLanes, sum, 31);
}

/// The columns of a token's scores and the rows to write for them. `run` columns from a multiple of it on have
/// consecutive rows: row(place(column), column) and up. `place` reads memory. No kernel of a step's layers writes what
/// the constructor reads, so it comes before the wait for the scores, and `finish` after it.
template <typename Params>
struct Columns;

/// Entries at ratio 4. Their rows are buffer indices.
template <>
struct Columns<SelectParams> {
  static constexpr int run = kKeysPerBlock;
  int n;  // entries that the token sees
  const int32_t* table;
  int32_t* rows;
  const float* scores;

  __device__ __forceinline__ Columns(const SelectParams& p, int token)
      : table(p.table + p.request[token] * p.table_stride),
        rows(p.rows + token * p.rows_stride),
        scores(p.scores + token * p.scores_stride) {
    const int64_t visible = (p.positions[token] + 1) / kCsaRatio;
    n = int(visible <= p.top ? visible : min(visible, int64_t(p.width)));
  }
  __device__ __forceinline__ void finish(const SelectParams&, int) {}
  __device__ __forceinline__ int32_t place(int column) const { return table[column / run]; }
  __device__ __forceinline__ int32_t row(int32_t place, int column) const { return place * run + column % run; }
};

/// Candidate blocks. Their rows are their numbers.
template <>
struct Columns<CandidateSelectParams> {
  static constexpr int run = 32;
  int n;  // blocks with entries that the token sees
  int32_t* rows;
  const float* scores;

  __device__ __forceinline__ Columns(const CandidateSelectParams& p, int token)
      : rows(p.rows + token * p.rows_stride), scores(p.scores + token * p.scores_stride) {
    const int64_t blocks = p.candidates(p.visible(p.positions[token]));
    n = int(blocks <= p.top ? blocks : min(blocks, int64_t(p.width)));
  }
  __device__ __forceinline__ void finish(const CandidateSelectParams&, int) {}
  __device__ __forceinline__ int32_t place(int column) const { return column / run * run; }
  __device__ __forceinline__ int32_t row(int32_t place, int column) const { return place + column % run; }
};

/// Entries of the candidate blocks in a token's list. Their rows are buffer indices.
template <>
struct Columns<ListedSelectParams> {
  static constexpr int run = kCandidateEntries;
  int n = 0;
  const int32_t* table;
  const int32_t* list;
  int32_t* rows;
  const float* scores;
  int shift;  // candidate blocks of a block of the cache, as a power of two

  __device__ __forceinline__ Columns(const ListedSelectParams& p, int token)
      : table(p.table + p.request[token] * p.table_stride),
        list(p.of(token)),
        rows(p.rows + token * p.rows_stride),
        scores(p.scores + token * p.scores_stride),
        shift(p.candidates_shift()) {}
  /// The list may be the output of the previous kernel.
  __device__ __forceinline__ void finish(const ListedSelectParams& p, int token) {
    n = p.entries(token, p.positions[token]);
  }
  /// The row of the first entry of the block.
  __device__ __forceinline__ int32_t place(int column) const {
    const int number = list[column / run], inside = number & ((1 << shift) - 1);
    return (table[number >> shift] << shift | inside) * run;
  }
  __device__ __forceinline__ int32_t row(int32_t place, int column) const { return place + column % run; }
};

/// Writes the rows of all columns, if all are selected, and then -1.
template <typename Columns>
__device__ __forceinline__ void write_all(const Columns& t, int top) {
  for (int i = threadIdx.x; i < top; i += blockDim.x) t.rows[i] = i < t.n ? t.row(t.place(i), i) : -1;
}

/// Waits until all threads of the token's blocks have come here. What they wrote to shared memory is then visible.
template <bool clustered>
__device__ __forceinline__ void wait_for_all() {
  if constexpr (clustered) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

/// Returns the address in block `rank` of the cluster that corresponds to `p`, or `p` itself outside of clusters.
template <bool clustered, typename T>
__device__ __forceinline__ T* in_block(T* p, int rank) {
  if constexpr (clustered) return of_block(p, rank);
  return p;
}

/// find_bin for the bins of a single block.
template <int threads>
__device__ __forceinline__ Found find_bin_of_all(SharedHeld<threads>& s, uint32_t wanted, int, int) {
  return find_bin(s, wanted);
}

/// find_bin for the sums of the bins of `ranks` blocks of a cluster. Sets s.lower_ties and adds to s.lower_best.
template <int threads>
__device__ __forceinline__ Found find_bin_of_all(SharedHeldByCluster<threads>& s, uint32_t wanted, int rank,
                                                 int ranks) {
  constexpr int pieces = kClusterBins / 8;  // of 16 bytes
  static_assert(threads == kClusterBins && threads % pieces == 0, "a bin, and a piece for some blocks, per thread");
  const int piece = threadIdx.x % pieces;
  for (int to = threadIdx.x / pieces; to < ranks; to += threads / pieces) {
    const uint4 a = reinterpret_cast<const uint4*>(s.bins)[2 * piece],
                b = reinterpret_cast<const uint4*>(s.bins)[2 * piece + 1];
    *of_block(reinterpret_cast<uint4*>(s.counts[rank]) + piece, to) =
        make_uint4(a.x | a.y << 16, a.z | a.w << 16, b.x | b.y << 16, b.z | b.w << 16);
  }
  wait_for_all<true>();
  const uint32_t bin = kClusterBins - 1 - threadIdx.x;
  uint32_t inside = 0, lower = 0;
#pragma unroll
  for (int i = 0; i < kMaxCluster; ++i) {
    const uint32_t count = i < ranks ? s.counts[i][bin] : 0;
    inside += count;
    lower += i < rank ? count : 0;
  }
  const uint32_t above = sum_before(s, inside);
  if (above < wanted && wanted <= above + inside) s.found = {bin, above, inside}, s.lower_ties = lower;
  __syncthreads();
  const uint32_t lower_best = __reduce_add_sync(kAllLanes, bin > s.found.bin ? lower : 0);
  if (threadIdx.x % 32 == 0) atomicAdd(&s.lower_best, lower_best);
  return s.found;
}

/// Returns how many of the ties are larger than the one of this thread.
template <typename Held>
__device__ __forceinline__ uint32_t larger_ties(const Held& s, uint32_t ties) {
  uint32_t larger = 0;
  for (uint32_t i = 0; i < ties; ++i) larger += s.ties[i] > s.ties[threadIdx.x];
  return larger;
}

/// Bins of equal width for scores from `low` to `high`, over which scores of both signs spread better than their bits.
/// One bin if the range is not finite.
struct EqualBins {
  float low, width, scale;

  __device__ __forceinline__ EqualBins(float least, float most, int bins) {
    low = least, width = __fmul_rd(__fsub_rd(most, least), 1.0f / bins), scale = __fdividef(bins, most - least);
  }
  template <int bins>
  __device__ __forceinline__ uint32_t of(float score) const {
    return uint32_t(min(__float2int_rz((score - low) * scale), bins - 1));
  }
  /// Returns a number that all scores in this bin and higher ones reach, less than two bins below. Rounding of `of` is
  /// far below a bin, and rounding here is down.
  __device__ __forceinline__ float bound(uint32_t bin) const { return __fadd_rd(low, __fmul_rd(bin - 1.0f, width)); }
};

/// select_held for scores of which few reach a bound: writes them to a list in the order of entries, of the first block
/// of a cluster, which then selects from it. Returns false if there are too many of them, or too many close to the last
/// one to be selected. s.bins, s.chosen and s.count are 0 at first, and all but s.bins also after failure.
template <int quads, typename Held, typename Params>
__device__ __forceinline__ bool select_listed(const Params& p, Held& s, const Columns<Params>& t, int rank, int ranks) {
  constexpr bool clustered = Held::kClustered;
  constexpr int warps = Held::kWarps, threads = 32 * warps, step = 4 * threads, share = quads * step;
  constexpr int parts = kGroups / (4 * threads), own = kListed / threads;
  constexpr float none = -INFINITY;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = share * rank + 4 * threadIdx.x;
  static_assert(quads <= 8, "one flag per entry");
  float4 v[quads];
  load_fours(v, t.scores, first, step, t.n, p.aligned);
  if constexpr (clustered) cluster_wait();
  if (p.top >= min(kGroups, kListed)) return false;
  // The bound is in the bin of the `top`-th largest of the groups' maxima. For a block of a cluster it is its share of
  // `top`, then the least of the blocks.
  float best[parts][4];
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    const float four[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
    float (&of_part)[4] = best[i * parts / quads];
#pragma unroll
    for (int k = 0; k < 4; ++k) of_part[k] = fmaxf(i * parts % quads ? of_part[k] : none, four[k]);
  }
  float low = -none, high = none;
#pragma unroll
  for (int i = 0; i < 4 * parts; ++i) {
    const float x = best[i / 4][i % 4];
    low = fminf(low, x > none ? x : low), high = fmaxf(high, x);
  }
  const uint32_t warp_low = __reduce_min_sync(kAllLanes, order_of(low)),
                 warp_high = __reduce_max_sync(kAllLanes, order_of(high));
  if (lane == 0) s.warp_low[warp] = warp_low, s.warp_high[warp] = warp_high;
  if (threadIdx.x == 0) s.found.bin = 0;
  __syncthreads();
  low = score_of(__reduce_min_sync(kAllLanes, lane < warps ? s.warp_low[lane] : 0xffffffffu));
  uint32_t highest = __reduce_max_sync(kAllLanes, lane < warps ? s.warp_high[lane] : 0);
  const EqualBins bins(low, score_of(highest), kBins);
#pragma unroll
  for (int i = 0; i < 4 * parts; ++i) {
    const float x = best[i / 4][i % 4];
    atomicAdd(&s.bins[x > none ? bins.of<kBins>(x) : kBins], 1u);
  }
  __syncthreads();
  const uint32_t entries = min(t.n - share * rank, share);
  Found found = find_bin(s, clustered ? (p.top * entries + t.n - 1) / t.n : p.top);
  float bound = found.bin ? bins.bound(found.bin) : none;  // none if there are too few groups, too
  if constexpr (clustered) {
    if (threadIdx.x < ranks) {
      *of_block(&s.bound[rank], threadIdx.x) = order_of(bound);
      *of_block(&s.high[rank], threadIdx.x) = highest;
    }
    wait_for_all<true>();
    uint32_t least = order_of(bound);
    for (int i = 0; i < ranks; ++i) least = min(least, s.bound[i]), highest = max(highest, s.high[i]);
    bound = score_of(least);
  }
  if (bound == none) return false;
  clear_bins(s);

  // Bits of scores below the bound, from signs of differences. NaNs are not below.
  uint32_t below = 0, before[quads];
#pragma unroll
  for (int i = quads - 1; i >= 0; --i) {
    const float four[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (int k = 3; k >= 0; --k) below = __funnelshift_l(bits_of(four[k] - bound), below, 1);
  }
  const uint32_t flags = ~below;  // the lowest 4 x quads count
  uint32_t count = set_before_by_quad<quads, threads>(s.list.quad_sums, flags, before), lower = 0;
  if constexpr (clustered) {
    if (threadIdx.x < ranks) *of_block(&s.listed[rank], threadIdx.x) = count;
    wait_for_all<true>();
    count = 0;
    for (int i = 0; i < ranks; ++i) lower += i < rank ? s.listed[i] : 0, count += s.listed[i];
  }
  if (count > kListed) return false;
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    const float four[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
    uint2* to = in_block<clustered>(s.list.scores, 0) + lower + before[i];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (flags >> (4 * i + k) & 1) *to++ = make_uint2(bits_of(four[k]), first + step * i + k);
    }
  }
  wait_for_all<clustered>();
  if constexpr (clustered) {
    if (rank > 0) {
      wait_for_all<true>();
      return s.done;
    }
  }
  // A thread has consecutive places of the list.
  const uint32_t place = own * threadIdx.x;
  uint32_t bin[own];
  int32_t to[own];
  const EqualBins fine(bound, score_of(highest), kBins);
  const auto order_at = [&](int i) { return order_of(float_of(s.list.scores[place + i].x)); };
  if (place < count) {
#pragma unroll
    for (int i = 0; i < own; ++i) to[i] = t.place(s.list.scores[min(place + i, count - 1)].y);
#pragma unroll
    for (int i = 0; i < own; ++i) {
      bin[i] = fine.of<kBins>(score_of(min(order_at(i), highest)));  // NaNs may be above
      atomicAdd(&s.bins[place + i < count ? bin[i] : kBins], 1u);
    }
  }
  __syncthreads();
  found = find_bin(s, p.top);
  const uint32_t wanted = p.top - found.above;
  const bool all = found.inside == wanted;
  const bool done = all || found.inside <= kTies;
  if constexpr (clustered) {
    if (threadIdx.x < ranks) *of_block(&s.done, threadIdx.x) = done;
    cluster_arrive();
  }
  if (!done) {
    if constexpr (clustered) cluster_wait();
    return false;
  }
  uint32_t chosen = 0;
#pragma unroll
  for (int i = 0; i < own; ++i) {
    if (place + i >= count) continue;
    chosen |= uint32_t(bin[i] > found.bin || (all && bin[i] == found.bin)) << i;
    if (!all && bin[i] == found.bin) s.ties[atomicAdd(&s.count, 1u)] = order_of(order_at(i), place + i);
  }
  if (!all) {
    __syncthreads();
    if (threadIdx.x < found.inside) {
      const uint32_t at = entry_of(s.ties[threadIdx.x]);
      if (larger_ties(s, found.inside) < wanted) atomicOr(&s.chosen[at / own], 1u << at % own);
    }
    __syncthreads();
    chosen |= s.chosen[threadIdx.x];
  }
  if constexpr (clustered) cluster_wait();
  uint32_t at = sum_before(s, __popc(chosen));
#pragma unroll
  for (int i = 0; i < own; ++i) {
    if (chosen >> i & 1) t.rows[at++] = t.row(to[i], s.list.scores[place + i].y);
  }
  return true;
}

/// Writes the buffer indices of the `p.top` best of n entries, p.top < n <= 4 x quads x threads x ranks. A block has
/// 4 x quads x threads consecutive entries, a warp 128 x quads of them, a lane four of each 128. `ranks`: blocks of the
/// cluster that take part. Held: SharedHeld or SharedHeldByCluster.
template <int quads, typename Held, typename Params>
__device__ __forceinline__ void select_held(const Params& p, Held& s, const Columns<Params>& t, int rank = 0,
                                            int ranks = 1) {
  constexpr bool clustered = Held::kClustered;
  constexpr int warps = Held::kWarps, threads = 32 * warps, share = 4 * quads * threads;
  constexpr int bins = clustered ? kClusterBins : kBins, bin_bits = clustered ? kClusterBinBits : kBinBits;
  static_assert(kTies <= threads && warps <= 32, "one thread per tie, one lane per warp");
  constexpr bool listed = quads >= (clustered ? 4 : 8);  // enough scores that a list of a few of them is faster
  static_assert(quads <= 8, "one bit of `best` per entry");
  static_assert(share <= 0xffff, "a block's counts are 16 bits");
  const int n = t.n;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = share * rank + 128 * quads * warp + 4 * lane;
  if constexpr (clustered) {
    cluster_arrive();  // other blocks write to this one's memory only when it runs
    if (threadIdx.x == 0) s.lower_best = 0;
  }
  if (threadIdx.x == 0) s.count = 0;
  s.chosen[threadIdx.x] = 0;
  clear_bins<(listed ? kBins : bins)>(s);
  if constexpr (listed) {
    if (select_listed<quads>(p, s, t, rank, ranks)) return;
    clear_bins<bins>(s);
  }
  float4 v[quads];
  // Loaded together with the scores, unless that takes more registers than available.
  constexpr bool early = quads <= 4;
  int32_t place[quads];
  load_fours(v, t.scores, first, 128, n, p.aligned);
#pragma unroll
  for (int i = 0; i < quads; ++i) place[i] = early && first + 128 * i < n ? t.place(first + 128 * i) : 0;
  if constexpr (clustered && !listed) cluster_wait();
  uint32_t order[quads][4];
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    const float four[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (int k = 0; k < 4; ++k) order[i][k] = first + 128 * i + k < n ? order_of(four[k]) : 0;  // below all scores
  }
  // The `best` scores are selected, and `wanted` of the `inside` ties: one bit per entry. Ties have orders from `low`
  // to `high`.
  uint32_t best = 0, ties = 0, low = 1, high = 0xffffffffu, wanted = p.top, inside = n;
  uint32_t lower_ties = share * rank;  // ties in lower blocks
  const auto in_range = [&](uint32_t x) { return x >= low && x <= high; };
  // Sets `low` and `high` to the least and the largest order of a tie.
  const auto narrow = [&](auto is_tie) {
    uint32_t least = 0xffffffffu, most = 0;
#pragma unroll
    for (int i = 0; i < 4 * quads; ++i) {
      const uint32_t x = order[i / 4][i % 4];
      const bool tie = is_tie(x);
      least = min(least, tie ? x : 0xffffffffu), most = max(most, tie ? x : 0);
    }
    least = __reduce_min_sync(kAllLanes, least), most = __reduce_max_sync(kAllLanes, most);
    if (lane < ranks) {
      *in_block<clustered>(&s.warp_low[warps * rank + warp], lane) = least;
      *in_block<clustered>(&s.warp_high[warps * rank + warp], lane) = most;
    }
    wait_for_all<clustered>();
    least = 0xffffffffu, most = 0;
#pragma unroll
    for (int i = 0; i < Held::kAllWarps; i += 32) {
      const int at = i + lane;
      if (at < warps * ranks) least = min(least, s.warp_low[at]), most = max(most, s.warp_high[at]);
    }
    low = __reduce_min_sync(kAllLanes, least), high = __reduce_max_sync(kAllLanes, most);
  };
  // Finds the bin of the last score in range that is wanted. bin_of(order) is monotone and below `bins`. There is no
  // branch, so that the scores do not wait for each other.
  const auto find = [&](auto bin_of) {
#pragma unroll
    for (int i = 0; i < 4 * quads; ++i) {
      const uint32_t x = order[i / 4][i % 4], bin = bin_of(x);
      atomicAdd(&s.bins[in_range(x) ? bin : kBins], 1u);
    }
    __syncthreads();
    const Found found = find_bin_of_all(s, wanted, rank, ranks);
    wanted -= found.above, inside = found.inside;
    if constexpr (clustered) lower_ties = s.lower_ties;
    return found.bin;
  };
  const auto few_ties = [&] { return inside == wanted || inside <= kTies; };
  // Sets the bits of the scores to select and of the ties.
  const auto set_bits = [&](auto is_best, auto is_tie) {
#pragma unroll
    for (int i = 0; i < 4 * quads; ++i) {
      const uint32_t x = order[i / 4][i % 4];
      best |= uint32_t(is_best(x)) << i, ties |= uint32_t(is_tie(x)) << i;
    }
  };
  narrow(in_range);
  bool done = false;
  if constexpr (clustered || quads <= 4) {
    // With bins of equal width one round is enough, for more instructions per score.
    const EqualBins equal(score_of(low), score_of(high), bins);
    const auto bin_of = [&](uint32_t x) { return equal.of<bins>(score_of(x)); };
    const uint32_t bin = find(bin_of);
    const auto is_tie = [&](uint32_t x) { return in_range(x) && bin_of(x) == bin; };
    done = few_ties();
    if (done)
      set_bits([&](uint32_t x) { return in_range(x) && bin_of(x) > bin; }, is_tie);
    else
      narrow(is_tie);
  }
  if (!done) {
    while (!few_ties() && low < high) {
      clear_bins<bins>(s);
      __syncthreads();
      const int bits = 32 - __clz(high - low), shift = bits > bin_bits ? bits - bin_bits : 0;
      low += find([&](uint32_t x) { return (x - low) >> shift; }) << shift;
      high = low + min(high - low, (1u << shift) - 1);
      if constexpr (clustered) wait_for_all<true>();  // before other blocks write s.counts again
    }
    set_bits([&](uint32_t x) { return x > high; }, in_range);
  }

  uint32_t before[quads];
  uint32_t lower_best = 0;  // selected in lower blocks, of the ties
  if (inside == wanted) {
    best |= ties;
    lower_best = lower_ties;
  } else if (inside <= kTies) {
#pragma unroll
    for (int i = 0; i < quads; ++i) {
      if (!(ties >> 4 * i & 15)) continue;  // few threads have ties
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (!(ties >> (4 * i + k) & 1)) continue;
        const uint64_t number = order_of(order[i][k], first + 128 * i + k);
        const uint32_t at = lower_ties + atomicAdd(&s.count, 1u);
        for (int to = 0; to < ranks; ++to) *in_block<clustered>(&s.ties[at], to) = number;
      }
    }
    wait_for_all<clustered>();
    if (threadIdx.x < inside) {
      const int entry = int(entry_of(s.ties[threadIdx.x])) - share * rank, at = entry % (128 * quads);
      const int owner = entry / (128 * quads) * 32 + at % 128 / 4;
      if (larger_ties(s, inside) < wanted) {
        if (entry >= 0 && entry < share) atomicOr(&s.chosen[owner], 1u << (4 * (at / 128) + at % 4));
        if constexpr (clustered) {
          if (entry < 0) atomicAdd(&s.lower_best, 1u);
        }
      }
    }
    __syncthreads();
    best |= s.chosen[threadIdx.x];
  } else {  // all scores are equal: select the first ones
    set_before<quads, threads>(s, ties, before);
#pragma unroll
    for (int i = 0; i < quads; ++i) {
      uint32_t at = lower_ties + before[i];
      for (uint32_t four = ties >> 4 * i & 15; four && at < wanted; four &= four - 1, ++at)
        best |= (four & -four) << 4 * i;
    }
    lower_best = min(lower_ties, wanted);
    __syncthreads();
  }
  set_before<quads, threads>(s, best, before);
  if constexpr (clustered) lower_best += s.lower_best;
#pragma unroll
  for (int i = 0; i < quads; ++i) {
    const uint32_t four = best >> 4 * i & 15;
    if (!early && four) place[i] = t.place(first + 128 * i);
    int32_t* to = t.rows + lower_best + before[i];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (four >> k & 1) *to++ = t.row(place[i], 4 * lane) + k;
    }
  }
}

/// For tokens that see at most 4 x quads x threads entries: `resident` blocks per SM.
template <typename Params, int threads, int quads, int resident>
__global__ void __launch_bounds__(threads, resident) select_held_kernel(const __grid_constant__ Params p) {
  let_next_kernel_start();
  SharedHeld<threads>& s = *static_cast<SharedHeld<threads>*>(shared_memory());
  Columns<Params> t(p, blockIdx.x);
  wait_for_previous_kernel();
  t.finish(p, blockIdx.x);
  if (t.n <= p.top)
    write_all(t, p.top);
  else if (t.n <= 2 * quads * threads)
    select_held<quads / 2>(p, s, t);
  else
    select_held<quads>(p, s, t);
}

/// `resident`: thread blocks per SM.
template <typename Params, bool clustered, int resident>
__global__ void __launch_bounds__(kThreads, resident) select_kernel(const __grid_constant__ Params p) {
  let_next_kernel_start();
  Shared& s = *static_cast<Shared*>(shared_memory());
  uint32_t* bitmap = reinterpret_cast<uint32_t*>(&s + 1);
  const int token = clustered ? blockIdx.x / p.cluster : blockIdx.x, rank = clustered ? cluster_rank() : 0;
  Columns<Params> t(p, token);
  wait_for_previous_kernel();
  t.finish(p, token);
  const int n = t.n;
  const float* row = t.scores;
  // Eight quads take more registers than three blocks per SM leave.
  constexpr int most = resident > 2 ? 4 : 8;
  const int blocks = clustered ? p.cluster : 1;
  if (n <= max(p.top, 4 * most * kThreads * blocks)) {
    if (n <= max(p.top, 8 * kThreads)) {
      if (rank > 0) return;
      if (n <= p.top)
        write_all(t, p.top);
      else
        select_held<2>(p, *static_cast<SharedHeld<kThreads>*>(shared_memory()), t);
      return;
    }
    using Held = std::conditional_t<clustered, SharedHeldByCluster<kThreads>, SharedHeld<kThreads>>;
    Held& held = *static_cast<Held*>(shared_memory());
    const auto select = [&](auto counted) {
      constexpr int quads = decltype(counted)::value, share = 4 * quads * kThreads;
      const int ranks = clustered ? (n + share - 1) / share : 1;
      if (rank < ranks) select_held<quads>(p, held, t, rank, ranks);
    };
    if (clustered && n <= 8 * kThreads * blocks)
      select(Count<clustered ? 2 : 4>());
    else if (n <= 16 * kThreads * blocks)
      select(Count<4>());
    else
      select(Count<most>());
    return;
  }
  const int ranks = clustered ? min(p.cluster, (n + kShare - 1) / kShare) : 1;
  if (rank >= ranks) return;
  if (threadIdx.x == 0) s.count = s.peak = s.equal = 0;
  const Quads own = Quads::of_block(rank, ranks);
  uint32_t bound;
  const auto list = [&] {
    uint32_t equal = 0;
    visit_scores(row, n, p.aligned, own, [&](int entry, uint32_t order, int) {
      equal += order == bound;
      if (order <= bound) return;
      atomicMax(&s.peak, order);
      const uint32_t at = atomicAdd(&s.count, 1u);
      if (at < kCandidates) s.candidates[at] = order_of(order, entry);
    });
    return equal;
  };
  bool listed = false;
  if (ranks == 1 && n >= 2 * kSampled * kGroups && 4 * p.top <= kCandidates) {
    bound = find_bound(s, row, n, p.aligned, Quads::sample(), kGroups, (2 * p.top + kSampled - 1) / kSampled);
    const uint32_t equal = __reduce_add_sync(kAllLanes, list());
    if (threadIdx.x % 32 == 0) atomicAdd(&s.equal, equal);
    __syncthreads();
    listed = s.count + s.equal >= p.top && s.count <= kCandidates;
    __syncthreads();
    if (!listed && threadIdx.x == 0) s.count = s.peak = 0;
  }
  Shared* root = &s;
  if (!listed) {
    if (ranks > 1) cluster_arrive();
    // With several blocks, each has at least kGroups entries.
    bound = find_bound(s, row, n, p.aligned, own, ranks > 1 ? kGroups : min(n, kGroups),
                       uint32_t((p.top + ranks - 1) / ranks));
    if (ranks > 1) {
      cluster_wait();
      if (threadIdx.x < ranks) *of_block(&s.bound[rank], threadIdx.x) = bound;
      cluster_arrive();
      cluster_wait();
      for (int i = 0; i < ranks; ++i) bound = min(bound, s.bound[i]);
      root = of_block(&s, 0);
    }
    list();
  }
  if (ranks > 1) {
    if (rank > 0) {
      __syncthreads();
      if (threadIdx.x == 0) s.low = atomicAdd(&root->count, s.count), atomicMax(&root->peak, s.peak);
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
      visit_scores(row, n, p.aligned, Quads::of_block(0, 1),
                   [&](int entry, uint32_t order, int) { f(order_of(order, entry)); });
    });
  }
  __syncthreads();
  write_rows(s, bitmap, t);
}

template <int threads, int quads, int resident, typename Params>
cudaError_t launch_held(const Params& p, bool sm_90, cudaStream_t stream) {
  using Held = SharedHeld<threads>;
  constexpr unsigned bytes = sizeof(Held) - (quads > 4 ? 0 : sizeof(typename Held::List));
  static_assert(bytes <= 48 << 10, "more needs an opt-in");
  return launch(select_held_kernel<Params, threads, quads, resident>,
                {dim3(unsigned(p.tokens)), threads, bytes, 1, sm_90}, stream, p);
}

}  // namespace

template <typename Params>
cudaError_t launch_select(Params p, bool sm_90, int processors, cudaStream_t stream) {
  // If two blocks per SM hold all tokens, a third would only make the load uneven.
  const bool few = p.tokens <= 2 * processors;
  if (!few && p.width <= 4096) return launch_held<256, 4, 6>(p, sm_90, stream);
  if (!few && p.width <= 8192) return launch_held<256, 8, 4>(p, sm_90, stream);
  if (!few && p.width <= 16384) return launch_held<512, 8, 2>(p, sm_90, stream);
  // A large block needs no barriers of a cluster.
  if (p.tokens <= processors && p.width > kShare && p.width <= 8192) return launch_held<1024, 2, 1>(p, sm_90, stream);
  const unsigned bytes = shared_bytes(p.width);
  const auto shape = [&](int cluster) -> LaunchShape {
    return {dim3(unsigned(p.tokens * cluster)), kThreads, bytes, unsigned(cluster), sm_90};
  };
  const auto allow_bytes = [&](auto kernel) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  };
  // More blocks than are portable only if fewer cannot hold a row.
  const auto in_clusters = select_kernel<Params, true, 1>;
  constexpr int portable = kPortableCluster;
  const int most = p.width > portable * kHeld ? kMaxCluster : portable;
  p.cluster = 1;
  while (sm_90 && p.cluster < most && 2 * p.cluster * p.tokens <= processors && p.cluster * kShare < p.width)
    p.cluster *= 2;
  cudaError_t error = p.cluster > 1 ? allow_bytes(in_clusters) : cudaSuccess;
  // No token waits until the clusters of others end.
  for (int at_once = 0; error == cudaSuccess && p.cluster > 1; p.cluster /= 2) {
    error = count_clusters_at_once(in_clusters, shape(p.cluster), at_once);
    if (error == cudaSuccess && at_once >= p.tokens) return launch(in_clusters, shape(p.cluster), stream, p);
  }
  if (error != cudaSuccess) return error;
  const auto kernel = few ? select_kernel<Params, false, 2> : select_kernel<Params, false, 3>;
  error = allow_bytes(kernel);
  if (error != cudaSuccess) return error;
  return launch(kernel, shape(1), stream, p);
}

template cudaError_t launch_select(SelectParams, bool, int, cudaStream_t);
template cudaError_t launch_select(CandidateSelectParams, bool, int, cudaStream_t);
template cudaError_t launch_select(ListedSelectParams, bool, int, cudaStream_t);

}  // namespace dsv4
