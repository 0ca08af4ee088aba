// Instructions of sm_90a: warpgroup products (wgmma), bulk copies, barriers in shared memory.
#pragma once

#include <cstdint>

namespace dsv4 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to bulk copies.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_and_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
/// Waits until the phase of this parity is complete.
__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

/// Copies to shared memory; `barrier` counts the bytes. Addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

/// Returns the descriptor of an operand of 64 rows at a shared address: rows of 128 bytes, 16-byte pieces swizzled as
/// in `word_in_image`.
__device__ __forceinline__ uint64_t operand_in_shared(uint32_t address) {
  constexpr uint64_t eight_rows = 1024, swizzle_128 = 1;
  return (eight_rows >> 4 | swizzle_128 << 30) << 32 | (address >> 4 | 1 << 16);
}

/// Returns the descriptor of an operand `bytes` after that of another one.
__device__ __forceinline__ uint64_t after(uint64_t operand, int bytes) { return operand + bytes / 16; }

/// Sets the number of registers of a thread of this warpgroup.
template <int count>
__device__ __forceinline__ void limit_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void extend_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `groups` committed groups are in flight. `d` are sums that are then complete.
template <int groups>
__device__ __forceinline__ void products_wait(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Warpgroup product d = (add ? d : 0) + a b: a [64, 32 bytes] in registers, b [32 bytes, 64] in shared memory, d [64,
// 64] fp32.
#define DSV4_MULTIPLY_64X64(shape_and_types, last)                                                                   \
  asm volatile(                                                                                                      \
      "{\n"                                                                                                          \
      ".reg .pred add;\n"                                                                                            \
      "setp.ne.b32 add, %37, 0;\n"                                                                                   \
      "wgmma.mma_async.sync.aligned." shape_and_types                                                                \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, " \
      "add, 1, 1" last                                                                                               \
      ";\n"                                                                                                          \
      "}\n"                                                                                                          \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),  \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),       \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),      \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add ? 1 : 0))

/// Product over 16 fp16 numbers.
template <bool add>
__device__ __forceinline__ void multiply_halves(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  DSV4_MULTIPLY_64X64("m64n64k16.f32.f16.f16", ", 0");
}

/// Product over 32 e4m3 numbers.
template <bool add>
__device__ __forceinline__ void multiply_bytes(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  DSV4_MULTIPLY_64X64("m64n64k32.f32.e4m3.e4m3", "");
}

#endif

}  // namespace dsv4
