// Rounding and quantisation of single numbers, for the device and the host (tests compare the host version with torch).
//
// e4m3, e2m1: round to nearest even, saturating. e8m0: biased exponent of the smallest power of two that is at least x.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define DSV4_HD __host__ __device__ __forceinline__

namespace dsv4 {

DSV4_HD uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
#endif
}

DSV4_HD float float_of(uint32_t u) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(u);
#else
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
#endif
}

DSV4_HD float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

/// The larger magnitude of two numbers. Unlike fmaxf it returns a NaN if one is given: as integers, NaNs are above all
/// numbers.
DSV4_HD float max_magnitude(float a, float b) {
  const uint32_t u = bits_of(a) & 0x7fffffff, v = bits_of(b) & 0x7fffffff;
  return float_of(u > v ? u : v);
}

DSV4_HD uint32_t bits_of_bf162(__nv_bfloat162 pair) {
  uint32_t u;
  memcpy(&u, &pair, sizeof u);
  return u;
}

DSV4_HD __nv_bfloat162 bf162_of_bits(uint32_t u) {
  __nv_bfloat162 pair;
  memcpy(&pair, &u, sizeof pair);
  return pair;
}

/// Two floats as bf16, `low` in the low half.
DSV4_HD uint32_t pack_bf16(float low, float high) { return bits_of_bf162(__floats2bfloat162_rn(low, high)); }

/// The two floats of a pair packed by `pack_bf16`.
DSV4_HD float low_bf16(uint32_t pair) { return float_of(pair << 16); }
DSV4_HD float high_bf16(uint32_t pair) { return float_of(pair & 0xffff0000u); }

/// Rounds two floats to bf16 at once, which is faster than one by one.
DSV4_HD void round_pair(float& a, float& b) {
  const uint32_t pair = pack_bf16(a, b);
  a = low_bf16(pair), b = high_bf16(pair);
}

/// Biased exponent e with 2^(e-127) the smallest power of two that is at least x; x positive and normal (SPEC 2.4).
DSV4_HD uint32_t ceil_pow2_exponent(float x) {
  const uint32_t u = bits_of(x);
  return ((u >> 23) & 0xff) + ((u & 0x7fffff) != 0);
}

/// 2^(e-127) for 1 <= e <= 254.
DSV4_HD float exp2_of_biased(uint32_t e) { return float_of(e << 23); }

/// One float to e4m3, round to nearest even, saturating at 448.
DSV4_HD uint32_t e4m3(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
#else
  const uint32_t sign = (bits_of(x) >> 24) & 0x80;
  const uint32_t magnitude = bits_of(x) & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7f;   // NaN
  if (magnitude >= 0x43e00000) return sign | 0x7e;  // 448 and above
  if (magnitude < 0x3c800000) {                     // below 2^-6: the adder rounds to multiples of 2^-9
    return sign | (bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f));
  }
  const uint32_t odd = (magnitude >> 20) & 1;
  return sign | ((magnitude + 0x7ffff + odd - (120u << 23)) >> 20);
#endif
}

/// Two floats to e4m3, `low` in the low byte.
DSV4_HD uint32_t e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
#else
  return e4m3(low) | (e4m3(high) << 8);
#endif
}

/// Value of a non-negative e4m3 code.
DSV4_HD float e4m3_value(uint32_t code) { return code < 8 ? code * 0x1p-9f : float_of((code << 20) + (120u << 23)); }

/// One float to a 4-bit e2m1 code (sign in bit 3), round to nearest even, saturating at 6.
DSV4_HD uint32_t e2m1(float x) {
  const float a = float_of(bits_of(x) & 0x7fffffff);
  const uint32_t magnitude =
      (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return ((bits_of(x) >> 28) & 8) | magnitude;
}

/// Rounds to the e2m1 number that `e2m1` encodes. The addition rounds to multiples of 1/2 below 2, of 1 below 4, of 2
/// above.
DSV4_HD float round_e2m1(float x) {
  const float a = fminf(float_of(bits_of(x) & 0x7fffffff), 6.0f);
  const float adder = float_of((bits_of(fmaxf(a, 1.0f)) & 0x7f800000) + (22 << 23));
  return float_of(bits_of((a + adder) - adder) | (bits_of(x) & 0x80000000));
}

/// Value of an e2m1 code.
DSV4_HD float e2m1_value(uint32_t code) { return float_of((code & 8) << 28 | (code & 7) << 22) * 0x1p126f; }

/// Biased exponent of an FP8 entry's multiplier, from the largest magnitude of its 448 dims without RoPE (SPEC 2.4).
/// 255, the NaN of ue8m0, if it is not finite: the entry then reads as NaN.
DSV4_HD uint32_t row_exponent(float amax) {
  const uint32_t e = ceil_pow2_exponent(max_magnitude(amax, 1e-4f) * (1.0f / 448.0f));
  return e < 255 ? e : 255;
}

/// Biased exponent of an MXFP4 block's scale that is not stored (SPEC 11.6).
DSV4_HD uint32_t mxfp4_unlimited_exponent(float amax) {
  return ceil_pow2_exponent(fmaxf(amax, 6 * 0x1p-126f) * (1.0f / 6.0f));
}

/// The same for the bits of a bf16 number between 6 2^-126 and 6 2^125. A sixth of 1.m 2^e is at most 2^(e-2) up to 1.m
/// = 1.5, else 2^(e-1).
DSV4_HD uint32_t mxfp4_exponent_of_bf16(uint32_t amax) { return ((amax + 63) >> 7) - 2; }

/// Clamped to the powers of two that e4m3 represents: 2^-9 .. 2^8 (SPEC 2.5, 6.3).
DSV4_HD uint32_t mxfp4_exponent(float amax) {
  const uint32_t e = mxfp4_unlimited_exponent(amax);
  return e < 127 - 9 ? 127 - 9 : e > 127 + 8 ? 127 + 8 : e;
}

/// e4m3 code of an NVFP4 block's scale, at least the smallest positive e4m3 (SPEC 2.5). NaN for NaN.
DSV4_HD uint32_t nvfp4_scale(float amax) { return e4m3(max_magnitude(amax * (1.0f / 6.0f), 0x1p-9f)); }

}  // namespace dsv4
