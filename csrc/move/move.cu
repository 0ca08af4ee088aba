// Copy kernels: state slots (copy_state), scattered blocks to and from rows of pinned host memory or of a buffer
// (swap_blocks), and the parts of all requests' tables that a decode step needs (gather_tables). Every byte is read and
// written once.
//
// - copy_state: grid (layers x 16 KiB pieces of all tensors, pairs of slots).
// - swap_blocks: one warp per piece of a block, 2 KiB with 16 B accesses. A warp loads the whole piece before it stores
//   it, bypassing the caches because each byte is used once. Over PCIe few thread blocks are launched: they have 1 MiB
//   in flight, where 55 GB/s with 2 us of latency need 110 KB, and leave SMs free for steps.
// - gather_tables: grid (groups of 1024 block ids, requests), one 32 B sector read and 4 B written per block. Groups
//   beyond a request's length are idle.
//
// A launch cannot raise, and an assertion would destroy the process's CUDA context. If a pair is out of range,
// copy_state writes nothing and stores the index of the first one in `rejected`, which is -1 otherwise. If pairs have
// equal destinations, only these pairs are skipped: a block compares its own pair with all others.
#include <algorithm>
#include <cstdio>

#include "move.h"

namespace dsv4 {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPiece = 16384;

/// Copies `bytes` with a thread block.
template <typename T>
__device__ __forceinline__ void copy_as(uint8_t* __restrict__ to, const uint8_t* __restrict__ from, int64_t bytes) {
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < bytes / int64_t(sizeof(T)); i += kThreads) {
    __stcs(reinterpret_cast<T*>(to) + i, __ldcs(reinterpret_cast<const T*>(from) + i));
  }
}

__device__ __forceinline__ void copy(int width, uint8_t* to, const uint8_t* from, int64_t bytes) {
  switch (width) {
    case 16:
      return copy_as<uint4>(to, from, bytes);
    case 8:
      return copy_as<uint2>(to, from, bytes);
    case 4:
      return copy_as<unsigned>(to, from, bytes);
    default:
      return copy_as<unsigned char>(to, from, bytes);
  }
}

__host__ __device__ int64_t pieces(const StateTensor& t) { return (t.bytes + kPiece - 1) / kPiece; }

/// Keeps the lowest reported index. -1 is the largest unsigned number.
__device__ void report(int32_t* rejected, int index) {
  atomicMin(reinterpret_cast<unsigned*>(rejected), unsigned(index));
}

__global__ void __launch_bounds__(kThreads) copy_state_kernel(const __grid_constant__ CopyStateParams p) {
  const int own = blockIdx.y, src = p.src[own], dst = p.dst[own];
  if (src < 0 || dst < 0) return;
  // Every block checks all pairs before it writes, so that none writes if any pair is out of range.
  bool wrong = false;
  for (int pair = threadIdx.x; pair < p.pairs; pair += kThreads) {
    const int from = p.src[pair], to = p.dst[pair];
    if (from < 0 || to < 0) continue;
    const bool leaves = max(from, to) >= p.slots, same = to == dst && pair != own;
    if (!leaves && !same) continue;
    wrong = true;
    if (p.rejected) {
      report(p.rejected, pair);
    } else if (leaves && pair == own && blockIdx.x == 0) {
      printf("copy_state: pair %d, slot %d to slot %d, is out of range for tensors of %d slots; nothing is written\n",
             pair, src, dst, p.slots);
    } else if (same && blockIdx.x == 0) {
      printf("copy_state: pair %d, slot %d to slot %d, has the same destination as pair %d; neither is written\n", own,
             src, dst, pair);
    }
  }
  if (__syncthreads_or(wrong)) return;
  int64_t item = blockIdx.x;
  int k = 0;
  while (item >= p.tensors[k].layers * pieces(p.tensors[k])) {
    item -= p.tensors[k].layers * pieces(p.tensors[k]);
    ++k;
  }
  const StateTensor& t = p.tensors[k];
  const int64_t layer = item / pieces(t), begin = item % pieces(t) * kPiece;
  uint8_t* base = t.base + layer * t.layer_stride + begin;
  const int64_t bytes = min(kPiece, t.bytes - begin);
  copy(t.width, base + dst * t.slot_stride, base + src * t.slot_stride, bytes);
}

/// Copies a piece with one warp: at most kSwapLoads accesses of each lane, fewer if `bytes` is smaller.
template <typename T>
__device__ __forceinline__ void copy_piece(uint8_t* to, const uint8_t* from, int64_t bytes, int lane) {
  T kept[kSwapLoads];
  const int64_t count = bytes / int64_t(sizeof(T));
#pragma unroll
  for (int i = 0; i < kSwapLoads; ++i) {
    if (lane + 32 * i < count) kept[i] = __ldcs(reinterpret_cast<const T*>(from) + lane + 32 * i);
  }
#pragma unroll
  for (int i = 0; i < kSwapLoads; ++i) {
    if (lane + 32 * i < count) __stcs(reinterpret_cast<T*>(to) + lane + 32 * i, kept[i]);
  }
}

__global__ void __launch_bounds__(kThreads) swap_blocks_kernel(const __grid_constant__ SwapParams p) {
  const int warps = kThreads / 32, lane = threadIdx.x % 32, stop = p.pools[p.pool_count - 1].end;
  int k = 0;
  for (int unit = blockIdx.x * warps + threadIdx.x / 32; unit < stop; unit += gridDim.x * warps) {
    while (unit >= p.pools[k].end) ++k;
    const SwapPool& pool = p.pools[k];
    const int of_pool = unit - (pool.end - p.count * pool.pieces), i = of_pool / pool.pieces;
    const int64_t block = p.blocks[i * p.blocks_stride];
    const int64_t begin = int64_t(of_pool % pool.pieces) * 32 * kSwapLoads * pool.width;
    if (block < 0 || block >= pool.blocks) {
      if (lane == 0 && k == 0 && begin == 0) {
        printf("swap_blocks: block %lld is not in 0..%lld; it is skipped\n", static_cast<long long>(block),
               static_cast<long long>(pool.blocks - 1));
      }
      continue;
    }
    uint8_t* device = pool.base + block * pool.stride + begin;
    uint8_t* host = p.host + p.row[i] * p.host_stride + pool.offset + begin;
    uint8_t* to = p.to_host ? host : device;
    const uint8_t* from = p.to_host ? device : host;
    const int64_t bytes = pool.bytes - begin;
    switch (pool.width) {
      case 16:
        copy_piece<uint4>(to, from, bytes, lane);
        break;
      case 8:
        copy_piece<uint2>(to, from, bytes, lane);
        break;
      case 4:
        copy_piece<unsigned>(to, from, bytes, lane);
        break;
      case 2:
        copy_piece<unsigned short>(to, from, bytes, lane);
        break;
      default:
        copy_piece<unsigned char>(to, from, bytes, lane);
    }
  }
}

/// Thread blocks of swap_blocks: enough to saturate the link, or the GPU's memory.
constexpr int kLinkBlocks = 64, kMemoryBlocks = 2048;

constexpr int kGatherColumns = 4 * kThreads;

__device__ __forceinline__ int64_t number_at(const void* numbers, bool is_long, int i) {
  return is_long ? static_cast<const int64_t*>(numbers)[i] : static_cast<const int32_t*>(numbers)[i];
}

__global__ void __launch_bounds__(kThreads) gather_tables_kernel(const __grid_constant__ GatherParams p) {
  const int b = blockIdx.y;
  const int64_t request = number_at(p.requests, p.long_requests, b);
  const int64_t blocks = (number_at(p.seq_lens, p.long_lens, b) + kBlockTokens - 1) / kBlockTokens;
  if (blockIdx.x == 0 && threadIdx.x == 0) p.state_slots[b] = p.state_slot[request];
  const int stop = int(min(blocks, int64_t(p.columns)));
#pragma unroll
  for (int i = 0; i < kGatherColumns / kThreads; ++i) {
    const int column = blockIdx.x * kGatherColumns + i * kThreads + threadIdx.x;
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

cudaError_t launch_gather_tables(const GatherParams& p, cudaStream_t stream) {
  const unsigned groups = unsigned(std::max(1, (p.columns + kGatherColumns - 1) / kGatherColumns));
  gather_tables_kernel<<<dim3(groups, unsigned(p.count)), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_swap_blocks(const SwapParams& p, cudaStream_t stream) {
  const int units = p.pools[p.pool_count - 1].end, warps = kThreads / 32;
  const int blocks = std::min((units + warps - 1) / warps, p.over_link ? kLinkBlocks : kMemoryBlocks);
  if (blocks == 0) return cudaSuccess;  // pools with empty blocks
  swap_blocks_kernel<<<unsigned(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace dsv4
