// Instructions without a C++ equivalent: tensor-core products, clusters of thread blocks, dynamic shared memory; and
// counts as types.
#pragma once

#include <cstdint>
#include <type_traits>

namespace dsv4 {

/// An argument whose value is known when the code is compiled, so that loops up to it are unrolled.
template <int n>
using Count = std::integral_constant<int, n>;

/// The thread block's dynamic shared memory.
__device__ __forceinline__ void* shared_memory() {
  extern __shared__ uint4 shared_bytes[];
  return shared_bytes;
}

/// The first multiple of 1024 bytes in it.
__device__ __forceinline__ void* shared_memory_1024() {
  char* p = static_cast<char*>(shared_memory());
  return p + (-uint32_t(__cvta_generic_to_shared(p)) & 1023);
}

/// d += a b: a [16, 16] row by row, b [16, 8] column by column, fp16; d [16, 8] fp32.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
#else
  return 0;
#endif
}

/// Returns the address in block `rank` of the cluster that corresponds to `p` in this block's shared memory.
template <typename T>
__device__ __forceinline__ T* of_block(T* p, int rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t address;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(p)), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  return p;
#endif
}

/// A cluster barrier in two halves: writes before `arrive` are visible after `wait`.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

}  // namespace dsv4
