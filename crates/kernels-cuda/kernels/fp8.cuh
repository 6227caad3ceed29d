// FP8 weights (E4M3) as kernels read them: four consecutive codes per word, arranged so that few
// instructions turn them into BF16. `src/gemm/fp8.rs` arranges them and tests this arithmetic.
//
// Codes 0 and 1 lie in the two halves of the word, in the bits of a BF16 number's sign, low four
// exponent bits and first three mantissa bits. Codes 2 and 3 fill the gaps: a rotation by 12 moves
// their signs and exponents into place (exponents come from the other half), a shift by 4 their
// mantissas:
//
//   bit   31  30-27  26-23  22-20  19   18-16   15  14-11  10-7   6-4   3    2-0
//         s1   e2     e1     m1    s3    m3     s0   e3     e0    m0    s2   m2
//
// The result is 2^-120 times the value, because the exponent bias of BF16 differs. Subnormals of
// E4M3 become subnormals of BF16.
#pragma once

#include "common.cuh"

#define FP8_TOO_SMALL_BY 0x1p120f
constexpr u32 FP8_BLOCK = 128;  // outputs and inputs that share a scale

DEVICE u32 fp8_first_pair(u32 word) { return word & 0x87f087f0u; }
DEVICE u32 fp8_second_pair(u32 word) {
    return (__funnelshift_l(word, word, 12) & 0x87808780u) | (word << 4 & 0x00700070u);
}

// The B operand of the i-th product of a lane's 16 bytes of weights, FP8 or BF16.
DEVICE void operand(const uint4& bytes, int i, u32& first, u32& second) {
    const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#ifdef FP8
    first = fp8_first_pair(words[i]), second = fp8_second_pair(words[i]);
#else
    first = words[2 * i], second = words[2 * i + 1];
#endif
}
