// append, prefill: all cache writes of one layer for the tokens of a step with chunks, in one launch (SPEC 2.1, 2.4,
// 2.5, 3.1 to 3.7).
//
// Thread blocks by index:
// - The first `requests` blocks (CSA, HCA) process the boundary of one request each: the entries that pool rows from
//   before the step, then the compressor state. A thread reads only columns of the compressor state that it later
//   writes itself, so reading old rows first needs no synchronisation (raw HCA divides rows among warps and has a
//   barrier).
// - Then two kinds of blocks alternate as long as both last, so that both are always in flight: blocks that pool the
//   entry that is completed in `ratio` tokens from rows of this step only, and blocks of window entries, one warp per
//   entry (HCA: two entries per warp, because its blocks hold few warps).
// - The last blocks copy ring entries from before the step that the step does not overwrite to the workspace. An
//   overwritten entry is copied by the warp that overwrites it.
//
// No block waits for another one, there are no atomics, and every sum has a fixed order.
//
// Bytes per token with bf16 kv and FP8 entries. Read: kv 1024, scores CSA 10,240 / HCA 4,096 in fp32, each once.
// Written: window entry 584 (twice for the last 128), compressed entries and keys CSA 146 + 18, HCA 5.
#include "../launch.cuh"
#include "hca.cuh"
#include "window.cuh"

namespace dsv4 {
namespace {

template <LayerKind kind>
struct Shape {
  static constexpr int groups = is_hca<kind> ? 4 : 1;  // groups of 128 threads that share the rows of an HCA window
  static constexpr int warps = is_csa<kind> ? kCsaThreads / 32 : 4 * groups;
  static constexpr int rows_a_warp = is_hca<kind> ? 2 : 1;
  static constexpr int blocks_per_sm = is_csa<kind> ? 3 : is_hca<kind> ? 1 : 8;
};

/// Numbers of thread blocks by kind.
template <LayerKind kind>
struct Grid {
  using S = Shape<kind>;
  int boundary, entries, rows;

  __host__ __device__ Grid(int tokens, int requests)
      : boundary(ratio_of<kind> ? requests : 0),
        entries(entry_blocks(tokens)),
        rows(divide_up(row_warps(tokens) + kWindow * requests, S::warps)) {}

  /// Number of warps that write window entries of the step's tokens.
  __host__ __device__ static constexpr int row_warps(int tokens) { return divide_up(tokens, S::rows_a_warp); }
  /// Number of blocks that pool an entry from rows of this step only.
  __host__ __device__ static constexpr int entry_blocks(int tokens) {
    if constexpr (ratio_of<kind> > 0) return divide_up(tokens, ratio_of<kind>);
    return 0;
  }
  __host__ __device__ static constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
};

/// The entry that one of `ratio` tokens completes from rows of this step only. There is at most one, because such
/// windows do not overlap.
struct Closing {
  int token;     // -1: none
  int position;  // position of its window's first token

  /// Finds the entry among the tokens first .. first + ratio - 1. All lanes of a warp take part.
  template <int ratio>
  __device__ __forceinline__ static Closing find(const AppendParams& p, int first, int lane) {
    constexpr int rounds = ratio > 32 ? ratio / 32 : 1;
    int b[rounds], slot[rounds], length[rounds], begin[rounds], end[rounds];
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      const int token = first + 32 * i + lane;
      b[i] = lane < ratio && token < p.tokens ? p.token_request[token] : -1;
    }
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      const int request = max(b[i], 0);
      slot[i] = p.slots[request], length[i] = p.prefix_lens[request];
      begin[i] = p.query_start[request], end[i] = p.query_start[request + 1];
    }
    Closing closing{-1, 0};
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      const int token = first + 32 * i + lane, window = length[i] + token - begin[i] + 1 - ratio;
      const int oldest = ratio == kCsaRatio ? max(window - 4, 0) : window;
      const bool closes = b[i] >= 0 && slot[i] >= 0 && token < end[i] && window % ratio == 0 && oldest >= length[i];
      const unsigned votes = __ballot_sync(kAllLanes, closes);
      if (votes) closing = {first + 32 * i + __ffs(votes) - 1, __shfl_sync(kAllLanes, window, __ffs(votes) - 1)};
    }
    return closing;
  }
};

// ---- CSA ----

/// Operands of the epilogue for the five compressor warps.
struct CsaFinish {
  QuadFinish entry;
  KeyFinish key;

  __device__ __forceinline__ void load(const AppendParams& p, int64_t position) {
    if (threadIdx.x < kRowThreads) {
      entry.load(p, p.entry_norm, p.entry_norm_bf16, position, threadIdx.x);
    } else {
      key.load(p, position, threadIdx.x - kRowThreads);
    }
  }

  __device__ __forceinline__ void store(const AppendParams& p, float4 pooled, RowScratch& scratch, int64_t row) const {
    if (threadIdx.x < kRowThreads) {
      store_entry(p, pooled, entry, scratch, row, threadIdx.x);
    } else {
      key.store(p, pooled, row, threadIdx.x - kRowThreads);
    }
  }
};

/// Five warps: the part of request b that needs rows from before the step, then the update of its compressor state.
__device__ void csa_boundary(const AppendParams& p, Shared<1>& shared, int b) {
  const int slot = p.slots[b], length = p.prefix_lens[b], begin = p.query_start[b],
            stop = length + p.query_start[b + 1] - begin;
  if (slot < 0 || stop <= length) return;
  const Stream s = csa_stream_of_thread(p, threadIdx.x);
  const CompressorStateRows rows{p.csa};
  float* compressor_state = s.compressor_state(p, slot);
  // Only the open window at `length` and the next one can pool older rows.
  for (int which = 0; which < 2; ++which) {
    const int entry = length / kCsaRatio + which, first = kCsaRatio * entry - 4, last = first + 7;
    if (max(first, 0) >= length || last >= stop) continue;
    const auto k_of = [&](int row) {
      const int position = first + row;
      if (position < 0) return splat(0);
      return load4(position < length ? state_k(compressor_state, rows, row, position)
                                     : input_row(s, row, begin + position - length));
    };
    const auto z_of = [&](int row) {
      const int position = first + row;
      if (position < 0) return splat(-INFINITY);
      if (position < length) return load4(state_z(compressor_state, rows, row, position));
      return load4(input_row(s, row, begin + position - length) + 2 * s.width) + input_bias(s, row);
    };
    float4 z[8];
#pragma unroll
    for (int row = 0; row < 8; ++row) z[row] = z_of(row);
    CsaFinish finish;
    finish.load(p, kCsaRatio * entry);
    finish.store(p, pool_entry(z, k_of), shared.scratch[which], p.out_loc[begin + last - length] / kCsaRatio);
  }
  for (int position = max(length, stop - 8); position < stop; ++position) {
    const int64_t token = begin + position - length;
    write_prev_row(s, rows, compressor_state, token, position);
    if (position >= stop - 4) {
      const float* score = s.scores + token * s.stride + s.width;
      store4(compressor_state + rows.current_k(position) * kCsaCompressorStateWidth, load4(score));
      store4(compressor_state + rows.current_z(position) * kCsaCompressorStateWidth,
             load4(score + 2 * s.width) + load4(s.ape + bias_row(position) * 2 * s.width + s.width));
    }
  }
}

/// Five warps: the entry that one of the tokens first .. first + 3 completes.
__device__ void csa_entry(const AppendParams& p, Shared<1>& shared, int first) {
  // All warps see the same tokens, so they agree on the entry and reach the same barriers.
  const Closing closing = Closing::find<kCsaRatio>(p, first, threadIdx.x % 32);
  if (closing.token < 0) return;
  const Stream s = csa_stream_of_thread(p, threadIdx.x);
  float4 k[8], z[8];
#pragma unroll
  for (int row = 0; row < 8; ++row) {
    const bool there = row >= 4 || closing.position > 0;
    const float* score = input_row(s, row, closing.token - 7 + row);
    k[row] = there ? load4_once(score) : splat(0);
    z[row] = there ? load4_once(score + 2 * s.width) : splat(-INFINITY);
  }
  const int64_t loc = p.out_loc[closing.token];
  CsaFinish finish;
  finish.load(p, closing.position);
#pragma unroll
  for (int row = 0; row < 8; ++row) z[row] = z[row] + input_bias(s, row);
  finish.store(p, pool_entry(z, [&](int row) { return k[row]; }), shared.scratch[0], loc / kCsaRatio);
}

// ---- HCA ----

/// All warps: the entry that one of the tokens first .. first + 127 completes.
template <int groups>
__device__ void hca_entry(const AppendParams& p, Shared<groups>& shared, int first) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const Closing closing = Closing::find<kHcaRatio>(p, first, threadIdx.x % 32);
  if (closing.token < 0) return;
  const float* scores = p.kv_score + int64_t(closing.token + 1 - kHcaRatio) * p.kv_score_stride + 4 * thread;
  Pool pool = Pool::empty();
  pool_whole<groups, 4>(pool, scores, p.kv_score_stride, p.ape + 4 * thread, group);
  merge_groups<groups>(pool, shared, group, thread);
  if (group > 0) return;
  QuadFinish finish;
  finish.load(p, p.entry_norm, p.entry_norm_bf16, closing.position, thread);
  store_entry(p, pool.result(), finish, shared.scratch[0], p.out_loc[closing.token] / kHcaRatio, thread);
}

// ---- The kernel ----

template <LayerKind kind>
__global__ void __launch_bounds__(32 * Shape<kind>::warps, Shape<kind>::blocks_per_sm)
    append_prefill(const __grid_constant__ AppendParams p) {
  using S = Shape<kind>;
  __shared__ Shared<S::groups> shared;
  wait_for_previous_kernel();
  const Grid<kind> grid(p.tokens, p.requests);
  int block = blockIdx.x;
  if constexpr (ratio_of<kind> > 0) {
    if (block < grid.boundary) {
      if constexpr (is_csa<kind>) {
        csa_boundary(p, shared, block);
      } else {
        hca_request<kind == LayerKind::kHcaRaw, true>(p, shared, block);
      }
      return;
    }
    block -= grid.boundary;
    // Compressed entries are bound by bandwidth, window entries by latency: alternate them, then process the rest.
    const int paired = min(grid.entries, grid.rows);
    const bool is_entry = block < 2 * paired ? block % 2 == 0 : grid.entries > paired;
    block = block < 2 * paired ? block / 2 : block - paired;
    if (is_entry) {
      if constexpr (is_csa<kind>) {
        csa_entry(p, shared, block * kCsaRatio);
      } else {
        hca_entry(p, shared, block * kHcaRatio);
      }
      return;
    }
  }
  const int warp = block * S::warps + threadIdx.x / 32, lane = threadIdx.x % 32, old = warp - grid.row_warps(p.tokens);
  if (old < 0) {
    write_window_entries<kind, S::rows_a_warp>(p, warp * S::rows_a_warp, lane);
  } else if (old < kWindow * p.requests) {
    keep_old_row(p, old / kWindow, old % kWindow, lane);
  }
}

template <LayerKind kind>
cudaError_t launch_kind(const AppendParams& p, bool overlap, cudaStream_t stream) {
  const Grid<kind> grid(p.tokens, p.requests);
  const dim3 blocks(unsigned(grid.boundary + grid.entries + grid.rows));
  return launch(append_prefill<kind>, {blocks, 32 * Shape<kind>::warps, 0, 1, overlap}, stream, p);
}

}  // namespace

cudaError_t launch_append_prefill(const AppendParams& p, LayerKind kind, bool overlap, cudaStream_t stream) {
  constexpr cudaError_t (*launches[])(const AppendParams&, bool, cudaStream_t) = {
      launch_kind<LayerKind::kSwa>, launch_kind<LayerKind::kCsa>, launch_kind<LayerKind::kHcaOnline>,
      launch_kind<LayerKind::kHcaRaw>};
  return launches[int(kind)](p, overlap, stream);
}

}  // namespace dsv4
