// How `score` holds index keys and queries in registers, and how `select` orders scores.
//
// The products of a key with 64 heads come from mma.m16n8k16: heads are rows of A, eight keys columns of B. Lane 4 g +
// c of a warp has 16 bytes of key g, channels 32 c .. 32 c + 31: four words, each two steps of the sum over channels.
// Which channels a step takes is free as long as keys and queries agree: half-word i of a word's lower half goes with
// half-word i + 4, since these lie 16 bits apart.
#pragma once

#include <cuda_fp16.h>

#include "../numeric.h"

namespace dsv4 {

/// Channel j of each 8 of a prepared query: what is at place p of the 8 is channel (p / 2) + 4 (p % 2).
DSV4_HD int channel_at(int place) { return (place & ~7) + (place & 7) / 2 + 4 * (place & 1); }

/// How a prepared query [64, 128] lies in memory.
enum class QueryForm {
  kPlaces,     // fp16, each eight channels in the order of channel_at
  kHalfImage,  // fp16, an image for warpgroup products (sm_90a)
  kByteImage,  // e4m3, an image of half the bytes, where all scales are powers of two (MXFP4)
};

/// An image is operand B as it lies in shared memory. A row of 128 bytes a head, for fp16 first of channels 0 .. 63 of
/// all heads, then of the others; 16-byte pieces of each row exchanged, so that eight rows of a piece lie in different
/// state copies.
///
/// A step of 32 bytes of a row, 16 numbers of fp16 or 32 of e4m3, has the words of (c, lower) for c = 0 .. 3 and then
/// those of (c, upper): what a lane with channels 32 c .. 32 c + 31 of a key has of operand A. In fp16, step s has the
/// pairs of places 32 c + 4 s + {0, 1} and {2, 3}; in e4m3, channels 32 c + 8 s + {0 .. 3} and {4 .. 7}. Number in the
/// image of the word of (head, c, s, upper or not).
DSV4_HD int word_in_image(int head, int c, int step, int upper) {
  const int piece = (2 * (step % 4) + upper) ^ head % 8;
  return step / 4 * (64 * 32) + head * 32 + piece * 4 + c;
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

/// Keys are kept times 2^-7, so that with every e4m3 scale all products are fp16 numbers (exact: 2 + 4 significant
/// bits).
constexpr float kKeyGain = 0x1p7f;

/// Two e4m3 scales -> times 2^7 in fp16, one in each half of the pair. e4m3 bits in the place of fp16's are the number
/// times 2^-8.
DSV4_HD __half2 decode_scales(uint32_t two_bytes) {
  const uint32_t spread = (two_bytes & 0xff) << 7 | (two_bytes & 0xff00) << 15;
  return __hmul2(half2_of_bits(spread), half2_of_bits(0x78007800));  // 2^15
}

/// Bits of `a` where `mask` has ones, else of `b`.
DSV4_HD uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t x;  // one instruction, which the compiler would split to merge its halves with what follows
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(x) : "r"(a), "r"(b), "r"(mask));
  return x;
#else
  return (a & mask) | (b & ~mask);
#endif
}

/// A word of eight e2m1 codes: pair i is numbers i and i + 4, times 2^-14 (their bits in the place of fp16's).
DSV4_HD void decode_codes(uint32_t word, __half2 (&pairs)[4]) {
  // In each byte, the sign in bit 7 and the magnitude in bits 1 to 3, as in the upper byte of an fp16 number: of codes
  // 0, 2, 4, 6 and of codes 1, 3, 5, 7.
  const uint32_t even = choose(0x80808080, word << 4, word << 1), odd = choose(0x80808080, word, word >> 3);
  constexpr uint32_t mask = 0x8e008e00;
  pairs[0] = half2_of_bits(even << 8 & mask);
  pairs[1] = half2_of_bits(odd << 8 & mask);
  pairs[2] = half2_of_bits(even & mask);
  pairs[3] = half2_of_bits(odd & mask);
}

/// The blocks with the largest scale of a vector are kept as e4m3 times 2^kByteShift, where 6 becomes 384; others by as
/// much smaller as their scale is, exactly down to 2^-kByteRange of the largest. What is smaller yet is taken for 0.
constexpr int kByteShift = 6, kByteRange = 11;

/// e2m1's magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6 in e4m3, a byte each.
struct ByteCodes {
  uint32_t low, high;
};
/// Of a block whose scale is 2^-below times the largest.
DSV4_HD ByteCodes byte_codes(int below) {
  const uint32_t exponents = 8 * uint32_t(kByteShift - below);
  if (below > kByteRange) return {0, 0};
  return {0x3c383000u + exponents * 0x01010100u, 0x4c484440u + exponents * 0x01010101u};
}

/// Of the four low nibbles of `nibbles`, which are e2m1 codes: a byte of `codes` each.
DSV4_HD uint32_t four_bytes(uint32_t nibbles, ByteCodes codes) {
#ifdef __CUDA_ARCH__
  // A selector's bit 3 fills the byte with its own bit 7: 0xff from 0x80 where the sign is set, of which bit 0 then
  // goes to bit 7.
  uint32_t filled;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(filled) : "r"(0x80808080u), "r"(nibbles));
  return __byte_perm(codes.low, codes.high, nibbles & 0x7777) | (filled << 7 & 0x80808080u);
#else
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = nibbles >> 4 * i & 0xf,
                   magnitude = (code & 4 ? codes.high : codes.low) >> 8 * (code & 3) & 0xff;
    bytes |= (magnitude | (code & 8) << 4) << 8 * i;
  }
  return bytes;
#endif
}

/// Integers in the order of the scores; -0 equals 0.
DSV4_HD uint32_t order_of(float score) {
  const uint32_t u = bits_of(score == 0.0f ? 0.0f : score);
  return u ^ (u >> 31 ? 0xffffffffu : 0x80000000u);
}

DSV4_HD float score_of(uint32_t order) { return float_of(order ^ (order >> 31 ? 0x80000000u : 0xffffffffu)); }

/// The same with the entry: all different, and of equal scores the first entry is the largest.
DSV4_HD uint64_t order_of(uint32_t order, uint32_t entry) { return uint64_t(order) << 32 | (0xffffffffu - entry); }
DSV4_HD uint32_t entry_of(uint64_t order) { return 0xffffffffu - uint32_t(order); }

}  // namespace dsv4
