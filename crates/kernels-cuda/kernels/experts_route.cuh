// The router of a mixture of experts and the lists of its rows (experts.cu).
#pragma once
#include "experts_choice.cuh"

// ---- Router, by tensor cores. Both operands are split into two BF16 numbers, and three of the four
// products are added. Four consecutive inputs of a lane are two neighbouring pairs of an operand, in the
// same order on both sides. Squares are summed along the way, so the norm costs no second pass. ----

// The A operand of 16 rows, times the weights of the norm.
struct RouterRows {
    const float4 *upper, *lower, *norm;
    float squares[2];

    DEVICE RouterRows(const ExpertsParams& p, u32 first) : squares{0.0f, 0.0f} {
        const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        upper = (const float4*)(p.x + (u64)min(first + g, p.rows - 1) * p.hidden) + t;
        lower = (const float4*)(p.x + (u64)min(first + g + 8, p.rows - 1) * p.hidden) + t;
        norm = (const float4*)p.norm + t;
    }
    // Inputs 4i + 4t .. 4i + 4t + 3.
    DEVICE void load(u32 i, u32 (&high)[4], u32 (&low)[4]) {
        const float4 w = norm[i], x[2] = {upper[i], lower[i]};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            squares[h] = __fmaf_rn(x[h].x, x[h].x, __fmaf_rn(x[h].y, x[h].y, __fmaf_rn(x[h].z, x[h].z, __fmaf_rn(x[h].w, x[h].w, squares[h]))));
            split(x[h].x * w.x, x[h].y * w.y, high[h], low[h]);
            split(x[h].z * w.z, x[h].w * w.w, high[h + 2], low[h + 2]);
        }
    }
    // Squares of row g + 8h that the lanes of the row have seen.
    DEVICE float total(int h) const {
        return quad_sum(squares[h]);
    }
};

DEVICE void add_logits(float (&sum)[4], const u32 (&high)[4], const u32 (&low)[4], float4 router) {
    u32 of_high[2], of_low[2];
    split(router.x, router.y, of_high[0], of_low[0]);
    split(router.z, router.w, of_high[1], of_low[1]);
    mma_bf16(sum, high[0], high[1], high[2], high[3], of_high[0], of_high[1]);
    mma_bf16(sum, high[0], high[1], high[2], high[3], of_low[0], of_low[1]);
    mma_bf16(sum, low[0], low[1], low[2], low[3], of_high[0], of_high[1]);
}

// Writes four values of a normed row, the i-th.
DEVICE void store_normed(const ExpertsParams& p, u32 row, u32 i, float4 v) {
    if (!p.rounded) {
        ((float4*)(p.normed + (u64)row * p.hidden))[i] = v;
        return;
    }
    u16* to = (u16*)p.normed + (u64)row * p.hidden;
    const u32 first = pack_bf16(v.x, v.y), second = pack_bf16(v.z, v.w);
#ifdef FP8
    // In the order of experts_grouped.cu.
    to += 64 * (i / 16) + 16 * (i & 3) + 2 * (i / 4 & 3);
    *(u32*)to = first, *(u32*)(to + 8) = second;
#else
    *(uint2*)(to + 4 * i) = make_uint2(first, second);
#endif
}

DEVICE void norm_and_store(const ExpertsParams& p, u32 row, u32 i, float scale) {
    const float4 x = ((const float4*)(p.x + (u64)row * p.hidden))[i], w = ((const float4*)p.norm)[i];
    store_normed(p, row, i, make_float4(x.x * scale * w.x, x.y * scale * w.y, x.z * scale * w.z, x.w * scale * w.w));
}

// Few rows: a block computes the logits of 16 rows and 8 experts; its warps divide the inputs. The last
// block of the rows chooses their experts. Grid: (rows / 16, experts / 8).
extern "C" __global__ void __launch_bounds__(256) experts_route(const __grid_constant__ ExpertsParams p) {
    constexpr u32 WARPS = 8;
    __shared__ float sums[WARPS][16][8], squares[WARPS][16], scales[16];
    __shared__ bool last;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const u32 first = blockIdx.x * 16, rows = min(16u, p.rows - first), quads = p.hidden / 4, blocks = gridDim.y;
    const u32 experts = min(8u, p.experts - blockIdx.y * 8);
    allow_next_kernel();
    const float* matrix = p.router + (u64)blockIdx.y * 8 * p.hidden;
    for (u32 i = threadIdx.x * 32; i < experts * p.hidden; i += 32 * 256) prefetch_to_l2(matrix + i);
    wait_for_previous_kernel();
    RouterRows operand(p, first);
    const float4* router = (const float4*)(matrix + (u64)min(g, experts - 1) * p.hidden) + t;
    float sum[4] = {};
#pragma unroll 4
    for (u32 i = warp * 4; i < quads; i += WARPS * 4) {
        u32 high[4], low[4];
        operand.load(i, high, low);
        add_logits(sum, high, low, router[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        *(float2*)&sums[warp][g + 8 * h][2 * t] = make_float2(sum[2 * h], sum[2 * h + 1]);
        const float s = operand.total(h);
        if (t == 0) squares[warp][g + 8 * h] = s;
    }
    __syncthreads();
    if (threadIdx.x < 16 * 8) {
        const u32 row = threadIdx.x >> 3, expert = threadIdx.x & 7;
        float logit = 0.0f, all = 0.0f;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) logit += sums[w][row][expert], all += squares[w][row];
        const float scale = 1.0f / sqrtf(all / (float)p.hidden + p.eps);
        if (expert == 0) scales[row] = scale;
        if (row < rows && expert < experts) p.logits[(u64)(first + row) * p.experts + blockIdx.y * 8 + expert] = logit * scale;
    }
    __syncthreads();
    // The blocks of these rows share the writing of their normed values.
    const u32 each = (quads + blocks - 1) / blocks, begin = blockIdx.y * each, end = min(begin + each, quads);
    for (u32 row = warp; row < rows; row += WARPS)
        for (u32 i = begin + lane; i < end; i += 32) norm_and_store(p, first + row, i, scales[row]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(p.finished + blockIdx.x, 1u) == blocks - 1;
        if (last) p.finished[blockIdx.x] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (u32 row = warp; row < rows; row += WARPS) store_choice(p, first + row, lane);
}

// Many rows: a block computes all logits of 16 rows. Grid: rows / 16.
extern "C" __global__ void __launch_bounds__(256) experts_route_many(const __grid_constant__ ExpertsParams p) {
    constexpr int WARPS = 8, TILES = MOST_EXPERTS / (8 * WARPS);
    __shared__ float scales[16];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const u32 first = blockIdx.x * 16, quads = p.hidden / 4;
    allow_next_kernel();
    wait_for_previous_kernel();
    RouterRows operand(p, first);
    const float4* router[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) router[n] = (const float4*)p.router + (u64)min((warp + n * WARPS) * 8 + g, p.experts - 1) * quads + t;
    float sum[TILES][4] = {};
#pragma unroll 4
    for (u32 i = 0; i < quads; i += 4) {
        u32 high[4], low[4];
        operand.load(i, high, low);
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            if ((warp + n * WARPS) * 8 >= p.experts) break;
            add_logits(sum[n], high, low, router[n][i]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float scale = 1.0f / sqrtf(operand.total(h) / (float)p.hidden + p.eps);
        const u32 row = first + g + 8 * h;
        if (warp == 0 && t == 0) scales[g + 8 * h] = scale;
        if (row >= p.rows) continue;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const u32 expert = (warp + n * WARPS) * 8 + 2 * t;
            float* logits = p.logits + (u64)row * p.experts + expert;
            if (expert < p.experts) logits[0] = sum[n][2 * h] * scale;
            if (expert + 1 < p.experts) logits[1] = sum[n][2 * h + 1] * scale;
        }
    }
    __syncthreads();
    for (u32 row = first + warp; row < min(first + 16, p.rows); row += WARPS) {
        store_choice(p, row, lane);
        for (u32 i = lane; i < quads; i += 32) norm_and_store(p, row, i, scales[row - first]);
    }
}

// ---- Rows by expert. One block. The order of an expert's rows differs from run to run; nothing that
// is computed depends on it. ----

extern "C" __global__ void __launch_bounds__(1024) experts_sort(const __grid_constant__ ExpertsParams p) {
    __shared__ u32 next_slot[MOST_EXPERTS], first_slot[MOST_EXPERTS + 1], first_tile[MOST_EXPERTS + 1];
    const u32 thread = threadIdx.x, entries = p.rows * p.per_row;
    allow_next_kernel();
    if (thread < MOST_EXPERTS) next_slot[thread] = 0;
    __syncthreads();
    wait_for_previous_kernel();
    for (u32 i = thread; i < entries; i += 1024) atomicAdd(next_slot + __ldcg(p.chosen + i), 1u);
    __syncthreads();
    // One warp adds up the counts of eight experts a lane.
    if (thread < 32) {
        constexpr u32 EACH = MOST_EXPERTS / 32;
        u32 slots = 0, tiles = 0;
        for (u32 i = 0; i < EACH; i++) {
            const u32 count = next_slot[thread * EACH + i];
            slots += count, tiles += (count + p.tile_rows - 1) / p.tile_rows;
        }
        u32 slot = slots, tile = tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u32 s = __shfl_up_sync(0xffffffffu, slot, step), t = __shfl_up_sync(0xffffffffu, tile, step);
            if (thread >= step) slot += s, tile += t;
        }
        if (thread == 31) first_slot[MOST_EXPERTS] = slot, first_tile[MOST_EXPERTS] = tile, *p.tile_count = tile;
        slot -= slots, tile -= tiles;
        for (u32 i = 0; i < EACH; i++) {
            const u32 e = thread * EACH + i, count = next_slot[e];
            first_slot[e] = next_slot[e] = slot, first_tile[e] = tile;
            slot += count, tile += (count + p.tile_rows - 1) / p.tile_rows;
        }
    }
    __syncthreads();
    for (u32 i = thread; i < entries; i += 1024) {
        const u32 slot = atomicAdd(next_slot + __ldcg(p.chosen + i), 1u);
        p.slots[slot] = i, p.slot_of[i] = slot;
    }
    if (thread >= p.experts) return;
    const u32 begin = first_slot[thread], count = first_slot[thread + 1] - begin;
    const u32 tile = first_tile[thread], tiles = first_tile[thread + 1] - tile;
    // Tiles of an expert are of one size, in steps of 32 rows if products are of BF16.
    u32 each = (count + tiles - 1) / max(tiles, 1u);
    if (p.rounded) each = min((each + 31) / 32 * 32, p.tile_rows);
    for (u32 t = 0; t < tiles; t++) p.tiles[tile + t] = make_uint4(thread, begin + t * each, min(each, count - min(t * each, count)), 0);
}
