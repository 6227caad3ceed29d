// Results: from the warps of a block to the block, and from the blocks of an item to memory.
#pragma once
#include "decode_block.cuh"

// Puts a warp's state down in shared memory, for all to add up. All readers.
DEVICE void put_down(Shared& shared, State& state, int lane, int warp) {
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float l = sum_over_tokens(state.l[n][i]), z = sum_over_tokens(state.z[n][i]);
            if (lane < 4) {
                int column = n * 8 + 2 * lane + i;
                shared.m[column][warp] = state.fresh ? NEGATIVE_INFINITY : state.m[n][i];
                shared.l[column][warp] = l, shared.z[column][warp] = z;
            }
        }
    float* room = (float*)shared.sum_room(warp) + 2 * (lane & 3) * SUMS_STRIDE + (lane >> 2);
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int j = 0; j < STEPS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) room[(n * 8 + (i & 1)) * SUMS_STRIDE + 16 * j + 8 * (i >> 1)] = state.o[n][j][i];
    sync_readers();
}

DEVICE void add_to(float4& v, float4 x, float f) {
    v.x = fmaf(x.x, f, v.x), v.y = fmaf(x.y, f, v.y), v.z = fmaf(x.z, f, v.z), v.w = fmaf(x.w, f, v.w);
}

// Four channels of one column summed over the warps: the reference, the sum of weights, the weighted sum of values.
struct BlockSum {
    float m, l;
    float4 v;

    DEVICE BlockSum(Shared& shared, int column, int channel) : m(NEGATIVE_INFINITY), l(0.f), v(make_float4(0.f, 0.f, 0.f, 0.f)) {
        float z = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) m = fmaxf(m, shared.m[column][w]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float f = exp2_fast(shared.m[column][w] - m);
            l = fmaf(shared.l[column][w], f, l), z = fmaf(shared.z[column][w], f, z);
            // A warp that read nothing has put down nothing.
            if (f > 0.f) add_to(v, *(const float4*)((const float*)shared.sum_room(w) + column * SUMS_STRIDE + channel), f);
        }
        v.x += z, v.y += z, v.z += z, v.w += z;
    }
};

// Where an item's result goes.
struct OutputRows {
    u64 first;  // element

    DEVICE OutputRows(const DecodeArgs& a, u32 row, u32 head) : first(((u64)row * a.kv_heads + head) * a.group * HEAD_DIM) {}
    DEVICE void store(const DecodeArgs& a, int head, int channel, float4 v) const {
        u64 at = first + head * HEAD_DIM + channel;
        if (a.out) *(float4*)(a.out + at) = v;
        if (a.rounded) *(uint2*)(a.rounded + at) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    }
};

DEVICE float4 scaled(float4 v, float f) { return make_float4(v.x * f, v.y * f, v.z * f, v.w * f); }

constexpr int PARTIAL = HEADS * (HEAD_DIM + 2);  // floats: results, then (m, l) of each head
constexpr int QUADS = HEAD_DIM / 4;

// A block's share of an item is done: writes the result, or a partial one that the last block merges. All threads.
DEVICE void finish_segment(Shared& shared, const DecodeArgs& a, u32 item, u32 row, u32 head_index, u32 worker, bool first_of_worker) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, quads = (int)a.group * QUADS;
    const ItemPlan readers = shared.readers;
    const OutputRows out(a, row, head_index);
    if (readers.count == 1) {
#pragma unroll 1
        for (int e = tid; e < quads; e += THREADS) {
            int head = e / QUADS, channel = e % QUADS * 4;
            const BlockSum sum(shared, column_of(head), channel);
            out.store(a, head, channel, scaled(sum.v, 1.f / sum.l));
        }
        return;
    }
    float* own = a.partials + (u64)(2 * worker + (first_of_worker ? 0 : 1)) * PARTIAL;
#pragma unroll 1
    for (int e = tid; e < quads; e += THREADS) {
        const BlockSum sum(shared, column_of(e / QUADS), e % QUADS * 4);
        __stcg((float4*)own + e, sum.v);
        if (e % QUADS == 0) __stcg((float2*)(own + HEADS * HEAD_DIM) + e / QUADS, make_float2(sum.m, sum.l));
    }
    sync_readers();
    if (tid == 0) {
        u32 before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(a.arrived + item) : "memory");
        shared.last = before + 1 == readers.count;
    }
    sync_readers();
    if (!shared.last) return;
    // The first reader holds the item in its second partial unless it begins with it; the others begin with it.
    const float* const first = a.partials + (u64)(2 * readers.first + readers.second) * PARTIAL;
    const float* const others = a.partials + (u64)(2 * readers.first) * PARTIAL;
    auto partial = [&](u32 k) { return k == 0 ? first : others + (u64)k * (2 * PARTIAL); };
    // The block's parts take every parts-th partial; channels beyond the threads' number go round by round. The first
    // loads need not wait for the factors.
    const int columns = quads < THREADS ? quads : THREADS, parts = THREADS / columns, part = tid / columns;
    const u32 known = readers.count < KNOWN_FACTORS ? readers.count : KNOWN_FACTORS;
    constexpr int BATCH = 8;
    float4 x[BATCH];
    auto load_batch = [&](u32 from, int e, bool takes) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            u32 k = from + i * parts;
            if (takes && k < known) x[i] = __ldcg((const float4*)partial(k) + e);
        }
    };
    load_batch(part, tid % columns, part < parts);
    for (int head = warp; head < a.group; head += WARPS) {
        auto pair = [&](u32 k) { return __ldcg((const float2*)(partial(k) + HEADS * HEAD_DIM) + head); };
        float2 own_pair = make_float2(NEGATIVE_INFINITY, 0.f);
        if (lane < readers.count) own_pair = pair(lane);
        float m = own_pair.x;
#pragma unroll 1
        for (u32 k = lane + 32; k < readers.count; k += 32) m = fmaxf(m, pair(k).x);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, step));
        float f = own_pair.y > 0.f ? exp2_fast(own_pair.x - m) : 0.f, l = own_pair.y * f;
        shared.factor(head, lane) = f;
#pragma unroll 1
        for (u32 k = lane + 32; k < readers.count; k += 32) {
            float2 p = pair(k);
            if (p.y > 0.f) l = fmaf(p.y, exp2_fast(p.x - m), l);
        }
        l = warp_sum(l);
        if (lane == 0) shared.item_m[head] = m, shared.item_scale[head] = 1.f / l;
    }
    sync_readers();
    auto part_sum = [&](int t) { return (float4*)shared.sum_room(t >> 5) + (t & 31); };
#pragma unroll 1
    for (int round = 0; round < quads; round += columns) {
        const int e = round + tid % columns, head = e / QUADS;
        const bool takes = part < parts && e < quads;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (takes) {
            u32 k = part;
#pragma unroll 1
            while (k < known) {
                if (round > 0 || k != part) load_batch(k, e, true);
#pragma unroll
                for (int i = 0; i < BATCH; i++, k += parts)
                    if (k < known) add_to(v, x[i], shared.factor(head, k));
            }
            // More readers than factors are kept for: their factors once more.
#pragma unroll 1
            for (k = known + (part + parts - known % parts) % parts; k < readers.count; k += parts) {
                float2 p = __ldcg((const float2*)(partial(k) + HEADS * HEAD_DIM) + head);
                add_to(v, __ldcg((const float4*)partial(k) + e), p.y > 0.f ? exp2_fast(p.x - shared.item_m[head]) : 0.f);
            }
            *part_sum(tid) = v;
        }
        sync_readers();
        if (takes && part == 0) {
            for (int p = 1; p < parts; p++) add_to(v, *part_sum(tid + p * columns), 1.f);
            out.store(a, head, e % QUADS * 4, scaled(v, shared.item_scale[head]));
        }
        sync_readers();
    }
    if (tid == 0) a.arrived[item] = 0;
}
