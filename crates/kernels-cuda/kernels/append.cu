// Query and key heads on their way to the cache: QK-norm, RoPE, key mean, rotation; keys and values into their full
// pages, rotated queries out. One block takes the query heads of one KV head and the key head itself, for a few rows.
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
    const float* rotation;   // [kv head][HEAD_DIM][HEAD_DIM], or null
    const float* mean;       // [kv head][HEAD_DIM]
    u32 query_heads;
    u32 kv_heads;
    u32 rows_per_block;
    float eps;
};

constexpr int D = HEAD_DIM;
constexpr int PARTS = 1024 / D < 4 ? 1024 / D : 4;  // threads that share one output channel
constexpr int THREADS = D * PARTS, WARPS = THREADS / 32;
constexpr int VECTORS = 16;                         // rows times heads a block takes at a time
constexpr int PER_LANE = D / 32;
constexpr int PER_PART = D / PARTS;
// Few enough to hold a thread's share of the rotation in registers from before the wait on.
constexpr bool ROTATION_HELD = D <= 128;

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

// sum += x[0] * y[0] + x[1] * y[1] + ..., one after the other.
template <int COUNT, int ROOM>
DEVICE void add_products(float& sum, const float* x, const float (&y)[ROOM]) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const float4 q = *(const float4*)(x + i);
        sum = __fmaf_rn(q.x, y[i], sum);
        sum = __fmaf_rn(q.y, y[i + 1], sum);
        sum = __fmaf_rn(q.z, y[i + 2], sum);
        sum = __fmaf_rn(q.w, y[i + 3], sum);
    }
}

// The full page of a row's position.
DEVICE u16* page_of(const AppendParams& p, const HeadPages& pages, u32 row, u32& position) {
    position = __ldcg(p.step.row_position + row);
    const u32 table = __ldcg(&p.step.sequences[__ldcg(p.step.row_sequence + row)].table);
    return (u16*)(pages.full + (u64)__ldcg(p.step.full + table + position / 64) * full_page_bytes(D));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) append(AppendParams p) {
    extern __shared__ float4 memory[];
    float(*vectors)[D] = (float(*)[D])memory;              // [VECTORS][D]
    float(*sums)[VECTORS][D] = (float(*)[VECTORS][D])(vectors + VECTORS);  // [PARTS][VECTORS][D]
    const u32 kv_head = blockIdx.y, group = p.query_heads / p.kv_heads;
    const u32 first_row = blockIdx.x * p.rows_per_block;
    const u32 rows = min(p.rows_per_block, p.step.rows - first_row);
    const u32 width = (p.query_heads + 2 * p.kv_heads) * D;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 channel = threadIdx.x % D, part = threadIdx.x / D;
    const u32 total = rows * (group + 1);
    allow_next_kernel();

    // Everything but the projections is there already: the tables of a step are complete before its first kernel.
    const HeadPages pages = p.pages[kv_head];
    u32 position;
    u16* page = page_of(p, pages, first_row, position);
    const float* const rotation = p.rotation ? p.rotation + (u64)kv_head * D * D + (u64)part * PER_PART * D + channel : nullptr;
    float held[ROTATION_HELD ? PER_PART : 1];
    if (ROTATION_HELD && rotation) {
#pragma unroll
        for (int i = 0; i < PER_PART; i++) held[ROTATION_HELD ? i : 0] = rotation[i * D];
    }
    VectorConstants constants;
    if (warp < total) constants.load(p, first_row + warp / (group + 1), warp % (group + 1) == group, kv_head, lane);
    wait_for_previous_kernel();

    // Values go into their pages as they are: the model's weights already hold their rotation. The last warps do
    // it, which have the fewest vectors.
    for (u32 r = PARTS - 1 - part; r < rows; r += PARTS) {
        u32 at = position;
        u16* to = r == 0 ? page : page_of(p, pages, first_row + r, at);
        float v = p.qkv[(u64)(first_row + r) * width + (p.query_heads + p.kv_heads + kv_head) * D + channel];
        to[full_element(VALUE, D, at % 64, channel)] = f32_to_bf16(v);
    }

    // Vector `v` of a block is head `v % (group + 1)` of row `v / (group + 1)`; the last head is the key.
    for (u32 base = 0; base < total; base += VECTORS) {
        const u32 count = min((u32)VECTORS, total - base);
        for (u32 v = warp; v < count; v += WARPS) {
            const u32 row = first_row + (base + v) / (group + 1), head = (base + v) % (group + 1);
            const bool is_key = head == group;
            float* x = p.qkv + (u64)row * width + (is_key ? p.query_heads + kv_head : kv_head * group + head) * D;
            float values[PER_LANE];
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) values[k] = x[lane + 32 * k];
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
                x[lane + 32 * k] = values[k];
                vectors[v][lane + 32 * k] = values[k] - constants.mean[k];
            }
        }
        __syncthreads();
        if (rotation) {
            // Thread (part, channel) adds up its share of `sum_i x[i] * R[i][channel]` for every vector.
            if constexpr (ROTATION_HELD) {
#pragma unroll 2
                for (u32 v = 0; v < count; v++) {
                    float sum = 0.0f;
                    add_products<PER_PART>(sum, vectors[v] + part * PER_PART, held);
                    sums[part][v][channel] = sum;
                }
            } else {
                float sum[VECTORS] = {};
                for (int i = 0; i < PER_PART; i += 8) {
                    float column[8];
#pragma unroll
                    for (int k = 0; k < 8; k++) column[k] = rotation[(i + k) * D];
#pragma unroll
                    for (int v = 0; v < VECTORS; v++)
                        if (v < count) add_products<8>(sum[v], vectors[v] + part * PER_PART + i, column);
                }
#pragma unroll
                for (int v = 0; v < VECTORS; v++)
                    if (v < count) sums[part][v][channel] = sum[v];
            }
            __syncthreads();
        }
        for (u32 v = part; v < count; v += PARTS) {
            float x = vectors[v][channel];
            if (rotation) {
                x = sums[0][v][channel];
#pragma unroll
                for (int other = 1; other < PARTS; other++) x += sums[other][v][channel];
            }
            const u32 row = first_row + (base + v) / (group + 1), head = (base + v) % (group + 1);
            if (head < group) {
                p.queries[((u64)row * p.query_heads + kv_head * group + head) * D + channel] = x;
            } else {
                u32 at = position;
                u16* to = row == first_row ? page : page_of(p, pages, row, at);
                to[full_element(KEY, D, at % 64, channel)] = f32_to_bf16(x);
            }
        }
        __syncthreads();
    }
}
