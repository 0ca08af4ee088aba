// Host side of `append`: checks the arguments and fills the kernel's parameters. It neither synchronises nor allocates
// memory on the device.
#include "append.h"

#include <algorithm>

#include "../ops.h"
#include "../tables.h"
#include "check.h"

namespace dsv4 {
namespace {

/// Programmatic dependent launch needs sm_90 or later.
bool can_overlap(int device) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

/// Returns true while a CUDA graph is recorded on the stream.
bool is_recorded(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive;
}

/// Checks and stores the projections, weights and batch of any layer.
void take_step(const AppendChecker& check, AppendParams& p, const Tensor& kv, const Tensor& kv_norm, const Tensor& rope,
               const Tensor& slots, const Tensor& prefix_lens, const Tensor& query_start, const Tensor& token_request,
               const Tensor& out_loc, const std::optional<Tensor>& staging_slots) {
  check.projection("kv", kv, {kBFloat, kFloat}, p.tokens, kEntryDim);
  p.kv = kv.data_ptr(), p.kv_stride = kv.stride(0), p.kv_bf16 = is_bf16(kv);
  check.weight("kv_norm", kv_norm, {kBFloat, kFloat}, {kEntryDim});
  p.kv_norm = kv_norm.data_ptr(), p.kv_norm_bf16 = is_bf16(kv_norm);
  check.weight("rope", rope, {kFloat}, {kAny, kRopeDim});
  p.rope = data<float>(rope);

  check.vector("slots", slots, kInt, p.requests);
  check.vector("prefix_lens", prefix_lens, kInt, p.requests);
  check.vector("query_start", query_start, kInt, p.requests + 1);
  check.vector("token_request", token_request, kInt, p.tokens);
  check.vector("out_loc", out_loc, kLong, p.tokens);
  p.slots = data<int32_t>(slots), p.prefix_lens = data<int32_t>(prefix_lens);
  p.query_start = data<int32_t>(query_start), p.token_request = data<int32_t>(token_request);
  p.out_loc = data<int64_t>(out_loc);
  if (staging_slots) check.vector("staging_slots", *staging_slots, kInt, p.tokens);
  p.staging_slots = data<int32_t>(staging_slots);
}

/// Checks and stores the window ring, the workspace of a prefill step and the position tables.
void take_window(const AppendChecker& check, AppendParams& p, KVFormat format, int64_t positions, const Tensor& ring,
                 const std::optional<Tensor>& window, const std::optional<Tensor>& swa_pos,
                 const std::optional<Tensor>& swa_head, const std::optional<Tensor>& tail_len) {
  p.ring = kv_buffer(check, "ring", ring, format, kAny, kAny);
  const int64_t slots = ring.size(0), rows = ring.size(1);
  if (rows < kWindow || rows * positions > UINT32_MAX) {
    check.fail("ring is ", describe(ring), "; expected at least ", kWindow, " rows per slot and, with ", positions,
               " positions of rope, at most ", UINT32_MAX / positions);
  }
  p.ring_reciprocal = uint32_t((uint64_t(1) << 32) / rows + ((uint64_t(1) << 32) % rows != 0));
  if (window) p.window = kv_buffer(check, "window", *window, format, 1, p.tokens + int64_t(kWindow) * p.requests);
  if (swa_pos) {
    check.tensor("swa_pos", *swa_pos, {kInt}, {slots, rows});
    check.dense("swa_pos", *swa_pos, 1);
    p.swa_pos = data<int32_t>(swa_pos), p.swa_pos_stride = swa_pos->stride(0);
  }
  if (swa_head) check.vector("swa_head", *swa_head, kInt, slots);
  if (tail_len) check.vector("tail_len", *tail_len, kInt, slots);
  p.swa_head = data<int32_t>(swa_head), p.tail_len = data<int32_t>(tail_len);
}

/// Returns the rings of a CSA compressor state, identified by its rows per slot.
CsaCompressorState csa_compressor_state(const AppendChecker& check, const Tensor& compressor_state) {
  for (const CsaCompressorState& rings : kCsaCompressorStates) {
    if (compressor_state.size(1) == rows_of(rings)) return rings;
  }
  check.fail("compressor_state is ", describe(compressor_state), "; expected 24, 48 or 64 rows per slot for ratio 4");
}

/// Checks and stores the main compressor of a CSA or HCA layer, its state and its entries. Returns the kind of the
/// layer, which depends on the form of the compressor state.
LayerKind take_compressor(const AppendChecker& check, AppendParams& p, KVFormat format, int64_t ratio, int64_t slots,
                          const std::optional<Tensor>& kv_score, const std::optional<Tensor>& entry_norm,
                          const std::optional<Tensor>& ape, const std::optional<Tensor>& compressor_state,
                          const std::optional<Tensor>& entries) {
  const bool csa = ratio == kCsaRatio;
  const char* when = csa ? "for ratio 4" : "for ratio 128";
  const Tensor& score = check.given("kv_score", kv_score, when);
  const Tensor& norm = check.given("entry_norm", entry_norm, when);
  const Tensor& bias = check.given("ape", ape, when);
  const Tensor& state = check.given("compressor_state", compressor_state, when);
  const Tensor& table = check.given("entries", entries, when);
  const int64_t streams = csa ? 2 : 1;
  check.projection("kv_score", score, {kFloat}, p.tokens, 2 * streams * kEntryDim);
  p.kv_score = data<float>(score), p.kv_score_stride = score.stride(0);
  check.weight("entry_norm", norm, {kBFloat, kFloat}, {kEntryDim});
  p.entry_norm = norm.data_ptr(), p.entry_norm_bf16 = is_bf16(norm);
  check.weight("ape", bias, {kFloat}, {ratio, streams * kEntryDim});
  p.ape = data<float>(bias);
  p.entries = kv_buffer(check, "entries", table, format, csa ? kAny : 1, kAny);

  check.tensor("compressor_state", state, {kFloat}, {slots, kAny, kAny});
  const LayerKind kind = csa                            ? LayerKind::kCsa
                         : state.size(1) == kHcaRawRows ? LayerKind::kHcaRaw
                                                        : LayerKind::kHcaOnline;
  if (csa) {
    p.csa = csa_compressor_state(check, state);
  } else if (kind == LayerKind::kHcaOnline) {
    if (state.size(1) == 0 || state.size(1) % kHcaOnlineRows) {
      check.fail("compressor_state is ", describe(state),
                 "; expected 256 rows per slot or a multiple of 3 for ratio 128");
    }
    p.hca_state_copies = int(state.size(1)) / kHcaOnlineRows;
  }
  check.tensor("compressor_state", state, {kFloat}, {slots, state.size(1), csa ? kEntryDim + kIndexDim : kEntryDim});
  check.dense("compressor_state", state, 1);
  check.aligned("compressor_state", state, 16);
  p.compressor_state = data<float>(state), p.compressor_state_stride = state.stride(0);
  return kind;
}

/// Checks and stores the indexer's compressor of a CSA layer and its keys.
void take_indexer(const AppendChecker& check, AppendParams& p, KeyFormat format,
                  const std::optional<Tensor>& index_kv_score, const std::optional<Tensor>& index_norm,
                  const std::optional<Tensor>& index_ape, const std::optional<Tensor>& index_keys) {
  const Tensor& score = check.given("index_kv_score", index_kv_score, "for ratio 4");
  const Tensor& norm = check.given("index_norm", index_norm, "for ratio 4");
  const Tensor& bias = check.given("index_ape", index_ape, "for ratio 4");
  const Tensor& keys = check.given("index_keys", index_keys, "for ratio 4");
  check.projection("index_kv_score", score, {kFloat}, p.tokens, 4 * kIndexDim);
  p.index_kv_score = data<float>(score), p.index_kv_score_stride = score.stride(0);
  check.weight("index_norm", norm, {kBFloat, kFloat}, {kIndexDim});
  p.index_norm = norm.data_ptr(), p.index_norm_bf16 = is_bf16(norm);
  check.weight("index_ape", bias, {kFloat}, {kCsaRatio, 2 * kIndexDim});
  p.index_ape = data<float>(bias);
  p.index_keys = key_table(check, "index_keys", keys, format, kAny);
}

/// A decode step has the same number of tokens of each request, at most the number that ring and compressor state
/// support.
void check_decode(const AppendChecker& check, const AppendParams& p, LayerKind kind) {
  if (p.requests == 0 ? p.tokens > 0 : p.tokens % p.requests > 0) {
    check.fail(p.tokens, " tokens for ", p.requests,
               " requests without `window`; expected the same number for each. A step with chunks needs `window`");
  }
  const int each = p.requests ? p.tokens / p.requests : 0;
  const auto at_most = [&](const char* name, int most) {
    if (each > most) {
      check.fail(each, " tokens of each request without `window`, but ", name, " supports at most ", most,
                 ". Construct the cache with draft_tokens ", each);
    }
  };
  at_most("ring", draft_tokens_of_ring(p.ring.entries_per_block));
  if (kind == LayerKind::kCsa) at_most("compressor_state", draft_tokens_of(p.csa));
  if (kind == LayerKind::kHcaOnline) at_most("compressor_state", draft_tokens_of_state_copies(p.hca_state_copies));
  if (kind == LayerKind::kHcaRaw) at_most("compressor_state", 1);
}

}  // namespace

void append(Tensor kv, std::optional<Tensor> kv_score, std::optional<Tensor> index_kv_score, Tensor kv_norm,
            std::optional<Tensor> entry_norm, std::optional<Tensor> index_norm, std::optional<Tensor> ape,
            std::optional<Tensor> index_ape, Tensor rope, double eps, int64_t ratio, int64_t kv_format,
            int64_t key_format, Tensor slots, Tensor prefix_lens, Tensor query_start, Tensor token_request,
            Tensor out_loc, std::optional<Tensor> staging_slots, Tensor ring, std::optional<Tensor> compressor_state,
            std::optional<Tensor> entries, std::optional<Tensor> index_keys, std::optional<Tensor> window,
            std::optional<Tensor> swa_pos, std::optional<Tensor> swa_head, std::optional<Tensor> tail_len) {
  if (!kv.is_cuda() || kv.dim() != 2) fail("append: kv is ", describe(kv), "; expected [tokens, 512] on a CUDA device");
  const int device = kv.get_device_index();
  const AppendChecker check("append", device);
  const int64_t tokens = kv.size(0), requests = slots.numel();
  if (ratio != 0 && ratio != kCsaRatio && ratio != kHcaRatio) check.fail("ratio is ", ratio, "; expected 0, 4 or 128");
  const KVFormat rows = kv_format_of(check, kv_format);
  const KeyFormat keys = key_format_of(check, key_format);

  AppendParams p{};
  p.eps = float(eps), p.tokens = int(tokens), p.requests = int(requests);
  take_step(check, p, kv, kv_norm, rope, slots, prefix_lens, query_start, token_request, out_loc, staging_slots);
  take_window(check, p, rows, std::max<int64_t>(rope.size(0), 1), ring, window, swa_pos, swa_head, tail_len);
  LayerKind kind = LayerKind::kSwa;
  if (ratio)
    kind = take_compressor(check, p, rows, ratio, ring.size(0), kv_score, entry_norm, ape, compressor_state, entries);
  if (kind == LayerKind::kCsa) take_indexer(check, p, keys, index_kv_score, index_norm, index_ape, index_keys);
  if (!window) check_decode(check, p, kind);

  if (tokens == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  // Outside a graph the preceding kernel may have written the batch, so launches must not overlap (append.h).
  const cudaError_t launched = window
                                   ? launch_append_prefill(p, kind, can_overlap(device), stream)
                                   : launch_append_decode(p, kind, can_overlap(device) && is_recorded(stream), stream);
  check.succeeded(launched, "the launch for ", tokens, " tokens of ", requests, " requests, ratio ", ratio,
                  window ? ", prefill" : ", decode");
}

}  // namespace dsv4
