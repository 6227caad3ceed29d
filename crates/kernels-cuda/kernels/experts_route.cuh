// The router of a mixture of experts and the lists of its rows (experts.cu).
#pragma once
#include "common.cuh"


struct ExpertsParams {
    float* x;                  // [rows][hidden]: the residual
    const float* norm;         // weights of the norm before the layer
    float* normed;             // [rows][hidden]
    const float* router;       // [experts][hidden]
    const float* correction;   // [experts], added to scores for the choice, or null
    float* logits;             // [rows][experts]
    u32* finished;             // [rows]: blocks that have written logits of the row; zero between launches
    u32* chosen;               // [rows][chosen]: experts in ascending id
    float* weights;            // [rows][chosen]
    u32* slots;                // [slot]: row * per_row + index, sorted by expert, then by row
    u32* slot_of;              // [rows][chosen]: the inverse
    uint4* tiles;              // (expert, first slot, slots, 0)
    u32* tile_count;
    float* between;            // [slot][width]
    float* partial;            // [slot][hidden]
    const u8* gate_up;         // [experts][gate, up][width][hidden]
    const float* gate_up_scales;
    const u8* down;            // [experts][hidden][width]
    const float* down_scales;
    u32 rows;
    u32 experts;
    u32 per_row;               // experts of a row
    u32 hidden;
    u32 width;
    u32 sigmoid;               // 1: scores are sigmoids, 0: a softmax
    u32 normalize;
    float factor;
    float eps;
    u32 channels;              // FP8: 1: a scale for each output, 0: for each 128 x 128
};
CHECK_LAYOUT(ExpertsParams);

constexpr u32 MOST_CHOSEN = 32, MOST_EXPERTS = 256;
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
            ((float4*)(p.normed + (u64)(first + m) * p.hidden))[i] =
                make_float4(x.x * scale * w.x, x.y * scale * w.y, x.z * scale * w.z, x.w * scale * w.w);
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

extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS) experts_route(const __grid_constant__ ExpertsParams p) { route<1>(p); }
extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS) experts_route_many(const __grid_constant__ ExpertsParams p) { route<8>(p); }

// ---- Rows by expert. One block of 32 warps; a warp lists the rows of one expert at a time. ----

constexpr u32 TILE_ROWS = 8;

extern "C" __global__ void __launch_bounds__(1024) experts_sort(const __grid_constant__ ExpertsParams p) {
    __shared__ u32 first_slot[MOST_EXPERTS + 1], first_tile[MOST_EXPERTS + 1];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, entries = p.rows * p.per_row;
    allow_next_kernel();
    wait_for_previous_kernel();
    for (u32 e = warp; e < p.experts; e += 32) {
        u32 count = 0;
        for (u32 i = lane; i < entries; i += 32) count += p.chosen[i] == e;
        count = __reduce_add_sync(0xffffffffu, count);
        if (lane == 0) first_slot[e + 1] = count, first_tile[e + 1] = (count + TILE_ROWS - 1) / TILE_ROWS;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        first_slot[0] = first_tile[0] = 0;
        for (u32 e = 0; e < p.experts; e++) first_slot[e + 1] += first_slot[e], first_tile[e + 1] += first_tile[e];
        *p.tile_count = first_tile[p.experts];
    }
    __syncthreads();
    for (u32 e = warp; e < p.experts; e += 32) {
        const u32 begin = first_slot[e], count = first_slot[e + 1] - begin, tiles = first_tile[e + 1] - first_tile[e];
        if (count == 0) continue;
        u32 at = begin;
        for (u32 base = 0; base < entries; base += 32) {
            const bool mine = base + lane < entries && p.chosen[base + lane] == e;
            const u32 all = __ballot_sync(0xffffffffu, mine), slot = at + __popc(all & ((1u << lane) - 1));
            if (mine) p.slots[slot] = base + lane, p.slot_of[base + lane] = slot;
            at += __popc(all);
        }
        for (u32 t = lane; t < tiles; t += 32)
            p.tiles[first_tile[e] + t] = make_uint4(e, begin + t * TILE_ROWS, min(TILE_ROWS, count - t * TILE_ROWS), 0);
    }
}
