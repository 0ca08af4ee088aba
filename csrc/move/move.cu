// Copies of state slots (copy_state), of slices of rows (update_rows), of scattered blocks to and from pinned host
// memory (swap_blocks), and of what a decode step needs of the tables of all requests (snapshot_tables). Every byte is
// read and written once.
//
// copy_state: grid (layers x 16 KiB pieces of all tensors, pairs of slots). update_rows: grid (row groups, slices), a
// warp a row. swap_blocks: grid (blocks, pools), loads and stores that pass the caches by, since each block is touched
// once. snapshot_tables: grid (groups of 1024 block ids, requests), a sector of 32 bytes read and 4 bytes written a
// block; groups behind a length are idle.
#include <algorithm>
#include <cassert>

#include "move.h"

namespace dsv4 {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPiece = 16384;

/// `lanes` threads, of which this is number `lane`, copy `bytes`.
template <typename T>
__device__ __forceinline__ void copy_as(uint8_t* __restrict__ to, const uint8_t* __restrict__ from, int64_t bytes,
                                        int lane, int lanes) {
#pragma unroll 4
  for (int64_t i = lane; i < bytes / int64_t(sizeof(T)); i += lanes) {
    __stcs(reinterpret_cast<T*>(to) + i, __ldcs(reinterpret_cast<const T*>(from) + i));
  }
}

__device__ __forceinline__ void copy(int width, uint8_t* to, const uint8_t* from, int64_t bytes, int lane, int lanes) {
  switch (width) {
    case 16:
      return copy_as<uint4>(to, from, bytes, lane, lanes);
    case 8:
      return copy_as<uint2>(to, from, bytes, lane, lanes);
    case 4:
      return copy_as<unsigned>(to, from, bytes, lane, lanes);
    default:
      return copy_as<unsigned char>(to, from, bytes, lane, lanes);
  }
}

__host__ __device__ int64_t pieces(const StateTensor& t) { return (t.bytes + kPiece - 1) / kPiece; }

__global__ void __launch_bounds__(kThreads) copy_state_kernel(const __grid_constant__ CopyStateParams p) {
  const int src = p.src[blockIdx.y], dst = p.dst[blockIdx.y];
  if (src < 0 || dst < 0) return;
  int64_t item = blockIdx.x;
  int k = 0;
  while (item >= p.tensors[k].layers * pieces(p.tensors[k])) {
    item -= p.tensors[k].layers * pieces(p.tensors[k]);
    ++k;
  }
  const StateTensor& t = p.tensors[k];
  assert(src < t.slots && dst < t.slots && "copy_state: a slot is not one of the tensors'");
  const int64_t layer = item / pieces(t), begin = item % pieces(t) * kPiece;
  uint8_t* base = t.base + layer * t.layer_stride + begin;
  const int64_t bytes = min(kPiece, t.bytes - begin);
  copy(t.width, base + dst * t.slot_stride, base + src * t.slot_stride, bytes, threadIdx.x, kThreads);
}

__global__ void __launch_bounds__(kThreads) update_rows_kernel(const __grid_constant__ UpdateRowsParams p) {
  const int valid = min(*p.valid, p.count), mine = blockIdx.y;
  if (mine >= valid) return;
  const int64_t *starts = p.slices, *sources = starts + p.slices_stride, *lengths = sources + p.slices_stride;
  const int64_t start = starts[mine], source = sources[mine], length = lengths[mine];
  // A launch cannot raise: a refused slice stops the kernel, as an index out of range does in torch.
  assert(length >= 0 && start >= 0 && source >= 0 && "update_rows: a slice is negative");
  assert(start <= p.pool_rows - length && source <= p.source_rows - length &&
         "update_rows: a slice leaves pool or new_rows");
  for (int other = threadIdx.x; other < valid; other += kThreads) {
    const bool apart = other == mine || starts[other] >= start + length || start >= starts[other] + lengths[other];
    assert(apart && "update_rows: slices overlap in the destination");
  }
  __syncthreads();
  const int warps = kThreads / 32, lane = threadIdx.x % 32;
  for (int64_t row = blockIdx.x * warps + threadIdx.x / 32; row < length; row += gridDim.x * warps) {
    copy(p.width, p.pool + (start + row) * p.pool_stride, p.source + (source + row) * p.source_stride, p.row_bytes,
         lane, 32);
  }
}

__global__ void __launch_bounds__(kThreads) swap_blocks_kernel(const __grid_constant__ SwapParams p) {
  const SwapPool& pool = p.pools[blockIdx.y];
  uint8_t* device = pool.device + p.device_block[blockIdx.x] * pool.device_stride;
  uint8_t* host = pool.host + p.host_block[blockIdx.x] * pool.host_stride;
  copy(pool.width, p.to_host ? host : device, p.to_host ? device : host, pool.bytes, threadIdx.x, kThreads);
}

constexpr int kSnapshotColumns = 4 * kThreads;

__device__ __forceinline__ int64_t number_at(const void* numbers, bool is_long, int i) {
  return is_long ? static_cast<const int64_t*>(numbers)[i] : static_cast<const int32_t*>(numbers)[i];
}

__global__ void __launch_bounds__(kThreads) snapshot_tables_kernel(const __grid_constant__ SnapshotParams p) {
  const int b = blockIdx.y;
  const int64_t request = number_at(p.requests, p.long_requests, b);
  const int64_t blocks = (number_at(p.seq_lens, p.long_lens, b) + kBlockTokens - 1) / kBlockTokens;
  if (blockIdx.x == 0 && threadIdx.x == 0) p.owned[b] = p.state_slot[request];
  const int stop = int(min(blocks, int64_t(p.columns)));
#pragma unroll
  for (int i = 0; i < kSnapshotColumns / kThreads; ++i) {
    const int column = blockIdx.x * kSnapshotColumns + i * kThreads + threadIdx.x;
    if (column >= stop) continue;
    p.block_table[b * p.table_stride + column] =
        p.req_to_token[request * p.token_stride + int64_t(column) * kBlockTokens] / kBlockTokens;
  }
}

}  // namespace

cudaError_t launch_copy_state(const CopyStateParams& p, cudaStream_t stream) {
  int64_t blocks = 0;
  for (int k = 0; k < p.count; ++k) blocks += p.tensors[k].layers * pieces(p.tensors[k]);
  if (blocks == 0) return cudaSuccess;
  copy_state_kernel<<<dim3(unsigned(blocks), unsigned(p.pairs)), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_update_rows(const UpdateRowsParams& p, cudaStream_t stream) {
  // Lengths are known on the device only: enough blocks a slice for an even share of the new rows, 8 rows a block.
  const int64_t share = (p.source_rows + p.count - 1) / p.count;
  const unsigned groups = unsigned(std::clamp<int64_t>((share + 7) / 8, 1, 1024));
  update_rows_kernel<<<dim3(groups, unsigned(p.count)), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_snapshot_tables(const SnapshotParams& p, cudaStream_t stream) {
  const unsigned groups = unsigned(std::max(1, (p.columns + kSnapshotColumns - 1) / kSnapshotColumns));
  snapshot_tables_kernel<<<dim3(groups, unsigned(p.count)), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_swap_blocks(const SwapParams& p, cudaStream_t stream) {
  swap_blocks_kernel<<<dim3(unsigned(p.blocks), unsigned(p.pool_count)), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace dsv4
