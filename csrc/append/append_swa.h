// Parameters and launch of the append_swa kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dsv4 {

struct AppendSwaParams {
  const void* raw_kv;  // [tokens, nope + rope] bf16
  int64_t kv_stride;   // elements
  const int32_t *request_slots, *positions;
  int tokens, nope, rope;
  // The ring [slots, ring_rows, ...] as separate views. Strides in bytes.
  uint8_t *fp8, *rotated, *inv;
  int64_t fp8_slot, fp8_entry, rotated_slot, rotated_row, inv_slot, inv_row;
  int ring_rows;
  int inv_bytes;  // equal exponent bytes per entry
  int32_t *pos, *head;
  int64_t pos_slot;  // elements
};

cudaError_t launch_append_swa(const AppendSwaParams& params, cudaStream_t stream);

}  // namespace dsv4
