// Turns the projections of a token into the cache's basis: QK-norm, RoPE, subtraction of the key
// mean, rotation. `append.cu` does it for any rows; decode attention with FROM_PROJECTIONS does it
// for steps of single tokens. Both use the same order of summation, so their results are identical.
#pragma once
#include "fragments.cuh"

// Channels per lane of a vector that is spread over a warp: lane, lane + 32, ...
constexpr int CHANNELS = HEAD_DIM / 32;
constexpr int TILES_OF_HEAD = HEAD_DIM / 8;
constexpr int ROTATION_QUADS = STEPS * TILES_OF_HEAD * 32;

// Constants of a layer. No kernel of a step writes them.
struct HeadConstants {
    const float* query_norm;  // weights, or null
    const float* key_norm;
    const float* cosines;     // [position][HEAD_DIM / 2]
    const float* sines;
    const uint4* rotation;    // by KV head, as fragments (see SplitVectors), or null
    const float* mean;        // [kv head][HEAD_DIM], or null
    float eps;
};
CHECK_LAYOUT(HeadConstants);

// The constants that one vector needs, in a lane's registers.
struct VectorConstants {
    float weight[CHANNELS], mean[CHANNELS], cosine[CHANNELS / 2], sine[CHANNELS / 2];

    DEVICE void load(const HeadConstants& h, u32 position, bool is_key, u32 kv_head, u32 lane) {
        const float* norm = is_key ? h.key_norm : h.query_norm;
        const float* means = is_key && h.mean ? h.mean + kv_head * HEAD_DIM : nullptr;
        const u64 at = (u64)position * (HEAD_DIM / 2) + lane;
#pragma unroll
        for (int k = 0; k < CHANNELS; k++) {
            weight[k] = norm ? norm[lane + 32 * k] : 1.0f;
            mean[k] = means ? means[lane + 32 * k] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < CHANNELS / 2; k++) cosine[k] = h.cosines[at + 32 * k], sine[k] = h.sines[at + 32 * k];
    }

    // QK-norm (if the model has it), then RoPE. The caller subtracts the mean afterwards.
    DEVICE void norm_and_rope(float (&x)[CHANNELS], bool normed, float eps) const {
        if (normed) {
            float squares = 0.0f;
#pragma unroll
            for (int k = 0; k < CHANNELS; k++) squares = __fmaf_rn(x[k], x[k], squares);
            float scale = 1.0f / sqrtf(warp_sum(squares) / (float)HEAD_DIM + eps);
#pragma unroll
            for (int k = 0; k < CHANNELS; k++) x[k] = x[k] * scale * weight[k];
        }
#pragma unroll
        for (int k = 0; k < CHANNELS / 2; k++) {
            float c = cosine[k], s = sine[k], a = x[k], b = x[k + CHANNELS / 2];
            x[k] = a * c - b * s;
            x[k + CHANNELS / 2] = b * c + a * s;
        }
    }
};

// Vectors before their rotation. Each number is the sum of two BF16 numbers, high + low, and so is
// each number of the rotation. A product is the sum of three of the four partial products; low *
// low is below the rounding error of either operand and is left out.
//
// A rotation is stored as B fragments of 16 inputs and 8 outputs, [input step][output tile][lane]:
// two registers with the high parts, two with the low parts.
template <int VECTORS>
struct alignas(16) SplitVectors {
    static constexpr int STRIDE = HEAD_DIM + 8;  // padding against bank conflicts
    u16 high[VECTORS][STRIDE], low[VECTORS][STRIDE];

    DEVICE void put(u32 vector, u32 channel, float x) {
        const u16 h = f32_to_bf16(x);
        high[vector][channel] = h, low[vector][channel] = f32_to_bf16(x - bf16_to_f32(h));
    }
    // Two channels of a vector in one register.
    DEVICE u32 high_pair(u32 vector, u32 channel) const { return *(const u32*)&high[vector][channel]; }
    DEVICE u32 low_pair(u32 vector, u32 channel) const { return *(const u32*)&low[vector][channel]; }
};

// Rotates up to 16 vectors; computes two tiles of 8 output channels. Called by a whole warp.
// out[tile][i] belongs to vector lane / 4 + 8 * (i / 2) and channel 2 * (lane % 4) + i % 2 of the
// tile. `vectors(step, high, low)` returns the A registers, `rotation(step, tile)` the B registers.
// Rows of absent vectors may hold anything; they do not affect the others.
template <int UNROLLED, class Vectors, class Rotation>
DEVICE void rotate(float (&out)[2][4], Vectors&& vectors, Rotation&& rotation) {
    float sums[3][2][4] = {};
#pragma unroll UNROLLED
    for (int step = 0; step < STEPS; step++) {
        u32 high[4], low[4];
        vectors(step, high, low);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint4 r = rotation(step, n);
            mma_bf16(sums[0][n], high[0], high[1], high[2], high[3], r.x, r.y);
            mma_bf16(sums[1][n], low[0], low[1], low[2], low[3], r.x, r.y);
            mma_bf16(sums[2][n], high[0], high[1], high[2], high[3], r.z, r.w);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[n][i] = sums[0][n][i] + (sums[1][n][i] + sums[2][n][i]);
}
