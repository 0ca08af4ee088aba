// index_query: RoPE, Hadamard transform and FP4 rounding of the index queries of a step (SPEC 2.5, 4.1). Eight lanes
// prepare a head of a token, a warp four heads. Lane j of a head has channels 32 c + 4 j .. 32 c + 4 j + 3 of each
// block c of 32 channels. Four of the seven stages of the transform then need no exchange between lanes, and the lane's
// words of an image are adjacent.
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
constexpr int kHeadLanes = 8, kBlockHeads = 32 * kWarps / kHeadLanes;
constexpr int kScaled = 32, kScales = kIndexDim / kScaled;  // channels of an MXFP4 block, blocks of a head
// Without the transform the largest scale of a head is stored as 2^kHalfShift. A block below 2^-kHalfRange of it is 0.
constexpr int kHalfShift = 8, kHalfRange = 40;

/// A lane's channels of a head: [c][i] is channel 32 c + 4 j + i.
using Channels = float[kScales][4];
/// The same in bf16, [c][i] has channels 2 i and 2 i + 1 of those.
using Pairs = __nv_bfloat162[kScales][2];

/// Orthonormal Hadamard transform (Sylvester order). Its sums have the order of `hadamard` for a vector per warp.
__device__ __forceinline__ void hadamard(Channels& x, int j) {
#pragma unroll
  for (int c = 0; c < kScales; ++c) add_and_subtract(x[c][0], x[c][1], x[c][2], x[c][3]);
#pragma unroll
  for (int step = 1; step < kHeadLanes; step *= 2) {
    const float sign = j & step ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4 * kScales; ++i)
      x[i / 4][i % 4] = fmaf(sign, x[i / 4][i % 4], __shfl_xor_sync(kAllLanes, x[i / 4][i % 4], step));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) add_and_subtract(x[0][i], x[1][i], x[2][i], x[3][i]);
#pragma unroll
  for (int i = 0; i < 4 * kScales; ++i) x[i / 4][i % 4] *= kHadamardScale;
}

/// Returns the biased exponents of the head's MXFP4 scales, limited to those of keys with the Hadamard transform.
template <bool with_hadamard>
__device__ __forceinline__ void scale_exponents(const Pairs& pairs, uint32_t (&exponents)[kScales]) {
  constexpr float least = with_hadamard ? 0x1p-9f : 0x1p-126f, most = with_hadamard ? 0x1p8f : 0x1p125f;
#pragma unroll
  for (int c = 0; c < kScales; c += 2) {
    const __nv_bfloat162 a = __hmax2(__habs2(pairs[c][0]), __habs2(pairs[c][1])),
                         b = __hmax2(__habs2(pairs[c + 1][0]), __habs2(pairs[c + 1][1]));
    __nv_bfloat162 amax = __hmax2(__lows2bfloat162(a, b), __highs2bfloat162(a, b));  // of blocks c and c + 1
#pragma unroll
    for (int step = 1; step < kHeadLanes; step *= 2) amax = __hmax2(amax, __shfl_xor_sync(kAllLanes, amax, step));
    // The first number is the result if all are NaN.
    amax = __hmin2(__hmax2(amax, __float2bfloat162_rn(6 * least)), __float2bfloat162_rn(6 * most));
    exponents[c] = mxfp4_exponent_of_bf16(bits_of_bf162(amax) & 0xffff);
    exponents[c + 1] = mxfp4_exponent_of_bf16(bits_of_bf162(amax) >> 16);
  }
}

/// Rounds like round_e2m1, in multiples of `unit`, a power of two. bf16 has eight significant bits, so adding 64 times
/// the largest power of two in a number leaves two of its own.
__device__ __forceinline__ __nv_bfloat162 round_pair_e2m1(__nv_bfloat162 x, __nv_bfloat162 unit) {
  const __nv_bfloat162 magnitude = __hmin2(__habs2(x), __hmul2(unit, __float2bfloat162_rn(6.0f)));
  const __nv_bfloat162 power = bf162_of_bits(bits_of_bf162(__hmax2(magnitude, unit)) & 0x7f807f80);
  const __nv_bfloat162 sum = __hfma2(power, __float2bfloat162_rn(64.0f), magnitude);
  const __nv_bfloat162 rounded = __hfma2(power, __float2bfloat162_rn(-64.0f), sum);
  return bf162_of_bits(bits_of_bf162(rounded) | (bits_of_bf162(x) & 0x80008000));
}

/// Rounds a head to MXFP4 and divides it by 2^(base - 127), a power of two for its `form`. Returns `base`.
template <bool with_hadamard>
__device__ __forceinline__ uint32_t round_mxfp4(Pairs& pairs, QueryForm form) {
  uint32_t exponents[kScales];
  scale_exponents<with_hadamard>(pairs, exponents);
  const uint32_t most = max(max(exponents[0], exponents[1]), max(exponents[2], exponents[3]));
  uint32_t base = 127;
  if constexpr (!with_hadamard)
    base = max(most, uint32_t(kHalfShift + 1)) - kHalfShift;
  else if (form == QueryForm::kByteImage)
    base = most - kByteShift;
  const __nv_bfloat162 gain = __float2bfloat162_rn(exp2_of_biased(254 - base));
#pragma unroll
  for (int c = 0; c < kScales; ++c) {
    const int exponent = max(127 + int(exponents[c]) - int(base), 127 + kHalfShift - kHalfRange);
    const __nv_bfloat162 unit = bf162_of_bits(exponent * 0x00800080u);
#pragma unroll
    for (int i = 0; i < 2; ++i) pairs[c][i] = round_pair_e2m1(__hmul2(pairs[c][i], gain), unit);
  }
  return base;
}

__device__ __forceinline__ void load(const QueryParams& p, int64_t at, Channels& x) {
#pragma unroll
  for (int c = 0; c < kScales; ++c) {
    if (p.q_bf16) {
      const uint2 u = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.q) + at + kScaled * c);
      x[c][0] = low_bf16(u.x), x[c][1] = high_bf16(u.x), x[c][2] = low_bf16(u.y), x[c][3] = high_bf16(u.y);
    } else {
      const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(p.q) + at + kScaled * c);
      x[c][0] = v.x, x[c][1] = v.y, x[c][2] = v.z, x[c][3] = v.w;
    }
  }
}

__device__ __forceinline__ void store_bytes(const QueryParams& p, const Pairs& pairs, int token, int head, int j) {
  uint32_t words[kScales];
#pragma unroll
  for (int c = 0; c < kScales; ++c) {
    const float2 low = __bfloat1622float2(pairs[c][0]), high = __bfloat1622float2(pairs[c][1]);
    words[c] = e4m3_pair(low.x, low.y) | e4m3_pair(high.x, high.y) << 16;
  }
  uint32_t* image = static_cast<uint32_t*>(p.out) + int64_t(token) * (kIndexHeads * kIndexDim / 2);
  *reinterpret_cast<uint4*>(image + word_in_image(kIndexHeads, head, 0, j / 2, j % 2)) =
      make_uint4(words[0], words[1], words[2], words[3]);
}

template <int image_heads>
__device__ __forceinline__ void store_halves(const QueryParams& p, const Pairs& pairs, int token, int head, int j) {
  // Places 2 k and 2 k + 1 of eight channels have channels k and k + 4, of which the adjacent lane has one: an even
  // lane stores those of k = 0 and 1, an odd lane of k = 2 and 3.
  const bool upper = j % 2;
  const uint32_t low = upper ? 0x1054 : 0x5410, high = low + 0x2222;  // halves of two words in the order of places
  uint32_t words[2][kScales];
#pragma unroll
  for (int c = 0; c < kScales; ++c) {
    const uint32_t first = bits_of_half2(__float22half2_rn(__bfloat1622float2(pairs[c][0]))),
                   second = bits_of_half2(__float22half2_rn(__bfloat1622float2(pairs[c][1])));
    const uint32_t own = upper ? second : first, other = __shfl_xor_sync(kAllLanes, upper ? first : second, 1);
    words[0][c] = __byte_perm(own, other, low), words[1][c] = __byte_perm(own, other, high);
  }
  if (p.form == QueryForm::kHalfImage) {
    uint32_t* image = static_cast<uint32_t*>(p.out) + int64_t(token) * (image_heads * kIndexDim / 2);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<uint4*>(image + word_in_image(image_heads, head, 0, j, i)) =
          make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
  } else {
    uint2* out = reinterpret_cast<uint2*>(p.out) + (int64_t(token) * p.heads + head) * (kIndexDim / 4) + j;
#pragma unroll
    for (int c = 0; c < kScales; ++c) out[kHeadLanes * c] = make_uint2(words[0][c], words[1][c]);
  }
}

template <bool with_hadamard>
__global__ void __launch_bounds__(32 * kWarps) query_kernel(const __grid_constant__ QueryParams p) {
  let_next_kernel_start();
  const int j = threadIdx.x % kHeadLanes;
  // All lanes take part in the exchanges: those without a head repeat the last one and store the same.
  const int token = blockIdx.x, head = min(int(blockIdx.y * kBlockHeads + threadIdx.x / kHeadLanes), p.heads - 1);
  const int64_t item = int64_t(token) * p.heads + head;
  // No kernel of a step's layers writes positions and angles, so they can be read before the wait.
  const float* angles = p.rope + p.positions[token] * kRopeDim + 4 * j;
  float4 angle[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) angle[i] = *reinterpret_cast<const float4*>(angles + kScaled * i);
  wait_for_previous_kernel();
  Channels x;
  load(p, token * p.token_stride + head * p.head_stride + 4 * j, x);
  const float weight = p.weights[token * p.weights_stride + head];
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // channels 64 .. 127
    float (&y)[4] = x[2 + i];
    rotate_pair(y[0], y[1], angle[i].x, angle[i].y);
    rotate_pair(y[2], y[3], angle[i].z, angle[i].w);
    if (p.q_bf16) round_pair(y[0], y[1]), round_pair(y[2], y[3]);
  }
  if (with_hadamard) hadamard(x, j);
  uint32_t base = 127;
  if (with_hadamard && p.format == kKeyFp32) {
    float4* out = reinterpret_cast<float4*>(p.out) + item * (kIndexDim / 4) + j;
#pragma unroll
    for (int c = 0; c < kScales; ++c) out[kHeadLanes * c] = make_float4(x[c][0], x[c][1], x[c][2], x[c][3]);
  } else {
    Pairs pairs;
    if (with_hadamard && p.format == kNvfp4) {
#pragma unroll
      for (int c = 0; c < kScales; ++c) {
        Scaled scaled = scale_blocks(x[c], kNvfp4);
#pragma unroll
        for (float& unit : scaled.units) unit = round_e2m1(unit) * scaled.scale;  // six significant bits
        pairs[c][0] = __floats2bfloat162_rn(scaled.units[0], scaled.units[1]);
        pairs[c][1] = __floats2bfloat162_rn(scaled.units[2], scaled.units[3]);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kScales; ++c) {
        pairs[c][0] = __floats2bfloat162_rn(x[c][0], x[c][1]);
        pairs[c][1] = __floats2bfloat162_rn(x[c][2], x[c][3]);
      }
      base = round_mxfp4<with_hadamard>(pairs, p.form);
    }
    if (with_hadamard && p.form == QueryForm::kByteImage)
      store_bytes(p, pairs, token, head, j);
    else
      store_halves<with_hadamard ? kIndexHeads : kCandidateHeads>(p, pairs, token, head, j);
  }
  if (j == 0) p.out_weights[item] = weight * exp2_of_biased(base);
}

}  // namespace

cudaError_t launch_query(const QueryParams& p, bool hadamard, bool sm_90, cudaStream_t stream) {
  const dim3 blocks(unsigned(p.tokens), unsigned((p.heads + kBlockHeads - 1) / kBlockHeads));
  const auto kernel = hadamard ? query_kernel<true> : query_kernel<false>;
  // The next kernel's blocks need shared memory, and their beginning overlaps with this one.
  const cudaError_t error = prefer_shared_memory(kernel);
  if (error != cudaSuccess) return error;
  return launch(kernel, {blocks, 32 * kWarps, 0, 1, sm_90}, stream, p);
}

}  // namespace dsv4
