// Decode attention: the running softmax in a warp's registers, and how BF16 tiles and codes enter
// it.
//
// Scores are exponents of two: scale * log2(e) is folded into the query. In the fragments of lane
// 4r + q, query heads are columns (2q and 2q+1 of each tile of eight). Rows are tokens (r and r+8
// of a 16-token tile) in scores, and channels (r and r+8 of a 16-channel step) in the result. Sums
// over tokens stay split over the lanes r until the end.
//
// SPLIT_QUERY (head size 128): against 2-bit keys the query is multiplied in integers, as a high
// and a low byte, with four codes per byte mask. The two bytes are neighbouring columns, so a tile
// of eight columns holds four heads. SPLIT_QUERY is the number of such tiles: 1 for groups of up to
// four query heads, 2 for up to eight. A lane then has heads q and q + 4 everywhere.
#pragma once
#include "fragments.cuh"

#ifndef SPLIT_QUERY
#define SPLIT_QUERY 0
#endif
static_assert(!SPLIT_QUERY || (HEAD_DIM == 128 && QUERY_TILES == 1), "the split query needs head size 128");

constexpr int COLUMNS = 8 * QUERY_TILES;
// Columns per lane that hold heads while 2-bit pages are read.
constexpr int LANE_COLUMNS = SPLIT_QUERY == 1 ? 1 : 2;
// The column of a query head of the group, and the inverse.
DEVICE int column_of(int head) { return !SPLIT_QUERY ? head : head < 4 ? 2 * head : 2 * (head - 4) + 1; }
DEVICE int head_of(int column) { return SPLIT_QUERY ? column / 2 + 4 * (column & 1) : column; }

// A slot holds a 2-bit page, half of any other coded page, or one side of a BF16 tile.
constexpr int SLOT_BYTES = 32 * HEAD_DIM + 512;
constexpr int NEAR_SIDE_BYTES = 2 * TILE_TOKENS * HEAD_DIM;
constexpr int PANELS = HEAD_DIM / 64;
// Whether the fragments of the query fit into registers beside the result.
constexpr bool QUERY_IN_REGISTERS = QUERY_TILES * HEAD_DIM <= 256;

// The product p * scale (softmax weight times a value's scale) is rounded to fp16. The reference
// `m` is chosen so that the largest product is about 2^10: sums of eight products then stay below
// 2^15 even if scores grow a little, and products 2^-24 times the largest are still normal numbers.
// The weight p itself stays in f32 and may reach 2^60 if a value's scale is tiny.
constexpr float PRODUCT_TARGET = 10.f;
constexpr u32 PRODUCT_LIMIT = 0x78007800;  // 2^15, twice
constexpr float WEIGHT_TARGET = 60.f;
constexpr float WEIGHT_LIMIT = 1.2379400392853803e27f;  // 2^90
// BF16 tiles: weights have the range of f32, so the reference may lag behind the maximum by this
// much.
constexpr float NEAR_SLACK = 8.f;

struct State {
    float o[QUERY_TILES][STEPS][4];
    float m[QUERY_TILES][2], l[QUERY_TILES][2], z[QUERY_TILES][2];
    bool fresh;  // nothing was read yet

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

    // Multiplies the state by a factor per head.
    DEVICE void rescale(int n, float f0, float f1) {
#pragma unroll
        for (int j = 0; j < STEPS; j++)
            o[n][j][0] *= f0, o[n][j][1] *= f1, o[n][j][2] *= f0, o[n][j][3] *= f1;
        l[n][0] *= f0, l[n][1] *= f1, z[n][0] *= f0, z[n][1] *= f1;
    }

    // Multiplies the result by a factor per half step (8 channels).
    DEVICE void scale_channels(const float2 (&factors)[STEPS]) {
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            float2 f = factors[j];
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++)
                o[n][j][0] *= f.x, o[n][j][1] *= f.x, o[n][j][2] *= f.y, o[n][j][3] *= f.y;
        }
    }
};

// Maximum over the lanes that hold the same heads.
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

// ---- BF16 tiles. ----

// Shared address, for ldmatrix, of the 16 bytes of `token` that hold channels 16j + 8 * half.
DEVICE u32 near_chunk(u32 base, int token, int j, int half) {
    int chunk = 2 * j + half;
    return base + (chunk >> 3) * (TILE_TOKENS * 128) + token * 128 + (((chunk & 7) ^ (token & 7)) << 4);
}

// Scores of a tile of keys. The query is the sum of two BF16 numbers, so 16 bits of it count.
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

// Softmax weights of a tile as B registers. Each weight is the sum of two BF16 numbers: registers 0
// and 1 hold the high parts of tokens 0..7 and 8..15, registers 2 and 3 the low parts.
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
            // Rows beyond the end may hold NaN, and 0 * NaN is not 0: clear them.
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

// ---- Coded tiles. ----

// The query for codes: fp16 fragments divided by the exponents of the planes, the sums of its
// channels, and the factor from products with codes to scores.
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
    // Two tiles at a time: their products are independent, which hides latency.
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

// Moves the reference so that the products of these tiles fit fp16. `settle`: these are the first
// coded tiles after BF16 tiles.
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
            // A fresh state takes any reference. After BF16 tiles the reference may fall as long as
            // their weights stay finite. Later it only rises.
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

// Softmax weights times the values' scales, as fp16 pairs. Adds the weights and weight * minimum to
// the state. Returns false and changes nothing if a product would overflow: move the reference
// first.
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

// ---- 2-bit tiles with the split query. ----
//
// Byte i of a word, masked for plane p, is the code of step 4(i & 1) + p and channel 2q + (i >> 1)
// of the half step. Codes of odd planes are four times too large; the query is rounded to steps
// four times as large for them.

#if SPLIT_QUERY
constexpr int PLANES = 4;
constexpr float SPLIT_RANGE = 16256.f;  // 127 * 128

struct SplitQuery {
    u32 b[SPLIT_QUERY][PLANES][2];
    float sum[LANE_COLUMNS];  // of the rounded channels
    float factor;             // the rounding step
};

DEVICE u32 byte_codes(u32 word, int plane) {
    return (plane < 2 ? word : word >> 4) & (plane & 1 ? 0x0c0c0c0cu : 0x03030303u);
}

// Like coded_scores.
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
