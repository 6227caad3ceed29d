// The running softmax of decode attention, in a warp's registers, and the two ways of adding tokens to it.
//
// Scores are in powers of two (the scale times log2 e is in the query). Heads are columns: a lane has heads 2q and 2q+1 of
// each tile of eight; tokens are rows r and r+8 of a 16-token tile while they are scores, and channels are rows r and r+8 of a
// step in the result. Sums over tokens stay split over the lanes r until the end.
//
// SPLIT_QUERY (head size 128): against two-bit keys the query is multiplied as its high and low byte, in integers, four codes
// to a mask. Columns of those products come in pairs, so a tile of eight columns holds four heads; SPLIT_QUERY is their number,
// 1 for groups of up to four and 2 for up to eight. A lane then has heads q and q + 4 in all it does.
#pragma once
#include "fragments.cuh"

#ifndef SPLIT_QUERY
#define SPLIT_QUERY 0
#endif
static_assert(!SPLIT_QUERY || (HEAD_DIM == 128 && QUERY_TILES == 1), "the split query is made for head size 128");

constexpr int COLUMNS = 8 * QUERY_TILES;
// Columns of a lane that two-bit pages are read for.
constexpr int LANE_COLUMNS = SPLIT_QUERY == 1 ? 1 : 2;
// Column of a query head of the group, and back.
DEVICE int column_of(int head) { return !SPLIT_QUERY ? head : head < 4 ? 2 * head : 2 * (head - 4) + 1; }
DEVICE int head_of(int column) { return SPLIT_QUERY ? column / 2 + 4 * (column & 1) : column; }

constexpr int SLOT_BYTES = 32 * HEAD_DIM + 512;  // a two-bit page, half of any other, or one side of a BF16 tile
constexpr int NEAR_SIDE_BYTES = 2 * TILE_TOKENS * HEAD_DIM;
constexpr int PANELS = HEAD_DIM / 64;
// Few enough registers to keep the query's fragments beside the result's.
constexpr bool QUERY_IN_REGISTERS = QUERY_TILES * HEAD_DIM <= 256;

// p * scale is rounded to fp16. The reference `m` is chosen so that the largest product is about 2^10: then sums of eight stay
// below 2^15 while scores grow a little, and products 2^-24 times the largest are still normal numbers. The weight p alone is
// kept in f32 and may reach 2^60 where a value's scale is tiny.
constexpr float PRODUCT_TARGET = 10.f;
constexpr u32 PRODUCT_LIMIT = 0x78007800;  // 2^15, twice
constexpr float WEIGHT_TARGET = 60.f;
constexpr float WEIGHT_LIMIT = 1.2379400392853803e27f;  // 2^90
// In BF16 weights have the range of f32: the reference may lag by this much.
constexpr float NEAR_SLACK = 8.f;

struct State {
    float o[QUERY_TILES][STEPS][4];
    float m[QUERY_TILES][2], l[QUERY_TILES][2], z[QUERY_TILES][2];
    bool fresh;  // nothing read yet

    DEVICE void clear() {
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
#pragma unroll
            for (int j = 0; j < STEPS; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[n][j][i] = 0.f;
#pragma unroll
            for (int i = 0; i < 2; i++) m[n][i] = NEGATIVE_INFINITY, l[n][i] = 0.f, z[n][i] = 0.f;
        }
        fresh = true;
    }

    // Multiplies what was read by a factor for each head.
    DEVICE void rescale(int n, float f0, float f1) {
#pragma unroll
        for (int j = 0; j < STEPS; j++)
            o[n][j][0] *= f0, o[n][j][1] *= f1, o[n][j][2] *= f0, o[n][j][3] *= f1;
        l[n][0] *= f0, l[n][1] *= f1, z[n][0] *= f0, z[n][1] *= f1;
    }

    // Takes the result to other units: a factor for each half of a step's channels.
    DEVICE void to_units(const float2 (&factors)[STEPS]) {
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            float2 f = factors[j];
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++)
                o[n][j][0] *= f.x, o[n][j][1] *= f.x, o[n][j][2] *= f.y, o[n][j][3] *= f.y;
        }
    }
};

// Largest over the lanes that hold the same heads.
DEVICE float max_over_tokens(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

DEVICE float sum_over_tokens(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// ---- BF16 tiles ----------------------------------------------------------------------------------------------------

// Shared address of the 16 bytes that lane `lane` names for ldmatrix: `token` and channels 16j + 8 * half.
DEVICE u32 near_chunk(u32 base, int token, int j, int half) {
    int chunk = 2 * j + half;
    return base + (chunk >> 3) * (TILE_TOKENS * 128) + token * 128 + (((chunk & 7) ^ (token & 7)) << 4);
}

// Scores of a tile of keys. The query is the sum of two BF16 numbers, so nothing of it is lost.
DEVICE void near_scores(float (&s)[QUERY_TILES][4], u32 keys, const uint4* query, int lane) {
    const int token = (lane & 7) + (lane & 8), half = lane >> 4;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = 0.f;
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        u32 a[4];
        load_matrix(a, near_chunk(keys, token, j, half));
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            uint4 q = query[(n * STEPS + j) * 32 + lane];
            mma_bf16(s[n], a[0], a[1], a[2], a[3], q.x, q.y);
            mma_bf16(s[n], a[0], a[1], a[2], a[3], q.z, q.w);
        }
    }
}

// Weights of the scores, as sums of two BF16 numbers in B registers: [0], [1] the high parts of tokens 0..7 and 8..15.
DEVICE void near_weights(State& state, float (&s)[QUERY_TILES][4], int tokens, u32 (&p)[QUERY_TILES][4], int lane) {
    const int r = lane >> 2;
    bool grows = false;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        if (r >= tokens) s[n][0] = s[n][1] = NEGATIVE_INFINITY;
        if (r + 8 >= tokens) s[n][2] = s[n][3] = NEGATIVE_INFINITY;
        grows |= fmaxf(s[n][0], s[n][2]) - state.m[n][0] > NEAR_SLACK || fmaxf(s[n][1], s[n][3]) - state.m[n][1] > NEAR_SLACK;
    }
    if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            float m0 = fmaxf(state.m[n][0], max_over_tokens(fmaxf(s[n][0], s[n][2])));
            float m1 = fmaxf(state.m[n][1], max_over_tokens(fmaxf(s[n][1], s[n][3])));
            state.rescale(n, exp2_fast(state.m[n][0] - m0), exp2_fast(state.m[n][1] - m1));
            state.m[n][0] = m0, state.m[n][1] = m1;
        }
    }
    state.fresh = false;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = exp2_fast(s[n][i] - state.m[n][i & 1]);
            state.l[n][i & 1] += w[i];
        }
        u32 low = pack_bf16(w[0], w[1]), high = pack_bf16(w[2], w[3]);
        p[n][0] = transpose_8x8(low);
        p[n][1] = transpose_8x8(high);
        p[n][2] = transpose_8x8(pack_bf16(w[0] - low_bf16(low), w[1] - high_bf16(low)));
        p[n][3] = transpose_8x8(pack_bf16(w[2] - low_bf16(high), w[3] - high_bf16(high)));
    }
}

DEVICE void near_values(State& state, const u32 (&p)[QUERY_TILES][4], u32 values, int tokens, int lane) {
    const int token = (lane & 7) + ((lane >> 1) & 8), half = (lane >> 3) & 1;
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        u32 a[4];
        load_matrix_transposed(a, near_chunk(values, token, j, half));
        if (tokens < TILE_TOKENS) {
            // Rows beyond the end hold anything; their weight is zero, but zero times NaN is not.
            int t = 2 * (lane & 3);
            u32 low = (t < tokens ? 0xffffu : 0u) | (t + 1 < tokens ? 0xffff0000u : 0u);
            u32 high = (t + 8 < tokens ? 0xffffu : 0u) | (t + 9 < tokens ? 0xffff0000u : 0u);
            a[0] &= low, a[1] &= low, a[2] &= high, a[3] &= high;
        }
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            mma_bf16(state.o[n][j], a[0], a[1], a[2], a[3], p[n][0], p[n][1]);
            mma_bf16(state.o[n][j], a[0], a[1], a[2], a[3], p[n][2], p[n][3]);
        }
    }
}

// ---- Coded tiles ---------------------------------------------------------------------------------------------------

// The query against codes: fp16 fragments with the planes' exponents taken off, the sums of its channels, and the factor from
// products of codes to scores.
struct CodedQuery {
    u32 b[QUERY_IN_REGISTERS ? QUERY_TILES : 1][QUERY_IN_REGISTERS ? STEPS : 1][2];
    float sum[QUERY_TILES][2];
    float factor;
    const uint2* shared;

    DEVICE uint2 at(int n, int j, int lane) const {
        if constexpr (QUERY_IN_REGISTERS) return make_uint2(b[n][j][0], b[n][j][1]);
        else return shared[(n * STEPS + j) * 32 + lane];
    }
};

// Scores of TILES tiles relative to the reference: scale * (q . codes) + minimum * sum(q) - m.
template <int BITS, int TILES>
DEVICE void coded_scores(float (&s)[TILES][QUERY_TILES][4], const State& state, const CodedQuery& query, const u8* codes,
                         const u8* params, int lane) {
    // Two tiles at a time, so that one's products need not wait for the other's.
#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
        TileWords<BITS> words[2];
#pragma unroll
        for (int u = 0; u < 2; u++) {
            load_tile(words[u], codes + (t + u) * code_bytes_per_tile(BITS), lane);
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[t + u][n][i] = 0.f;
        }
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
#pragma unroll
            for (int u = 0; u < 2; u++) {
                u32 a[4];
#pragma unroll
                for (int x = 0; x < 4; x++) a[x] = code_pair<BITS, KEY>(words[u], j, x);
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++) {
                    uint2 q = query.at(n, j, lane);
                    mma_f16(s[t + u][n], a[0], a[1], a[2], a[3], q.x, q.y);
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        uint2 pairs = *(const uint2*)(params + t * 64 + (lane >> 2) * 8);
        float scale0 = low_f16(pairs.x) * query.factor, min0 = high_f16(pairs.x);
        float scale1 = low_f16(pairs.y) * query.factor, min1 = high_f16(pairs.y);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                s[t][n][i] = fmaf(s[t][n][i], scale0, fmaf(min0, query.sum[n][i], -state.m[n][i]));
                s[t][n][2 + i] = fmaf(s[t][n][2 + i], scale1, fmaf(min1, query.sum[n][i], -state.m[n][i]));
            }
        }
    }
}

DEVICE void clear_scores(float (&s)[QUERY_TILES][4]) {
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = NEGATIVE_INFINITY;
}

// Moves the reference so that the products of these tiles fit fp16.
template <int LANE_COLUMNS_USED, int TILES>
DEVICE void move_reference(State& state, float (&s)[TILES][QUERY_TILES][4], const u8* params, bool settle, int lane) {
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        float weight[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, product[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            uint2 pairs = *(const uint2*)(params + t * 64 + (lane >> 2) * 8);
            float log0 = log2_fast(low_f16(pairs.x)), log1 = log2_fast(low_f16(pairs.y));
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS_USED; i++) {
                weight[i] = fmaxf(weight[i], fmaxf(s[t][n][i], s[t][n][2 + i]));
                product[i] = fmaxf(product[i], fmaxf(s[t][n][i] + log0, s[t][n][2 + i] + log1));
            }
        }
        float factor[2] = {1.f, 1.f};
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS_USED; i++) {
            float up = fmaxf(max_over_tokens(product[i]) - PRODUCT_TARGET, max_over_tokens(weight[i]) - WEIGHT_TARGET);
            // Before anything was read the reference may go anywhere; after BF16 tiles it may come down as long as their
            // weights stay finite; later it only rises.
            if (!state.fresh) up = fmaxf(up, settle ? -WEIGHT_TARGET : 0.f);
            factor[i] = exp2_fast(-up);
            state.m[n][i] += up;
#pragma unroll
            for (int t = 0; t < TILES; t++) s[t][n][i] -= up, s[t][n][2 + i] -= up;
        }
        if (!state.fresh) state.rescale(n, factor[0], factor[1]);
    }
    state.fresh = false;
}

// Weights of the tiles times the values' scales, as fp16 pairs; adds up weights and weight * minimum. False, with nothing
// changed, where the reference has to move first.
template <int LANE_COLUMNS_USED, int TILES>
DEVICE bool coded_weights(u32 (&w)[TILES][QUERY_TILES][2], State& state, const float (&s)[TILES][QUERY_TILES][4],
                          const u8* params, int lane) {
    float l[QUERY_TILES][2], z[QUERY_TILES][2];
    u32 sum[QUERY_TILES];
    bool too_large = false;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) l[n][i] = state.l[n][i], z[n][i] = state.z[n][i];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        uint2 pairs = *(const uint2*)(params + t * 64 + (lane >> 2) * 8);
        float scale0 = low_f16(pairs.x), min0 = high_f16(pairs.x), scale1 = low_f16(pairs.y), min1 = high_f16(pairs.y);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if ((i & 1) >= LANE_COLUMNS_USED) {
                    p[i] = 0.f;
                    continue;
                }
                p[i] = exp2_fast(s[t][n][i]);
                l[n][i & 1] += p[i];
                z[n][i & 1] = fmaf(p[i], i < 2 ? min0 : min1, z[n][i & 1]);
            }
            w[t][n][0] = pack_f16(p[0] * scale0, LANE_COLUMNS_USED == 2 ? p[1] * scale0 : 0.f);
            w[t][n][1] = pack_f16(p[2] * scale1, LANE_COLUMNS_USED == 2 ? p[3] * scale1 : 0.f);
            u32 both = add_f16x2(w[t][n][0], w[t][n][1]);
            sum[n] = t == 0 ? both : add_f16x2(sum[n], both);
        }
    }
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
        too_large |= any_at_least_f16x2(sum[n], PRODUCT_LIMIT) || l[n][0] > WEIGHT_LIMIT || l[n][1] > WEIGHT_LIMIT;
    if (__any_sync(0xffffffffu, too_large)) return false;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) state.l[n][i] = l[n][i], state.z[n][i] = z[n][i];
    return true;
}

template <int BITS, int TILES>
DEVICE void coded_values(State& state, const u32 (&w)[TILES][QUERY_TILES][2], const u8* codes, int lane) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        TileWords<BITS> words;
        load_tile(words, codes + t * code_bytes_per_tile(BITS), lane);
        u32 b[QUERY_TILES][2];
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) b[n][0] = transpose_8x8(w[t][n][0]), b[n][1] = transpose_8x8(w[t][n][1]);
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            u32 a[4];
#pragma unroll
            for (int x = 0; x < 4; x++) a[x] = code_pair<BITS, VALUE>(words, j, x);
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++) mma_f16(state.o[n][j], a[0], a[1], a[2], a[3], b[n][0], b[n][1]);
        }
    }
}

// ---- Two-bit tiles against the split query --------------------------------------------------------------------------
//
// Byte i of a word, masked for plane p, is the code of step 4(i & 1) + p, channel 2q + (i >> 1) of the step's half. Odd planes
// arrive four times too large; the query's bytes for them are in steps four times as large.

#if SPLIT_QUERY
constexpr int PLANES = 4;
constexpr float SPLIT_RANGE = 16256.f;  // 127 * 128

struct SplitQuery {
    u32 b[SPLIT_QUERY][PLANES][2];
    float sum[LANE_COLUMNS];  // of the channels, as rounded
    float factor;             // of a step
};

DEVICE u32 byte_codes(u32 word, int plane) {
    return (plane < 2 ? word : word >> 4) & (plane & 1 ? 0x0c0c0c0cu : 0x03030303u);
}

// As coded_scores.
template <int TILES>
DEVICE void split_scores(float (&s)[TILES][1][4], const State& state, const SplitQuery& query, const u8* codes, const u8* params,
                         int lane) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        u32 words[4];
        load_words(words, codes + t * code_bytes_per_tile(2), lane);
        int c[SPLIT_QUERY][4] = {};
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            u32 a[4];
#pragma unroll
            for (int x = 0; x < 4; x++) a[x] = byte_codes(words[x], p);
#pragma unroll
            for (int k = 0; k < SPLIT_QUERY; k++) mma_u8s8(c[k], a[0], a[1], a[2], a[3], query.b[k][p][0], query.b[k][p][1]);
        }
        uint2 pairs = *(const uint2*)(params + t * 64 + (lane >> 2) * 8);
        float scale0 = low_f16(pairs.x) * query.factor, min0 = high_f16(pairs.x);
        float scale1 = low_f16(pairs.y) * query.factor, min1 = high_f16(pairs.y);
#pragma unroll
        for (int k = 0; k < LANE_COLUMNS; k++) {
            s[t][0][k] = fmaf((float)(c[k][0] * 128 + c[k][1]), scale0, fmaf(min0, query.sum[k], -state.m[0][k]));
            s[t][0][2 + k] = fmaf((float)(c[k][2] * 128 + c[k][3]), scale1, fmaf(min1, query.sum[k], -state.m[0][k]));
        }
    }
}
#endif
