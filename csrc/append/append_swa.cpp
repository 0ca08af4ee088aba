// Host side of `append_swa`: checks the arguments and fills the kernel's parameters.
#include "append_swa.h"

#include "../entries.h"
#include "../geometry.h"
#include "../ops.h"
#include "../tensors.h"

namespace dsv4 {
namespace {

constexpr int64_t kMaxHeadDim = kEntryDim;  // four channels per thread

}  // namespace

void append_swa(Tensor raw_kv, Tensor request_slots, Tensor positions, Tensor swa_fp8, Tensor swa_rope, Tensor swa_inv,
                Tensor swa_pos, Tensor swa_head, int64_t rope_dim) {
  if (!raw_kv.is_cuda() || raw_kv.dim() != 2) {
    fail("append_swa: raw_kv is ", describe(raw_kv), "; expected [tokens, head_dim] on a CUDA device");
  }
  const int device = raw_kv.get_device_index();
  const Checker check("append_swa", device);
  const int64_t tokens = raw_kv.size(0), head_dim = raw_kv.size(1), nope = head_dim - rope_dim;
  if (head_dim > kMaxHeadDim || head_dim % 4 || rope_dim % 4 || rope_dim < 0 || nope <= 0) {
    fail("append_swa: head_dim is ", head_dim, " and rope_dim ", rope_dim,
         "; expected multiples of 4, rope_dim < head_dim <= ", kMaxHeadDim);
  }
  check.tensor("raw_kv", raw_kv, {ScalarType::BFloat16}, {tokens, head_dim});
  check.dense("raw_kv", raw_kv, 1);
  check.aligned("raw_kv", raw_kv, 8);
  for (auto [name, t] : {std::pair{"request_slots", &request_slots}, {"positions", &positions}}) {
    check.tensor(name, *t, {ScalarType::Int}, {tokens});
    check.dense(name, *t, 0);
  }
  if (swa_fp8.dim() != 3) fail("append_swa: swa_fp8 is ", describe(swa_fp8), "; expected [slots, rows, ", nope, "]");
  const int64_t slots = swa_fp8.size(0), rows = swa_fp8.size(1);
  if (rows < kWindow)
    fail("append_swa: swa_fp8 is ", describe(swa_fp8), "; expected at least ", kWindow, " rows per slot");
  check.tensor("swa_fp8", swa_fp8, {ScalarType::Byte}, {slots, rows, nope});
  check.tensor("swa_rope", swa_rope, {ScalarType::BFloat16}, {slots, rows, rope_dim});
  check.tensor("swa_inv", swa_inv, {ScalarType::Float8_e8m0fnu}, {slots, rows});
  check.tensor("swa_pos", swa_pos, {ScalarType::Int}, {slots, rows});
  check.tensor("swa_head", swa_head, {ScalarType::Int}, {slots});
  check.dense("swa_fp8", swa_fp8, 2);
  check.dense("swa_rope", swa_rope, 2);
  check.dense("swa_pos", swa_pos, 1);
  check.dense("swa_head", swa_head, 0);
  check.aligned("swa_fp8", swa_fp8, 4);
  check.aligned("swa_rope", swa_rope, 8);
  if (swa_fp8.stride(1) % 4 || swa_rope.stride(1) % 4) {
    fail("append_swa: swa_fp8 and swa_rope have row strides ", swa_fp8.stride(1), " and ", swa_rope.stride(1),
         "; expected multiples of 4");
  }
  // An entry has 8 exponent bytes, one of which is in the view. FlashMLA reads one per tile, so all get the same value.
  const int64_t strip = swa_inv.stride(1);
  if (strip != 1 && strip != kScaleBytes) {
    fail("append_swa: swa_inv is ", describe(swa_inv), "; expected its rows 1 or ", kScaleBytes, " bytes apart");
  }
  if (tokens == 0) return;

  AppendSwaParams p{};
  p.raw_kv = raw_kv.data_ptr(), p.kv_stride = raw_kv.stride(0);
  p.request_slots = data<int32_t>(request_slots), p.positions = data<int32_t>(positions);
  p.ring_rows = int(rows);
  p.tokens = int(tokens), p.nope = int(nope), p.rope = int(rope_dim);
  p.fp8 = data<uint8_t>(swa_fp8), p.fp8_slot = swa_fp8.stride(0), p.fp8_entry = swa_fp8.stride(1);
  p.rotated = data<uint8_t>(swa_rope), p.rotated_slot = 2 * swa_rope.stride(0), p.rotated_row = 2 * swa_rope.stride(1);
  p.inv = data<uint8_t>(swa_inv), p.inv_slot = swa_inv.stride(0), p.inv_row = strip, p.inv_bytes = int(strip);
  p.pos = data<int32_t>(swa_pos), p.pos_slot = swa_pos.stride(0), p.head = data<int32_t>(swa_head);
  const torch::stable::accelerator::DeviceGuard guard(device);
  check.succeeded(launch_append_swa(p, current_stream(device)), "the launch for ", tokens, " tokens");
}

}  // namespace dsv4
