// append_swa: quantises window entries that are already normalised and rotated into the ring (SPEC 2.4, one scale per
// entry).
//
// One block of 128 threads per token, four adjacent channels per thread. A token costs 1024 B read and 584 B written,
// plus 8 B (slot and position) of every token of the launch: a block first checks whether a later token has the same
// ring index, so that the result does not depend on the order of blocks. Intended for decode batches; `append` needs no
// such search.
#include "../entries.cuh"
#include "append_swa.h"

namespace dsv4 {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) append_swa_kernel(const __grid_constant__ AppendSwaParams p) {
  __shared__ float warp_amax[kThreads / 32];
  const int token = blockIdx.x, thread = threadIdx.x;
  const int slot = p.request_slots[token], position = p.positions[token];
  if (slot < 0) return;
  bool later = false, replaced = false;  // by a token of this request; of equal positions the last token wins
  for (int other = thread; other < p.tokens; other += kThreads) {
    if (p.request_slots[other] != slot) continue;
    const int at = p.positions[other];
    if (at > position || (at == position && other > token)) {
      later = true;
      replaced |= (at - position) % p.ring_rows == 0;
    }
  }
  if (__syncthreads_or(replaced)) return;
  const bool latest = !__syncthreads_or(later);

  const int row = position % p.ring_rows, channel = 4 * thread;
  uint32_t pair[2] = {0, 0};
  if (channel < p.nope + p.rope) {
    const uint2 raw =
        *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.raw_kv) + token * p.kv_stride + channel);
    pair[0] = raw.x, pair[1] = raw.y;
  }
  float amax = 0;
  if (channel < p.nope) {
    amax = max_magnitude(max_magnitude(low_bf16(pair[0]), high_bf16(pair[0])),
                         max_magnitude(low_bf16(pair[1]), high_bf16(pair[1])));
  }
  amax = warp_max(amax);
  if (thread % 32 == 0) warp_amax[thread / 32] = amax;
  __syncthreads();
  amax = max_magnitude(max_magnitude(warp_amax[0], warp_amax[1]), max_magnitude(warp_amax[2], warp_amax[3]));
  const uint32_t exponent = row_exponent(amax);
  const float inverse = exp2_of_biased(254 - exponent);

  if (channel < p.nope) {
    const uint32_t codes = e4m3_pair(low_bf16(pair[0]) * inverse, high_bf16(pair[0]) * inverse) |
                           e4m3_pair(low_bf16(pair[1]) * inverse, high_bf16(pair[1]) * inverse) << 16;
    *reinterpret_cast<uint32_t*>(p.fp8 + slot * p.fp8_slot + row * p.fp8_entry + channel) = codes;
  } else if (channel < p.nope + p.rope) {
    uint8_t* to = p.rotated + slot * p.rotated_slot + row * p.rotated_row + 2 * (channel - p.nope);
    *reinterpret_cast<uint2*>(to) = make_uint2(pair[0], pair[1]);
  }
  if (thread < p.inv_bytes) p.inv[slot * p.inv_slot + row * p.inv_row + thread] = uint8_t(exponent);
  if (thread == 0) {
    p.pos[slot * p.pos_slot + row] = position;
    if (latest) p.head[slot] = (position + 1) % p.ring_rows;
  }
}

}  // namespace

cudaError_t launch_append_swa(const AppendSwaParams& p, cudaStream_t stream) {
  append_swa_kernel<<<p.tokens, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace dsv4
