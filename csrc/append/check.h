// Argument checks that all append ops share.
#pragma once

#include "../tensors.h"

namespace dsv4 {

inline constexpr auto kBFloat = ScalarType::BFloat16;
inline constexpr auto kFloat = ScalarType::Float;
inline constexpr auto kInt = ScalarType::Int;
inline constexpr auto kLong = ScalarType::Long;

class AppendChecker : public Checker {
 public:
  using Checker::Checker;

  /// A matrix of projections [tokens, columns] with any row stride.
  void projection(const char* name, const Tensor& t, std::initializer_list<ScalarType> types, int64_t tokens,
                  int64_t columns) const {
    tensor(name, t, types, {tokens, columns});
    dense(name, t, 1);
    aligned(name, t, 16);
  }

  void weight(const char* name, const Tensor& t, std::initializer_list<ScalarType> types,
              std::initializer_list<int64_t> shape) const {
    tensor(name, t, types, shape);
    dense(name, t, 0);
    aligned(name, t, 16);
  }

  void vector(const char* name, const Tensor& t, ScalarType type, int64_t size) const {
    tensor(name, t, {type}, {size});
    dense(name, t, 0);
  }
};

inline bool is_bf16(const Tensor& t) { return t.scalar_type() == kBFloat; }

}  // namespace dsv4
