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
constexpr int THREADS = D * PARTS;
constexpr int VECTORS = 16;                         // rows times heads a block takes at a time
constexpr int PER_LANE = D / 32;

extern "C" __global__ void __launch_bounds__(THREADS) append(AppendParams p) {
    extern __shared__ float4 memory[];
    float(*vectors)[D] = (float(*)[D])memory;              // [VECTORS][D]
    float(*sums)[VECTORS][D] = (float(*)[VECTORS][D])(vectors + VECTORS);  // [PARTS][VECTORS][D]
    const u32 kv_head = blockIdx.y, group = p.query_heads / p.kv_heads;
    const u32 first_row = blockIdx.x * p.rows_per_block;
    const u32 rows = min(p.rows_per_block, p.step.rows - first_row);
    const u32 width = (p.query_heads + 2 * p.kv_heads) * D;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const HeadPages pages = p.pages[kv_head];
    allow_next_kernel();
    wait_for_previous_kernel();

    // Values go into their pages as they are: the model's weights already hold their rotation.
    for (u32 i = threadIdx.x; i < rows * D; i += THREADS) {
        u32 row = first_row + i / D, channel = i % D, position = p.step.row_position[row];
        const SequenceInfo& s = p.step.sequences[p.step.row_sequence[row]];
        u16* page = (u16*)(pages.full + (u64)p.step.full[s.table + position / 64] * full_page_bytes(D));
        float v = p.qkv[(u64)row * width + (p.query_heads + p.kv_heads + kv_head) * D + channel];
        page[full_element(VALUE, D, position % 64, channel)] = f32_to_bf16(v);
    }

    // Vector `v` of a block is head `v % (group + 1)` of row `v / (group + 1)`; the last head is the key.
    const u32 total = rows * (group + 1);
    for (u32 base = 0; base < total; base += VECTORS) {
        const u32 count = min((u32)VECTORS, total - base);
        for (u32 v = warp; v < count; v += THREADS / 32) {
            u32 row = first_row + (base + v) / (group + 1), head = (base + v) % (group + 1);
            bool is_key = head == group;
            u32 column = (is_key ? p.query_heads + kv_head : kv_head * group + head) * D;
            float* x = p.qkv + (u64)row * width + column;
            const float* weight = is_key ? p.key_norm : p.query_norm;
            float values[PER_LANE];
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) values[k] = x[lane + 32 * k];
            if (weight) {
                float squares = 0.0f;
#pragma unroll
                for (int k = 0; k < PER_LANE; k++) squares = __fmaf_rn(values[k], values[k], squares);
                float scale = 1.0f / sqrtf(warp_sum(squares) / (float)D + p.eps);
#pragma unroll
                for (int k = 0; k < PER_LANE; k++) values[k] = values[k] * scale * weight[lane + 32 * k];
            }
            u32 position = p.step.row_position[row];
#pragma unroll
            for (int k = 0; k < PER_LANE / 2; k++) {
                float c = p.cosines[(u64)position * (D / 2) + lane + 32 * k];
                float s = p.sines[(u64)position * (D / 2) + lane + 32 * k];
                float a = values[k], b = values[k + PER_LANE / 2];
                values[k] = a * c - b * s;
                values[k + PER_LANE / 2] = b * c + a * s;
            }
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) {
                x[lane + 32 * k] = values[k];
                float m = is_key && p.mean ? p.mean[kv_head * D + lane + 32 * k] : 0.0f;
                vectors[v][lane + 32 * k] = values[k] - m;
            }
        }
        __syncthreads();
        if (p.rotation) {
            // Thread (part, channel) adds up its share of `sum_i x[i] * R[i][channel]` for every vector.
            const u32 channel = threadIdx.x % D, part = threadIdx.x / D;
            const float* r = p.rotation + (u64)kv_head * D * D + channel;
            float sum[VECTORS] = {};
            for (u32 i = part * (D / PARTS); i < (part + 1) * (D / PARTS); i += 8) {
                float column[8];
#pragma unroll
                for (int k = 0; k < 8; k++) column[k] = r[(u64)(i + k) * D];
#pragma unroll
                for (int v = 0; v < VECTORS; v++) {
                    if (v >= count) break;
                    float4 x = *(const float4*)&vectors[v][i], y = *(const float4*)&vectors[v][i + 4];
                    sum[v] = __fmaf_rn(x.x, column[0], sum[v]);
                    sum[v] = __fmaf_rn(x.y, column[1], sum[v]);
                    sum[v] = __fmaf_rn(x.z, column[2], sum[v]);
                    sum[v] = __fmaf_rn(x.w, column[3], sum[v]);
                    sum[v] = __fmaf_rn(y.x, column[4], sum[v]);
                    sum[v] = __fmaf_rn(y.y, column[5], sum[v]);
                    sum[v] = __fmaf_rn(y.z, column[6], sum[v]);
                    sum[v] = __fmaf_rn(y.w, column[7], sum[v]);
                }
            }
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (v < count) sums[part][v][channel] = sum[v];
            __syncthreads();
        }
        for (u32 i = threadIdx.x; i < count * D; i += THREADS) {
            u32 v = i / D, channel = i % D;
            float x = vectors[v][channel];
            if (p.rotation) {
                x = sums[0][v][channel];
#pragma unroll
                for (int part = 1; part < PARTS; part++) x += sums[part][v][channel];
            }
            u32 row = first_row + (base + v) / (group + 1), head = (base + v) % (group + 1);
            if (head < group) {
                p.queries[((u64)row * p.query_heads + kv_head * group + head) * D + channel] = x;
            } else {
                u32 position = p.step.row_position[row];
                const SequenceInfo& s = p.step.sequences[p.step.row_sequence[row]];
                u16* page = (u16*)(pages.full + (u64)p.step.full[s.table + position / 64] * full_page_bytes(D));
                page[full_element(KEY, D, position % 64, channel)] = f32_to_bf16(x);
            }
        }
        __syncthreads();
    }
}
