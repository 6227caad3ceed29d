// Demotion: quantizes 16-token tiles of full pages. A row is clipped at an exact order statistic;
// its scale and minimum are rounded to fp16; codes are the levels nearest to the row under the
// rounded pair, or chosen by query-aware rounding (feedback). Operations and their order are those
// of oscar_codec (clip, affine, rounding), so codes and pairs equal the scalar reference bit for
// bit.
//
// One thread block per tile, head and side (keys or values). Each warp quantizes one row; then the
// block packs the codes into words. Compiled with HEAD_DIM.
#include "common.cuh"

// How the codes of a head are rounded (oscar_codec::Rounding).
struct HeadRounding {
    const float* feedback;  // for keys, [HEAD_DIM][HEAD_DIM]; null: nearest level
    u64 unbiased;           // 0 or 1
};
CHECK_LAYOUT(HeadRounding);

struct DemoteArgs {
    StepTables step;
    const HeadPages* heads;         // of one layer, or of several consecutive layers
    const HeadRounding* roundings;  // likewise; null: nearest level everywhere
    u32 head_count;
};
CHECK_LAYOUT(DemoteArgs);

constexpr int DEMOTE_WARPS = TILE_TOKENS;  // one warp per row
constexpr int VALUES = HEAD_DIM / 32;   // elements per lane: channels lane, lane + 32, ...
constexpr float SATURATION = 32752.f;   // oscar_codec::affine::SATURATION
constexpr float MOST_GROWTH = 1.5f, LARGEST_MIN = 65504.f;  // oscar_codec::rounding

// The largest threshold that at least `above` magnitudes of the row reach: the order statistic at
// index HEAD_DIM - above. BF16 values and SATURATION end in 13 zero bits, so bits 30..13 decide.
DEVICE float order_statistic(const float (&x)[VALUES], u32 above) {
    u32 threshold = 0;
    for (int bit = 30; bit >= 13; bit--) {
        u32 candidate = threshold | 1u << bit, reach = 0;
#pragma unroll
        for (int i = 0; i < VALUES; i++) reach += (__float_as_uint(x[i]) & 0x7fffffffu) >= candidate;
        if (__reduce_add_sync(0xffffffffu, reach) >= above) threshold = candidate;
    }
    return __uint_as_float(threshold);
}

// Sum of f over the channels in the order of oscar_codec::affine::lane_sum: sixteen strided sums,
// then a tree over them. Every lane receives the sum.
template <class F>
DEVICE float channel_sum(F&& f, int lane) {
    float sum = 0.f;
    for (int c = lane & 15; c < HEAD_DIM; c += 16) sum = __fadd_rn(sum, f(c));
#pragma unroll
    for (int half = 8; half > 0; half /= 2) sum = __fadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, half, 16));
    return __shfl_sync(0xffffffffu, sum, 0);
}

// The nearest level; 0 if the row is constant.
DEVICE float level_of(float x, float scale, float minimum, float top) {
    float level = floorf(__fadd_rn(__fdiv_rn(__fsub_rn(x, minimum), scale), 0.5f));
    return scale <= 0.f ? 0.f : fminf(fmaxf(level, 0.f), top);
}

DEVICE u16 f32_to_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// Scale and minimum of a row, fp16.
struct RowParams {
    u16 scale, minimum;
};

// Quantizes a sanitized row with one warp: `codes` and `row` are its shared memory, one element per
// channel.
DEVICE RowParams quantize_row(float (&x)[VALUES], u32 side, u32 bits, u32 clip, const HeadRounding& rounding,
                              u8* codes, float* row, int lane) {
    const float top = (float)((1u << bits) - 1);
    float raw[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) raw[i] = x[i];
    if (clip != 0xffffffffu) {
        float t = order_statistic(x, HEAD_DIM - clip);
#pragma unroll
        for (int i = 0; i < VALUES; i++) x[i] = x[i] < -t ? -t : x[i] > t ? t : x[i];
    }
    float scale, minimum;
    if (bits == 1) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < VALUES; i++) row[lane + 32 * i] = x[i];
        __syncwarp();
        float mean = __fdiv_rn(channel_sum([&](int c) { return row[c]; }, lane), (float)HEAD_DIM);
        float deviation = __fdiv_rn(
            channel_sum([&](int c) { return fabsf(__fsub_rn(row[c], mean)); }, lane), (float)HEAD_DIM);
        scale = __fmul_rn(2.f, deviation), minimum = __fsub_rn(mean, deviation);
    } else {
        float low = x[0], high = x[0];
#pragma unroll
        for (int i = 1; i < VALUES; i++) low = fminf(low, x[i]), high = fmaxf(high, x[i]);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            low = fminf(low, __shfl_xor_sync(0xffffffffu, low, step));
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
        }
        scale = __fdiv_rn(__fsub_rn(high, low), top), minimum = low;
    }
    u16 scale16 = f32_to_f16(scale), minimum16 = f32_to_f16(minimum);
    scale = f16_to_f32(scale16), minimum = f16_to_f32(minimum16);
    if (side == KEY && rounding.feedback) {
        // From the last channel to the first: each rounding error shifts the targets of the
        // channels before it.
#pragma unroll
        for (int i = 0; i < VALUES; i++) x[i] = raw[i];
#pragma unroll
        for (int i = VALUES - 1; i >= 0; i--) {
            for (int owner = 31; owner >= 0; owner--) {
                const int channel = owner + 32 * i;
                const float level = level_of(x[i], scale, minimum, top);
                if (lane == owner) codes[channel] = (u8)level;
                const float own = __fsub_rn(raw[i], __fadd_rn(__fmul_rn(scale, level), minimum));
                const float error = __shfl_sync(0xffffffffu, own, owner);
                const float* weights = rounding.feedback + channel * HEAD_DIM;
#pragma unroll
                for (int j = 0; j <= i; j++)
                    if (lane + 32 * j < channel) x[j] = __fadd_rn(x[j], __fmul_rn(weights[lane + 32 * j], error));
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < VALUES; i++) codes[lane + 32 * i] = (u8)level_of(x[i], scale, minimum, top);
    }
    if (rounding.unbiased && bits > 1) {
        // Unbiased: refit scale and minimum so that the mean and the length of the row are
        // exact.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < VALUES; i++) row[lane + 32 * i] = raw[i];
        __syncwarp();
        u32 levels = 0;
#pragma unroll
        for (int i = 0; i < VALUES; i++) levels += codes[lane + 32 * i];
        const float level = __fdiv_rn((float)__reduce_add_sync(0xffffffffu, levels), (float)HEAD_DIM);
        const float mean = __fdiv_rn(channel_sum([&](int c) { return row[c]; }, lane), (float)HEAD_DIM);
        const float own = channel_sum([&](int c) {
            float v = __fsub_rn(row[c], mean);
            return __fmul_rn(v, v);
        }, lane);
        const float common = channel_sum([&](int c) {
            return __fmul_rn(__fsub_rn(row[c], mean), __fsub_rn((float)codes[c], level));
        }, lane);
        if (common > 0.f) {
            const u16 fitted16 = f32_to_f16(fminf(__fdiv_rn(own, common), __fmul_rn(scale, MOST_GROWTH)));
            const float low = __fsub_rn(mean, __fmul_rn(f16_to_f32(fitted16), level));
            if (fabsf(low) <= LARGEST_MIN) scale16 = fitted16, minimum16 = f32_to_f16(low);
        }
    }
    return {scale16, minimum16};
}

// A row of a full page, sanitized: the channels of one lane.
DEVICE void load_row(float (&x)[VALUES], const u16* page, u32 side, u32 token, int lane) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        float v = bf16_to_f32(page[full_element(side, HEAD_DIM, token, lane + 32 * i)]);
        x[i] = v != v ? 0.f : fminf(fmaxf(v, -SATURATION), SATURATION);
    }
}

// The code at (lane, word, half, plane) of a tile, for widths that are powers of two: the inverse
// of code_place.
DEVICE u32 code_at(const u8 (*codes)[HEAD_DIM], u32 side, u32 bits, u32 lane, u32 word, u32 half, u32 plane) {
    constexpr u32 steps = HEAD_DIM / 16;
    u32 planes = 16 / bits, j, token_half, channel_half;
    if (planes <= steps) {
        u32 row_half = word & 1, column_half = (word >> 1) & 1;
        j = plane + planes * (word / 4);
        token_half = side == KEY ? row_half : column_half, channel_half = side == KEY ? column_half : row_half;
    } else {
        j = plane % steps, channel_half = plane / steps & 1;
        token_half = planes == 2 * steps ? word : plane / (2 * steps);
    }
    u32 r = lane >> 2, pair = 2 * (lane & 3) + half;
    u32 token = (side == KEY ? r : pair) + 8 * token_half, channel = 16 * j + (side == KEY ? pair : r) + 8 * channel_half;
    return codes[token][channel];
}

extern "C" __global__ void __launch_bounds__(32 * DEMOTE_WARPS, 3) demote(DemoteArgs a) {
    __shared__ u8 codes[TILE_TOKENS][HEAD_DIM];
    __shared__ float rows[DEMOTE_WARPS][HEAD_DIM];
    wait_for_previous_kernel();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 jobs = a.step.demoted_count * a.head_count * 2;
    for (u32 job = blockIdx.x; job < jobs; job += gridDim.x) {
        const u32 side = job & 1, head_index = (job >> 1) % a.head_count;
        const DemotedTile tile = a.step.demoted[(job >> 1) / a.head_count];
        const HeadPages head = a.heads[head_index];
        if (!head.keeps_history()) continue;
        const CodedPage shape = {head.key_bits, head.value_bits, HEAD_DIM};
        const u32 bits = shape.side_bits(side), clip = side == KEY ? head.key_clip : head.value_clip;
        const u16* from = (const u16*)head.full + (u64)tile.full * (2 * PAGE_TOKENS * HEAD_DIM);
        u8* const page = (u8*)head.coded + (u64)tile.coded * shape.bytes();
        const int token = warp;
        float x[VALUES];
        load_row(x, from, side, tile.tile * TILE_TOKENS + token, lane);
        const HeadRounding rounding = a.roundings ? a.roundings[head_index] : HeadRounding{};
        const RowParams params = quantize_row(x, side, bits, clip, rounding, codes[token], rows[warp], lane);
        if (lane == 0)
            store_params(page, shape, side, tile.tile * TILE_TOKENS + token, params.scale, params.minimum);
        __syncthreads();
        u8* const out = page + shape.codes(side) + tile.tile * (2 * HEAD_DIM * bits);
        const u32 low_bits = bits == 3 ? 2 : bits, words = HEAD_DIM * low_bits / 64, planes = 16 / low_bits;
        for (u32 w = threadIdx.x; w < 32 * words; w += blockDim.x) {
            u32 in_lane = w % 32, word = w / 32, packed = 0;
            for (u32 half = 0; half < 2; half++)
                for (u32 plane = 0; plane < planes; plane++)
                    packed |= (code_at(codes, side, low_bits, in_lane, word, half, plane) & ((1u << low_bits) - 1))
                              << (16 * half + low_bits * plane);
            *(u32*)(out + word_byte(words, in_lane, word)) = packed;
        }
        if (bits == 3) {
            for (u32 w = threadIdx.x; w < 16 * words; w += blockDim.x) {
                u32 in_lane = w % 32, word = w / 32, packed = 0;
                for (u32 half = 0; half < 2; half++)
                    for (u32 bit = 0; bit < 16; bit++)
                        packed |= (code_at(codes, side, 2, in_lane, 2 * word + (bit & 1), half, bit / 2) >> 2) << (16 * half + bit);
                *(u32*)(out + 4 * HEAD_DIM + word_byte(words / 2, in_lane, word)) = packed;
            }
        }
        __syncthreads();
    }
}

// ---- Calibration: history as its codes would give it back. ----

// Widths of a head; 0 leaves a side exact.
struct RecodedHead {
    u32 key_bits, value_bits;
    u32 key_clip, value_clip;  // as in HeadPages
};
CHECK_LAYOUT(RecodedHead);

// A full page and its copy, in which tokens first .. end are recoded.
struct RecodedPage {
    u32 from, to, first, end;
};
CHECK_LAYOUT(RecodedPage);

struct RecodeArgs {
    const HeadPages* heads;         // of one layer
    const HeadRounding* roundings;  // likewise; null: nearest level everywhere
    const RecodedHead* widths;      // by head
    const RecodedPage* pages;
};
CHECK_LAYOUT(RecodeArgs);

// Block (tile, head, side); tiles of all pages, four of a page. One warp per row.
extern "C" __global__ void __launch_bounds__(32 * DEMOTE_WARPS, 3) recode(RecodeArgs a) {
    __shared__ u8 codes[TILE_TOKENS][HEAD_DIM];
    __shared__ float rows[DEMOTE_WARPS][HEAD_DIM];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 side = blockIdx.z, token = blockIdx.x % 4 * TILE_TOKENS + warp;
    const RecodedPage page = a.pages[blockIdx.x / 4];
    const RecodedHead head = a.widths[blockIdx.y];
    const u32 bits = side == KEY ? head.key_bits : head.value_bits;
    u16* const full = (u16*)a.heads[blockIdx.y].full;
    const u16* const from = full + (u64)page.from * (2 * PAGE_TOKENS * HEAD_DIM);
    u16* const to = full + (u64)page.to * (2 * PAGE_TOKENS * HEAD_DIM);
    if (bits == 0 || token < page.first || token >= page.end) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const u64 at = full_element(side, HEAD_DIM, token, lane + 32 * i);
            to[at] = from[at];
        }
        return;
    }
    float x[VALUES];
    load_row(x, from, side, token, lane);
    const HeadRounding rounding = a.roundings ? a.roundings[blockIdx.y] : HeadRounding{};
    const u32 clip = side == KEY ? head.key_clip : head.value_clip;
    const RowParams params = quantize_row(x, side, bits, clip, rounding, codes[warp], rows[warp], lane);
    const float scale = f16_to_f32(params.scale), minimum = f16_to_f32(params.minimum);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        const float v = __fadd_rn(__fmul_rn(scale, (float)codes[warp][lane + 32 * i]), minimum);
        to[full_element(side, HEAD_DIM, token, lane + 32 * i)] = f32_to_bf16(v);
    }
}
