// Per-channel softmax pooling of compressor rows (SPEC 3.2, 3.3). A thread owns four adjacent channels throughout.
#pragma once

#include <cfloat>

#include "../entries.cuh"

namespace dsv4 {

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ void store4(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }

/// Loads projections. They are read once, so they bypass L1.
__device__ __forceinline__ float4 load4_once(const float* p) {
  float4 v;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ float4 splat(float x) { return make_float4(x, x, x, x); }
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 operator-(float4 a, float4 b) {
  return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
}
__device__ __forceinline__ float4 operator*(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float4 operator/(float4 a, float4 b) {
  return make_float4(a.x / b.x, a.y / b.y, a.z / b.z, a.w / b.w);
}
__device__ __forceinline__ float4 max4(float4 a, float4 b) {
  return make_float4(fmaxf(a.x, b.x), fmaxf(a.y, b.y), fmaxf(a.z, b.z), fmaxf(a.w, b.w));
}

/// e^x for x <= 0. Flushes subnormal results to 0, which saves the instructions for them.
__device__ __forceinline__ float exp_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}
__device__ __forceinline__ float4 exp4(float4 a) {
  return make_float4(exp_flushed(a.x), exp_flushed(a.y), exp_flushed(a.z), exp_flushed(a.w));
}

/// Softmax state over the rows seen so far: running maximum, sum of weights, weighted sum. All are finite, also when
/// empty.
struct Pool {
  float4 peak, sum, acc;

  __device__ __forceinline__ static Pool empty() { return {splat(-FLT_MAX), splat(0), splat(0)}; }
  __device__ __forceinline__ float4 result() const { return acc / sum; }
};

/// Loads the state of an open window from an online compressor state, at the channels of a thread.
__device__ __forceinline__ Pool load_pool(const float* compressor_state) {
  return {load4(compressor_state), load4(compressor_state + kEntryDim), load4(compressor_state + 2 * kEntryDim)};
}

__device__ __forceinline__ void store_pool(float* compressor_state, const Pool& pool) {
  store4(compressor_state, pool.peak), store4(compressor_state + kEntryDim, pool.sum),
      store4(compressor_state + 2 * kEntryDim, pool.acc);
}

/// Adds `rows` rows at once. A row with z = -inf and k = 0 contributes nothing.
template <int rows>
__device__ __forceinline__ void add_rows(Pool& pool, const float4 (&k)[rows], const float4 (&z)[rows]) {
  float4 peak = pool.peak;
#pragma unroll
  for (int i = 0; i < rows; ++i) peak = max4(peak, z[i]);
  const float4 keep = exp4(pool.peak - peak);
  pool.sum = pool.sum * keep, pool.acc = pool.acc * keep;
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    const float4 weight = exp4(z[i] - peak);
    pool.sum = pool.sum + weight, pool.acc = pool.acc + weight * k[i];
  }
  pool.peak = peak;
}

/// Adds the rows of another pool.
__device__ __forceinline__ void add_pool(Pool& pool, const Pool& other) {
  const float4 peak = max4(pool.peak, other.peak);
  const float4 keep = exp4(pool.peak - peak), weight = exp4(other.peak - peak);
  pool.sum = pool.sum * keep + other.sum * weight;
  pool.acc = pool.acc * keep + other.acc * weight;
  pool.peak = peak;
}

}  // namespace dsv4
