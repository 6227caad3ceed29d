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
    const float* rotation;   // [kv head][HEAD_DIM][HEAD_DIM], or null
    const float* mean;       // [kv head][HEAD_DIM]
    u32 query_heads;
    u32 kv_heads;
    u32 rows_per_block;
    float eps;
};

constexpr int D = HEAD_DIM;
constexpr int PARTS = 4;                  // threads that share two output channels, each a part of the sum
constexpr int PER_PART = D / PARTS;
constexpr int PAIRS = D / 2;
constexpr int THREADS = PAIRS * PARTS, WARPS = THREADS / 32;
constexpr int VECTORS = 10;               // rows times heads a block takes at a time
constexpr int PER_LANE = D / 32;
// Larger rotations are read where they lie.
constexpr bool ROTATION_NEAR = D <= 128;

struct Shared {
    float vectors[VECTORS][D];
    float sums[PARTS][VECTORS][D];
    float rotation[ROTATION_NEAR ? D * D : 4];
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

// Thread (part, pair) adds up its part of `sum_i x[i] * R[i][channel]` for two channels of COUNT vectors from `first` on.
// `rotation` is at the thread's first row and channel.
template <int COUNT>
DEVICE void rotate_few(Shared& shared, const float* rotation, u32 first, u32 part, u32 pair) {
    float sum[COUNT][2] = {};
#pragma unroll 2
    for (int i = 0; i < PER_PART; i += 4) {
        float2 r[4];
#pragma unroll
        for (int k = 0; k < 4; k++) r[k] = *(const float2*)(rotation + (i + k) * D);
#pragma unroll
        for (int v = 0; v < COUNT; v++) {
            const float4 x = *(const float4*)&shared.vectors[first + v][part * PER_PART + i];
            sum[v][0] = __fmaf_rn(x.x, r[0].x, sum[v][0]), sum[v][1] = __fmaf_rn(x.x, r[0].y, sum[v][1]);
            sum[v][0] = __fmaf_rn(x.y, r[1].x, sum[v][0]), sum[v][1] = __fmaf_rn(x.y, r[1].y, sum[v][1]);
            sum[v][0] = __fmaf_rn(x.z, r[2].x, sum[v][0]), sum[v][1] = __fmaf_rn(x.z, r[2].y, sum[v][1]);
            sum[v][0] = __fmaf_rn(x.w, r[3].x, sum[v][0]), sum[v][1] = __fmaf_rn(x.w, r[3].y, sum[v][1]);
        }
    }
#pragma unroll
    for (int v = 0; v < COUNT; v++) *(float2*)&shared.sums[part][first + v][2 * pair] = make_float2(sum[v][0], sum[v][1]);
}

// Their number is known to the compiler, which then loads ahead of the sums.
DEVICE void rotate(Shared& shared, const float* rotation, u32 count, u32 part, u32 pair) {
    u32 first = 0;
    for (; first + 5 <= count; first += 5) rotate_few<5>(shared, rotation, first, part, pair);
    switch (count - first) {
        case 1: return rotate_few<1>(shared, rotation, first, part, pair);
        case 2: return rotate_few<2>(shared, rotation, first, part, pair);
        case 3: return rotate_few<3>(shared, rotation, first, part, pair);
        case 4: return rotate_few<4>(shared, rotation, first, part, pair);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) append(AppendParams p) {
    extern __shared__ float4 memory[];
    Shared& shared = *(Shared*)memory;
    const u32 tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, pair = tid % PAIRS, part = tid / PAIRS;
    const u32 kv_head = blockIdx.y, heads = p.query_heads / p.kv_heads + 1, width = (p.query_heads + 2 * p.kv_heads) * D;
    const u32 first_row = blockIdx.x * p.rows_per_block, rows = min(p.rows_per_block, p.step.rows - first_row);
    // Vector `v` is head `v % heads` of row `v / heads`; the last head is the key.
    const u32 total = rows * heads;
    allow_next_kernel();

    const float* rotation = p.rotation ? p.rotation + (u64)kv_head * D * D : nullptr;
    if (ROTATION_NEAR && rotation) {
        for (u32 i = 4 * tid; i < D * D; i += 4 * THREADS) copy_to_shared(shared_address(shared.rotation + i), rotation + i);
        rotation = shared.rotation;
    }
    // The tables of a step are complete before its first kernel.
    VectorConstants constants;
    if (warp < total) constants.load(p, first_row + warp / heads, warp % heads == heads - 1, kv_head, lane);
    const HeadPages pages = p.pages[kv_head];
    const RowPlace first_place(p, pages, first_row);
    wait_for_previous_kernel();

    // Values go into their pages as they are: the model's weights already hold their rotation.
    const float* values_from = p.qkv + (u64)first_row * width + (p.query_heads + p.kv_heads + kv_head) * D;
    float first_value = 0.0f;
    if (tid < D) first_value = values_from[tid];
    for (u32 base = 0; base < total; base += VECTORS) {
        const u32 count = min((u32)VECTORS, total - base);
        for (u32 v = warp; v < count; v += WARPS) {
            const u32 row = first_row + (base + v) / heads, head = (base + v) % heads;
            const bool is_key = head == heads - 1;
            float* x = p.qkv + (u64)row * width + (is_key ? p.query_heads + kv_head : kv_head * (heads - 1) + head) * D;
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
                shared.vectors[v][lane + 32 * k] = values[k] - constants.mean[k];
            }
        }
        wait_for_copied_bytes();
        __syncthreads();
        if (rotation) {
            rotate(shared, rotation + (u64)part * PER_PART * D + 2 * pair, count, part, pair);
            __syncthreads();
        }
        for (u32 i = tid; i < count * D; i += THREADS) {
            const u32 v = i / D, channel = i % D;
            float x = shared.vectors[v][channel];
            if (rotation) {
                x = shared.sums[0][v][channel];
#pragma unroll
                for (int other = 1; other < PARTS; other++) x += shared.sums[other][v][channel];
            }
            const u32 row = first_row + (base + v) / heads, head = (base + v) % heads;
            if (head < heads - 1) p.queries[((u64)row * p.query_heads + kv_head * (heads - 1) + head) * D + channel] = x;
            else if (row == first_row) first_place.put(KEY, channel, x);
            else RowPlace(p, pages, row).put(KEY, channel, x);
        }
        if (base + VECTORS < total) __syncthreads();
    }
    if (tid < D) first_place.put(VALUE, tid, first_value);
    for (u32 i = D + tid; i < rows * D; i += THREADS)
        RowPlace(p, pages, first_row + i / D).put(VALUE, i % D, values_from[(u64)(i / D) * width + i % D]);
}
