// Host side of `index_query`, `index_score` and `index_select`, the three steps of index_topk: checks, then one launch
// each. They neither synchronise nor allocate memory.
#include "index.h"

#include <algorithm>
#include <utility>

#include "../ops.h"
#include "../tables.h"

namespace dsv4 {
namespace {

constexpr auto kBFloat = ScalarType::BFloat16;
constexpr auto kHalf = ScalarType::Half;
constexpr auto kFloat = ScalarType::Float;
constexpr auto kInt = ScalarType::Int;
constexpr auto kLong = ScalarType::Long;

struct Gpu {
  int processors = 0;
  bool sm_90 = false;   // or later
  bool hopper = false;  // can run code for sm_90a

  Gpu(const Checker& check, int device) {
    int major = 0;
    for (auto [value, of] : {std::pair{&major, cudaDevAttrComputeCapabilityMajor},
                             std::pair{&processors, cudaDevAttrMultiProcessorCount}}) {
      check.succeeded(cudaDeviceGetAttribute(value, of, device), "querying the GPU's attributes");
    }
    sm_90 = major >= 9, hopper = major == 9;
  }
};

/// Returns the form of prepared queries for FP4 keys. `kByteImage` and `kHalfImage` are for `launch_score_hopper`.
QueryForm form_of(const Gpu& gpu, KeyFormat format, int64_t heads) {
  if (!gpu.hopper || heads != kIndexHeads || format == kKeyFp32) return QueryForm::kPlaces;
  return format == kMxfp4 ? QueryForm::kByteImage : QueryForm::kHalfImage;
}

int device_of(const char* op, const char* name, const Tensor& t) {
  if (!t.is_cuda()) fail(op, ": ", name, " is ", describe(t), "; expected a CUDA tensor");
  return t.get_device_index();
}

/// Checks the common arguments of `index_score` and `index_select`.
void check_step(const Checker& check, const Tensor& scores, const Tensor& table, const Tensor& request,
                const Tensor& positions, int64_t tokens) {
  check.tensor("block_table", table, {kInt}, {kAny, kAny});
  check.dense("block_table", table, 1);
  check.tensor("token_request", request, {kInt}, {tokens});
  check.dense("token_request", request, 0);
  check.tensor("positions", positions, {kLong}, {tokens});
  check.dense("positions", positions, 0);
  check.tensor("scores", scores, {kFloat}, {kAny, kAny});
  check.dense("scores", scores, 1);
}

}  // namespace

void index_query(Tensor q, Tensor weights, Tensor positions, Tensor rope, int64_t key_format, Tensor out,
                 Tensor out_weights) {
  const int device = device_of("index_query", "q", q);
  const Checker check("index_query", device);
  check.tensor("q", q, {kBFloat, kFloat}, {kAny, kAny, kIndexDim});
  check.dense("q", q, 2);
  const int64_t tokens = q.size(0), heads = q.size(1), bytes = q.element_size();
  for (int64_t dim : {0, 1}) {
    if (q.size(dim) > 1 && q.stride(dim) % 4)
      fail("index_query: q is ", describe(q), "; expected strides that are multiples of 4");
  }
  if (reinterpret_cast<uintptr_t>(q.data_ptr()) % (4 * bytes)) {
    fail("index_query: q is at ", q.data_ptr(), "; expected a multiple of ", 4 * bytes, " bytes");
  }
  check.tensor("weights", weights, {kFloat}, {tokens, heads});
  check.dense("weights", weights, 1);
  check.tensor("positions", positions, {kLong}, {tokens});
  check.dense("positions", positions, 0);
  check.tensor("rope", rope, {kFloat}, {kAny, kRopeDim});
  check.dense("rope", rope, 0);
  check.aligned("rope", rope, 16);
  const KeyFormat format = key_format_of(check, key_format);
  check.tensor("out", out, {format == kKeyFp32 ? kFloat : kHalf}, {tokens, heads, kIndexDim});
  check.dense("out", out, 0);
  check.aligned("out", out, 16);
  check.tensor("out_weights", out_weights, {kFloat}, {tokens, heads});
  check.dense("out_weights", out_weights, 0);
  if (tokens * heads > INT32_MAX / 32) fail("index_query: q is ", describe(q), "; expected at most 2^26 heads in all");
  if (tokens * heads == 0) return;
  QueryParams p{};
  p.q = q.data_ptr(), p.token_stride = q.stride(0), p.head_stride = q.stride(1), p.q_bf16 = q.scalar_type() == kBFloat;
  p.positions = data<int64_t>(positions), p.rope = data<float>(rope), p.out = out.data_ptr();
  p.weights = data<float>(weights), p.weights_stride = weights.stride(0), p.out_weights = data<float>(out_weights);
  p.tokens = int(tokens), p.heads = int(heads);
  p.format = format;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Gpu gpu(check, device);
  p.form = form_of(gpu, format, heads);
  check.succeeded(launch_query(p, gpu.sm_90, current_stream(device)), "the launch for ", tokens, " tokens of ", heads,
                  " heads");
}

void index_score(Tensor query, Tensor weights, Tensor index_keys, Tensor block_table, Tensor token_request,
                 Tensor positions, int64_t key_format, int64_t top, Tensor scores) {
  const int device = device_of("index_score", "query", query);
  const Checker check("index_score", device);
  const KeyFormat format = key_format_of(check, key_format);
  const KeyTable keys = key_table(check, "index_keys", index_keys, format, kKeysPerBlock);
  const bool fp4 = format != kKeyFp32;
  check.tensor("query", query, {fp4 ? kHalf : kFloat}, {kAny, kAny, kIndexDim});
  check.dense("query", query, 0);
  check.aligned("query", query, 16);
  const int64_t tokens = query.size(0), heads = query.size(1);
  if (heads > kIndexHeads)
    fail("index_score: query is ", describe(query), "; expected at most ", kIndexHeads, " heads");
  check.tensor("weights", weights, {kFloat}, {tokens, heads});
  check.dense("weights", weights, 0);
  check_step(check, scores, block_table, token_request, positions, tokens);
  if (scores.size(0) < tokens)
    fail("index_score: scores is ", describe(scores), "; expected at least ", tokens, " rows");
  if (tokens == 0 || scores.size(1) == 0) return;
  ScoreParams p{};
  p.query = query.data_ptr(), p.weights = data<float>(weights);
  p.keys = keys.base, p.block_bytes = keys.block_bytes;
  p.table = data<int32_t>(block_table), p.table_stride = block_table.stride(0);
  p.request = data<int32_t>(token_request), p.positions = data<int64_t>(positions);
  p.scores = data<float>(scores), p.scores_stride = scores.stride(0);
  p.tokens = int(tokens), p.heads = int(heads), p.top = int(top), p.requests = int(block_table.size(0));
  p.width = int(std::min(scores.size(1), block_table.size(1) * kKeysPerBlock));
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Gpu gpu(check, device);
  const QueryForm form = form_of(gpu, format, heads);
  if (form != QueryForm::kPlaces) check.aligned("weights", weights, 8);
  const cudaError_t launched = form == QueryForm::kPlaces
                                   ? launch_score(p, fp4, gpu.sm_90, gpu.processors, current_stream(device))
                                   : launch_score_hopper(p, form, gpu.processors, current_stream(device));
  check.succeeded(launched, "the launch for ", tokens, " tokens of ", heads, " heads, ", p.width, " keys each");
}

void index_select(Tensor scores, Tensor block_table, Tensor token_request, Tensor positions, Tensor rows) {
  const int device = device_of("index_select", "rows", rows);
  const Checker check("index_select", device);
  check.tensor("rows", rows, {kInt}, {kAny, kAny});
  check.dense("rows", rows, 1);
  const int64_t tokens = rows.size(0);
  check_step(check, scores, block_table, token_request, positions, tokens);
  if (scores.size(1) > 0 && scores.size(0) < tokens) {
    fail("index_select: scores is ", describe(scores), "; expected at least ", tokens, " rows, or no columns");
  }
  if (scores.size(1) > kIndexEntries)
    fail("index_select: scores is ", describe(scores), "; expected at most ", kIndexEntries, " columns");
  if (tokens == 0 || rows.size(1) == 0) return;
  SelectParams p{};
  p.scores = data<float>(scores), p.scores_stride = scores.stride(0);
  p.table = data<int32_t>(block_table), p.table_stride = block_table.stride(0);
  p.request = data<int32_t>(token_request), p.positions = data<int64_t>(positions);
  p.rows = data<int32_t>(rows), p.rows_stride = rows.stride(0);
  p.tokens = int(tokens), p.top = int(rows.size(1));
  p.width = int(std::min(scores.size(1), block_table.size(1) * kKeysPerBlock));
  p.aligned = reinterpret_cast<uintptr_t>(scores.data_ptr()) % 16 == 0 && (tokens == 1 || scores.stride(0) % 4 == 0);
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Gpu gpu(check, device);
  check.succeeded(launch_select(p, gpu.sm_90, gpu.processors, current_stream(device)), "the launch for ", tokens,
                  " tokens, ", p.top, " of ", p.width, " each");
}

}  // namespace dsv4
