// Host side of `index_query`, `index_score` and `index_select`, the three steps of index_topk, and of the score and the
// select of candidate blocks and of the entries in them: checks, then one launch each. They neither synchronise nor
// allocate memory.
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

/// Returns the form of prepared queries. `kByteImage` and `kHalfImage` are for `launch_score_hopper`. Without the
/// Hadamard transform, e4m3 has too few exponents for the scales of a head.
QueryForm form_of(const Gpu& gpu, KeyFormat format, bool hadamard, int64_t heads) {
  if (!gpu.hopper || heads != (hadamard ? kIndexHeads : kCandidateHeads) || format == kKeyFp32)
    return QueryForm::kPlaces;
  return hadamard && format == kMxfp4 ? QueryForm::kByteImage : QueryForm::kHalfImage;
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

void index_query(Tensor q, Tensor weights, Tensor positions, Tensor rope, int64_t key_format, bool hadamard, Tensor out,
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
  if (!hadamard && format != kMxfp4) check.fail("key_format is ", key_format, "; expected 0 (mxfp4) without hadamard");
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
  p.form = form_of(gpu, format, hadamard, heads);
  check.succeeded(launch_query(p, hadamard, gpu.sm_90, current_stream(device)), "the launch for ", tokens,
                  " tokens of ", heads, " heads");
}

namespace {

/// The common parameters of the kernels that score. `keys_per_block` belongs to the ratio, `columns` to a row of scores
/// of all entries.
ScoreParams score_params(const Checker& check, const Tensor& query, const Tensor& weights, const Tensor& index_keys,
                         const Tensor& table, const Tensor& request, const Tensor& positions, KeyFormat format,
                         int64_t keys_per_block, int64_t most_heads, int64_t top, const Tensor& scores) {
  const KeyTable keys = key_table(check, "index_keys", index_keys, format, keys_per_block);
  check.tensor("query", query, {format == kKeyFp32 ? kFloat : kHalf}, {kAny, kAny, kIndexDim});
  check.dense("query", query, 0);
  check.aligned("query", query, 16);
  const int64_t tokens = query.size(0), heads = query.size(1);
  if (heads > most_heads) check.fail("query is ", describe(query), "; expected at most ", most_heads, " heads");
  check.tensor("weights", weights, {kFloat}, {tokens, heads});
  check.dense("weights", weights, 0);
  check_step(check, scores, table, request, positions, tokens);
  if (scores.size(0) < tokens) check.fail("scores is ", describe(scores), "; expected at least ", tokens, " rows");
  ScoreParams p{};
  p.query = query.data_ptr(), p.weights = data<float>(weights);
  p.keys = keys.base, p.block_bytes = keys.block_bytes;
  p.table = data<int32_t>(table), p.table_stride = table.stride(0);
  p.request = data<int32_t>(request), p.positions = data<int64_t>(positions);
  p.scores = data<float>(scores), p.scores_stride = scores.stride(0);
  p.tokens = int(tokens), p.heads = int(heads), p.top = int(top), p.requests = int(table.size(0));
  return p;
}

/// The common parameters of the kernels that select.
SelectParams select_params(const Tensor& scores, const Tensor& positions, const Tensor& rows) {
  SelectParams p{};
  p.scores = data<float>(scores), p.scores_stride = scores.stride(0);
  p.positions = data<int64_t>(positions);
  p.rows = data<int32_t>(rows), p.rows_stride = rows.stride(0);
  p.tokens = int(rows.size(0)), p.top = int(rows.size(1));
  p.aligned = reinterpret_cast<uintptr_t>(scores.data_ptr()) % 16 == 0 && (p.tokens == 1 || scores.stride(0) % 4 == 0);
  return p;
}

/// Returns the number of tokens of `rows` [tokens, most] int32. `scores` must have a row for each of them, or no
/// columns.
int64_t check_rows(const Checker& check, const char* name, const Tensor& rows, const Tensor& scores) {
  check.tensor(name, rows, {kInt}, {kAny, kAny});
  check.dense(name, rows, 1);
  const int64_t tokens = rows.size(0);
  check.tensor("scores", scores, {kFloat}, {kAny, kAny});
  check.dense("scores", scores, 1);
  if (scores.size(1) > 0 && scores.size(0) < tokens)
    check.fail("scores is ", describe(scores), "; expected at least ", tokens, " rows, or no columns");
  if (scores.size(1) > kIndexEntries)
    check.fail("scores is ", describe(scores), "; expected at most ", kIndexEntries, " columns");
  return tokens;
}

Ratio ratio_of(const Checker& check, int64_t ratio) {
  if (ratio != 1 && ratio != 2) check.fail("ratio is ", ratio, "; expected 1 or 2 in a selection of two levels");
  return {int(ratio - 1)};
}

CandidateLists lists_of(const Checker& check, int64_t ratio, const Tensor& blocks, int64_t tokens) {
  check.tensor("blocks", blocks, {kInt}, {tokens, kAny});
  check.dense("blocks", blocks, 1);
  return {ratio_of(check, ratio), data<int32_t>(blocks), blocks.stride(0), int(blocks.size(1))};
}

}  // namespace

void index_score(Tensor query, Tensor weights, Tensor index_keys, Tensor block_table, Tensor token_request,
                 Tensor positions, int64_t key_format, int64_t top, Tensor scores) {
  const int device = device_of("index_score", "query", query);
  const Checker check("index_score", device);
  const KeyFormat format = key_format_of(check, key_format);
  ScoreParams p = score_params(check, query, weights, index_keys, block_table, token_request, positions, format,
                               kKeysPerBlock, kIndexHeads, top, scores);
  if (p.tokens == 0 || scores.size(1) == 0) return;
  p.width = int(std::min(scores.size(1), block_table.size(1) * kKeysPerBlock));
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Gpu gpu(check, device);
  p.form = form_of(gpu, format, true, p.heads);
  if (p.form != QueryForm::kPlaces) check.aligned("weights", weights, 16);
  const cudaError_t launched =
      p.form == QueryForm::kPlaces
          ? launch_score(p, format != kKeyFp32, gpu.sm_90, gpu.processors, current_stream(device))
          : launch_score_hopper(p, gpu.processors, current_stream(device));
  check.succeeded(launched, "the launch for ", p.tokens, " tokens of ", p.heads, " heads, ", p.width, " keys each");
}

void index_score_blocks(Tensor query, Tensor weights, Tensor index_keys, Tensor block_table, Tensor token_request,
                        Tensor positions, int64_t ratio, int64_t top, bool newest, Tensor scores) {
  const int device = device_of("index_score_blocks", "query", query);
  const Checker check("index_score_blocks", device);
  CandidateScoreParams p{};
  static_cast<Ratio&>(p) = ratio_of(check, ratio);
  const int64_t keys_per_block = kBlockTokens / ratio;
  static_cast<ScoreParams&>(p) = score_params(check, query, weights, index_keys, block_table, token_request, positions,
                                              kMxfp4, keys_per_block, kCandidateHeads, top, scores);
  if (p.tokens == 0 || scores.size(1) == 0) return;
  p.width = int(std::min(scores.size(1) * kCandidateEntries, block_table.size(1) * keys_per_block));
  p.newest = newest;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Gpu gpu(check, device);
  p.form = form_of(gpu, kMxfp4, false, p.heads);
  if (p.form != QueryForm::kPlaces) check.aligned("weights", weights, 16);
  const bool prefill = p.tokens >= kManyTokens * p.requests;
  const cudaError_t launched = p.form != QueryForm::kPlaces && prefill
                                   ? launch_score_hopper(p, gpu.processors, current_stream(device))
                                   : launch_score(p, gpu.sm_90, gpu.processors, current_stream(device));
  check.succeeded(launched, "the launch for ", p.tokens, " tokens of ", p.heads, " heads, ", p.width, " keys each");
}

void index_score_listed(Tensor query, Tensor weights, Tensor index_keys, Tensor block_table, Tensor token_request,
                        Tensor positions, int64_t ratio, Tensor blocks, int64_t top, Tensor scores) {
  const int device = device_of("index_score_listed", "query", query);
  const Checker check("index_score_listed", device);
  ListedScoreParams p{};
  static_cast<CandidateLists&>(p) = lists_of(check, ratio, blocks, query.size(0));
  static_cast<ScoreParams&>(p) = score_params(check, query, weights, index_keys, block_table, token_request, positions,
                                              kMxfp4, kBlockTokens / ratio, kCandidateHeads, top, scores);
  p.width = kCandidateEntries * p.listed;
  if (scores.size(1) < p.width)
    check.fail("scores is ", describe(scores), "; expected at least ", p.width, " columns, ", kCandidateEntries,
               " for each of the blocks");
  if (p.tokens == 0 || p.width == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Gpu gpu(check, device);
  p.form = form_of(gpu, kMxfp4, false, p.heads);
  check.succeeded(launch_score(p, gpu.sm_90, gpu.processors, current_stream(device)), "the launch for ", p.tokens,
                  " tokens of ", p.heads, " heads, ", p.listed, " blocks each");
}

void index_select(Tensor scores, Tensor block_table, Tensor token_request, Tensor positions, Tensor rows) {
  const int device = device_of("index_select", "rows", rows);
  const Checker check("index_select", device);
  const int64_t tokens = check_rows(check, "rows", rows, scores);
  check_step(check, scores, block_table, token_request, positions, tokens);
  if (tokens == 0 || rows.size(1) == 0) return;
  SelectParams p = select_params(scores, positions, rows);
  p.table = data<int32_t>(block_table), p.table_stride = block_table.stride(0);
  p.request = data<int32_t>(token_request);
  p.width = int(std::min(scores.size(1), block_table.size(1) * kKeysPerBlock));
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Gpu gpu(check, device);
  check.succeeded(launch_select(p, gpu.sm_90, gpu.processors, current_stream(device)), "the launch for ", tokens,
                  " tokens, ", p.top, " of ", p.width, " each");
}

void index_select_blocks(Tensor scores, Tensor positions, int64_t ratio, Tensor blocks) {
  const int device = device_of("index_select_blocks", "blocks", blocks);
  const Checker check("index_select_blocks", device);
  const int64_t tokens = check_rows(check, "blocks", blocks, scores);
  check.tensor("positions", positions, {kLong}, {tokens});
  check.dense("positions", positions, 0);
  CandidateSelectParams p{};
  static_cast<Ratio&>(p) = ratio_of(check, ratio);
  if (tokens == 0 || blocks.size(1) == 0) return;
  static_cast<SelectParams&>(p) = select_params(scores, positions, blocks);
  p.width = int(scores.size(1));
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Gpu gpu(check, device);
  check.succeeded(launch_select(p, gpu.sm_90, gpu.processors, current_stream(device)), "the launch for ", tokens,
                  " tokens, ", p.top, " of ", p.width, " blocks each");
}

void index_select_listed(Tensor scores, Tensor block_table, Tensor token_request, Tensor positions, int64_t ratio,
                         Tensor blocks, Tensor rows) {
  const int device = device_of("index_select_listed", "rows", rows);
  const Checker check("index_select_listed", device);
  const int64_t tokens = check_rows(check, "rows", rows, scores);
  check_step(check, scores, block_table, token_request, positions, tokens);
  ListedSelectParams p{};
  static_cast<CandidateLists&>(p) = lists_of(check, ratio, blocks, tokens);
  if (tokens == 0 || rows.size(1) == 0) return;
  static_cast<SelectParams&>(p) = select_params(scores, positions, rows);
  p.table = data<int32_t>(block_table), p.table_stride = block_table.stride(0);
  p.request = data<int32_t>(token_request);
  p.width = kCandidateEntries * p.listed;
  if (p.width > p.top && scores.size(1) < p.width)
    check.fail("scores is ", describe(scores), "; expected at least ", p.width, " columns, ", kCandidateEntries,
               " for each of the blocks");
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Gpu gpu(check, device);
  check.succeeded(launch_select(p, gpu.sm_90, gpu.processors, current_stream(device)), "the launch for ", tokens,
                  " tokens, ", p.top, " of ", p.width, " each");
}

}  // namespace dsv4
