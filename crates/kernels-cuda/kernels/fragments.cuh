// Tensor-core products beyond those of common.cuh, and the conversion of codes into fragments.
//
// Registers of lane 4r + q in mma.m16n8k16:
//   A 0..3     register x: row r + 8(x & 1), columns 2q and 2q+1 (+8 if x >= 2)
//   B 0, 1     rows 2q and 2q+1 (+8 for register 1), column r
//   sums 0..3  rows r, r, r+8, r+8; columns 2q, 2q+1, 2q, 2q+1
#pragma once
#include "common.cuh"

#ifdef HEAD_DIM
constexpr int STEPS = HEAD_DIM / 16;  // 16-channel steps of a head
#endif

DEVICE void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// D(16x8) += A(16x32, unsigned bytes) B(32x8, signed bytes) in 32-bit integers.
DEVICE void mma_u8s8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transposes an 8x8 block of 16-bit elements. Turns softmax weights, which lie like sums, into a B
// register.
DEVICE u32 transpose_8x8(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

DEVICE u32 pack_f16(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

DEVICE float low_f16(u32 x) { return f16_to_f32((u16)(x & 0xffff)); }
DEVICE float high_f16(u32 x) { return f16_to_f32((u16)(x >> 16)); }

DEVICE u32 add_f16x2(u32 a, u32 b) {
    u32 y;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// Whether either half of `a` is at least that half of `limit`.
DEVICE bool any_at_least_f16x2(u32 a, u32 limit) {
    u32 y;
    asm("{ .reg .pred p, q; setp.ge.f16x2 p|q, %1, %2; or.pred p, p, q; selp.u32 %0, 1, 0, p; }"
        : "=r"(y)
        : "r"(a), "r"(limit));
    return y != 0;
}

DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- Codes as A registers. ----
//
// Masking a word gives two fp16 numbers code * 2^(exponent - 24), exactly: the low bits of an fp16
// number count in steps of 2^-24, so no conversion is needed. The exponent depends on the plane.
// The query (for keys) or the result (for values) is multiplied by the inverse power of two.

#ifdef HEAD_DIM
__host__ __device__ constexpr int planes_of(int bits) { return 16 / (bits == 3 ? 2 : bits); }

// Words per lane of one 16-token tile (for 3 bits: of its low two bits).
__host__ __device__ constexpr int words_of(int bits) { return HEAD_DIM * (bits == 3 ? 2 : bits) / 64; }

__host__ __device__ constexpr int code_bytes_per_tile(int bits) { return 2 * HEAD_DIM * bits; }

// Exponent of the codes of step j. `channel_half` is 0 for channels 0..7 of the step, 1 for 8..15.
template <int BITS>
DEVICE int plane_exponent(int j, int channel_half) {
    constexpr int planes = planes_of(BITS);
    int plane = planes <= STEPS ? j % planes : j + STEPS * channel_half;
    return BITS == 1 ? (plane & 7) : BITS == 4 ? 4 * (plane & 1) : 2 * (plane % 5);
}
DEVICE int plane_exponent(u32 bits, int j, int channel_half) {
    switch (bits) {
        case 1: return plane_exponent<1>(j, channel_half);
        case 2:
        case 3: return plane_exponent<2>(j, channel_half);
        case 4: return plane_exponent<4>(j, channel_half);
        default: return 0;  // zero-width head: it has no codes
    }
}

template <int BITS>
struct TileWords {
    u32 low[words_of(BITS)];
    u32 top[BITS == 3 ? (words_of(3) / 2) : 1];
};

template <int N>
DEVICE void load_words(u32 (&w)[N], const u8* tile, int lane) {
    if constexpr (N >= 4) {
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            uint4 v = *(const uint4*)(tile + i * 512 + lane * 16);
            w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
        }
    } else if constexpr (N == 2) {
        uint2 v = *(const uint2*)(tile + lane * 8);
        w[0] = v.x, w[1] = v.y;
    } else {
        w[0] = *(const u32*)(tile + lane * 4);
    }
}

template <int BITS>
DEVICE void load_tile(TileWords<BITS>& words, const u8* tile, int lane) {
    load_words(words.low, tile, lane);
    if constexpr (BITS == 3) load_words(words.top, tile + 4 * HEAD_DIM, lane);
}

// A register x of step j. After unrolling, j and x are constants.
template <int BITS, int SIDE>
DEVICE u32 code_pair(const TileWords<BITS>& words, int j, int x) {
    constexpr int planes = planes_of(BITS);
    const int channel_half = SIDE == KEY ? x >> 1 : x & 1, token_half = SIDE == KEY ? x & 1 : x >> 1;
    int word, plane;
    if constexpr (planes <= STEPS) {
        word = x + 4 * (j / planes), plane = j % planes;
    } else if constexpr (planes == 2 * STEPS) {
        word = token_half, plane = j + STEPS * channel_half;
    } else {
        word = 0, plane = j + STEPS * channel_half + 2 * STEPS * token_half;
    }
    u32 w = words.low[word];
    if constexpr (BITS == 1) return (plane < 8 ? w : w >> 8) & (0x00010001u << (plane & 7));
    if constexpr (BITS == 4) return (plane < 2 ? w : w >> 8) & (0x000f000fu << (4 * (plane & 1)));
    u32 low = (plane < 5 ? w : w >> 10) & (0x00030003u << (2 * (plane % 5)));
    if constexpr (BITS == 3) {
        // Insert the high bit above the low two.
        u32 t = words.top[word / 2];
        u32 lifted = plane < 5 ? t << (2 - (word & 1)) : t >> (8 + (word & 1));
        low |= lifted & (0x00040004u << (2 * (plane % 5)));
    }
    return low;
}
#endif
