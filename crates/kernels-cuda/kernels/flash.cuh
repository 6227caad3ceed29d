// Flash attention of the kernels whose warps have 16 rows each, with the products of common.cuh.
//
// Rows of a block are (token, query head of the group) pairs. A thread holds rows g and g + 8 of its
// warp's 16, where lane = 4g + t: score[n] has those of row g at tokens 8n + 2t and 8n + 2t + 1, then
// those of row g + 8. Sums lie likewise, with channels in place of tokens.
#pragma once
#include "fragments.cuh"

// Where a flat row of a sequence and KV head lies in queries and output.
template <class Params>
DEVICE u64 row_offset(const Params& p, const SequenceInfo& s, u32 row, u32 group, u32 kv_head) {
    return ((u64)(s.first_row + row / group) * p.query_heads + kv_head * group + row % group) * HEAD_DIM;
}

// Two channels of the output from `at` on.
template <class Params>
DEVICE void store_pair(const Params& p, u64 at, float x, float y) {
    if (p.out) *(float2*)(p.out + at) = make_float2(x, y);
    if (p.rounded) *(u32*)(p.rounded + at) = pack_bf16(x, y);
}

// Byte offset of a 16-byte chunk in panels of 64 channels (or tokens), swizzled like full pages.
DEVICE u32 panel_byte(u32 rows, u32 row, u32 chunk) {
    return (chunk >> 3) * rows * 128 + row * 128 + ((chunk & 7) ^ (row & 7)) * 16;
}

// Turns the scores of row h (0 or 1) into weights relative to its `largest`, a base-2 logarithm; `scale`
// takes scores there. Returns the factor by which the sums so far shrink; `total` has done so.
template <int N>
DEVICE float weigh(float (&score)[N][4], int h, float scale, float& largest, float& total) {
    float top = NEGATIVE_INFINITY;
#pragma unroll
    for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(score[n][2 * h], score[n][2 * h + 1]));
    const float before = largest, after = fmaxf(before, quad_max(top) * scale);
    // As long as every score is -infinity any finite reference gives weights of zero.
    const float reference = after == NEGATIVE_INFINITY ? 0.0f : after;
    const float factor = exp2_fast(before - reference);
    largest = after;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float w = exp2_fast(__fmaf_rn(score[n][2 * h + c], scale, -reference));
            score[n][2 * h + c] = w;
            sum += w;
        }
    total = __fmaf_rn(total, factor, sum);
    return factor;
}

// Multiplies the sums of row h.
DEVICE void shrink(float (&out)[2 * STEPS][4], int h, float factor) {
#pragma unroll
    for (int n = 0; n < 2 * STEPS; n++) out[n][2 * h] *= factor, out[n][2 * h + 1] *= factor;
}

// The softmax of row h: both of the above.
template <int N>
DEVICE float update(float (&score)[N][4], int h, float scale, float& largest, float& total,
                    float (&out)[2 * STEPS][4]) {
    const float factor = weigh(score, h, scale, largest, total);
    shrink(out, h, factor);
    return factor;
}

// The weights of tokens 16k .. 16k + 16 as the first operand of a product.
template <int N>
DEVICE void pack_weights(u32 (&a)[4], const float (&score)[N][4], int k) {
    a[0] = pack_bf16(score[2 * k][0], score[2 * k][1]);
    a[1] = pack_bf16(score[2 * k][2], score[2 * k][3]);
    a[2] = pack_bf16(score[2 * k + 1][0], score[2 * k + 1][1]);
    a[3] = pack_bf16(score[2 * k + 1][2], score[2 * k + 1][3]);
}

// d[0] and d[1] += a b, for 16 columns of b.
DEVICE void mma_pair(float (*d)[4], const u32 (&a)[4], const u32 (&b)[4]) {
    mma_bf16(d[0], a[0], a[1], a[2], a[3], b[0], b[1]);
    mma_bf16(d[1], a[0], a[1], a[2], a[3], b[2], b[3]);
}
