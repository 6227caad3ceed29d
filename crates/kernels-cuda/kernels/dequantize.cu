// Expands the quantized pages that a prompt reads to FP16, for prefill attention on Hopper.
//
// One block for each page and KV head. The result has the layout of a BF16 page: 64 tokens of keys, then
// of values, in panels of 64 channels (page.cuh). It is kept for one layer only; the pages themselves
// stay quantized.
#include "fragments.cuh"

struct DequantizeParams {
    StepTables step;
    const HeadPages* pages;  // of the layer
    u8* expanded;            // FP16 pages: [KV head - first_head][place in the page tables]
    u64 expanded_head;       // bytes of one head
    u32 first_head;
    u32 least_rows;          // sequences with fewer rows do not come here
};
CHECK_LAYOUT(DequantizeParams);

constexpr int D = HEAD_DIM;
constexpr int THREADS = 128;               // a warp for each 16-token tile
constexpr int PAGE_BYTES = 64 * D * 4;

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

// One lane's part of a tile: lane 4r + q has tokens r and r + 8 of keys, channels r and r + 8 of values.
template <int BITS, int SIDE>
DEVICE void expand(const CodedPage& shape, const u8* page, u32 tile, u32 lane, u16* to) {
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
        const u32 scale = __byte_perm(x, y, 0x5410), minimum = __byte_perm(x, y, 0x7632);
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            const u32 channels = 16 * (i / 2) + 8 * (i % 2);
            const u32 pair = fma_f16x2(codes_f16<BITS, SIDE>(words, i / 2, half, i % 2), scale, minimum);
            if constexpr (SIDE == KEY) {
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

extern "C" __global__ void __launch_bounds__(THREADS) dequantize_pages(const DequantizeParams p) {
    extern __shared__ uint4 memory[];  // the expanded page
    allow_next_kernel();
    wait_for_previous_kernel();
    const SequenceInfo s = p.step.sequences[blockIdx.z];
    const HeadPages pages = p.pages[p.first_head + blockIdx.y];
    const u32 last = s.first_position + s.rows - 1, boundary = boundary_of(p.step, last);
    const u32 block = p.step.sink / 64 + blockIdx.x;
    if (s.rows < p.least_rows || !pages.keeps_history()) return;
    const History history = history_of(p.step, s.view, s.view_end, p.first_head + blockIdx.y);
    if (boundary <= p.step.sink || block * 64 >= min(boundary, last + 1) || block < history.first) return;
    const CodedPage shape = {pages.key_bits, pages.value_bits, D};
    const u8* page = (const u8*)(pages.coded + (u64)history.page(p.step, s.table, block) * shape.bytes());
    const u32 lane = threadIdx.x & 31, tile = threadIdx.x >> 5;
    expand_any<KEY>(shape, page, tile, lane, (u16*)memory);
    expand_any<VALUE>(shape, page, tile, lane, (u16*)memory);
    __syncthreads();
    uint4* to = (uint4*)(p.expanded + blockIdx.y * p.expanded_head + (u64)(s.table + block) * PAGE_BYTES);
    for (u32 i = threadIdx.x; i < PAGE_BYTES / 16; i += THREADS) to[i] = memory[i];
}
