// Argument checks for LibTorch's stable tensors. Every error message names the op, the tensor, its actual and its
// expected properties.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace dsv4 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline std::string list(const int64_t* values, int64_t n) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < n; ++i) text << (i ? ", " : "") << values[i];
  text << ']';
  return text.str();
}

/// "Float [3, 512] with strides [512, 1] on cuda:0"
inline std::string describe(const Tensor& t) {
  std::ostringstream text;
  text << torch::headeronly::toString(t.scalar_type()) << ' ' << list(t.sizes().data(), t.dim()) << " with strides "
       << list(t.strides().data(), t.dim()) << " on ";
  if (t.is_cuda()) {
    text << "cuda:" << t.get_device_index();
  } else {
    text << (t.is_cpu() ? "cpu" : "another device");
  }
  return text.str();
}

/// Any size.
constexpr int64_t kAny = -1;

/// The checks of one op's tensors; all CUDA tensors must be on the device of the first one.
class Checker {
 public:
  Checker(const char* op, int device) : op_(op), device_(device) {}

  /// Device, dtype (one of `types`) and shape of a CUDA tensor.
  void tensor(const char* name, const Tensor& t, std::initializer_list<ScalarType> types,
              std::initializer_list<int64_t> shape) const {
    bool ok = t.is_cuda() && t.get_device_index() == device_ && t.dim() == int64_t(shape.size());
    bool type_ok = false;
    for (ScalarType type : types) type_ok |= t.scalar_type() == type;
    ok &= type_ok;
    int64_t dim = 0;
    for (int64_t size : shape) {
      if (ok && size != kAny) ok = t.size(dim) == size;
      ++dim;
    }
    if (ok) return;
    std::ostringstream expected;
    const char* separator = "";
    for (ScalarType type : types) expected << separator << torch::headeronly::toString(type), separator = " or ";
    expected << " [";
    separator = "";
    for (int64_t size : shape) {
      expected << separator;
      size == kAny ? expected << "any" : expected << size;
      separator = ", ";
    }
    fail(name, " is ", describe(t), "; expected ", expected.str(), "] on cuda:", device_);
  }

  /// Checks that dimensions from `first_dense` on are contiguous.
  void dense(const char* name, const Tensor& t, int64_t first_dense) const {
    int64_t expected = 1;
    for (int64_t dim = t.dim() - 1; dim >= first_dense; --dim) {
      if (t.size(dim) != 1 && t.stride(dim) != expected) {
        fail(name, " is ", describe(t), "; expected dimensions ", first_dense, " and up without gaps (stride ",
             expected, " in dimension ", dim, ")");
      }
      expected *= t.size(dim);
    }
  }

  /// Checks that the start and, with several dimensions, the stride of the first one are multiples of `bytes`.
  void aligned(const char* name, const Tensor& t, int64_t bytes) const {
    const bool start = reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0;
    if (start && (t.dim() == 1 || t.size(0) <= 1 || t.stride(0) * int64_t(t.element_size()) % bytes == 0)) return;
    fail(name, " is ", describe(t), " at ", t.data_ptr(), "; expected its start and its rows at multiples of ", bytes,
         " bytes");
  }

  const Tensor& given(const char* name, const std::optional<Tensor>& t, const char* when) const {
    if (!t) fail(name, " is missing; expected a tensor ", when);
    return *t;
  }

  void absent(const char* name, const std::optional<Tensor>& t, const char* when) const {
    if (t) fail(name, " is ", describe(*t), "; expected None ", when);
  }

  /// Throws if `error` is not success. `parts` name the operation, such as "the launch for ", 3, " tokens".
  template <typename... Parts>
  void succeeded(cudaError_t error, const Parts&... parts) const {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clears the error, or the next launch would report it
    fail(parts..., " failed: ", cudaGetErrorString(error), " (", cudaGetErrorName(error),
         "). Errors inside a kernel are reported by a later call; set CUDA_LAUNCH_BLOCKING=1 to find the kernel");
  }

  /// Throws an error whose message begins with the op's name.
  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    dsv4::fail(op_, ": ", parts...);
  }

 private:
  const char* op_;
  int device_;
};

inline cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

template <typename T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

template <typename T>
T* data(const std::optional<Tensor>& t) {
  return t ? static_cast<T*>(t->data_ptr()) : nullptr;
}

}  // namespace dsv4
