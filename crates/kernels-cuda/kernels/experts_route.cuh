// The router of a mixture of experts and the lists of its rows (experts.cu).
#pragma once
#include "experts.cuh"

constexpr int ROUTE_WARPS = 4;

// ---- Router. Grid: (groups of ROWS rows, groups of ROUTE_WARPS experts). A warp computes one
// expert's logits. Squares are summed along the way, so the norm costs no second pass. ----

DEVICE u64 order_key(float score, u32 expert) {
    if (score != score) return 0;  // NaN comes last
    const u32 bits = __float_as_uint(score);
    return (u64)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | ~expert;
}

// Chooses the experts of a row. Called by one warp.
DEVICE void choose(const ExpertsParams& p, u32 row, u32 lane) {
    const float* logits = p.logits + (u64)row * p.experts;
    constexpr u32 EACH = MOST_EXPERTS / 32;
    float score[EACH];
    u64 key[EACH];
    float largest = NEGATIVE_INFINITY, sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        const u32 e = lane + 32 * i;
        score[i] = e < p.experts ? __ldcg(logits + e) : NEGATIVE_INFINITY;
        largest = fmaxf(largest, score[i]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        const u32 e = lane + 32 * i;
        score[i] = p.sigmoid ? 1.0f / (1.0f + __expf(-score[i])) : __expf(score[i] - largest);
        sum += e < p.experts ? score[i] : 0.0f;
    }
    sum = warp_sum(sum);
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        const u32 e = lane + 32 * i;
        if (!p.sigmoid) score[i] /= sum;
        key[i] = e < p.experts ? order_key(score[i] + (p.correction ? p.correction[e] : 0.0f), e) : 0;
        // A score that is no number still has a place, behind all others.
        if (e < p.experts && key[i] == 0) key[i] = (u64)(~e) & 0xffffffffu;
    }
    u32 mine = 0xffffffffu;  // lane i: the i-th choice
    float weight = 0.0f;
    for (u32 n = 0; n < p.per_row; n++) {
        u64 best = 0;
        float of_best = 0.0f;
#pragma unroll
        for (u32 i = 0; i < EACH; i++)
            if (key[i] > best) best = key[i], of_best = score[i];
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            const u64 other = __shfl_xor_sync(0xffffffffu, best, step);
            const float of_other = __shfl_xor_sync(0xffffffffu, of_best, step);
            if (other > best) best = other, of_best = of_other;
        }
        const u32 expert = ~(u32)best;
        if (lane == n) mine = expert, weight = of_best;
#pragma unroll
        for (u32 i = 0; i < EACH; i++)
            if (lane + 32 * i == expert) key[i] = 0;
    }
    // Ascending ids; the sum takes them in that order.
    u32 place = 0;
    for (u32 n = 0; n < p.per_row; n++) place += __shfl_sync(0xffffffffu, mine, n) < mine;
    float total = 0.0f;
    for (u32 n = 0; n < p.per_row; n++) {
        const u32 holder = __ffs(__ballot_sync(0xffffffffu, lane < p.per_row && place == n)) - 1;
        total += __shfl_sync(0xffffffffu, weight, holder);
    }
    if (lane >= p.per_row) return;
    const float factor = p.normalize ? p.factor / fmaxf(total, 1.17549435e-38f) : p.factor;
    const u32 at = row * p.per_row + place;
    p.chosen[at] = mine, p.weights[at] = weight * factor;
    if (p.rows == 1) {
        // The lists of a single row.
        p.slots[place] = place, p.slot_of[place] = place;
        p.tiles[place] = make_uint4(mine, place, 1, 0);
        if (place == 0) *p.tile_count = p.per_row;
    }
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

template <int ROWS>
DEVICE void route(const ExpertsParams& p) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 expert = blockIdx.y * ROUTE_WARPS + warp, first = blockIdx.x * ROWS, rows = min((u32)ROWS, p.rows - first);
    const bool there = expert < p.experts;
    allow_next_kernel();
    float dot[ROWS] = {}, squares[ROWS] = {};
    wait_for_previous_kernel();
    const float4* router = (const float4*)(p.router + (u64)(there ? expert : 0) * p.hidden);
    for (u32 i = lane; i < p.hidden / 4; i += 32) {
        const float4 r = router[i], w = ((const float4*)p.norm)[i];
        const float4 v = make_float4(r.x * w.x, r.y * w.y, r.z * w.z, r.w * w.w);
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
            if (m >= rows) break;
            const float4 x = ((const float4*)(p.x + (u64)(first + m) * p.hidden))[i];
            dot[m] = __fmaf_rn(x.x, v.x, __fmaf_rn(x.y, v.y, __fmaf_rn(x.z, v.z, __fmaf_rn(x.w, v.w, dot[m]))));
            squares[m] = __fmaf_rn(x.x, x.x, __fmaf_rn(x.y, x.y, __fmaf_rn(x.z, x.z, __fmaf_rn(x.w, x.w, squares[m]))));
        }
    }
    const u32 blocks = gridDim.y;
    __shared__ u32 before[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
        if (m >= rows) break;
        const float scale = 1.0f / sqrtf(warp_sum(squares[m]) / (float)p.hidden + p.eps);
        const float logit = warp_sum(dot[m]) * scale;
        if (there && lane == 0) p.logits[(u64)(first + m) * p.experts + expert] = logit;
        // The blocks of a row share the writing of its normed values.
        const u32 each = (p.hidden / 4 + blocks * ROUTE_WARPS - 1) / (blocks * ROUTE_WARPS);
        const u32 begin = (blockIdx.y * ROUTE_WARPS + warp) * each, end = min(begin + each, p.hidden / 4);
        for (u32 i = begin + lane; i < end; i += 32) {
            const float4 x = ((const float4*)(p.x + (u64)(first + m) * p.hidden))[i], w = ((const float4*)p.norm)[i];
            store_normed(p, first + m, i, make_float4(x.x * scale * w.x, x.y * scale * w.y, x.z * scale * w.z, x.w * scale * w.w));
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x < rows) before[threadIdx.x] = atomicAdd(p.finished + first + threadIdx.x, 1u);
    __syncthreads();
    for (u32 m = warp; m < rows; m += ROUTE_WARPS) {
        if (before[m] != blocks - 1) continue;
        __threadfence();
        if (lane == 0) p.finished[first + m] = 0;
        choose(p, first + m, lane);
    }
}

// Many rows, by tensor cores: a block computes all logits of 16 rows. Both operands are split into two
// BF16 numbers, and three of the four products are added. Four consecutive inputs of a lane are two
// neighbouring pairs of an operand, in the same order on both sides. Grid: rows / 16.
extern "C" __global__ void __launch_bounds__(256) experts_route_tiles(const __grid_constant__ ExpertsParams p) {
    constexpr int WARPS = 8, TILES = MOST_EXPERTS / (8 * WARPS);
    __shared__ float scales[16];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, first = blockIdx.x * 16;
    allow_next_kernel();
    wait_for_previous_kernel();
    const u32 quads = p.hidden / 4;
    const float4* upper = (const float4*)(p.x + (u64)min(first + g, p.rows - 1) * p.hidden) + t;
    const float4* lower = (const float4*)(p.x + (u64)min(first + g + 8, p.rows - 1) * p.hidden) + t;
    const float4* norm = (const float4*)p.norm + t;
    const float4* router[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) router[n] = (const float4*)p.router + (u64)min((warp + n * WARPS) * 8 + g, p.experts - 1) * quads + t;
    float sum[TILES][4] = {}, squares[2] = {};
#pragma unroll 4
    for (u32 i = 0; i < quads; i += 4) {
        const float4 w = norm[i], x[2] = {upper[i], lower[i]};
        u32 high[4], low[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            squares[h] = __fmaf_rn(x[h].x, x[h].x, __fmaf_rn(x[h].y, x[h].y, __fmaf_rn(x[h].z, x[h].z, __fmaf_rn(x[h].w, x[h].w, squares[h]))));
            split(x[h].x * w.x, x[h].y * w.y, high[h], low[h]);
            split(x[h].z * w.z, x[h].w * w.w, high[h + 2], low[h + 2]);
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            if ((warp + n * WARPS) * 8 >= p.experts) break;
            const float4 r = router[n][i];
            u32 of_high[2], of_low[2];
            split(r.x, r.y, of_high[0], of_low[0]);
            split(r.z, r.w, of_high[1], of_low[1]);
            mma_bf16(sum[n], high[0], high[1], high[2], high[3], of_high[0], of_high[1]);
            mma_bf16(sum[n], high[0], high[1], high[2], high[3], of_low[0], of_low[1]);
            mma_bf16(sum[n], low[0], low[1], low[2], low[3], of_high[0], of_high[1]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float s = squares[h] + __shfl_xor_sync(0xffffffffu, squares[h], 1);
        s += __shfl_xor_sync(0xffffffffu, s, 2);
        const float scale = 1.0f / sqrtf(s / (float)p.hidden + p.eps);
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
        choose(p, row, lane);
        const float scale = scales[row - first];
        for (u32 i = lane; i < quads; i += 32) {
            const float4 x = ((const float4*)(p.x + (u64)row * p.hidden))[i], w = ((const float4*)p.norm)[i];
            store_normed(p, row, i, make_float4(x.x * scale * w.x, x.y * scale * w.y, x.z * scale * w.z, x.w * scale * w.w));
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS) experts_route(const __grid_constant__ ExpertsParams p) { route<1>(p); }
extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS) experts_route_many(const __grid_constant__ ExpertsParams p) { route<8>(p); }

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
