// The HCA compressor, four channels per thread. Rows of a window are divided among groups of 128 threads (SPEC 3.3,
// 3.7).
#pragma once

#include "entry_epilogue.cuh"

namespace dsv4 {

/// Shared memory of a block's compressor warps: scratch of the epilogue, used by the first four warps, and the pools of
/// the groups.
template <int groups>
struct Shared {
  RowScratch scratch[2];
  Pool pool[groups > 1 ? groups - 1 : 1][groups > 1 ? kEntryDim / 4 : 1];
};

/// Sources of the rows of one HCA window: `old` rows of the raw compressor state, then projections. Pointers are at the
/// channels of the thread.
struct HcaSources {
  const float* compressor_state;  // raw compressor state of the slot, or null
  int old;                        // rows from before the step, in `compressor_state`
  const float* scores;            // projections of window row 0, possibly before the step's first token
  int64_t stride;
  const float* ape;
};

/// Adds the rows of this group among first .. last - 1.
template <int groups, int batch>
__device__ __forceinline__ void pool_rows(Pool& pool, const HcaSources& from, int first, int last, int group) {
  for (int row = first + group; row < last; row += groups * batch) {
    float4 k[batch], z[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int r = row + i * groups;
      if (r >= last) {
        k[i] = splat(0), z[i] = splat(-INFINITY);
      } else if (r < from.old) {
        k[i] = load4(from.compressor_state + r * kEntryDim),
        z[i] = load4(from.compressor_state + (kHcaRatio + r) * kEntryDim);
      } else {
        const float* score = from.scores + r * from.stride;
        k[i] = load4_once(score);
        z[i] = load4_once(score + kEntryDim) + load4(from.ape + r * kEntryDim);
      }
    }
    add_rows(pool, k, z);
  }
}

/// Adds the rows of this group of a whole window, whose projections start at `scores`.
template <int groups, int batch>
__device__ __forceinline__ void pool_whole(Pool& pool, const float* scores, int64_t stride, const float* ape,
                                           int group) {
  scores += group * stride, ape += group * kEntryDim;
  for (int row = 0; row < kHcaRatio; row += groups * batch) {
    float4 k[batch], z[batch], bias[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      k[i] = load4_once(scores), z[i] = load4_once(scores + kEntryDim), bias[i] = load4(ape);
      scores += groups * stride, ape += groups * kEntryDim;
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) z[i] = z[i] + bias[i];
    add_rows(pool, k, z);
  }
}

/// Merges the pools of all groups in the threads of group 0.
template <int groups>
__device__ __forceinline__ void merge_groups(Pool& pool, Shared<groups>& shared, int group, int thread) {
  if (groups == 1) return;
  barrier(3, 128 * groups);  // the last merge has been read
  if (group > 0) shared.pool[group - 1][thread] = pool;
  barrier(3, 128 * groups);
  if (group > 0) return;
#pragma unroll
  for (int other = 1; other < groups; ++other) add_pool(pool, shared.pool[other - 1][thread]);
}

/// Returns the copy of the online state of a slot's open window after `length` tokens.
__device__ __forceinline__ float* hca_state_copy(const AppendParams& p, int slot, int length) {
  return p.compressor_state + slot * p.compressor_state_stride +
         length % p.hca_state_copies * (kHcaOnlineRows * kEntryDim);
}

/// All compressor warps: the part of request b that needs state from before the step, then the update of its compressor
/// state. Also a complete raw decode step.
template <bool raw, bool prefill, int groups>
__device__ void hca_request(const AppendParams& p, Shared<groups>& shared, int b) {
  constexpr int batch = 4;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, channel = 4 * thread;
  const int slot = p.slots[b], length = p.prefix_lens[b];
  const int begin = prefill ? p.query_start[b] : b, count = prefill ? p.query_start[b + 1] - begin : 1;
  if (slot < 0 || count <= 0) return;
  const int stop = length + count, old = length % kHcaRatio, closing = length / kHcaRatio;
  float* compressor_state = p.compressor_state + slot * p.compressor_state_stride + channel;  // used in the raw form
  // The open window at `length`; its row r is token begin + r - old.
  HcaSources rows{raw ? compressor_state : nullptr, raw ? old : 0,
                  p.kv_score + (begin - old) * p.kv_score_stride + channel, p.kv_score_stride, p.ape + channel};

  const auto resumed = [&] {
    Pool pool = Pool::empty();
    if (!raw && old > 0 && group == 0) pool = load_pool(hca_state_copy(p, slot, length) + channel);
    return pool;
  };
  if (old > 0 && stop >= kHcaRatio * (closing + 1)) {
    Pool pool = resumed();
    pool_rows<groups, batch>(pool, rows, raw ? 0 : old, kHcaRatio, group);
    merge_groups<groups>(pool, shared, group, thread);
    if (group == 0) {
      const int64_t row = p.out_loc[begin + kHcaRatio - 1 - old] / kHcaRatio;
      QuadFinish finish;
      finish.load(p, p.entry_norm, p.entry_norm_bf16, int64_t(kHcaRatio) * closing, thread);
      store_entry(p, pool.result(), finish, shared.scratch[0], row, thread);
    }
  }
  if (raw) {
    // All groups have read their old rows: merge_groups ends with a barrier.
    for (int position = max(length, stop - kHcaRatio) + group; position < stop; position += groups) {
      const float* score = p.kv_score + (begin + position - length) * p.kv_score_stride + channel;
      const int row = position % kHcaRatio;
      store4(compressor_state + row * kEntryDim, load4(score));
      store4(compressor_state + (kHcaRatio + row) * kEntryDim,
             load4(score + kEntryDim) + load4(p.ape + row * kEntryDim + channel));
    }
    return;
  }
  const int open = stop % kHcaRatio;
  if (open == 0) return;  // an empty state is not stored
  const bool same = stop / kHcaRatio == closing;
  Pool pool = Pool::empty();
  if (same) {
    pool = resumed();
  } else {
    rows.scores = p.kv_score + (begin + count - open) * p.kv_score_stride + channel;
  }
  pool_rows<groups, batch>(pool, rows, same ? old : 0, open, group);
  merge_groups<groups>(pool, shared, group, thread);
  if (group == 0) store_pool(hca_state_copy(p, slot, stop) + channel, pool);
}

}  // namespace dsv4
