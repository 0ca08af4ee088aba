// KV and key buffers (entries.h) from tensors, with the checks that all ops share.
#pragma once

#include "entries.h"
#include "tensors.h"

namespace dsv4 {

inline ScalarType dtype_of(KVFormat format) {
  return format == kFp8 ? ScalarType::Byte : format == kBf16 ? ScalarType::BFloat16 : ScalarType::Float;
}

inline KVFormat kv_format_of(const Checker& check, int64_t code) {
  if (code < kFp8 || code > kFp32) check.fail("kv_format is ", code, "; expected 0 (fp8), 1 (bf16) or 2 (fp32)");
  return KVFormat(code);
}

inline KeyFormat key_format_of(const Checker& check, int64_t code) {
  if (code < kMxfp4 || code > kKeyFp32)
    check.fail("key_format is ", code, "; expected 0 (mxfp4), 1 (nvfp4) or 2 (fp32)");
  return KeyFormat(code);
}

/// `blocks`, `entries_per_block`: kAny for any number.
inline KVBuffer kv_buffer(const Checker& check, const char* name, const Tensor& t, KVFormat format, int64_t blocks,
                          int64_t entries_per_block) {
  check.tensor(name, t, {dtype_of(format)}, {blocks, entries_per_block, row_width(format)});
  check.dense(name, t, 1);
  check.aligned(name, t, 16);
  return {data<uint8_t>(t), t.stride(0) * int64_t(t.element_size()), int(t.size(1)), format};
}

inline KeyTable key_table(const Checker& check, const char* name, const Tensor& t, KeyFormat format,
                          int64_t keys_per_block) {
  const ScalarType dtype = format == kKeyFp32 ? ScalarType::Float : ScalarType::Byte;
  check.tensor(name, t, {dtype}, {kAny, keys_per_block, key_width(format)});
  check.dense(name, t, 1);
  check.aligned(name, t, 16);
  return {data<uint8_t>(t), t.stride(0) * int64_t(t.element_size()), int(t.size(1)), format};
}

}  // namespace dsv4
