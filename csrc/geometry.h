// Constants of DeepSeek-V4's cache: ratios, window, block, rows of a compressor state (SPEC 1.1, 3.7, 6.1, 6.2).
// dsv4_sglang/model/geometry.py has the same; tests/formats/test_numeric.py checks that both are equal.
#pragma once

namespace dsv4 {

constexpr int kCsaRatio = 4;
constexpr int kHcaRatio = 128;
constexpr int kWindow = 128;       // tokens in the sliding window of a query
constexpr int kBlockTokens = 128;  // tokens of a block in all layers
static_assert(kBlockTokens % kCsaRatio == 0 && kBlockTokens % kHcaRatio == 0);

/// A CSA compressor state: rings of k and z of the open window, `current` rows each, then of k and z of the overlapping
/// stream, which the next window pools too, `previous` rows each. Token t is in row t % current and t % previous of its
/// rings.
struct CsaCompressorState {
  int current, previous;  // powers of two
};
constexpr int kCsaCurrentRows = kCsaRatio;  // without speculation
constexpr int kCsaPreviousRows = 2 * kCsaRatio;
constexpr CsaCompressorState kCsaCompressorStates[] = {{kCsaCurrentRows, kCsaPreviousRows}, {8, 16}, {16, 16}};
constexpr int rows_of(const CsaCompressorState& compressor_state) {
  return 2 * (compressor_state.current + compressor_state.previous);
}

constexpr int kHcaOnlineRows = 3;           // rows of each copy: maximum, sum, accumulator
constexpr int kHcaRawRows = 2 * kHcaRatio;  // k of the open window, then z

// Maximum tokens per request in a decode step, of which all but the first may be rolled back. More tokens would
// overwrite what other tokens of the step, or the next step, read of earlier positions. Derived in
// dsv4_sglang/model/geometry.py.
constexpr int draft_tokens_of_ring(int rows) { return rows - (kWindow - 1); }
constexpr int draft_tokens_of(const CsaCompressorState& compressor_state) {
  const int current = compressor_state.current - (kCsaRatio - 1),
            previous = compressor_state.previous - (2 * kCsaRatio - 1);
  return current < previous ? current : previous;
}
constexpr int draft_tokens_of_state_copies(int state_copies) { return state_copies > 1 ? state_copies - 1 : 1; }

}  // namespace dsv4
