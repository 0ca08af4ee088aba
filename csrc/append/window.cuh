// The window row of a token: RMSNorm, RoPE, quantisation, ring and window workspace; a warp a row (SPEC 2.1, 2.4).
#pragma once

#include "csa.cuh"

namespace dsv4 {

constexpr int kWindow = 128;

__device__ __forceinline__ RowAddress ring_row(const AppendParams& p, int slot, int position) {
  return row_address(p.ring, slot, position & (kWindow - 1));
}

__device__ __forceinline__ const void* kv_row(const AppendParams& p, int64_t token) {
  return static_cast<const uint8_t*>(p.kv) + token * p.kv_stride * (p.kv_bf16 ? 2 : 4);
}

__device__ __forceinline__ void store_position(const AppendParams& p, int slot, int position) {
  if (p.swa_pos) p.swa_pos[slot * p.swa_pos_stride + (position & (kWindow - 1))] = position;
}

/// Whether a checkpoint that holds the token's row also needs its previous-window rows.
template <int ratio>
__device__ __forceinline__ bool tracks_prev_rows(int position) {
  return ratio == kCsaRatio && (position & (kWindow - 1)) >= kWindow - kCsaRatio;
}

/// What follows from the length of a request after the step.
template <int ratio>
__device__ __forceinline__ void store_length(const AppendParams& p, int slot, int length) {
  if (p.swa_head) p.swa_head[slot] = length & (kWindow - 1);
  if (p.tail_len && ratio > 1) p.tail_len[slot] = length & (ratio - 1);
}

/// First row of request `b` in the window workspace: that of position length - 128.
__device__ __forceinline__ int workspace_base(int begin, int b) { return begin + kWindow * b; }

/// One warp: window rows of the tokens first .. first + n - 1 of a prefill step; nothing is used before all that can be
/// has been asked for.
template <int ratio, int n>
__device__ void write_window_rows(const AppendParams& p, int first, int lane) {
  float x[n][16];
  int b[n], slot[n], length[n], begin[n], count[n], track[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int token = min(first + i, p.tokens - 1);
    b[i] = p.token_request[token];
    track[i] = p.track_slots ? p.track_slots[token] : -1;
    load_row(kv_row(p, token), p.kv_bf16, lane, x[i]);
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int request = max(b[i], 0);
    slot[i] = p.slots[request], length[i] = p.prefix_lens[request], begin[i] = p.query_start[request];
    count[i] = p.query_start[request + 1] - begin[i];
  }
  float weight[16];
  load_row(p.kv_norm, p.kv_norm_bf16, lane, weight);
  RowAngle angle[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int offset = first + i - begin[i];
    if (first + i >= p.tokens || b[i] < 0 || offset < 0 || offset >= count[i]) slot[i] = -1;
    if (slot[i] >= 0) angle[i].load(p, length[i] + offset, lane);
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (slot[i] < 0) continue;
    const int offset = first + i - begin[i], position = length[i] + offset;
    normalise_and_rotate(x[i], weight, angle[i], p.eps, p.kv_bf16, lane);
    const PackedRow packed = pack_row(p.ring.format, x[i], lane);
    const bool stays = offset >= count[i] - kWindow;
    const int base = workspace_base(begin[i], b[i]);
    const int old = offset & (kWindow - 1);  // the position that this row replaces is length - 128 + old
    if (stays && length[i] - kWindow + old >= 0) {
      copy_row(p.ring.format, ring_row(p, slot[i], position), row_address(p.window, 0, base + old), lane);
      __syncwarp();
    }
    store_row(p.ring.format, packed, row_address(p.window, 0, base + kWindow + offset), lane);
    if (stays) {
      store_row(p.ring.format, packed, ring_row(p, slot[i], position), lane);
      if (lane == 0) store_position(p, slot[i], position);
    }
    if (track[i] >= 0) {
      store_row(p.ring.format, packed, ring_row(p, track[i], position), lane);
      if (tracks_prev_rows<ratio>(position)) track_prev_rows(p, first + i, position, track[i], lane, 32);
    }
    if (offset == count[i] - 1 && lane == 0) store_length<ratio>(p, slot[i], position + 1);
  }
}

/// One warp: an old ring row that the chunk (shorter than the window) does not replace, into the workspace.
__device__ inline void keep_old_row(const AppendParams& p, int b, int old, int lane) {
  const int slot = p.slots[b], begin = p.query_start[b], count = p.query_start[b + 1] - begin,
            length = p.prefix_lens[b];
  const int position = length - kWindow + old;
  if (slot < 0 || count <= 0 || old < count || position < 0) return;
  copy_row(p.ring.format, ring_row(p, slot, position), row_address(p.window, 0, workspace_base(begin, b) + old), lane);
}

}  // namespace dsv4
