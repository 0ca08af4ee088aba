// index_query: RoPE, Hadamard transform and FP4 rounding of the index queries of a step (SPEC 2.5, 4.1), one warp per
// head of a token.
//
// In e4m3 the numbers of a head are multiplied by a power of two to use the range, and its weight by the reciprocal,
// which commutes with ReLU. So are fp16 numbers without the transform, whose scales may exceed the range of fp16 (SPEC
// 11.6). Bytes per head: 256 (bf16) read, 256 (fp16) or 128 (e4m3) written.
#include "../index_vector.cuh"
#include "../launch.cuh"
#include "index.h"
#include "layout.h"

namespace dsv4 {
namespace {

constexpr int kWarps = 4;
// Without the transform the largest scale of a head is stored as 2^kHalfShift. A block below 2^-kHalfRange of it is 0.
constexpr int kHalfShift = 8, kHalfRange = 40;

/// Returns the scale to store for a block whose scale has this biased exponent, and multiplies the head's weight by the
/// rest.
__device__ __forceinline__ float relative_scale(uint32_t exponent, float& weight) {
  const uint32_t most = max(__reduce_max_sync(kAllLanes, exponent), uint32_t(kHalfShift + 1));
  weight *= exp2_of_biased(most - kHalfShift);
  return exp2_of_biased(127 + kHalfShift - min(most - exponent, uint32_t(kHalfRange)));
}

template <bool with_hadamard>
__global__ void __launch_bounds__(32 * kWarps) query_kernel(const __grid_constant__ QueryParams p) {
  let_next_kernel_start();
  const int lane = threadIdx.x % 32, item = blockIdx.x * kWarps + threadIdx.x / 32;
  const bool there = item < p.tokens * p.heads;
  const int token = there ? item / p.heads : 0, head = item - token * p.heads;
  const int64_t at = token * p.token_stride + head * p.head_stride + 4 * lane;
  // No kernel of a step's layers writes positions and angles, so they can be read before the wait.
  float4 angle{};
  if (lane >= kFirstRotatedIndexLane) {
    const float* angles = p.rope + p.positions[token] * kRopeDim + 4 * (lane - kFirstRotatedIndexLane);
    angle = *reinterpret_cast<const float4*>(angles);
  }
  wait_for_previous_kernel();
  if (!there) return;
  if (with_hadamard && lane == 0 && p.form != QueryForm::kByteImage)
    p.out_weights[item] = p.weights[token * p.weights_stride + head];
  float x[4];
  if (p.q_bf16) {
    const uint2 u = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.q) + at);
    x[0] = low_bf16(u.x), x[1] = high_bf16(u.x), x[2] = low_bf16(u.y), x[3] = high_bf16(u.y);
  } else {
    const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(p.q) + at);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  }
  if (lane >= kFirstRotatedIndexLane) {
    rotate_pair(x[0], x[1], angle.x, angle.y);
    rotate_pair(x[2], x[3], angle.z, angle.w);
    if (p.q_bf16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = round_bf16(x[i]);
    }
  }
  if (with_hadamard) hadamard(x, lane);
  if (with_hadamard && p.format == kKeyFp32) {
    reinterpret_cast<float4*>(p.out)[int64_t(item) * 32 + lane] = make_float4(x[0], x[1], x[2], x[3]);
    return;
  }
  Scaled scaled;
  if constexpr (with_hadamard) {
    scaled = scale_blocks(x, p.format);
  } else {
    const uint32_t exponent = scale_unlimited(x, scaled);
    float weight = p.weights[token * p.weights_stride + head];
    scaled.scale = relative_scale(exponent, weight);
    if (lane == 0) p.out_weights[item] = weight;
  }
  if (with_hadamard && p.form == QueryForm::kByteImage) {
    const uint32_t exponent = bits_of(scaled.scale) >> 23, most = __reduce_max_sync(kAllLanes, exponent);
    const float factor = exp2_of_biased(127 + kByteShift + exponent - most);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= e4m3(round_e2m1(scaled.units[i]) * factor) << 8 * i;
    uint32_t* image = static_cast<uint32_t*>(p.out) + int64_t(token) * (kIndexHeads * kIndexDim / 2);
    image[word_in_image(kIndexHeads, head, lane / 8, lane % 8 / 2, lane % 2)] = word;
    if (lane == 0) p.out_weights[item] = p.weights[token * p.weights_stride + head] * exp2_of_biased(most - kByteShift);
    return;
  }
  // Places 2 j and 2 j + 1 of eight channels have channels j and j + 4, of which the adjacent lane has one.
  const bool upper = lane % 2;
  uint32_t pairs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float low = round_e2m1(scaled.units[i]) * scaled.scale, high = round_e2m1(scaled.units[i + 2]) * scaled.scale;
    const float other = __shfl_xor_sync(kAllLanes, upper ? low : high, 1);
    pairs[i] = bits_of_half2(upper ? __floats2half2_rn(other, high) : __floats2half2_rn(low, other));
  }
  if (p.form == QueryForm::kHalfImage) {
    constexpr int heads = with_hadamard ? kIndexHeads : kCandidateHeads;
    uint32_t* image = static_cast<uint32_t*>(p.out) + int64_t(token) * (heads * kIndexDim / 2);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) image[word_in_image(heads, head, lane / 8, lane % 8, upper)] = pairs[upper];
  } else {
    reinterpret_cast<uint2*>(p.out)[int64_t(item) * 32 + lane] = make_uint2(pairs[0], pairs[1]);
  }
}

}  // namespace

cudaError_t launch_query(const QueryParams& p, bool hadamard, bool sm_90, cudaStream_t stream) {
  const unsigned blocks = unsigned((int64_t(p.tokens) * p.heads + kWarps - 1) / kWarps);
  const auto kernel = hadamard ? query_kernel<true> : query_kernel<false>;
  // The next kernel's blocks need shared memory, and their beginning overlaps with this one.
  const cudaError_t error = prefer_shared_memory(kernel);
  if (error != cudaSuccess) return error;
  return launch(kernel, {dim3(blocks), 32 * kWarps, 0, 1, sm_90}, stream, p);
}

}  // namespace dsv4
