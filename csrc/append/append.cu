// append: everything that one layer writes for the tokens of a step, in one launch (SPEC 2.1, 2.4, 2.5, 3.1 to 3.7).
//
// Roles. Window row (a warp a token): RMSNorm, RoPE, quantisation, ring and window workspace. Compressor (threads that own
// four channels each): pools the windows of tokens that close, hands the entry to one warp that normalises, rotates, quantises
// and stores it, and moves the tails on. Nothing waits for another block, nothing is atomic, every sum has a fixed order.
//
// Decode, one token a request: one block a request: 4 warps main compressor (16 in the raw HCA form), 1 index compressor, 1 row.
// Prefill, blocks by index:
//   first `requests` blocks (CSA, HCA): the boundary of a request: entries that pool rows from before the step, then its tails.
//     A thread reads only tail columns that it later writes itself, so reading old rows first needs no synchronisation
//     (raw HCA splits rows over warps and has a barrier).
//   then, alternating while both last: the entries that pool only this step's rows (a block looks at `ratio` tokens), and rows.
// Ring rows that the step replaces are copied to the workspace by the warp that replaces them, the others by warps of their own.
//
// Bytes a token, bf16 kv and FP8 rows. Read: kv 1024, CSA 10,240 / HCA 4,096 fp32 of scores, each once. Written: row 584 (prefill twice
// for the last 128), CSA 146 + 18, HCA 5 of entries and keys. Decode besides: tail rows, CSA 10 kB written and, every fourth step, 36 kB
// read; HCA online 6 kB read and written.
#include "../index_vector.cuh"
#include "../launch.cuh"
#include "append.h"
#include "pool.cuh"

namespace dsv4 {
namespace {

constexpr int kWindow = 128;
constexpr int kCsaRatio = 4, kHcaRatio = 128;
// Rows of a tail: CSA 4 current k, 4 current z, 8 previous k, 8 previous z of 640 floats; HCA raw 128 k, 128 z, online 3, of 512.
constexpr int kCsaTailWidth = kEntryDim + kIndexDim;
constexpr int kCurZ = 4, kPrevK = 8, kPrevZ = 16;

template <LayerKind kind, bool prefill>
struct Shape {
  static constexpr bool is_csa = kind == LayerKind::kCsa;
  static constexpr bool is_hca = kind == LayerKind::kHcaOnline || kind == LayerKind::kHcaRaw;
  // Groups of 128 threads that share the rows of an HCA window.
  static constexpr int groups = is_csa ? 1 : !is_hca ? 0 : (prefill || kind == LayerKind::kHcaRaw) ? 4 : 1;
  static constexpr int compressor_warps = 4 * groups + (is_csa ? 1 : 0);
  static constexpr int threads = 32 * (!prefill ? compressor_warps + 1 : is_csa || is_hca ? compressor_warps : 4);
  static constexpr int blocks_per_sm = !prefill ? 1 : is_csa ? 3 : is_hca ? 2 : 8;
  static constexpr int ratio = is_csa ? kCsaRatio : is_hca ? kHcaRatio : 1;
};

/// What the blocks of a compressor share: the entry on its way to the warp that finishes it, and the pools of the groups.
template <int groups>
struct Shared {
  float4 entry[2][kEntryDim / 4];  // used in turn, so that one barrier an entry is enough
  Pool pool[groups > 1 ? groups : 1][kEntryDim / 4];
};

__device__ __forceinline__ void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- finishing: normalise, rotate, round, store -----------------------------------------------------------------------

/// What one lane needs to finish a row: norm weights and, in the lanes of the rotated channels, cos and sin. Loaded apart from
/// its use, so that the loads travel while the row is still being pooled.
struct RowFinish {
  float weight[16];
  float4 angle[2];

  __device__ __forceinline__ void load(const AppendParams& p, const void* norm, bool norm_bf16, int64_t position, int lane) {
    load_row(norm, norm_bf16, lane, weight);
    if (lane >= kFirstRopeLane) {
      const float* rope = p.rope + position * kRopeDim + 8 * (lane - kFirstRopeLane);
      angle[0] = load4(rope), angle[1] = load4(rope + 4);
    }
  }

  /// RMSNorm over the warp's row, then RoPE of channels 448..511, each rounded to bf16 if `round`.
  __device__ __forceinline__ void apply(float (&x)[16], float eps, bool round, int lane) const {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) squares += x[i] * x[i];
    const float scale = 1.0f / sqrtf(warp_sum(squares) * (1.0f / kEntryDim) + eps);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] = x[i] * scale * weight[i];
      if (round) x[i] = round_bf16(x[i]);
    }
    if (lane < kFirstRopeLane) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      turn(x[8 + 4 * i], x[9 + 4 * i], angle[i].x, angle[i].y);
      turn(x[10 + 4 * i], x[11 + 4 * i], angle[i].z, angle[i].w);
    }
#pragma unroll
    for (int i = 8; i < 16; ++i) {
      if (round) x[i] = round_bf16(x[i]);
    }
  }
};

/// One warp: the pooled entry in `pooled` [512] becomes row `row` of the entry table.
__device__ __forceinline__ void finish_entry(const AppendParams& p, const float4* pooled, const RowFinish& finish, int64_t row,
                                             int lane) {
  float x[16];
  load_row(pooled, false, lane, x);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (p.kv_bf16) x[i] = round_bf16(x[i]);
  }
  finish.apply(x, p.eps, p.kv_bf16, lane);
  store_row(p.entries.format, pack_row(p.entries.format, x, lane), row_address(p.entries, row), lane);
}

/// The same of an index key, four channels a lane.
struct KeyFinish {
  float weight[4];
  float4 angle;

  __device__ __forceinline__ void load(const AppendParams& p, int64_t position, int lane) {
    if (p.index_norm_bf16) {
      const uint2 u = static_cast<const uint2*>(p.index_norm)[lane];
      weight[0] = low_bf16(u.x), weight[1] = high_bf16(u.x), weight[2] = low_bf16(u.y), weight[3] = high_bf16(u.y);
    } else {
      const float4 v = load4(static_cast<const float*>(p.index_norm) + 4 * lane);
      weight[0] = v.x, weight[1] = v.y, weight[2] = v.z, weight[3] = v.w;
    }
    if (lane >= kFirstRotatedIndexLane) angle = load4(p.rope + position * kRopeDim + 4 * (lane - kFirstRotatedIndexLane));
  }
};

/// One warp: the pooled index key, channels 4 lane .. 4 lane + 3 in `pooled`, becomes row `row` of the key table (SPEC 2.5).
__device__ __forceinline__ void finish_key(const AppendParams& p, float4 pooled, const KeyFinish& finish, int64_t row, int lane) {
  float x[4] = {pooled.x, pooled.y, pooled.z, pooled.w};
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (p.kv_bf16) x[i] = round_bf16(x[i]);
    squares += x[i] * x[i];
  }
  const float scale = 1.0f / sqrtf(warp_sum(squares) * (1.0f / kIndexDim) + p.eps);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = x[i] * scale * finish.weight[i];
    if (p.kv_bf16) x[i] = round_bf16(x[i]);
  }
  if (lane >= kFirstRotatedIndexLane) {
    turn(x[0], x[1], finish.angle.x, finish.angle.y);
    turn(x[2], x[3], finish.angle.z, finish.angle.w);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (p.kv_bf16) x[i] = round_bf16(x[i]);
    }
  }
  hadamard(x, lane);

  const KeyTable& keys = p.index_keys;
  const uint32_t block = uint32_t(row) / uint32_t(keys.keys_per_block), key = uint32_t(row) - block * keys.keys_per_block;
  uint8_t* base = keys.base + block * keys.block_bytes;
  if (keys.format == kKeyFp32) {
    store4(reinterpret_cast<float*>(base) + key * kIndexDim + 4 * lane, make_float4(x[0], x[1], x[2], x[3]));
    return;
  }
  const Fp4 fp4 = quantise(x, keys.format);
  const uint32_t codes = fp4.code[0] | fp4.code[1] << 4 | fp4.code[2] << 8 | fp4.code[3] << 12;
  reinterpret_cast<uint16_t*>(base + key * kKeyBytes)[lane] = uint16_t(codes);
  if (lane % 4 == 0) base[keys.keys_per_block * kKeyBytes + key * kScaleBytes + lane / 4] = uint8_t(fp4.scale_code);
}

/// The 128 threads of a main compressor: thread i has channels 4 i .. 4 i + 3 of a pooled entry, the first 32 have `finish`.
__device__ __forceinline__ void emit_entry(const AppendParams& p, float4* buffer, float4 pooled, const RowFinish& finish,
                                           int64_t row, int thread) {
  buffer[thread] = pooled;
  barrier(2, 128);
  if (thread < 32) finish_entry(p, buffer, finish, row, thread);
}

// ---- window rows ------------------------------------------------------------------------------------------------------

/// One CSA compressor as a thread sees it: the main one (512 channels) or the indexer's (128), pointers at the thread's channels.
struct Stream {
  const float* scores;  // [tokens, k_prev | k_cur | z_prev | z_cur]
  int64_t stride;
  const float* ape;  // [4, prev | cur]
  int width;
  int column;  // in a tail row
};

__device__ __forceinline__ Stream csa_stream(const AppendParams& p, bool index, int channel) {
  if (index) return {p.index_kv_score + channel, p.index_kv_score_stride, p.index_ape + channel, kIndexDim, kEntryDim + channel};
  return {p.kv_score + channel, p.kv_score_stride, p.ape + channel, kEntryDim, channel};
}

__device__ __forceinline__ float* csa_tail(const AppendParams& p, int slot, const Stream& s) {
  return p.tail + slot * p.tail_stride + s.column;
}

__device__ __forceinline__ void write_prev_row(const Stream& s, float* tail, int64_t token, int position) {
  const float* score = s.scores + token * s.stride;
  store4(tail + (kPrevK + (position & 7)) * kCsaTailWidth, load4(score));
  const float4 z = load4(score + 2 * s.width) + load4(s.ape + (position & 3) * 2 * s.width);
  store4(tail + (kPrevZ + (position & 7)) * kCsaTailWidth, z);
}

/// One warp: the previous-window rows of a token among the last four before a checkpoint, into the checkpoint's tails.
__device__ void track_prev_rows(const AppendParams& p, int64_t token, int position, int slot, int lane) {
  for (int channel = 4 * lane; channel < kEntryDim; channel += 128) {
    const Stream s = csa_stream(p, false, channel);
    write_prev_row(s, csa_tail(p, slot, s), token, position);
  }
  const Stream s = csa_stream(p, true, 4 * lane);
  write_prev_row(s, csa_tail(p, slot, s), token, position);
}

__device__ __forceinline__ RowAddress ring_row(const AppendParams& p, int slot, int position) {
  return row_address(p.ring, slot, position & (kWindow - 1));
}

/// First row of request `b` in the window workspace: that of position length - 128.
__device__ __forceinline__ int workspace_base(int begin, int b) { return begin + kWindow * b; }

/// One warp: the window row of one token.
template <LayerKind kind, bool prefill>
__device__ void write_window_row(const AppendParams& p, int token, int lane) {
  float x[16];
  load_row(static_cast<const uint8_t*>(p.kv) + token * p.kv_stride * (p.kv_bf16 ? 2 : 4), p.kv_bf16, lane, x);
  const int track = p.track_slots ? p.track_slots[token] : -1;
  const int b = prefill ? p.token_request[token] : token;
  if (b < 0) return;
  // All that is known of the request at once: a load behind a branch waits for it.
  const int slot = p.slots[b], length = p.prefix_lens[b];
  const int begin = prefill ? p.query_start[b] : token, count = prefill ? p.query_start[b + 1] - begin : 1;
  const int offset = token - begin, position = length + offset;
  if (slot < 0 || offset < 0 || offset >= count) return;
  RowFinish finish;
  finish.load(p, p.kv_norm, p.kv_norm_bf16, position, lane);
  finish.apply(x, p.eps, p.kv_bf16, lane);
  const PackedRow packed = pack_row(p.ring.format, x, lane);

  const bool stays = !prefill || offset >= count - kWindow;
  if (prefill) {
    const int base = workspace_base(begin, b);
    const int old = offset & (kWindow - 1);  // the position that this row replaces is length - 128 + old
    if (stays && length - kWindow + old >= 0) {
      copy_row(p.ring.format, ring_row(p, slot, position), row_address(p.window, 0, base + old), lane);
      __syncwarp();
    }
    store_row(p.ring.format, packed, row_address(p.window, 0, base + kWindow + offset), lane);
  }
  if (stays) {
    store_row(p.ring.format, packed, ring_row(p, slot, position), lane);
    if (p.swa_pos && lane == 0) p.swa_pos[slot * p.swa_pos_stride + (position & (kWindow - 1))] = position;
  }
  if (track >= 0) {
    store_row(p.ring.format, packed, ring_row(p, track, position), lane);
    if (kind == LayerKind::kCsa && (position & (kWindow - 1)) >= kWindow - kCsaRatio) {
      track_prev_rows(p, token, position, track, lane);
    }
  }
  if (offset == count - 1 && lane == 0) {
    if (p.swa_head) p.swa_head[slot] = (position + 1) & (kWindow - 1);
    if (p.tail_len && kind != LayerKind::kSwa) p.tail_len[slot] = (position + 1) & (Shape<kind, prefill>::ratio - 1);
  }
}

/// One warp: an old ring row that the chunk (shorter than the window) does not replace, into the workspace.
__device__ void keep_old_row(const AppendParams& p, int b, int old, int lane) {
  const int slot = p.slots[b], begin = p.query_start[b], count = p.query_start[b + 1] - begin, length = p.prefix_lens[b];
  const int position = length - kWindow + old;
  if (slot < 0 || count <= 0 || old < count || position < 0) return;
  copy_row(p.ring.format, ring_row(p, slot, position), row_address(p.window, 0, workspace_base(begin, b) + old), lane);
}

// ---- CSA --------------------------------------------------------------------------------------------------------------

/// The eight rows of an entry, oldest first: four of the previous stream, four of the current one.
struct CsaRows {
  float4 k[8], z[8];

  __device__ __forceinline__ float4 pooled() const {
    Pool pool = Pool::empty();
    add_rows(pool, k, z);
    return pool.result();
  }

  __device__ __forceinline__ void clear(int row) { k[row] = splat(0), z[row] = splat(-INFINITY); }

  /// Row `row` from the projections of `token`; the bias row is row % 4 because windows start at multiples of 4.
  __device__ __forceinline__ void from_input(const Stream& s, int row, int64_t token) {
    const float* score = s.scores + token * s.stride + (row < 4 ? 0 : s.width);
    k[row] = load4_once(score);
    z[row] = load4_once(score + 2 * s.width) + load4(s.ape + (row & 3) * 2 * s.width + (row < 4 ? 0 : s.width));
  }

  __device__ __forceinline__ void from_tail(const float* tail, int row, int position) {
    const int k_row = row < 4 ? kPrevK + (position & 7) : position & 3;
    const int z_row = row < 4 ? kPrevZ + (position & 7) : kCurZ + (position & 3);
    k[row] = load4(tail + k_row * kCsaTailWidth);
    z[row] = load4(tail + z_row * kCsaTailWidth);
  }
};

using CsaShared = Shared<1>;

/// What the five warps of a CSA block need to finish entry `entry` and its key: the first warp the one, the last the other.
struct CsaFinish {
  RowFinish row;
  KeyFinish key;

  __device__ __forceinline__ void load(const AppendParams& p, int entry) {
    const int position = kCsaRatio * entry, thread = threadIdx.x;
    if (thread < 32) row.load(p, p.entry_norm, p.entry_norm_bf16, position, thread);
    if (thread >= 128) key.load(p, position, thread - 128);
  }
};

/// The five warps store a pooled entry and its key in row `row` of the tables.
__device__ __forceinline__ void emit_csa(const AppendParams& p, CsaShared& shared, int buffer, float4 pooled,
                                         const CsaFinish& finish, int64_t row) {
  if (threadIdx.x < 128) {
    emit_entry(p, shared.entry[buffer], pooled, finish.row, row, threadIdx.x);
  } else {
    finish_key(p, pooled, finish.key, row, threadIdx.x - 128);
  }
}

__device__ __forceinline__ Stream csa_stream_of_thread(const AppendParams& p) {
  const bool index = threadIdx.x >= 128;
  return csa_stream(p, index, 4 * (index ? threadIdx.x - 128 : threadIdx.x));
}

/// Five warps: request b of a decode step.
__device__ void csa_decode(const AppendParams& p, CsaShared& shared, int b) {
  const Stream s = csa_stream_of_thread(p);
  const float* score = s.scores + b * s.stride;
  const float4 k_prev = load4_once(score), k_cur = load4_once(score + s.width);
  float4 z_prev = load4_once(score + 2 * s.width), z_cur = load4_once(score + 3 * s.width);
  const int slot = p.slots[b], position = p.prefix_lens[b];
  if (slot < 0) return;
  const float* ape = s.ape + (position & 3) * 2 * s.width;
  const float4 ape_prev = load4(ape), ape_cur = load4(ape + s.width);
  float* tail = csa_tail(p, slot, s);
  const bool closes = (position & 3) == 3;
  const int first = position - 7;  // of the rows that the entry pools
  CsaRows rows;
  CsaFinish finish;
  int64_t loc = 0;
  if (closes) {
    loc = p.out_loc[b];
    finish.load(p, position / kCsaRatio);
#pragma unroll
    for (int row = 0; row < 7; ++row) {
      if (row >= 4 || first >= 0) {
        rows.from_tail(tail, row, first + row);
      } else {
        rows.clear(row);
      }
    }
  }
  z_prev = z_prev + ape_prev, z_cur = z_cur + ape_cur;
  // The token's previous-stream row goes to the other half of the ring of 8 than those just read, its current-stream row is the 4th.
  store4(tail + (kPrevK + (position & 7)) * kCsaTailWidth, k_prev);
  store4(tail + (kPrevZ + (position & 7)) * kCsaTailWidth, z_prev);
  store4(tail + (position & 3) * kCsaTailWidth, k_cur);
  store4(tail + (kCurZ + (position & 3)) * kCsaTailWidth, z_cur);
  if (!closes) return;
  rows.k[7] = k_cur, rows.z[7] = z_cur;
  emit_csa(p, shared, 0, rows.pooled(), finish, loc / kCsaRatio);
}

/// Five warps: what of request b touches rows from before the step, then its tails.
__device__ void csa_boundary(const AppendParams& p, CsaShared& shared, int b) {
  const int slot = p.slots[b], length = p.prefix_lens[b], begin = p.query_start[b], stop = length + p.query_start[b + 1] - begin;
  if (slot < 0 || stop <= length) return;
  const Stream s = csa_stream_of_thread(p);
  float* tail = csa_tail(p, slot, s);
  // Only the window that is open at `length` and the one after it can pool older rows.
  for (int turn = 0; turn < 2; ++turn) {
    const int entry = length / kCsaRatio + turn, first = kCsaRatio * entry - 4, last = first + 7;
    if (max(first, 0) >= length || last >= stop) continue;
    CsaRows rows;
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      const int position = first + row;
      if (position < 0) {
        rows.clear(row);
      } else if (position < length) {
        rows.from_tail(tail, row, position);
      } else {
        rows.from_input(s, row, begin + position - length);
      }
    }
    const float4 pooled = rows.pooled();
    CsaFinish finish;
    finish.load(p, entry);
    emit_csa(p, shared, turn, pooled, finish, p.out_loc[begin + last - length] / kCsaRatio);
  }
  for (int position = max(length, stop - 8); position < stop; ++position) {
    const int64_t token = begin + position - length;
    write_prev_row(s, tail, token, position);
    if (position >= stop - 4) {
      const float* score = s.scores + token * s.stride + s.width;
      store4(tail + (position & 3) * kCsaTailWidth, load4(score));
      store4(tail + (kCurZ + (position & 3)) * kCsaTailWidth,
             load4(score + 2 * s.width) + load4(s.ape + (position & 3) * 2 * s.width + s.width));
    }
  }
}

// ---- HCA --------------------------------------------------------------------------------------------------------------

/// Where the rows of one HCA window come from, for a thread: `old` rows of the raw tail, then inputs. Pointers at its channels.
struct HcaRows {
  const float* tail;  // raw tail of the slot, or null
  int old;            // rows before the step, in `tail`
  const float* scores;  // projections of window row 0, which may lie before the step's first token
  int64_t stride;
  const float* ape;
};

/// Adds rows first, first + 1, ... last - 1 that fall to this group of threads.
template <int groups, int batch>
__device__ __forceinline__ void pool_rows(Pool& pool, const HcaRows& from, int first, int last, int group) {
  for (int row = first + group; row < last; row += groups * batch) {
    float4 k[batch], z[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int r = row + i * groups;
      if (r >= last) {
        k[i] = splat(0), z[i] = splat(-INFINITY);
      } else if (r < from.old) {
        k[i] = load4(from.tail + r * kEntryDim), z[i] = load4(from.tail + (kHcaRatio + r) * kEntryDim);
      } else {
        const float* score = from.scores + r * from.stride;
        k[i] = load4_once(score);
        z[i] = load4_once(score + kEntryDim) + load4(from.ape + r * kEntryDim);
      }
    }
    add_rows(pool, k, z);
  }
}

/// Brings the pools of all groups together in group 0's threads.
template <int groups>
__device__ __forceinline__ void merge_groups(Pool& pool, Shared<groups>& shared, int group, int thread) {
  if (groups == 1) return;
  barrier(1, 128 * groups);  // the last merge has been read
  if (group > 0) shared.pool[group][thread] = pool;
  barrier(1, 128 * groups);
  if (group > 0) return;
#pragma unroll
  for (int other = 1; other < groups; ++other) add_pool(pool, shared.pool[other][thread]);
}

/// All compressor warps: what of request b touches state from before the step, then its tail. Also the whole of a decode step.
template <LayerKind kind, bool prefill>
__device__ void hca_request(const AppendParams& p, Shared<Shape<kind, prefill>::groups>& shared, int b) {
  constexpr int groups = Shape<kind, prefill>::groups, batch = groups > 1 ? 4 : 1;
  constexpr bool raw = kind == LayerKind::kHcaRaw;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, channel = 4 * thread;
  const int slot = p.slots[b], length = p.prefix_lens[b];
  const int begin = prefill ? p.query_start[b] : b, count = prefill ? p.query_start[b + 1] - begin : 1;
  if (slot < 0 || count <= 0) return;
  const int stop = length + count, old = length % kHcaRatio, closing = length / kHcaRatio;
  float* tail = p.tail + slot * p.tail_stride + channel;
  // The window that is open at `length`; row r of it is token begin + r - old.
  HcaRows rows{raw ? tail : nullptr, raw ? old : 0, p.kv_score + (begin - old) * p.kv_score_stride + channel, p.kv_score_stride,
               p.ape + channel};

  const auto resumed = [&] {
    Pool pool = Pool::empty();
    if (!raw && old > 0 && group == 0) pool.peak = load4(tail), pool.sum = load4(tail + kEntryDim), pool.acc = load4(tail + 2 * kEntryDim);
    return pool;
  };
  if (old > 0 && stop >= kHcaRatio * (closing + 1)) {
    Pool pool = resumed();
    pool_rows<groups, batch>(pool, rows, raw ? 0 : old, kHcaRatio, group);
    merge_groups<groups>(pool, shared, group, thread);
    if (group == 0) {
      const int64_t row = p.out_loc[begin + kHcaRatio - 1 - old] / kHcaRatio;
      RowFinish finish;
      if (thread < 32) finish.load(p, p.entry_norm, p.entry_norm_bf16, int64_t(kHcaRatio) * closing, thread);
      emit_entry(p, shared.entry[0], pool.result(), finish, row, thread);
    }
  }
  if (raw) {
    // Every group has read its old rows: merge_groups has a barrier behind them.
    for (int position = max(length, stop - kHcaRatio) + group; position < stop; position += groups) {
      const float* score = p.kv_score + (begin + position - length) * p.kv_score_stride + channel;
      const int row = position % kHcaRatio;
      store4(tail + row * kEntryDim, load4(score));
      store4(tail + (kHcaRatio + row) * kEntryDim, load4(score + kEntryDim) + load4(p.ape + row * kEntryDim + channel));
    }
    return;
  }
  const int open = stop % kHcaRatio;
  if (open == 0) return;  // an empty state has no bytes
  const bool same = stop / kHcaRatio == closing;
  Pool pool = Pool::empty();
  if (same) {
    pool = resumed();
  } else {
    rows.scores = p.kv_score + (begin + count - open) * p.kv_score_stride + channel;
  }
  pool_rows<groups, batch>(pool, rows, same ? old : 0, open, group);
  merge_groups<groups>(pool, shared, group, thread);
  if (group == 0) store4(tail, pool.peak), store4(tail + kEntryDim, pool.sum), store4(tail + 2 * kEntryDim, pool.acc);
}

// ---- entries of a prefill step that pool only its own tokens ---------------------------------------------------------------

/// All compressor warps: of tokens first .. first + ratio - 1, those that close a window whose rows are all in this step.
template <LayerKind kind>
__device__ void inner_entries(const AppendParams& p, Shared<Shape<kind, true>::groups>& shared, int first) {
  constexpr int ratio = Shape<kind, true>::ratio, groups = Shape<kind, true>::groups;
  constexpr bool is_csa = kind == LayerKind::kCsa;
  const int lane = threadIdx.x % 32;
  int turn = 0;
  for (int base = first; base < min(first + ratio, p.tokens); base += 32) {
    const int mine = base + lane;
    int position = 0;
    bool closes = false;
    if (lane < ratio && mine < p.tokens) {
      const int b = p.token_request[mine];
      if (b >= 0) {
        const int slot = p.slots[b], length = p.prefix_lens[b], begin = p.query_start[b], end = p.query_start[b + 1];
        position = length + mine - begin;
        const int window = position + 1 - ratio, oldest = is_csa ? max(window - 4, 0) : window;
        closes = slot >= 0 && mine < end && (position + 1) % ratio == 0 && oldest >= length;
      }
    }
    // Every warp sees the same tokens, so all agree on the entries and meet at the same barriers.
    for (unsigned left = __ballot_sync(kAllLanes, closes); left; left &= left - 1) {
      const int source = __ffs(left) - 1, last = __shfl_sync(kAllLanes, position, source), entry = last / ratio;
      const int64_t token = base + source, row = p.out_loc[token] / ratio;
      if constexpr (is_csa) {
        const Stream s = csa_stream_of_thread(p);
        CsaRows rows;
#pragma unroll
        for (int r = 0; r < 8; ++r) {
          if (r >= 4 || entry > 0) {
            rows.from_input(s, r, token - 7 + r);
          } else {
            rows.clear(r);
          }
        }
        const float4 pooled = rows.pooled();
        CsaFinish finish;
        finish.load(p, entry);
        emit_csa(p, shared, turn & 1, pooled, finish, row);
      } else {
        const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
        const float* scores = p.kv_score + (token + 1 - ratio) * p.kv_score_stride + 4 * thread;
        Pool pool = Pool::empty();
        pool_rows<groups, 4>(pool, {nullptr, 0, scores, p.kv_score_stride, p.ape + 4 * thread}, 0, ratio, group);
        merge_groups<groups>(pool, shared, group, thread);
        if (group == 0) {
          RowFinish finish;
          if (thread < 32) finish.load(p, p.entry_norm, p.entry_norm_bf16, int64_t(ratio) * entry, thread);
          emit_entry(p, shared.entry[turn & 1], pool.result(), finish, row, thread);
        }
      }
      ++turn;
    }
  }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------------

__host__ __device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

/// Blocks of a prefill launch.
template <LayerKind kind>
struct PrefillGrid {
  static constexpr int row_warps = Shape<kind, true>::threads / 32;
  int boundary, inner, rows;

  __host__ __device__ PrefillGrid(int tokens, int requests)
      : boundary(kind == LayerKind::kSwa ? 0 : requests),
        inner(kind == LayerKind::kSwa ? 0 : divide_up(tokens, Shape<kind, true>::ratio)),
        rows(divide_up(tokens + kWindow * requests, row_warps)) {}
};

template <LayerKind kind, bool prefill>
__global__ void __launch_bounds__(Shape<kind, prefill>::threads, Shape<kind, prefill>::blocks_per_sm)
    append_kernel(const __grid_constant__ AppendParams p) {
  using S = Shape<kind, prefill>;
  wait_for_previous_kernel();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __shared__ Shared<S::groups> shared;

  if constexpr (!prefill) {
    if (warp == S::compressor_warps) {
      write_window_row<kind, false>(p, blockIdx.x, lane);
    } else if constexpr (S::is_csa) {
      csa_decode(p, shared, blockIdx.x);
    } else if constexpr (S::is_hca) {
      hca_request<kind, false>(p, shared, blockIdx.x);
    }
  } else {
    const PrefillGrid<kind> grid(p.tokens, p.requests);
    int block = blockIdx.x;
    if constexpr (S::is_csa || S::is_hca) {
      if (block < grid.boundary) {
        if constexpr (S::is_csa) {
          csa_boundary(p, shared, block);
        } else {
          hca_request<kind, true>(p, shared, block);
        }
        return;
      }
      block -= grid.boundary;
      // Entries wait for bandwidth, rows for latency: alternate them so that both are always in flight.
      const int paired = min(grid.inner, grid.rows);
      const bool inner = block < 2 * paired ? block % 2 == 0 : grid.inner > paired;
      block = block < 2 * paired ? block / 2 : block - paired;
      if (inner) {
        inner_entries<kind>(p, shared, block * S::ratio);
        return;
      }
    }
    const int item = block * PrefillGrid<kind>::row_warps + warp, old = item - p.tokens;
    if (old < 0) {
      write_window_row<kind, true>(p, item, lane);
    } else if (old < kWindow * p.requests) {
      keep_old_row(p, old / kWindow, old % kWindow, lane);
    }
  }
}

template <LayerKind kind, bool prefill>
cudaError_t launch(const AppendParams& p, bool overlap, cudaStream_t stream) {
  const PrefillGrid<kind> grid(p.tokens, p.requests);
  const unsigned blocks = prefill ? grid.boundary + grid.inner + grid.rows : p.requests;
  return dsv4::launch(append_kernel<kind, prefill>, {dim3(blocks), Shape<kind, prefill>::threads, 0, 1, overlap}, stream, p);
}

}  // namespace

cudaError_t launch_append(const AppendParams& p, LayerKind kind, bool prefill, bool overlap, cudaStream_t stream) {
  switch (kind) {
    case LayerKind::kSwa:
      return prefill ? launch<LayerKind::kSwa, true>(p, overlap, stream) : launch<LayerKind::kSwa, false>(p, overlap, stream);
    case LayerKind::kCsa:
      return prefill ? launch<LayerKind::kCsa, true>(p, overlap, stream) : launch<LayerKind::kCsa, false>(p, overlap, stream);
    case LayerKind::kHcaOnline:
      return prefill ? launch<LayerKind::kHcaOnline, true>(p, overlap, stream)
                     : launch<LayerKind::kHcaOnline, false>(p, overlap, stream);
    default:
      return prefill ? launch<LayerKind::kHcaRaw, true>(p, overlap, stream) : launch<LayerKind::kHcaRaw, false>(p, overlap, stream);
  }
}

}  // namespace dsv4
