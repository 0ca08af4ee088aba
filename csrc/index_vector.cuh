// Operations of index keys, which index queries share in part: RoPE, Hadamard transform, FP4 (SPEC 2.1, 2.5). A warp
// holds a vector of 128 channels, lane i has channels 4 i .. 4 i + 3.
#pragma once

#include "entries.cuh"

namespace dsv4 {

constexpr int kFirstRotatedIndexLane = 16;  // channels 64 .. 127

/// Rotates (even, odd) by (cos, sin). Each product is rounded as in the reference.
__device__ __forceinline__ void rotate_pair(float& even, float& odd, float cos, float sin) {
  const float e = __fsub_rn(__fmul_rn(even, cos), __fmul_rn(odd, sin));
  odd = __fadd_rn(__fmul_rn(odd, cos), __fmul_rn(even, sin));
  even = e;
}

constexpr float kHadamardScale = 0.08838834764831845f;  // 128^-0.5

/// Two stages of a Hadamard transform.
__device__ __forceinline__ void add_and_subtract(float& x0, float& x1, float& x2, float& x3) {
  const float a = x0 + x1, b = x0 - x1, c = x2 + x3, d = x2 - x3;
  x0 = a + c, x1 = b + d, x2 = a - c, x3 = b - d;
}

/// Orthonormal Hadamard transform (Sylvester order).
__device__ __forceinline__ void hadamard(float (&x)[4], int lane) {
  add_and_subtract(x[0], x[1], x[2], x[3]);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = fmaf(sign, x[i], __shfl_xor_sync(kAllLanes, x[i], step));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] *= kHadamardScale;
}

/// Four channels as multiples of their block's scale.
struct Scaled {
  float units[4];
  float scale;
  uint32_t scale_code;  // e4m3
};

/// Rounds the warp's vector to bf16 and divides it by its scales. `format` is kMxfp4 or kNvfp4.
__device__ __forceinline__ Scaled scale_blocks(const float (&x)[4], int format) {
  Scaled result;
  float rounded[4], amax = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    rounded[i] = round_bf16(x[i]);
    amax = fmaxf(amax, fabsf(rounded[i]));
  }
  amax = group_max<4>(amax);  // blocks of 16
  if (format == kMxfp4) {
    const uint32_t exponent = mxfp4_exponent(group_max<8>(amax));  // blocks of 32
    result.scale = exp2_of_biased(exponent);
    result.scale_code = e4m3(result.scale);
    const float inverse = exp2_of_biased(254 - exponent);
#pragma unroll
    for (int i = 0; i < 4; ++i) result.units[i] = rounded[i] * inverse;
  } else {
    result.scale_code = nvfp4_scale(amax);
    result.scale = e4m3_value(result.scale_code);
#pragma unroll
    for (int i = 0; i < 4; ++i) result.units[i] = rounded[i] / result.scale;
  }
  return result;
}

/// Four channels in FP4 and the e4m3 code of their scale.
struct Fp4 {
  uint32_t code[4];
  uint32_t scale_code;
};

__device__ __forceinline__ Fp4 quantise(const float (&x)[4], int format) {
  const Scaled scaled = scale_blocks(x, format);
  Fp4 result;
  result.scale_code = scaled.scale_code;
#pragma unroll
  for (int i = 0; i < 4; ++i) result.code[i] = e2m1(scaled.units[i]);
  return result;
}

}  // namespace dsv4
