// Host side of `append`: checks its arguments and fills the kernel's parameters. No synchronisation, no allocation on
// the device.
#include "append.h"

#include "../ops.h"
#include "../tensors.h"

namespace dsv4 {
namespace {

constexpr auto kByte = ScalarType::Byte;
constexpr auto kBFloat = ScalarType::BFloat16;
constexpr auto kFloat = ScalarType::Float;
constexpr auto kInt = ScalarType::Int;
constexpr auto kLong = ScalarType::Long;

class AppendChecker : public Checker {
 public:
  using Checker::Checker;

  /// A matrix of projections: fp32 rows of `columns`, in rows of any stride.
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

  RowTable rows(const char* name, const Tensor& t, int64_t blocks, int64_t rows_per_block) const {
    tensor(name, t, {kByte, kBFloat, kFloat}, {blocks, rows_per_block, kAny});
    const int format = t.scalar_type() == kByte ? kFp8 : t.scalar_type() == kBFloat ? kBf16 : kFp32;
    const int64_t width = format == kFp8 ? kRowBytes + kScaleBytes : kEntryDim;
    tensor(name, t, {t.scalar_type()}, {blocks, rows_per_block, width});
    dense(name, t, 1);
    aligned(name, t, 16);
    return {data<uint8_t>(t), t.stride(0) * int64_t(t.element_size()), int(t.size(1)), format};
  }
};

bool is_bf16(const Tensor& t) { return t.scalar_type() == kBFloat; }

/// Programmatic dependent launch exists from sm_90 on.
bool can_overlap(int device) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

/// Whether a CUDA graph is being recorded on the stream.
bool is_recorded(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive;
}

}  // namespace

void append(Tensor kv, std::optional<Tensor> kv_score, std::optional<Tensor> index_kv_score, Tensor kv_norm,
            std::optional<Tensor> entry_norm, std::optional<Tensor> index_norm, std::optional<Tensor> ape,
            std::optional<Tensor> index_ape, Tensor rope, double eps, int64_t ratio, int64_t index_format, Tensor slots,
            Tensor prefix_lens, Tensor query_start, Tensor token_request, Tensor out_loc,
            std::optional<Tensor> track_slots, Tensor ring, std::optional<Tensor> tail, std::optional<Tensor> entries,
            std::optional<Tensor> index_keys, std::optional<Tensor> window, std::optional<Tensor> swa_pos,
            std::optional<Tensor> swa_head, std::optional<Tensor> tail_len) {
  if (!kv.is_cuda() || kv.dim() != 2) fail("append: kv is ", describe(kv), "; expected [tokens, 512] on a CUDA device");
  const int device = kv.get_device_index();
  const AppendChecker check("append", device);
  const int64_t tokens = kv.size(0), requests = slots.numel();
  if (ratio != 0 && ratio != 4 && ratio != 128) fail("append: ratio is ", ratio, "; expected 0, 4 or 128");
  const bool is_csa = ratio == 4, is_hca = ratio == 128;
  const bool prefill = window.has_value();
  if (!prefill && tokens != requests) {
    fail("append: ", tokens, " tokens for ", requests, " requests without `window`; a step with chunks needs one");
  }

  AppendParams p{};
  p.eps = float(eps);
  p.tokens = int(tokens), p.requests = int(requests);
  check.projection("kv", kv, {kBFloat, kFloat}, tokens, kEntryDim);
  p.kv = kv.data_ptr(), p.kv_stride = kv.stride(0), p.kv_bf16 = is_bf16(kv);
  check.weight("kv_norm", kv_norm, {kBFloat, kFloat}, {kEntryDim});
  p.kv_norm = kv_norm.data_ptr(), p.kv_norm_bf16 = is_bf16(kv_norm);
  check.weight("rope", rope, {kFloat}, {kAny, kRopeDim});
  p.rope = data<float>(rope);

  check.vector("slots", slots, kInt, requests);
  check.vector("prefix_lens", prefix_lens, kInt, requests);
  check.vector("query_start", query_start, kInt, requests + 1);
  check.vector("token_request", token_request, kInt, tokens);
  check.vector("out_loc", out_loc, kLong, tokens);
  p.slots = data<int32_t>(slots), p.prefix_lens = data<int32_t>(prefix_lens),
  p.query_start = data<int32_t>(query_start);
  p.token_request = data<int32_t>(token_request), p.out_loc = data<int64_t>(out_loc);
  if (track_slots) check.vector("track_slots", *track_slots, kInt, tokens);
  p.track_slots = data<int32_t>(track_slots);

  p.ring = check.rows("ring", ring, kAny, 128);
  const int64_t num_slots = ring.size(0);
  if (prefill) {
    p.window = check.rows("window", *window, 1, tokens + 128 * requests);
    if (p.window.format != p.ring.format) {
      fail("append: window is ", describe(*window), "; expected the format of ring, which is ", describe(ring));
    }
  }
  if (swa_pos) {
    check.tensor("swa_pos", *swa_pos, {kInt}, {num_slots, 128});
    check.dense("swa_pos", *swa_pos, 1);
    p.swa_pos = data<int32_t>(swa_pos), p.swa_pos_stride = swa_pos->stride(0);
  }
  if (swa_head) check.vector("swa_head", *swa_head, kInt, num_slots);
  if (tail_len) check.vector("tail_len", *tail_len, kInt, num_slots);
  p.swa_head = data<int32_t>(swa_head), p.tail_len = data<int32_t>(tail_len);

  LayerKind kind = LayerKind::kSwa;
  if (is_csa || is_hca) {
    const char* when = is_csa ? "for ratio 4" : "for ratio 128";
    const Tensor& score = check.given("kv_score", kv_score, when);
    const Tensor& norm = check.given("entry_norm", entry_norm, when);
    const Tensor& bias = check.given("ape", ape, when);
    const Tensor& state = check.given("tail", tail, when);
    const Tensor& table = check.given("entries", entries, when);
    const int64_t streams = is_csa ? 2 : 1;
    check.projection("kv_score", score, {kFloat}, tokens, 2 * streams * kEntryDim);
    p.kv_score = data<float>(score), p.kv_score_stride = score.stride(0);
    check.weight("entry_norm", norm, {kBFloat, kFloat}, {kEntryDim});
    p.entry_norm = norm.data_ptr(), p.entry_norm_bf16 = is_bf16(norm);
    check.weight("ape", bias, {kFloat}, {ratio, streams * kEntryDim});
    p.ape = data<float>(bias);
    p.entries = check.rows("entries", table, is_csa ? kAny : 1, kAny);

    check.tensor("tail", state, {kFloat}, {num_slots, kAny, kAny});
    if (is_csa) {
      kind = LayerKind::kCsa;
      check.tensor("tail", state, {kFloat}, {num_slots, 24, kEntryDim + kIndexDim});
    } else {
      kind = state.size(1) == 3 ? LayerKind::kHcaOnline : LayerKind::kHcaRaw;
      check.tensor("tail", state, {kFloat}, {num_slots, kind == LayerKind::kHcaOnline ? 3 : 256, kEntryDim});
    }
    check.dense("tail", state, 1);
    check.aligned("tail", state, 16);
    p.tail = data<float>(state), p.tail_stride = state.stride(0);
  }
  if (is_csa) {
    const Tensor& score = check.given("index_kv_score", index_kv_score, "for ratio 4");
    const Tensor& norm = check.given("index_norm", index_norm, "for ratio 4");
    const Tensor& bias = check.given("index_ape", index_ape, "for ratio 4");
    const Tensor& keys = check.given("index_keys", index_keys, "for ratio 4");
    check.projection("index_kv_score", score, {kFloat}, tokens, 4 * kIndexDim);
    p.index_kv_score = data<float>(score), p.index_kv_score_stride = score.stride(0);
    check.weight("index_norm", norm, {kBFloat, kFloat}, {kIndexDim});
    p.index_norm = norm.data_ptr(), p.index_norm_bf16 = is_bf16(norm);
    check.weight("index_ape", bias, {kFloat}, {ratio, 2 * kIndexDim});
    p.index_ape = data<float>(bias);

    check.tensor("index_keys", keys, {kByte, kFloat}, {kAny, kAny, kAny});
    const bool fp4 = keys.scalar_type() == kByte;
    check.tensor("index_keys", keys, {keys.scalar_type()}, {kAny, kAny, fp4 ? kKeyBytes + kScaleBytes : kIndexDim});
    check.dense("index_keys", keys, 1);
    check.aligned("index_keys", keys, 16);
    if (index_format != kMxfp4 && index_format != kNvfp4) {
      fail("append: index_format is ", index_format, "; expected 0 (mxfp4) or 1 (nvfp4)");
    }
    p.index_keys = {data<uint8_t>(keys), keys.stride(0) * int64_t(keys.element_size()), int(keys.size(1)),
                    fp4 ? int(index_format) : int(kKeyFp32)};
  }
  if (tokens == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  if (prefill) {
    check.launched(launch_append_prefill(p, kind, can_overlap(device), stream));
  } else {
    // Outside a graph, what computed the batch may be the kernel just before this one: no overlap then (append.h).
    check.launched(launch_append_decode(p, kind, can_overlap(device) && is_recorded(stream), stream));
  }
}

}  // namespace dsv4
