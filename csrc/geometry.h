// The numbers that DeepSeek-V4's cache is built on: ratios, window, block, rows of a tail (SPEC 1.1, 3.7, 6.1, 6.2).
// dsv4_sglang/model/geometry.py has the same; tests/test_numeric.py holds both equal.
#pragma once

namespace dsv4 {

constexpr int kCsaRatio = 4;
constexpr int kHcaRatio = 128;
constexpr int kWindow = 128;       // tokens that a query sees through the sliding window
constexpr int kBlockTokens = 128;  // of a block in all layers
static_assert(kBlockTokens % kCsaRatio == 0 && kBlockTokens % kHcaRatio == 0);

// A CSA tail: k of the open window, z of it, k of the stream that the next window pools too, z of that. Token t has row
// t % kCsaCurrentRows and row t % kCsaPreviousRows of its parts.
constexpr int kCsaCurrentRows = kCsaRatio;
constexpr int kCsaPreviousRows = 2 * kCsaRatio;
constexpr int kCsaCurrentZ = kCsaCurrentRows;
constexpr int kCsaPreviousK = 2 * kCsaCurrentRows;
constexpr int kCsaPreviousZ = kCsaPreviousK + kCsaPreviousRows;
constexpr int kCsaTailRows = kCsaPreviousZ + kCsaPreviousRows;

constexpr int kHcaOnlineRows = 3;           // maximum, sum, accumulator
constexpr int kHcaRawRows = 2 * kHcaRatio;  // k of the open window, then z

}  // namespace dsv4
