// Results: from the warps of a block to the block, and from the blocks of an item to memory.
#pragma once
#include "decode_block.cuh"

// Puts the columns of a warp's state that hold heads down in shared memory, for all to add up. All readers.
DEVICE void put_down(Shared& shared, State& state, int lane, int warp) {
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++) {
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
            for (int i = 0; i < 4; i += 3 - LANE_COLUMNS)
                room[(n * 8 + (i & 1)) * SUMS_STRIDE + 16 * j + 8 * (i >> 1)] = state.o[n][j][i];
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

// A partial result in memory: a block's sums of every head, then (m, l) of each. A word that nothing was written to is EMPTY:
// whoever waits for it reads it until it is not, and empties it again for the next launch. So a result is on its way in one
// step, and nothing has to be counted.
constexpr int PARTIAL = HEADS * (HEAD_DIM + 2);  // floats
constexpr int QUADS = HEAD_DIM / 4;
constexpr u32 EMPTY = 0xffffffffu;  // a NaN that no arithmetic gives
constexpr u32 MOST_READERS = 256, MOST_MERGERS = 4;

DEVICE float full_word(float x) { return __float_as_uint(x) == EMPTY ? __uint_as_float(0x7fffffffu) : x; }
DEVICE bool is_full(float x) { return __float_as_uint(x) != EMPTY; }
DEVICE bool is_full(float2 x) { return is_full(x.x) && is_full(x.y); }
DEVICE bool is_full(float4 x) { return is_full(x.x) && is_full(x.y) && is_full(x.z) && is_full(x.w); }

DEVICE void put(float4* to, float4 x) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}
DEVICE void put(float2* to, float2 x) {
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x.x), "f"(x.y) : "memory");
}
DEVICE void look(const float4* from, float4& x) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from)
                 : "memory");
}
DEVICE void look(const float2* from, float2& x) {
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from) : "memory");
}
DEVICE void empty(float4* at) {
    const float e = __uint_as_float(EMPTY);
    put(at, make_float4(e, e, e, e));
}
DEVICE void empty(float2* at) { put(at, make_float2(__uint_as_float(EMPTY), __uint_as_float(EMPTY))); }

// A block's share of an item is done: writes the result, or a partial one for the item's last readers. All readers.
DEVICE void finish_segment(Shared& shared, const DecodeArgs& a, u32 row, u32 head_index, u32 worker, bool first_of_worker) {
    const int tid = threadIdx.x, quads = (int)a.group * QUADS;
    const ItemPlan readers = shared.readers;
    const bool alone = readers.count == 1;
    const OutputRows out(a, row, head_index);
    float* own = a.partials + (u64)(2 * worker + (first_of_worker ? 0 : 1)) * PARTIAL;
#pragma unroll 1
    for (int e = tid; e < quads; e += THREADS) {
        const int head = e / QUADS, channel = e % QUADS * 4;
        const BlockSum sum(shared, column_of(head), channel);
        if (alone) {
            out.store(a, head, channel, scaled(sum.v, 1.f / sum.l));
            continue;
        }
        put((float4*)own + e, make_float4(full_word(sum.v.x), full_word(sum.v.y), full_word(sum.v.z), full_word(sum.v.w)));
        if (channel == 0) put((float2*)(own + HEADS * HEAD_DIM) + head, make_float2(full_word(sum.m), full_word(sum.l)));
    }
    // The last readers share the heads out among them. All readers but the first begin with the item, so whoever owes a merge
    // owes it for the first item of its range.
    if (tid == 0 && first_of_worker) {
        const u32 most = a.group < MOST_MERGERS ? a.group : MOST_MERGERS;
        const u32 mergers = readers.count - 1 < most ? readers.count - 1 : most;
        const u32 later = readers.first + readers.count - 1 - worker;
        shared.owed = {readers, row, head_index, later, later < mergers ? mergers : 0};
    }
}

// What merging uses of the slots, which are free by then.
struct MergeRoom {
    float factors[HEADS][MOST_READERS];
    float4 sums[THREADS];
};
static_assert(sizeof(MergeRoom) <= sizeof(Shared::slots), "merging needs more room than the slots have");

// Adds up the partial results of some heads of an item in the order of the plan. All readers.
DEVICE void merge_item(Shared& shared, const DecodeArgs& a, const OwedMerge& item) {
    MergeRoom& room = *(MergeRoom*)shared.slots;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int mergers = (int)item.mergers, first_head = (int)item.first_head;
    const int heads = ((int)a.group - first_head + mergers - 1) / mergers, quads = heads * QUADS;
    auto nth_head = [&](int i) { return first_head + i * mergers; };
    const u32 count = item.readers.count;
    const OutputRows out(a, item.row, item.head);
    // The first reader holds the item in its second partial unless it begins with it; the others begin with it.
    float* const first = a.partials + (u64)(2 * item.readers.first + item.readers.second) * PARTIAL;
    float* const others = a.partials + (u64)(2 * item.readers.first) * PARTIAL;
    auto partial = [&](u32 k) { return k == 0 ? first : others + (u64)k * (2 * PARTIAL); };
    // The block's parts take every parts-th partial; channels beyond the threads' number go round by round. The first
    // loads need not wait for the factors.
    const int columns = quads < THREADS ? quads : THREADS, room_for = THREADS / columns;
    const int parts = room_for < (int)count ? room_for : (int)count, part = tid / columns;
    auto place_of = [&](int e) { return nth_head(e / QUADS) * QUADS + e % QUADS; };
    constexpr int BATCH = 6;
    float4 x[BATCH];
    auto look_at = [&](u32 from, int e, bool again) {
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (from + i * parts < count && !(again && is_full(x[i])))
                look((const float4*)partial(from + i * parts) + place_of(e), x[i]);
    };
    auto missing = [&](u32 from) {
        bool any = false;
#pragma unroll
        for (int i = 0; i < BATCH; i++) any |= from + i * parts < count && !is_full(x[i]);
        return any;
    };
    if (part < parts) look_at(part, tid % columns, false);
    for (int i = warp; i < heads; i += WARPS) {
        const int head = nth_head(i);
        auto pair = [&](u32 k) { return (float2*)(partial(k) + HEADS * HEAD_DIM) + head; };
        float m = NEGATIVE_INFINITY, l = 0.f;
#pragma unroll 1
        for (u32 k = lane; k < count; k += 32) {
            float2 p;
            do look(pair(k), p);
            while (!is_full(p));
            empty(pair(k));
            // What weighs nothing must not move the reference.
            const float reference = p.y == 0.f ? NEGATIVE_INFINITY : p.x, higher = fmaxf(m, reference);
            room.factors[head][k] = reference;
            if (p.y != 0.f) l = fmaf(l, exp2_fast(m - higher), p.y * exp2_fast(reference - higher)), m = higher;
        }
        float top = m;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
#pragma unroll 1
        for (u32 k = lane; k < count; k += 32) room.factors[head][k] = exp2_fast(room.factors[head][k] - top);
        l = warp_sum(l != 0.f ? l * exp2_fast(m - top) : 0.f);
        if (lane == 0) shared.item_scale[head] = 1.f / l;
    }
    sync_readers();
#pragma unroll 1
    for (int round = 0; round < quads; round += columns) {
        const int e = round + tid % columns, head = nth_head(e / QUADS);
        const bool takes = part < parts && e < quads;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (takes) {
#pragma unroll 1
            for (u32 k = part; k < count; k += BATCH * parts) {
                if (round > 0 || k != part) look_at(k, e, false);
                while (missing(k)) look_at(k, e, true);
#pragma unroll
                for (int i = 0; i < BATCH; i++)
                    if (k + i * parts < count) {
                        empty((float4*)partial(k + i * parts) + place_of(e));
                        add_to(v, x[i], room.factors[head][k + i * parts]);
                    }
            }
            if (part > 0) room.sums[tid] = v;
        }
        sync_readers();
        if (takes && part == 0) {
            for (int p = 1; p < parts; p++) add_to(v, room.sums[tid + p * columns], 1.f);
            out.store(a, head, e % QUADS * 4, scaled(v, shared.item_scale[head]));
        }
        if (round + columns < quads) sync_readers();
    }
}
