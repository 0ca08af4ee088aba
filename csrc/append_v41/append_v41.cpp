// Host side of `append_v41` and `append_v41_keys`: checks the arguments and fills the kernels' parameters.
#include "append_v41.h"

#include "../append/check.h"
#include "../geometry.h"
#include "../ops.h"
#include "../tables.h"

namespace dsv4 {
namespace {

V41Table v41_table(const Checker& check, const char* name, const Tensor& t, int64_t blocks, int64_t entries_per_block,
                   int64_t row_bytes) {
  check.tensor(name, t, {ScalarType::Byte}, {blocks, entries_per_block, row_bytes});
  check.dense(name, t, 1);
  check.aligned(name, t, 16);
  return {data<uint8_t>(t), t.stride(0), int(t.size(1))};
}

/// Checks and stores the common arguments of both ops: their inputs `name` of `width` columns, the norm, and the batch.
AppendChecker take_inputs(const char* op, V41Inputs& p, const char* name, const Tensor& inputs, int64_t width,
                          const char* norm_name, const Tensor& norm, const Tensor& rope, double eps,
                          const Tensor& slots, const Tensor& prefix_lens, const Tensor& query_start,
                          const Tensor& token_request, const Tensor& out_loc) {
  if (!inputs.is_cuda() || inputs.dim() != 2) {
    fail(op, ": ", name, " is ", describe(inputs), "; expected [tokens, ", width, "] on a CUDA device");
  }
  const AppendChecker check(op, inputs.get_device_index());
  const int64_t tokens = inputs.size(0), requests = slots.numel();
  check.vector("slots", slots, kInt, requests);
  check.vector("prefix_lens", prefix_lens, kInt, requests);
  check.vector("query_start", query_start, kInt, requests + 1);
  check.vector("token_request", token_request, kInt, tokens);
  check.vector("out_loc", out_loc, kLong, tokens);
  p.batch = {data<int32_t>(slots),
             data<int32_t>(prefix_lens),
             data<int32_t>(query_start),
             data<int32_t>(token_request),
             data<int64_t>(out_loc),
             int(tokens),
             int(requests)};
  check.projection(name, inputs, {kBFloat}, tokens, width);
  p.inputs = inputs.data_ptr(), p.inputs_stride = inputs.stride(0);
  check.weight(norm_name, norm, {kBFloat, kFloat}, {width});
  p.norm = norm.data_ptr(), p.norm_bf16 = is_bf16(norm);
  check.weight("rope", rope, {kFloat}, {kAny, kRopeDim});
  p.rope = data<float>(rope), p.eps = float(eps);
  return check;
}

/// Checks and stores the compressor of a layer that writes entries.
void take_compressor(const AppendChecker& check, AppendV41Params& p, int64_t ratio, int64_t slots,
                     const std::optional<Tensor>& kv_score, const std::optional<Tensor>& entry_norm,
                     const std::optional<Tensor>& compressor_state, const std::optional<Tensor>& entries,
                     const std::optional<Tensor>& latents) {
  const char* when = ratio == 1 ? "for ratio 1" : "for ratio 2";
  const Tensor& inputs = check.given("kv_score", kv_score, when);
  const Tensor& norm = check.given("entry_norm", entry_norm, when);
  const Tensor& table = check.given("entries", entries, when);
  const Tensor& out = check.given("latents", latents, when);
  check.projection("kv_score", inputs, {ratio == 1 ? kBFloat : kFloat}, p.batch.tokens, ratio * kEntryDim);
  p.kv_score = inputs.data_ptr(), p.kv_score_stride = inputs.stride(0);
  check.weight("entry_norm", norm, {kBFloat, kFloat}, {kEntryDim});
  p.entry_norm = norm.data_ptr(), p.entry_norm_bf16 = is_bf16(norm);
  p.entries = v41_table(check, "entries", table, kAny, kBlockTokens / ratio, kV41EntryBytes + kV41EntryScales);
  check.projection("latents", out, {kBFloat}, p.batch.tokens, kEntryDim);
  p.latents = data<uint16_t>(out), p.latents_stride = out.stride(0);
  if (ratio == 1) return;
  const Tensor& state = check.given("compressor_state", compressor_state, when);
  check.tensor("compressor_state", state, {kFloat}, {slots, kAny, 2 * kEntryDim});
  check.dense("compressor_state", state, 1);
  check.aligned("compressor_state", state, 16);
  if (state.size(1) == 0) check.fail("compressor_state is ", describe(state), "; expected at least one row a slot");
  p.compressor_state = data<float>(state), p.compressor_state_stride = state.stride(0),
  p.compressor_state_rows = int(state.size(1));
}

/// A decode step has the same number of tokens of each request, at most the number that ring and compressor state
/// support (dsv4_sglang/model/v41.py).
void check_decode(const AppendChecker& check, const AppendV41Params& p, int64_t ratio) {
  const int tokens = p.batch.tokens, requests = p.batch.requests;
  if (requests == 0 ? tokens > 0 : tokens % requests > 0) {
    check.fail(tokens, " tokens for ", requests, " requests without `window`; expected the same number for each");
  }
  const int each = requests ? tokens / requests : 0;
  const auto at_most = [&](const char* name, int rows, int most) {
    if (each > most) {
      check.fail(each, " tokens of each request without `window`, but ", name, " has ", rows,
                 " rows per slot, for at most ", most);
    }
  };
  at_most("ring", p.ring.entries_per_block, draft_tokens_of_ring(p.ring.entries_per_block));
  if (ratio == 2)
    at_most("compressor_state", p.compressor_state_rows,
            p.compressor_state_rows == 1 ? 1 : 2 * p.compressor_state_rows - 1);
}

}  // namespace

void append_v41(Tensor kv, std::optional<Tensor> kv_score, Tensor kv_norm, std::optional<Tensor> entry_norm,
                Tensor rope, double eps, int64_t ratio, Tensor slots, Tensor prefix_lens, Tensor query_start,
                Tensor token_request, Tensor out_loc, std::optional<Tensor> staging_slots, Tensor ring,
                std::optional<Tensor> compressor_state, std::optional<Tensor> entries, std::optional<Tensor> latents,
                std::optional<Tensor> window) {
  AppendV41Params p{};
  const AppendChecker check = take_inputs("append_v41", p, "kv", kv, kEntryDim, "kv_norm", kv_norm, rope, eps, slots,
                                          prefix_lens, query_start, token_request, out_loc);
  const int64_t tokens = kv.size(0);
  if (ratio < 0 || ratio > 2) check.fail("ratio is ", ratio, "; expected 0, 1 or 2");
  if (staging_slots) check.vector("staging_slots", *staging_slots, kInt, tokens);
  p.staging_slots = data<int32_t>(staging_slots);
  constexpr int64_t row_bytes = kV41RowBytes + kV41RowScales;
  p.ring = v41_table(check, "ring", ring, kAny, kAny, row_bytes);
  if (ring.size(1) < kWindow) {
    check.fail("ring is ", describe(ring), "; expected at least ", kWindow, " rows per slot");
  }
  if (window) {
    p.window = v41_table(check, "window", *window, 1, tokens + int64_t(kWindow) * p.batch.requests, row_bytes);
  }
  if (ratio) take_compressor(check, p, ratio, ring.size(0), kv_score, entry_norm, compressor_state, entries, latents);
  if (!window) check_decode(check, p, ratio);

  if (tokens == 0) return;
  const int device = kv.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  check.succeeded(launch_append_v41(p, int(ratio), current_stream(device)), "the launch for ", tokens, " tokens of ",
                  p.batch.requests, " requests, ratio ", ratio, window ? ", prefill" : ", decode");
}

void append_v41_keys(Tensor keys, Tensor index_norm, Tensor rope, double eps, int64_t ratio, Tensor slots,
                     Tensor prefix_lens, Tensor query_start, Tensor token_request, Tensor out_loc, Tensor index_keys) {
  AppendV41KeysParams p{};
  const AppendChecker check = take_inputs("append_v41_keys", p, "keys", keys, kIndexDim, "index_norm", index_norm, rope,
                                          eps, slots, prefix_lens, query_start, token_request, out_loc);
  if (ratio < 1 || ratio > 2) check.fail("ratio is ", ratio, "; expected 1 or 2");
  p.ratio = int(ratio);
  p.index_keys = key_table(check, "index_keys", index_keys, kMxfp4, kBlockTokens / ratio);

  if (p.batch.tokens == 0) return;
  const int device = keys.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  check.succeeded(launch_append_v41_keys(p, current_stream(device)), "the launch for ", p.batch.tokens, " tokens of ",
                  p.batch.requests, " requests, ratio ", ratio);
}

}  // namespace dsv4
