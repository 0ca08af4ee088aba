// append, decode: all cache writes of one layer for one token of each request, or for a few drafts of each, in one
// launch (SPEC 2.1, 2.4, 2.5, 3.1 to 3.7).
//
// One thread block per token. CSA: four warps for the main compressor, one for the indexer's, four for the window
// entry. HCA: four warps for the compressor (16 in the raw form), four for the window entry. Compressor warps pool the
// window that the token completes, finish its entry and update the compressor state. An entry is spread over four warps
// because a single warp issues at most one instruction every five cycles. No block waits for another one, there are no
// atomics, and every sum has a fixed order.
//
// The launches of a step form a chain in which each waits for the previous one, so the time from that wait to the end
// counts. Before the wait, a block loads everything that no kernel of the step's layers writes (batch, weights, cos and
// sin) and prefetches the rows of the compressor state that it will read to L2. After the wait there is one round of
// loads (projections and compressor state), then the arithmetic and the stores.
//
// Bytes per token with bf16 kv and FP8 entries. Read: kv 1024, scores CSA 10,240 / HCA 4,096 in fp32. Written: window
// entry 584, compressed entries and keys CSA 146 + 18, HCA 5. Compressor state in addition: CSA 10 kB written and 36 kB
// read in every fourth step, HCA online 6 kB read and written.
//
// With several tokens per request (`drafts`) every block continues from the state before the step. The contributions of
// the request's earlier tokens come from their projections, because their blocks may not have run yet. Blocks of one
// step do not race in any order: rings and state copies are so large that no block writes what another one
// reads (draft_tokens_of and its neighbours in geometry.h, which `append` checks). A block reads no row of a token at
// `length` or later from the compressor state, and no row of an older token that shares its index with length .. length
// + tokens - 1. Each block writes only rows indexed by its own token position. If the next step starts at an earlier
// position because drafts were rejected, the state at that position is still intact.
#include "../launch.cuh"
#include "hca.cuh"
#include "window.cuh"

namespace dsv4 {
namespace {

template <LayerKind kind, bool drafts>
struct Shape {
  static constexpr int groups = kind == LayerKind::kHcaRaw ? 4 : 1;
  static constexpr int compressor_warps = is_csa<kind> ? 5 : is_hca<kind> ? 4 * groups : 0;
  static constexpr int threads = 32 * (compressor_warps + 4);
  // At most two CSA blocks: with room for a third, some SMs would start three blocks of the next layer and others one.
  static constexpr int blocks_per_sm = is_csa<kind>                 ? 2
                                       : kind == LayerKind::kHcaRaw ? 1
                                       : is_hca<kind> && drafts     ? 2
                                                                    : 4;
};

/// The token that a block processes.
struct Token {
  int input;  // row of the inputs
  int slot, position;
  int length;  // of the request before the step
  bool last;   // last token of its request in the step
};

/// Returns the compressor state's rings. They are constants in a step of one token per request.
template <bool drafts>
__device__ __forceinline__ CompressorStateRows compressor_state_rows(const AppendParams& p) {
  return {drafts ? p.csa : CsaCompressorState{kCsaCurrentRows, kCsaPreviousRows}};
}

/// Prefetches `bytes` (a multiple of 16) at `from` to L2. Called by one thread.
__device__ __forceinline__ void prefetch(const float* from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

/// Four warps: write the window entry.
template <LayerKind kind, bool drafts>
__device__ __forceinline__ void write_row(const AppendParams& p, RowScratch& scratch, const Token& token, int thread) {
  const int position = token.position, format = p.ring.format;
  const int track = p.staging_slots ? p.staging_slots[token.input] : -1;
  QuadFinish finish;
  finish.load(p, p.kv_norm, p.kv_norm_bf16, position, thread);
  const RowAddress row = ring_row(p, token.slot, position);
  wait_for_previous_kernel();

  const float4 kv = load_quad(kv_row(p, token.input), p.kv_bf16, thread);
  const PackedQuad packed = finish.apply(kv, format, p.eps, p.kv_bf16, scratch, 1, thread);
  packed.store(format, row, thread);
  if (track >= 0) {
    packed.store(format, ring_row(p, track, position), thread);
    if (tracks_prev_rows<kind>(position)) {
      track_prev_rows(p, compressor_state_rows<drafts>(p), token.input, position, track, thread, kRowThreads);
    }
  }
  if (thread == 0) {
    store_position(p, token.slot, position);
    if (token.last) store_length<kind>(p, token.slot, position + 1);
  }
}

/// Five warps: both compressors.
template <bool drafts>
__device__ __forceinline__ void csa_compress(const AppendParams& p, RowScratch& scratch, const Token& token) {
  const int position = token.position, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool closes = position % kCsaRatio == kCsaRatio - 1, index = warp == 4;
  const int first = position - 7;  // first row that the entry pools
  const Stream s = csa_stream_of_thread(p, threadIdx.x);
  const CompressorStateRows rows = compressor_state_rows<drafts>(p);
  const float* ape = s.ape + bias_row(position) * 2 * s.width;
  const float4 ape_prev = load4(ape), ape_cur = load4(ape + s.width);
  QuadFinish finish;
  KeyFinish key;
  int64_t loc = 0;
  if (closes) {
    if (lane == 0 && !index && (warp >= 2 || first >= 0)) {
      // The four older rows of the previous stream are contiguous, and so are the three of the current one.
      const int row = warp == 0   ? rows.previous_k(first)
                      : warp == 1 ? rows.previous_z(first)
                      : warp == 2 ? rows.current_k(first + 4)
                                  : rows.current_z(first + 4);
      prefetch(p.compressor_state + token.slot * p.compressor_state_stride + row * kCsaCompressorStateWidth,
               (warp < 2 ? 4 : 3) * kCsaCompressorStateWidth * sizeof(float));
    }
    loc = p.out_loc[token.input];
    if (index) {
      key.load(p, position + 1 - kCsaRatio, lane);
    } else {
      finish.load(p, p.entry_norm, p.entry_norm_bf16, position + 1 - kCsaRatio, threadIdx.x);
    }
  }
  wait_for_previous_kernel();

  const float* score = s.scores + token.input * s.stride;
  const float4 k_prev = load4_once(score), k_cur = load4_once(score + s.width);
  float4 z_prev = load4_once(score + 2 * s.width), z_cur = load4_once(score + 3 * s.width);
  float* compressor_state = s.compressor_state(p, token.slot);
  float4 k[8], z[8];
  if (closes) {
#pragma unroll
    for (int row = 0; row < 7; ++row) {
      const bool there = row >= 4 || first >= 0;
      const float *from_k = state_k(compressor_state, rows, row, first + row),
                  *from_z = state_z(compressor_state, rows, row, first + row);
      if (drafts && first + row >= token.length) {
        from_k = input_row(s, row, token.input - 7 + row), from_z = from_k + 2 * s.width;
      }
      k[row] = there ? load4(from_k) : splat(0);
      z[row] = there ? load4(from_z) : splat(-INFINITY);
    }
#pragma unroll
    for (int row = 0; row < 7; ++row) {
      if (drafts && first + row >= token.length) z[row] = z[row] + input_bias(s, row);
    }
  }
  z_prev = z_prev + ape_prev, z_cur = z_cur + ape_cur;
  // These are not the rows read above: the token's previous-stream row is four after the last of them in a ring of at
  // least 8, its current-stream row is the fourth.
  store4(compressor_state + rows.previous_k(position) * kCsaCompressorStateWidth, k_prev);
  store4(compressor_state + rows.previous_z(position) * kCsaCompressorStateWidth, z_prev);
  store4(compressor_state + rows.current_k(position) * kCsaCompressorStateWidth, k_cur);
  store4(compressor_state + rows.current_z(position) * kCsaCompressorStateWidth, z_cur);
  if (!closes) return;
  k[7] = k_cur, z[7] = z_cur;
  const float4 pooled = pool_entry(z, [&](int row) { return k[row]; });
  if (index) {
    key.store(p, pooled, loc / kCsaRatio, lane);
  } else {
    store_entry(p, pooled, finish, scratch, loc / kCsaRatio, threadIdx.x);
  }
}

/// Adds the `rows` rows before the one with projections at `score`, oldest first and one at a time, so that the bits
/// equal those of steps of one token. `ape` is the bias of the oldest row.
__device__ __forceinline__ void add_drafted(Pool& pool, const float* score, int64_t stride, const float* ape,
                                            int rows) {
  constexpr int batch = 4;  // loads in flight
  score -= rows * stride;
  for (int row = 0; row < rows; row += batch) {
    float4 k[batch], z[batch], bias[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (row + i >= rows) break;
      const float* from = score + (row + i) * stride;
      k[i] = load4(from), z[i] = load4(from + kEntryDim), bias[i] = load4(ape + (row + i) * kEntryDim);
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (row + i >= rows) break;
      const float4 one_k[1] = {k[i]}, one_z[1] = {z[i] + bias[i]};
      add_rows(pool, one_k, one_z);
    }
  }
}

/// Four warps: the compressor in its online form.
template <bool drafts>
__device__ __forceinline__ void hca_compress(const AppendParams& p, RowScratch& scratch, const Token& token) {
  const int channel = 4 * threadIdx.x, row = token.position % kHcaRatio;
  const bool closes = row == kHcaRatio - 1;
  // `drafted`: rows of the window from the request's earlier tokens of this step. `older`: rows from before the step.
  const int drafted = drafts ? min(row, token.position - token.length) : 0, older = row - drafted;
  float* before = drafts ? hca_state_copy(p, token.slot, token.length)
                         : p.compressor_state + token.slot * p.compressor_state_stride;
  float* after = drafts ? hca_state_copy(p, token.slot, token.position + 1) : before;
  const float4 ape = load4(p.ape + row * kEntryDim + channel);
  if (older > 0 && threadIdx.x == 0) prefetch(before, kHcaOnlineRows * kEntryDim * sizeof(float));
  QuadFinish finish;
  int64_t loc = 0;
  if (closes) {
    loc = p.out_loc[token.input];
    finish.load(p, p.entry_norm, p.entry_norm_bf16, token.position + 1 - kHcaRatio, threadIdx.x);
  }
  wait_for_previous_kernel();

  const float* score = p.kv_score + token.input * p.kv_score_stride + channel;
  const float4 k[1] = {load4_once(score)}, z_raw = load4_once(score + kEntryDim);
  Pool pool = Pool::empty();
  if (older > 0) pool = load_pool(before + channel);
  if (drafts) add_drafted(pool, score, p.kv_score_stride, p.ape + older * kEntryDim + channel, drafted);
  const float4 z[1] = {z_raw + ape};
  add_rows(pool, k, z);
  if (closes) {
    store_entry(p, pool.result(), finish, scratch, loc / kHcaRatio, threadIdx.x);  // an empty state is not stored
  } else {
    store_pool(after + channel, pool);
  }
}

template <LayerKind kind, bool drafts>
__global__ void __launch_bounds__(Shape<kind, drafts>::threads, Shape<kind, drafts>::blocks_per_sm)
    append_decode(const __grid_constant__ AppendParams p) {
  using S = Shape<kind, drafts>;
  let_next_kernel_start();
  __shared__ Shared<S::groups> shared;
  __shared__ RowScratch scratch;
  const int b = blockIdx.x, draft = drafts ? blockIdx.y : 0, each = drafts ? gridDim.y : 1, length = p.prefix_lens[b];
  const Token token{b * each + draft, p.slots[b], length + draft, length, draft == each - 1};
  if (token.slot < 0) {
    wait_for_previous_kernel();
  } else if (int(threadIdx.x) >= 32 * S::compressor_warps) {
    write_row<kind, drafts>(p, scratch, token, threadIdx.x - 32 * S::compressor_warps);
  } else if constexpr (is_csa<kind>) {
    csa_compress<drafts>(p, shared.scratch[0], token);
  } else if constexpr (kind == LayerKind::kHcaOnline) {
    hca_compress<drafts>(p, shared.scratch[0], token);
  } else if constexpr (kind == LayerKind::kHcaRaw) {
    wait_for_previous_kernel();
    hca_request<true, false>(p, shared, b);
  }
}

template <LayerKind kind, bool drafts>
cudaError_t launch_kind(const AppendParams& p, bool overlap, cudaStream_t stream) {
  const dim3 grid(unsigned(p.requests), unsigned(p.tokens / p.requests));
  return launch(append_decode<kind, drafts>, {grid, Shape<kind, drafts>::threads, 0, 1, overlap}, stream, p);
}

}  // namespace

cudaError_t launch_append_decode(const AppendParams& p, LayerKind kind, bool overlap, cudaStream_t stream) {
  using K = LayerKind;
  constexpr cudaError_t (*launches[][2])(const AppendParams&, bool, cudaStream_t) = {
      {launch_kind<K::kSwa, false>, launch_kind<K::kSwa, true>},
      {launch_kind<K::kCsa, false>, launch_kind<K::kCsa, true>},
      {launch_kind<K::kHcaOnline, false>, launch_kind<K::kHcaOnline, true>},
      {launch_kind<K::kHcaRaw, false>, launch_kind<K::kHcaRaw, false>}};  // the raw form supports one token per step
  const bool drafts = p.tokens > p.requests || p.csa.current > kCsaCurrentRows || p.hca_state_copies > 1;
  return launches[int(kind)][drafts](p, overlap, stream);
}

}  // namespace dsv4
