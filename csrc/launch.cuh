// Launches that overlap with their predecessor (programmatic dependent launch, sm_90 and later).
//
// Such a kernel may start while the stream's previous kernel still runs. Every block must call
// `wait_for_previous_kernel` before it writes global memory or reads what the previous kernel may write, and before it
// returns. Only then does the kernel's completion imply that all earlier kernels have completed.
#pragma once

#include <cuda_runtime.h>

namespace dsv4 {

/// Allows the next kernel to start. The earlier the call, the more of that start is hidden.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
  let_next_kernel_start();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets blocks of `kernel` and of the next or previous kernel share an SM, even if one needs much more shared memory:
/// an SM divides its memory into L1 and shared memory anew only when it runs no block.
template <typename Params>
cudaError_t prefer_shared_memory(void (*kernel)(Params)) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

struct LaunchShape {
  dim3 grid;
  unsigned threads;
  unsigned shared_bytes;
  unsigned cluster;  // blocks in x per cluster; 1: no cluster
  bool overlap;      // overlap with the previous kernel
};

/// The runtime's form of a shape.
struct LaunchConfig {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};

  LaunchConfig(const LaunchShape& shape, cudaStream_t stream) {
    config.gridDim = shape.grid;
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (shape.overlap) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.cluster > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {shape.cluster, 1, 1};
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;  // `config` points to `attributes`
};

template <typename Params>
cudaError_t launch(void (*kernel)(Params), const LaunchShape& shape, cudaStream_t stream, const Params& params) {
  const LaunchConfig with(shape, stream);
  return cudaLaunchKernelEx(&with.config, kernel, params);
}

constexpr unsigned kPortableCluster = 8;  // blocks of a cluster that every GPU with clusters supports

/// Sets `count` to the number of clusters of this shape that the GPU can run at once, as each needs SMs of one GPC. 0
/// if it does not support clusters of this size.
template <typename Params>
cudaError_t count_clusters_at_once(void (*kernel)(Params), LaunchShape shape, int& count) {
  count = 0;
  shape.overlap = false;
  const bool portable = shape.cluster <= kPortableCluster;
  cudaError_t error = cudaSuccess;
  if (!portable) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  const LaunchConfig with(shape, nullptr);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&count, kernel, &with.config);
  if (error == cudaSuccess || portable) return error;
  cudaGetLastError();  // no later check should report it
  count = 0;
  return cudaSuccess;
}

}  // namespace dsv4
