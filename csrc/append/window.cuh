// The window entry of a token: RMSNorm, RoPE, quantisation, stores to ring and window workspace; one warp per entry
// (SPEC 2.1, 2.4).
#pragma once

#include "csa.cuh"

namespace dsv4 {

/// Returns the index of a position in its slot's ring, that is position modulo the entries of the ring, which may be
/// more than the window. Exact while position x entries is below 2^32, which `append` checks.
__device__ __forceinline__ int ring_place(const AppendParams& p, int position) {
  return position - int(__umulhi(uint32_t(position), p.ring_reciprocal)) * p.ring.entries_per_block;
}

__device__ __forceinline__ RowAddress ring_row(const AppendParams& p, int slot, int position) {
  return row_address(p.ring, slot, ring_place(p, position));
}

__device__ __forceinline__ const void* kv_row(const AppendParams& p, int64_t token) {
  return static_cast<const uint8_t*>(p.kv) + token * p.kv_stride * (p.kv_bf16 ? 2 : 4);
}

__device__ __forceinline__ void store_position(const AppendParams& p, int slot, int position) {
  if (p.swa_pos) p.swa_pos[slot * p.swa_pos_stride + ring_place(p, position)] = position;
}

/// Returns true if a snapshot that holds the token's window entry also needs its previous-stream rows.
template <LayerKind kind>
__device__ __forceinline__ bool tracks_prev_rows(int position) {
  return is_csa<kind> && position % kBlockTokens >= kBlockTokens - kCsaRatio;
}

/// Stores the values that follow from the length of a request after the step.
template <LayerKind kind>
__device__ __forceinline__ void store_length(const AppendParams& p, int slot, int length) {
  if (p.swa_head) p.swa_head[slot] = ring_place(p, length);
  if constexpr (ratio_of<kind> > 0) {
    if (p.tail_len) p.tail_len[slot] = length % ratio_of<kind>;
  }
}

/// Returns the old entry, 0 .. 127 for position length - 128 .. length - 1, whose index in the ring the chunk's token
/// `offset` overwrites; negative if there is none.
__device__ __forceinline__ int replaced_by(const AppendParams& p, int offset) {
  return ring_place(p, offset) - (p.ring.entries_per_block - kWindow);
}

/// Returns the first index of request `b` in the window workspace, that of position length - 128.
__device__ __forceinline__ int workspace_base(int begin, int b) { return begin + kWindow * b; }

/// One warp: window entries of the tokens first .. first + n - 1 of a prefill step. All loads are issued before any of
/// them is used.
template <LayerKind kind, int n>
__device__ void write_window_entries(const AppendParams& p, int first, int lane) {
  float x[n][16];
  int b[n], slot[n], length[n], begin[n], count[n], track[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int token = min(first + i, p.tokens - 1);
    b[i] = p.token_request[token];
    track[i] = p.staging_slots ? p.staging_slots[token] : -1;
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
    const int old = replaced_by(p, offset);
    if (stays && old >= 0 && length[i] - kWindow + old >= 0) {
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
      if (tracks_prev_rows<kind>(position))
        track_prev_rows(p, CompressorStateRows{p.csa}, first + i, position, track[i], lane, 32);
    }
    if (offset == count[i] - 1 && lane == 0) store_length<kind>(p, slot[i], position + 1);
  }
}

/// One warp: copy an old ring entry that no token of the chunk overwrites to the workspace.
__device__ inline void keep_old_row(const AppendParams& p, int b, int old, int lane) {
  const int slot = p.slots[b], begin = p.query_start[b], count = p.query_start[b + 1] - begin,
            length = p.prefix_lens[b];
  const int position = length - kWindow + old;
  if (slot < 0 || count <= 0 || position < 0) return;
  // The last token with this ring index, if it is one of those that stay in the ring, has copied the entry.
  const int rows = p.ring.entries_per_block, place = old + rows - kWindow;
  const int behind = ring_place(p, count - 1 + rows - place);
  if (behind < kWindow && behind < count) return;
  copy_row(p.ring.format, ring_row(p, slot, position), row_address(p.window, 0, workspace_base(begin, b) + old), lane);
}

}  // namespace dsv4
