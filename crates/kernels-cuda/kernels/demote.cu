// Demotion: quantizes 16-token tiles of full pages. A row is clipped at an exact order statistic;
// its scale and minimum are rounded to fp16; codes are the levels nearest to the row under the
// rounded pair, or chosen by query-aware rounding (feedback). Operations and their order are those
// of oscar_codec (clip, affine, rounding), so codes and pairs equal the scalar reference bit for
// bit.
//
// One thread block per tile, head and side (keys or values). Each warp quantizes one row and packs its
// codes into words. Compiled with HEAD_DIM.
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

// The magnitude of rank `above` in the row: the order statistic at index HEAD_DIM - above. Lanes sort their
// own magnitudes, then the largest ones of the warp are taken off until the rank is reached.
DEVICE float order_statistic(const float (&x)[VALUES], u32 above) {
    u32 own[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) own[i] = __float_as_uint(x[i]) & 0x7fffffffu;
#pragma unroll
    for (int round = 0; round < VALUES; round++)
#pragma unroll
        for (int i = round % 2; i + 1 < VALUES; i += 2) {
            const u32 a = own[i], b = own[i + 1];
            own[i] = max(a, b), own[i + 1] = min(a, b);
        }
    while (true) {
        // A lane without magnitudes left counts as zero, which nothing is below.
        const u32 most = __reduce_max_sync(0xffffffffu, own[0]);
        const bool mine = own[0] == most;
        const u32 taken = __popc(__ballot_sync(0xffffffffu, mine));
        if (taken >= above) return __uint_as_float(most);
        above -= taken;
#pragma unroll
        for (int i = 0; i < VALUES; i++) own[i] = !mine ? own[i] : i + 1 < VALUES ? own[i + 1] : 0;
    }
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

// Puts a lane's codes of one token into the words of its tile, which were zero.
template <u32 BITS, u32 SIDE>
DEVICE void pack(const u8* codes, u32* words, u32 token, u32 lane) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        const u32 channel = lane + 32 * i, code = codes[channel];
        CodeField fields[2];
        const int count = code_fields(SIDE, BITS, HEAD_DIM, token, channel, fields);
#pragma unroll
        for (int f = 0; f < count; f++)
            atomicOr(words + fields[f].byte / 4, (code >> fields[f].code_shift & ((1u << fields[f].width) - 1)) << fields[f].bit);
    }
}
template <u32 SIDE>
DEVICE void pack_any(u32 bits, const u8* codes, u32* words, u32 token, u32 lane) {
    switch (bits) {
        case 1: pack<1, SIDE>(codes, words, token, lane); break;
        case 2: pack<2, SIDE>(codes, words, token, lane); break;
        case 3: pack<3, SIDE>(codes, words, token, lane); break;
        default: pack<4, SIDE>(codes, words, token, lane); break;
    }
}

extern "C" __global__ void __launch_bounds__(32 * DEMOTE_WARPS, 3) demote(DemoteArgs a) {
    __shared__ u8 codes[TILE_TOKENS][HEAD_DIM];
    __shared__ float rows[DEMOTE_WARPS][HEAD_DIM];
    __shared__ u32 words[2 * HEAD_DIM];  // a tile of 4-bit codes
    for (u32 i = threadIdx.x; i < 2 * HEAD_DIM; i += blockDim.x) words[i] = 0;
    __syncthreads();
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
        // A lane reads the codes that it wrote.
        if (side == KEY) pack_any<KEY>(bits, codes[token], words, token, lane);
        else pack_any<VALUE>(bits, codes[token], words, token, lane);
        __syncthreads();
        const u32 tile_words = HEAD_DIM * bits / 2;
        u32* const out = (u32*)(page + shape.codes(side)) + tile.tile * tile_words;
        for (u32 i = threadIdx.x; i < tile_words; i += blockDim.x) out[i] = words[i], words[i] = 0;
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
