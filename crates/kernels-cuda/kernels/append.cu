// Query and key heads on their way to the cache: QK-norm, RoPE, key mean, rotation; keys and values into their full
// pages, rotated queries out. One block takes the query heads of one KV head and the key head itself, for a few rows.
//
// At one row the kernel is a chain of waits, so all that is not this step's projections is fetched before the wait: the
// rotation into shared memory, norm weights, RoPE and page ids into registers. A block is small enough to be there while
// the product before it runs. The order of every sum is fixed: a row's result does not depend on the rows beside it.
#include "common.cuh"

struct AppendParams {
    StepTables step;
    const HeadPages* pages;  // of the layer
    float* qkv;              // rows of [queries | keys | values]; queries and keys are normed and roped in place
    float* queries;          // [row][query head][HEAD_DIM], rotated
    const float* query_norm; // weights, or null
    const float* key_norm;
    const float* cosines;    // [position][HEAD_DIM / 2]
    const float* sines;
    const uint4* rotation;   // of the kv heads, as fragments (below), or null
    const float* mean;       // [kv head][HEAD_DIM]
    u32 query_heads;
    u32 kv_heads;
    u32 rows_per_block;
    float eps;
};

constexpr int D = HEAD_DIM;
constexpr int WARPS = D / 16, THREADS = 32 * WARPS;  // a warp for 16 channels of the result
constexpr int STEPS = D / 16, TILES = D / 8;
constexpr int VECTORS = 16;               // rows times heads a block takes at a time
constexpr int STRIDE = D + 8;             // keeps the rows that a warp reads in different banks
constexpr int PER_LANE = D / 32;
constexpr int ROTATION = STEPS * TILES * 32;  // quads of a rotation
// Larger rotations are read where they lie.
constexpr bool ROTATION_NEAR = D <= 128;

// Vectors and rotation are the sum of two BF16 numbers each, high and low; their product is that of three pairs of these, all
// but low times low, which is below what is left of either. A rotation lies in fragments of 16 inputs and 8 outputs, [input
// step][output tile][lane]: the lane's two registers of the high parts and of the low.
struct Shared {
    u16 high[VECTORS][STRIDE], low[VECTORS][STRIDE];
    uint4 rotation[ROTATION_NEAR ? ROTATION : 1];

    DEVICE void put(u32 vector, u32 channel, float x) {
        const u16 h = f32_to_bf16(x);
        high[vector][channel] = h, low[vector][channel] = f32_to_bf16(x - bf16_to_f32(h));
    }
};

// What a vector meets on its way and no kernel of the step writes: a lane's channels lane, lane + 32, ...
struct VectorConstants {
    float weight[PER_LANE], mean[PER_LANE], cosine[PER_LANE / 2], sine[PER_LANE / 2];

    DEVICE void load(const AppendParams& p, u32 row, bool is_key, u32 kv_head, u32 lane) {
        const float* norm = is_key ? p.key_norm : p.query_norm;
        const float* means = is_key && p.mean ? p.mean + kv_head * D : nullptr;
        const u64 at = (u64)__ldcg(p.step.row_position + row) * (D / 2) + lane;
#pragma unroll
        for (int k = 0; k < PER_LANE; k++) {
            weight[k] = norm ? norm[lane + 32 * k] : 1.0f;
            mean[k] = means ? means[lane + 32 * k] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < PER_LANE / 2; k++) cosine[k] = p.cosines[at + 32 * k], sine[k] = p.sines[at + 32 * k];
    }
};

// Where a row's key and value go.
struct RowPlace {
    u16* page;
    u32 token;

    DEVICE RowPlace(const AppendParams& p, const HeadPages& pages, u32 row) {
        const u32 position = __ldcg(p.step.row_position + row), sequence = __ldcg(p.step.row_sequence + row);
        const u32 table = __ldcg(&p.step.sequences[sequence].table);
        page = (u16*)(pages.full + (u64)__ldcg(p.step.full + table + position / 64) * full_page_bytes(D));
        token = position % 64;
    }
    DEVICE void put(Side side, u32 channel, float x) const { page[full_element(side, D, token, channel)] = f32_to_bf16(x); }
};

// Two tiles of channels of the vectors, rotated: [tile][i] is of vector lane / 4 + 8 * (i / 2) and channel 2 * (lane % 4) + i % 2
// of the tile. All warps, each its own channels; what lies in the rows of vectors that are not there has no effect on others.
DEVICE void rotate(float (&out)[2][4], const Shared& shared, const uint4* rotation, u32 lane, u32 warp) {
    float sums[3][2][4] = {};
    const u32 g = lane >> 2, t = lane & 3;
    auto part = [&](const u16 (&x)[VECTORS][STRIDE], u32 row, u32 channel) { return *(const u32*)&x[row][channel]; };
#pragma unroll 2
    for (int step = 0; step < STEPS; step++) {
        const u32 channel = 16 * step + 2 * t;
        const u32 high[4] = {part(shared.high, g, channel), part(shared.high, g + 8, channel),
                             part(shared.high, g, channel + 8), part(shared.high, g + 8, channel + 8)};
        const u32 low[4] = {part(shared.low, g, channel), part(shared.low, g + 8, channel),
                            part(shared.low, g, channel + 8), part(shared.low, g + 8, channel + 8)};
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint4 r = rotation[(step * TILES + 2 * warp + n) * 32 + lane];
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

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) append(AppendParams p) {
    extern __shared__ float4 memory[];
    Shared& shared = *(Shared*)memory;
    const u32 tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 kv_head = blockIdx.y, group = p.query_heads / p.kv_heads, width = (p.query_heads + 2 * p.kv_heads) * D;
    const u32 first_row = blockIdx.x * p.rows_per_block, rows = min(p.rows_per_block, p.step.rows - first_row);
    // Vector `v` is vector `v % each` of row `v / each`: the query heads, the key, the value.
    const u32 each = group + 2, total = rows * each;
    allow_next_kernel();

    const uint4* rotation = p.rotation ? p.rotation + kv_head * ROTATION : nullptr;
    if (ROTATION_NEAR && rotation) {
        for (u32 i = tid; i < ROTATION; i += THREADS) copy_to_shared(shared_address(shared.rotation + i), rotation + i);
        rotation = shared.rotation;
    }
    // The tables of a step are complete before its first kernel.
    VectorConstants constants;
    if (warp < total) constants.load(p, first_row + warp / each, warp % each == group, kv_head, lane);
    const HeadPages pages = p.pages[kv_head];
    const RowPlace first_place(p, pages, first_row);
    auto place_of = [&](u32 row) { return row == first_row ? first_place : RowPlace(p, pages, row); };
    // Neighbouring channels of a finished query head or key go out.
    auto put_out = [&](u32 row, u32 index, u32 channel, auto... x) {
        u32 at = channel;
        if (index < group) {
            float* to = p.queries + ((u64)row * p.query_heads + kv_head * group + index) * D;
            ((to[at++] = x), ...);
        } else {
            const RowPlace place = place_of(row);
            (place.put(KEY, at++, x), ...);
        }
    };
    wait_for_previous_kernel();
    for (u32 base = 0; base < total; base += VECTORS) {
        const u32 count = min((u32)VECTORS, total - base);
        for (u32 v = warp; v < count; v += WARPS) {
            const u32 row = first_row + (base + v) / each, index = (base + v) % each;
            const bool is_query = index < group, is_key = index == group;
            const u32 head = is_query ? kv_head * group + index : p.query_heads + (is_key ? 0 : p.kv_heads) + kv_head;
            float* x = p.qkv + (u64)row * width + head * D + lane;
            float values[PER_LANE];
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) values[k] = x[32 * k];
            if (!is_query && !is_key) {
                // Values go into their pages as they are: the model's weights already hold their rotation.
                const RowPlace place = place_of(row);
#pragma unroll
                for (int k = 0; k < PER_LANE; k++) place.put(VALUE, lane + 32 * k, values[k]);
                continue;
            }
            if (base > 0 || v != warp) constants.load(p, row, is_key, kv_head, lane);
            if (is_key ? p.key_norm : p.query_norm) {
                float squares = 0.0f;
#pragma unroll
                for (int k = 0; k < PER_LANE; k++) squares = __fmaf_rn(values[k], values[k], squares);
                float scale = 1.0f / sqrtf(warp_sum(squares) / (float)D + p.eps);
#pragma unroll
                for (int k = 0; k < PER_LANE; k++) values[k] = values[k] * scale * constants.weight[k];
            }
#pragma unroll
            for (int k = 0; k < PER_LANE / 2; k++) {
                float c = constants.cosine[k], s = constants.sine[k];
                float a = values[k], b = values[k + PER_LANE / 2];
                values[k] = a * c - b * s;
                values[k + PER_LANE / 2] = b * c + a * s;
            }
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) {
                x[32 * k] = values[k];
                values[k] -= constants.mean[k];
                if (rotation) shared.put(v, lane + 32 * k, values[k]);
                else put_out(row, index, lane + 32 * k, values[k]);
            }
        }
        if (!rotation) continue;
        wait_for_copied_bytes();
        __syncthreads();
        float out[2][4];
        rotate(out, shared, rotation, lane, warp);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 v = (lane >> 2) + 8 * half, row = first_row + (base + v) / each, index = (base + v) % each;
            if (v >= count || index > group) continue;
#pragma unroll
            for (int n = 0; n < 2; n++)
                put_out(row, index, 16 * warp + 8 * n + 2 * (lane & 3), out[n][2 * half], out[n][2 * half + 1]);
        }
        if (base + VECTORS < total) __syncthreads();
    }
}
