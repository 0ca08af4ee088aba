// Host side of `copy_state`, `gather_tables` and `swap_blocks`: checks, then one launch each.
#include "move.h"

#include <algorithm>

#include "../ops.h"
#include "../tensors.h"

namespace dsv4 {
namespace {

constexpr int64_t kMaxGridY = 65535;

int64_t bytes_of(const Tensor& t, int64_t first_dim) {
  int64_t bytes = int64_t(t.element_size());
  for (int64_t dim = first_dim; dim < t.dim(); ++dim) bytes *= t.size(dim);
  return bytes;
}

int64_t stride_bytes(const Tensor& t, int64_t dim) { return t.stride(dim) * int64_t(t.element_size()); }
uint64_t address(const Tensor& t) { return reinterpret_cast<uint64_t>(t.data_ptr()); }

}  // namespace

void copy_state(Tensor src, Tensor dst, std::vector<Tensor> tensors, std::optional<Tensor> rejected) {
  const int device = src.is_cuda() ? src.get_device_index() : (tensors.empty() ? 0 : tensors[0].get_device_index());
  const Checker check("copy_state", device);
  const int64_t pairs = src.numel();
  for (auto [name, t] : {std::pair{"src", &src}, {"dst", &dst}}) {
    check.tensor(name, *t, {ScalarType::Int}, {pairs});
    check.dense(name, *t, 0);
  }
  if (pairs > kMaxGridY) fail("copy_state: ", pairs, " pairs of slots; expected at most ", kMaxGridY);
  if (rejected) check.tensor("rejected", *rejected, {ScalarType::Int}, {1});
  int64_t slots = INT32_MAX;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    if (!t.is_cuda() || t.get_device_index() != device || t.dim() < 2) {
      fail("copy_state: tensors[", i, "] is ", describe(t), "; expected [layers, slots, ...] on cuda:", device);
    }
    check.dense("a tensor", t, 2);
    slots = std::min(slots, t.size(1));
  }
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  if (rejected) {  // -1: all bytes are ones
    check.succeeded(cudaMemsetAsync(rejected->data_ptr(), 0xff, sizeof(int32_t), stream), "clearing `rejected`");
  }
  if (pairs == 0) return;
  CopyStateParams p{};
  p.src = data<int32_t>(src), p.dst = data<int32_t>(dst), p.pairs = int(pairs), p.slots = int(slots);
  p.rejected = data<int32_t>(rejected);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    StateTensor& s = p.tensors[p.count++];
    s.base = data<uint8_t>(t), s.layers = int(t.size(0));
    s.layer_stride = stride_bytes(t, 0), s.slot_stride = stride_bytes(t, 1), s.bytes = bytes_of(t, 2);
    s.width = access_width(address(t) | s.layer_stride | s.slot_stride | s.bytes);
    if (p.count == kMaxStateTensors || i + 1 == tensors.size()) {
      check.succeeded(launch_copy_state(p, stream), "the launch for ", pairs, " pairs of slots in ", p.count,
                      " tensors");
      p.count = 0;
    }
  }
}

void gather_tables(Tensor requests, Tensor seq_lens, Tensor state_slot_of_request, Tensor req_to_token,
                   Tensor state_slots, Tensor block_table) {
  const int device = state_slots.is_cuda() ? state_slots.get_device_index() : requests.get_device_index();
  const Checker check("gather_tables", device);
  const int64_t count = requests.numel();
  check.tensor("requests", requests, {ScalarType::Long, ScalarType::Int}, {count});
  check.dense("requests", requests, 0);
  check.tensor("seq_lens", seq_lens, {ScalarType::Long, ScalarType::Int}, {count});
  check.dense("seq_lens", seq_lens, 0);
  check.tensor("state_slot_of_request", state_slot_of_request, {ScalarType::Int}, {kAny});
  check.dense("state_slot_of_request", state_slot_of_request, 0);
  check.tensor("req_to_token", req_to_token, {ScalarType::Int}, {kAny, kAny});
  check.dense("req_to_token", req_to_token, 1);
  check.tensor("state_slots", state_slots, {ScalarType::Int}, {kAny});
  check.dense("state_slots", state_slots, 0);
  check.tensor("block_table", block_table, {ScalarType::Int}, {kAny, kAny});
  check.dense("block_table", block_table, 1);
  const int64_t room = std::min({state_slots.size(0), block_table.size(0), kMaxGridY});
  if (count > room) fail("gather_tables: ", count, " requests; expected at most ", room);
  if (count == 0) return;
  GatherParams p{};
  p.requests = requests.data_ptr(), p.long_requests = requests.scalar_type() == ScalarType::Long;
  p.seq_lens = seq_lens.data_ptr(), p.long_lens = seq_lens.scalar_type() == ScalarType::Long;
  p.state_slot = data<int32_t>(state_slot_of_request), p.req_to_token = data<int32_t>(req_to_token);
  p.token_stride = req_to_token.stride(0), p.table_stride = block_table.stride(0);
  p.state_slots = data<int32_t>(state_slots), p.block_table = data<int32_t>(block_table);
  p.count = int(count);
  p.columns = int(std::min(block_table.size(1), (req_to_token.size(1) + kBlockTokens - 1) / kBlockTokens));
  const torch::stable::accelerator::DeviceGuard guard(device);
  check.succeeded(launch_gather_tables(p, current_stream(device)), "the launch for ", count, " requests");
}

namespace {

/// Returns the row ids. Checks that they are distinct and inside `host`.
std::vector<int64_t> checked_rows(const Tensor& rows, int64_t size) {
  std::vector<int64_t> ids(rows.numel());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = data<int64_t>(rows)[int64_t(i) * rows.stride(0)];
  std::vector<int64_t> sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) fail("swap_blocks: host row ", *twice, " is listed twice");
  for (int64_t id : {sorted.front(), sorted.back()}) {
    if (id < 0 || id >= size) fail("swap_blocks: host row ", id, " is not in 0..", size - 1);
  }
  return ids;
}

/// Returns the device's address of `host`, which is device memory or pinned host memory.
uint8_t* as_device_sees(const Checker& check, const Tensor& host) {
  if (host.is_cuda()) return data<uint8_t>(host);
  cudaPointerAttributes attributes{};
  check.succeeded(cudaPointerGetAttributes(&attributes, host.data_ptr()), "looking up host ", describe(host));
  if (attributes.type != cudaMemoryTypeHost) {
    fail("swap_blocks: host is ", describe(host), " in pageable memory; expected pinned memory (pin_memory=True)");
  }
  return static_cast<uint8_t*>(attributes.devicePointer);
}

}  // namespace

void swap_blocks(std::vector<Tensor> pools, Tensor host, Tensor blocks, Tensor rows, bool to_host,
                 std::vector<int64_t> offsets) {
  if (!rows.is_cpu() || rows.scalar_type() != ScalarType::Long || rows.dim() != 1) {
    fail("swap_blocks: rows is ", describe(rows), "; expected Long [n] on the CPU");
  }
  const int64_t count = rows.numel();
  if (count == 0 || pools.empty()) return;
  if (!pools[0].is_cuda()) fail("swap_blocks: pools[0] is ", describe(pools[0]), "; expected a CUDA tensor");
  const int device = pools[0].get_device_index();
  const Checker check("swap_blocks", device);
  const torch::stable::accelerator::DeviceGuard guard(device);
  check.tensor("blocks", blocks, {ScalarType::Long}, {count});
  if (host.dim() != 2 || host.scalar_type() != ScalarType::Byte ||
      (host.is_cuda() && host.get_device_index() != device))
    fail("swap_blocks: host is ", describe(host), "; expected Byte [rows, bytes], pinned or on cuda:", device);
  check.dense("host", host, 1);
  SwapParams p{};
  p.host = as_device_sees(check, host), p.host_stride = host.stride(0);
  p.blocks = data<int64_t>(blocks), p.blocks_stride = blocks.stride(0), p.to_host = to_host;
  p.over_link = !host.is_cuda();
  const uint64_t base = reinterpret_cast<uint64_t>(p.host);
  if (offsets.size() != pools.size()) fail("swap_blocks: ", offsets.size(), " offsets for ", pools.size(), " pools");
  std::vector<SwapPool> parts;
  for (size_t i = 0; i < pools.size(); ++i) {
    const Tensor& t = pools[i];
    if (!t.is_cuda() || t.get_device_index() != device || t.dim() < 1) {
      fail("swap_blocks: pools[", i, "] is ", describe(t), "; expected [blocks, ...] on cuda:", device);
    }
    check.dense("a pool", t, 1);
    SwapPool s{data<uint8_t>(t), stride_bytes(t, 0), bytes_of(t, 1), t.size(0), offsets[i], 0, 0, 0};
    if (s.offset < 0 || s.offset > host.size(1) - s.bytes) {
      fail("swap_blocks: bytes ", s.offset, "..", s.offset + s.bytes, " are not within host rows of ", host.size(1),
           " bytes");
    }
    s.width = access_width(address(t) | (base + s.offset) | s.stride | p.host_stride | s.bytes);
    const int64_t piece = int64_t(32) * kSwapLoads * s.width;
    s.pieces = int((s.bytes + piece - 1) / piece);
    parts.push_back(s);
  }
  const std::vector<int64_t> ids = checked_rows(rows, host.size(0));

  // All checks on the host are done; blocks are copied from here on.
  const cudaStream_t stream = current_stream(device);
  for (size_t part = 0; part < parts.size(); part += kMaxSwapPools) {
    p.pool_count = int(std::min<size_t>(kMaxSwapPools, parts.size() - part));
    std::copy_n(parts.begin() + part, p.pool_count, p.pools);
    int64_t pieces = 0;  // of one row; the pieces of a launch are counted in 32 bits
    for (int k = 0; k < p.pool_count; ++k) pieces += p.pools[k].pieces;
    const size_t most = size_t(std::clamp<int64_t>(INT32_MAX / std::max<int64_t>(pieces, 1), 1, kMaxSwapRows));
    for (size_t i = 0; i < ids.size(); i += most) {
      p.count = int(std::min(most, ids.size() - i));
      for (int k = 0, end = 0; k < p.pool_count; ++k) p.pools[k].end = end += p.count * p.pools[k].pieces;
      for (int k = 0; k < p.count; ++k) p.row[k] = int32_t(ids[i + k]);
      p.blocks = data<int64_t>(blocks) + int64_t(i) * p.blocks_stride;
      check.succeeded(launch_swap_blocks(p, stream), "the launch for ", p.count, " blocks of ", p.pool_count, " pools ",
                      to_host ? "to" : "from", " host ", describe(host));
    }
  }
}

}  // namespace dsv4
