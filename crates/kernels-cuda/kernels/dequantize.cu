// Expands the quantized pages that a prompt reads to FP16, for prefill attention on Hopper.
//
// One block for each page and KV head. The result has the layout of a BF16 page: 64 tokens of keys, then
// of values, in panels of 64 channels (page.cuh). It is kept for one layer only; the pages themselves
// stay quantized.
//
// Keys of few bits become E4M3 instead, in panels of 128 channels and likewise 128 bytes, times a power of
// two; values follow, then the factor that takes it back.
#include "fragments.cuh"

struct DequantizeParams {
    StepTables step;
    const HeadPages* pages;  // of the layer
    u8* expanded;            // FP16 pages: [KV head - first_head][place in the page tables]
    u64 expanded_head;       // bytes of one head
    u32 first_head;
    u32 first_sequence;      // of the blocks with blockIdx.z = 0
    u32 least_rows;          // sequences with fewer rows do not come here
    u32 e4m3_bits;           // keys of at most this many bits become E4M3
};
CHECK_LAYOUT(DequantizeParams);

constexpr int D = HEAD_DIM;
constexpr int THREADS = 128;               // a warp for each 16-token tile
constexpr int PAGE_BYTES = 64 * D * 4;
constexpr int E4M3_FACTOR_AT = 64 * D * 3, E4M3_BYTES = E4M3_FACTOR_AT + 16;

DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// Two codes of a tile's words as FP16: neighbouring channels of a key, neighbouring tokens of a value.
// 1024 + x is exact in FP16 for integers x below 1024, and its last ten bits are those of x. So a code
// need not be shifted down as long as it stays below 1024: groups of planes share one shift.
template <int BITS, int SIDE>
DEVICE u32 codes_f16(const TileWords<BITS>& words, int j, int token_half, int channel_half) {
    constexpr int PLANES = planes_of(BITS), LOW = 16 / PLANES;
    constexpr int TOGETHER = BITS == 1 ? 8 : BITS == 2 ? 5 : BITS == 3 ? 4 : 2;
    constexpr u32 PAIR = 0x00010001u, HIGH_BIT = 0x6400 * PAIR;  // 1024, twice
    int word, plane;
    if constexpr (PLANES <= STEPS) {
        word = (SIDE == KEY ? token_half + 2 * channel_half : channel_half + 2 * token_half) + 4 * (j / PLANES);
        plane = j % PLANES;
    } else if constexpr (PLANES == 2 * STEPS) {
        word = token_half, plane = j + STEPS * channel_half;
    } else {
        word = 0, plane = j + STEPS * channel_half + 2 * STEPS * token_half;
    }
    const int shift = plane / TOGETHER * TOGETHER * LOW, at = plane % TOGETHER * LOW;
    u32 pair = words.low[word] >> shift & ((1u << LOW) - 1) * PAIR << at;
    if constexpr (BITS == 3) {
        const u32 top = words.top[word / 2] >> (word & 1);
        pair |= (shift >= 2 ? top >> (shift - 2) : top << 2) & (4 * PAIR) << at;
    }
    // (1024 + c 2^at) 2^-at - 1024 2^-at = c.
    return fma_f16x2(pair | HIGH_BIT, (0x3c00 - 0x400 * at) * PAIR, (0xe400 - 0x400 * at) * PAIR);
}

DEVICE u32 multiply_f16x2(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
DEVICE u16 e4m3_of_f16x2(u32 pair) {
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(y) : "r"(pair));
    return y;
}

// Place of two neighbouring channels of a key in E4M3.
DEVICE u32 e4m3_byte(u32 token, u32 channel) {
    return (channel / 128 * 64 + token) * 128 + ((channel % 128 / 16) ^ (token & 7)) * 16 + channel % 16;
}

// Exponent of the power of two that brings the largest magnitude of a page's keys to 128 .. 256, or near.
// Only tokens `first` .. `end` have keys.
template <int BITS>
DEVICE int key_exponent(const CodedPage& shape, const u8* page, u32 first, u32 end) {
    __shared__ u32 most;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    if (threadIdx.x < 64) {
        const u32 token = threadIdx.x, params = *(const u32*)(page + param_byte(shape, KEY, token));
        const float scale = low_f16(params), minimum = high_f16(params);
        const float top = __fmaf_rn(scale, (float)((1 << BITS) - 1), minimum);
        const u32 magnitude = __float_as_uint(fmaxf(fabsf(minimum), fabsf(top)));
        const u32 bound = __reduce_max_sync(0xffffffffu, token >= first && token < end ? magnitude : 0);
        if (threadIdx.x % 32 == 0) atomicMax(&most, bound);
    }
    __syncthreads();
    return min(max(134 - (int)(most >> 23), -14), 15);  // powers that FP16 has
}

// One lane's part of a tile: lane 4r + q has tokens r and r + 8 of keys, channels r and r + 8 of values.
// With E4M3, keys become E4M3 times 2^exponent.
template <int BITS, int SIDE, bool E4M3 = false>
DEVICE void expand(const CodedPage& shape, const u8* page, u32 tile, u32 lane, u16* to, int exponent = 0) {
    TileWords<BITS> words;
    load_tile(words, page + shape.codes(SIDE) + tile * code_bytes_per_tile(BITS), lane);
    const u32 r = lane >> 2, q = lane & 3, first = 16 * tile;
    // (scale, minimum) of tokens r, r + 8 for keys; of 2q, 2q + 8, 2q + 1, 2q + 9 for values.
    const u8* params = page + shape.params(SIDE) + tile * 64;
    const uint2 a = *(const uint2*)(params + (SIDE == KEY ? r * 8 : q * 16));
    const uint2 b = SIDE == KEY ? a : *(const uint2*)(params + q * 16 + 8);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 x = half == 0 ? a.x : a.y, y = half == 0 ? b.x : b.y;
        u32 scale = __byte_perm(x, y, 0x5410), minimum = __byte_perm(x, y, 0x7632);
        if constexpr (E4M3) {
            const u32 power = (u32)(15 + exponent) * 0x04000400u;
            scale = multiply_f16x2(scale, power), minimum = multiply_f16x2(minimum, power);
        }
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            const u32 channels = 16 * (i / 2) + 8 * (i % 2);
            const u32 pair = fma_f16x2(codes_f16<BITS, SIDE>(words, i / 2, half, i % 2), scale, minimum);
            if constexpr (E4M3) {
                *(u16*)((u8*)to + e4m3_byte(first + 8 * half + r, channels + 2 * q)) = e4m3_of_f16x2(pair);
            } else if constexpr (SIDE == KEY) {
                *(u32*)(to + full_element(KEY, D, first + 8 * half + r, channels + 2 * q)) = pair;
            } else {
                to[full_element(VALUE, D, first + 8 * half + 2 * q, channels + r)] = (u16)pair;
                to[full_element(VALUE, D, first + 8 * half + 2 * q + 1, channels + r)] = (u16)(pair >> 16);
            }
        }
    }
}

template <int SIDE>
DEVICE void expand_any(const CodedPage& shape, const u8* page, u32 tile, u32 lane, u16* to) {
    switch (shape.side_bits(SIDE)) {
        case 1: expand<1, SIDE>(shape, page, tile, lane, to); break;
        case 2: expand<2, SIDE>(shape, page, tile, lane, to); break;
        case 3: expand<3, SIDE>(shape, page, tile, lane, to); break;
        default: expand<4, SIDE>(shape, page, tile, lane, to); break;
    }
}

// Keys of BITS bits in E4M3, and their factor.
template <int BITS>
DEVICE void expand_e4m3(const CodedPage& shape, const u8* page, u32 first, u32 end, u32 tile, u32 lane, u8* to) {
    const int exponent = key_exponent<BITS>(shape, page, first, end);
    expand<BITS, KEY, true>(shape, page, tile, lane, (u16*)to, exponent);
    if (threadIdx.x == 0) *(float*)(to + E4M3_FACTOR_AT) = __uint_as_float((u32)(127 - exponent) << 23);
}

extern "C" __global__ void __launch_bounds__(THREADS) dequantize_pages(const DequantizeParams p) {
    extern __shared__ uint4 memory[];  // the expanded page
    allow_next_kernel();
    wait_for_previous_kernel();
    const SequenceInfo s = p.step.sequences[p.first_sequence + blockIdx.z];
    const HeadPages pages = p.pages[p.first_head + blockIdx.y];
    const u32 last = s.first_position + s.rows - 1, boundary = boundary_of(p.step, last);
    const u32 block = p.step.sink / 64 + blockIdx.x;
    if (s.rows < p.least_rows || !pages.keeps_history()) return;
    const History history = history_of(p.step, s.view, s.view_end, p.first_head + blockIdx.y);
    if (boundary <= p.step.sink || block * 64 >= min(boundary, last + 1) || block < history.first) return;
    const CodedPage shape = {pages.key_bits, pages.value_bits, D};
    const u8* page = (const u8*)(pages.coded + (u64)history.page(p.step, s.table, block) * shape.bytes());
    const u32 lane = threadIdx.x & 31, tile = threadIdx.x >> 5;
    u16* const expanded = (u16*)memory;
    const bool e4m3 = pages.key_bits <= p.e4m3_bits && s.view == NO_VIEW;
    const u32 first = max(p.step.sink, block * 64) - block * 64, end = min(boundary - block * 64, 64u);
    if (!e4m3) expand_any<KEY>(shape, page, tile, lane, expanded);
    else if (pages.key_bits == 1) expand_e4m3<1>(shape, page, first, end, tile, lane, (u8*)memory);
    else expand_e4m3<2>(shape, page, first, end, tile, lane, (u8*)memory);
    // Values follow keys of half their size.
    expand_any<VALUE>(shape, page, tile, lane, e4m3 ? expanded - 32 * D : expanded);
    __syncthreads();
    uint4* to = (uint4*)(p.expanded + blockIdx.y * p.expanded_head + (u64)(s.table + block) * PAGE_BYTES);
    for (u32 i = threadIdx.x; i < (e4m3 ? E4M3_BYTES : PAGE_BYTES) / 16; i += THREADS) to[i] = memory[i];
}
