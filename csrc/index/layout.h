// Register layout of index keys and queries in `score`, and the order of scores in `select`.
//
// The products of a key with 64 heads use mma.m16n8k16: heads are rows of A, eight keys are columns of B. Lane 4 g + c
// of a warp has 16 bytes of key g, channels 32 c .. 32 c + 31: four words, each for two steps of the sum over channels.
// The assignment of channels to steps is free as long as keys and queries agree: half-word i of a word's lower half is
// paired with half-word i + 4, because their bits are 16 apart.
#pragma once

#include <cuda_fp16.h>

#include "../numeric.h"

namespace dsv4 {

/// Returns the channel at a place of a prepared query: place p of each 8 has channel (p / 2) + 4 (p % 2).
DSV4_HD int channel_at(int place) { return (place & ~7) + (place & 7) / 2 + 4 * (place & 1); }

/// Memory layout of a prepared query [heads, 128].
enum class QueryForm {
  kPlaces,     // fp16, each eight channels in the order of channel_at
  kHalfImage,  // fp16, an image for warpgroup products (sm_90a)
  kByteImage,  // e4m3, an image with half the bytes, if all scales are powers of two (MXFP4) of similar size
};

/// An image is operand B in its shared memory layout. A head has rows of 128 bytes; in fp16 first a row of channels 0
/// .. 63 for all heads, then one of the others. The 16-byte pieces of each row are swizzled, so that eight rows of a
/// piece are in different banks.
///
/// A step of 32 bytes of a row (16 numbers in fp16, 32 in e4m3) has the words of (c, lower) for c = 0 .. 3, then those
/// of (c, upper), to match operand A in a lane with channels 32 c .. 32 c + 31 of a key. In fp16, step s has the pairs
/// at places 32 c + 4 s + {0, 1} and {2, 3}; in e4m3, channels 32 c + 8 s + {0 .. 3} and {4 .. 7}. Returns the index in
/// the image of `heads` heads of the word of (head, c, step, upper).
DSV4_HD int word_in_image(int heads, int head, int c, int step, int upper) {
  const int piece = (2 * (step % 4) + upper) ^ head % 8;
  return step / 4 * (heads * 32) + head * 32 + piece * 4 + c;
}

DSV4_HD uint32_t bits_of_half2(__half2 x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

DSV4_HD __half2 half2_of_bits(uint32_t u) {
  __half2 x;
  memcpy(&x, &u, sizeof x);
  return x;
}

/// Keys are multiplied by 2^-7, so that products with every e4m3 scale are exact in fp16 (2 + 4 significant bits).
constexpr float kKeyGain = 0x1p7f;

/// Converts two e4m3 scales to fp16, times 2^7, one in each half of the pair. e4m3 bits at the position of fp16's are
/// the number times 2^-8.
DSV4_HD __half2 decode_scales(uint32_t two_bytes) {
  const uint32_t spread = (two_bytes & 0xff) << 7 | (two_bytes & 0xff00) << 15;
  return __hmul2(half2_of_bits(spread), half2_of_bits(0x78007800));  // 2^15
}

/// Returns the bits of `a` where `mask` has ones, else those of `b`.
DSV4_HD uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t x;  // inline assembly, because the compiler would split it and merge the parts with later code
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(x) : "r"(a), "r"(b), "r"(mask));
  return x;
#else
  return (a & mask) | (b & ~mask);
#endif
}

/// Decodes a word of eight e2m1 codes. Pair i has numbers i and i + 4, times 2^-14 (their bits at the position of
/// fp16's).
DSV4_HD void decode_codes(uint32_t word, __half2 (&pairs)[4]) {
  // Each byte gets the sign in bit 7 and the magnitude in bits 1 to 3, like the upper byte of an fp16 number; for codes
  // 0, 2, 4, 6 and for codes 1, 3, 5, 7.
  const uint32_t even = choose(0x80808080, word << 4, word << 1), odd = choose(0x80808080, word, word >> 3);
  constexpr uint32_t mask = 0x8e008e00;
  pairs[0] = half2_of_bits(even << 8 & mask);
  pairs[1] = half2_of_bits(odd << 8 & mask);
  pairs[2] = half2_of_bits(even & mask);
  pairs[3] = half2_of_bits(odd & mask);
}

/// Blocks with the largest scale of a vector are stored as e4m3 times 2^kByteShift, where 6 becomes 384. Other blocks
/// are smaller by the ratio of their scales, exact down to 2^-kByteRange of the largest. Smaller blocks become 0.
constexpr int kByteShift = 6, kByteRange = 11;

/// e2m1's magnitudes 0, 0.5, 1, 1.5 (`low`) and 2, 3, 4, 6 (`high`) in e4m3, one byte each.
struct ByteCodes {
  uint32_t low, high;
};
/// Returns the codes of a block whose scale is 2^-below times the largest.
DSV4_HD ByteCodes byte_codes(int below) {
  const uint32_t exponents = 8 * uint32_t(kByteShift - below), high = 0x4c484440u + exponents * 0x01010101u;
  const bool in_range = below <= kByteRange;
  return {in_range ? high - exponents - 0x10101440u : 0, in_range ? high : 0};  // `low` is 0x3c383000 + the upper bytes
}

/// Converts a word of eight e2m1 codes to one byte of `codes` each: `bytes[0]` from its lower half, `bytes[1]` from its
/// upper one.
DSV4_HD void eight_bytes(uint32_t word, ByteCodes codes, uint32_t (&bytes)[2]) {
#ifdef __CUDA_ARCH__
  // The signs are bits 7 of the bytes of `left` and `word`, in turn.
  const uint32_t magnitudes = word & 0x77777777, left = word << 4, signs = 0x80808080;
  const auto look_up = [&](uint32_t nibbles) {
    uint32_t found;  // inline assembly, because `__byte_perm` would mask the nibbles of each half again
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(codes.low), "r"(codes.high), "r"(nibbles));
    return found;
  };
  bytes[0] = look_up(magnitudes) | (__byte_perm(left, word, 0x5140) & signs);
  bytes[1] = look_up(magnitudes >> 16) | (__byte_perm(left, word, 0x7362) & signs);
#else
  bytes[0] = bytes[1] = 0;
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = word >> 4 * i & 0xf, magnitude = (code & 4 ? codes.high : codes.low) >> 8 * (code & 3) & 0xff;
    bytes[i / 4] |= (magnitude | (code & 8) << 4) << 8 * (i % 4);
  }
#endif
}

/// Maps scores to integers of the same order. -0 equals 0.
DSV4_HD uint32_t order_of(float score) {
  const uint32_t u = bits_of(score == 0.0f ? 0.0f : score);
  return u ^ (u >> 31 ? 0xffffffffu : 0x80000000u);
}

DSV4_HD float score_of(uint32_t order) { return float_of(order ^ (order >> 31 ? 0x80000000u : 0xffffffffu)); }

/// Combines order and entry. All values are different, and of equal scores the first entry has the largest.
DSV4_HD uint64_t order_of(uint32_t order, uint32_t entry) { return uint64_t(order) << 32 | (0xffffffffu - entry); }
DSV4_HD uint32_t entry_of(uint64_t order) { return 0xffffffffu - uint32_t(order); }

}  // namespace dsv4
