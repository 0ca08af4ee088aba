// Parameters and launches of the kernels that copy state, blocks and tables. Strides in bytes unless noted
// otherwise.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../geometry.h"

namespace dsv4 {

/// Returns the widest access, 16 to 1 bytes, that `bits` (addresses, strides and sizes combined by OR) allows.
inline int access_width(uint64_t bits) {
  int width = 16;
  while (bits % width) width /= 2;
  return width;
}

struct StateTensor {  // [layers, slots, ...]
  uint8_t* base;
  int64_t layer_stride, slot_stride, bytes;  // `bytes` of one slot in one layer
  int layers, width;
};

constexpr int kMaxStateTensors = 32;
struct CopyStateParams {
  StateTensor tensors[kMaxStateTensors];
  int count;
  const int32_t *src, *dst;
  int pairs;
  int slots;          // smallest number of slots of the call's tensors
  int32_t* rejected;  // null: the kernel prints rejected pairs
};
cudaError_t launch_copy_state(const CopyStateParams& params, cudaStream_t stream);

struct SwapPool {
  uint8_t* base;
  int64_t stride, bytes, blocks;
  int64_t offset;  // in a host row
  int width;
  int pieces;  // pieces per block, each kSwapLoads accesses of a warp
  int end;     // end of its pieces in the launch, which are ordered by pool
};

constexpr int kSwapLoads = 4;
constexpr int kMaxSwapPools = 96, kMaxSwapRows = 1024;
struct SwapParams {
  SwapPool pools[kMaxSwapPools];
  uint8_t* host;  // device address
  int64_t host_stride;
  const int64_t* blocks;
  int64_t blocks_stride;  // elements
  int32_t row[kMaxSwapRows];
  int pool_count, count;
  bool to_host;
  bool over_link;  // `host` is host memory, not a buffer on the GPU
};
cudaError_t launch_swap_blocks(const SwapParams& params, cudaStream_t stream);

struct GatherParams {
  const void *requests, *seq_lens;  // int64 or int32
  const int32_t *state_slot, *req_to_token;
  int64_t token_stride, table_stride;  // elements
  int32_t *state_slots, *block_table;
  int count, columns;
  bool long_requests, long_lens;
};
cudaError_t launch_gather_tables(const GatherParams& params, cudaStream_t stream);

}  // namespace dsv4
