// Decode attention: merges the results of the warps of a block, then of the blocks of an item.
#pragma once
#include "decode_block.cuh"

DEVICE void add_to(float4& v, float4 x, float f) {
    v.x = fmaf(x.x, f, v.x), v.y = fmaf(x.y, f, v.y), v.z = fmaf(x.z, f, v.z), v.w = fmaf(x.w, f, v.w);
}
// The sum of a head's weights with that of its sink.
DEVICE float with_sink(const DecodeArgs& a, u32 row, u32 head, float top, float sum) {
#ifdef SINKS
    sum += sink_weight(a.sinks, row, head, top);
#endif
    return sum;
}
DEVICE float4 scaled(float4 v, float f) { return make_float4(v.x * f, v.y * f, v.z * f, v.w * f); }

// exp2(x - top); 0 for a state that has read nothing.
DEVICE float weight_of(float x, float top) { return x == NEGATIVE_INFINITY ? 0.f : exp2_fast(x - top); }

// Stores a warp's state in shared memory, rescaled to the largest reference of the block, so that
// the states of the warps can simply be added. Called by all readers.
DEVICE void put_down(Shared& shared, State& state, int lane, int warp) {
    float m[QUERY_TILES][LANE_COLUMNS], l[QUERY_TILES][LANE_COLUMNS], z[QUERY_TILES][LANE_COLUMNS];
    auto column = [&](int n, int i) { return n * 8 + 2 * (lane & 3) + i; };
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++) {
            m[n][i] = state.fresh ? NEGATIVE_INFINITY : state.m[n][i];
            if (lane < 4) shared.m[column(n, i)][warp] = m[n][i];
            l[n][i] = sum_over_tokens(state.l[n][i]), z[n][i] = sum_over_tokens(state.z[n][i]);
        }
    sync_readers();
    float* room = (float*)shared.sum_room(warp) + (lane >> 2);
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++) {
            const int c = column(n, i);
            float top = shared.m[c][0];
#pragma unroll
            for (int w = 1; w < WARPS; w++) top = fmaxf(top, shared.m[c][w]);
            const float f = weight_of(m[n][i], top), offset = z[n][i] * f;
            if (lane < 4) shared.l[c][warp] = l[n][i] * f;
            if (lane < 4 && warp == 0) shared.top[c] = top;
#pragma unroll
            for (int j = 0; j < STEPS; j++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    room[c * SUMS_STRIDE + 16 * j + 8 * half] = fmaf(state.o[n][j][2 * half + i], f, offset);
        }
    sync_readers();
}

// Sums over the warps, for four channels of one column: softmax weights, weighted values.
struct BlockSum {
    float l;
    float4 v;

    DEVICE BlockSum(Shared& shared, int column, int channel) : l(0.f), v(make_float4(0.f, 0.f, 0.f, 0.f)) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            l += shared.l[column][w];
            add_to(v, *(const float4*)((const float*)shared.sum_room(w) + column * SUMS_STRIDE + channel), 1.f);
        }
    }
};

// The place of an item's result.
struct OutputRows {
    u64 first;  // index of its first element

    DEVICE OutputRows(const DecodeArgs& a, u32 row, u32 head) : first(((u64)row * a.kv_heads + head) * a.group * HEAD_DIM) {}
    DEVICE void store(const DecodeArgs& a, int head, int channel, float4 v) const {
        u64 at = first + head * HEAD_DIM + channel;
        if (a.out) *(float4*)(a.out + at) = v;
        if (a.rounded) *(uint2*)(a.rounded + at) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    }
};

// ---- Words that blocks of one launch exchange through global memory. ----
//
// A word is EMPTY until it is written. The receiver polls it, then sets it back to EMPTY for the
// next launch. Data and flag are the same word, so no counter and no second round trip are needed.
// Blocks wait for one another, so all must be resident: no more blocks than multiprocessors.

constexpr u32 EMPTY = 0xffffffffu;  // a NaN that arithmetic never produces

DEVICE bool is_full(float x) { return __float_as_uint(x) != EMPTY; }
DEVICE bool is_full(float2 x) { return is_full(x.x) && is_full(x.y); }
DEVICE bool is_full(float4 x) { return is_full(x.x) && is_full(x.y) && is_full(x.z) && is_full(x.w); }

// Stores that other blocks read during the launch.
DEVICE void put(float4* to, float4 x) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}
DEVICE void put(float2* to, float2 x) {
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x.x), "f"(x.y) : "memory");
}
// Like `put`, but replaces a word that happens to equal EMPTY by another NaN.
DEVICE float full_word(float x) { return is_full(x) ? x : __uint_as_float(0x7fffffffu); }
DEVICE void hand_over(float4* to, float4 x) { put(to, make_float4(full_word(x.x), full_word(x.y), full_word(x.z), full_word(x.w))); }
DEVICE void hand_over(float2* to, float2 x) { put(to, make_float2(full_word(x.x), full_word(x.y))); }

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

// ---- Merging. ----

// A partial result: for each head and four channels, the block's weighted sums and the head's
// softmax state.
struct alignas(32) PartialQuad {
    float4 v;
    float2 ml;  // reference (maximum) and sum of weights of the head
};
CHECK_LAYOUT(PartialQuad);
// PartialQuads per head and per partial result.
constexpr int QUADS = HEAD_DIM / 4, PARTIAL = HEADS * QUADS;
constexpr int SHARERS = 8;  // lanes that merge the same four channels, each for some of the readers

DEVICE PartialQuad* partial_of(const DecodeArgs& a, u32 worker, bool first_of_worker) {
    return (PartialQuad*)a.partials + (u64)(2 * worker + (first_of_worker ? 0 : 1)) * PARTIAL;
}

// Prefetches the worker's partial result into L2. The weights of a layer have passed through L2
// since the last launch, so the first access would otherwise wait for memory.
DEVICE void fetch_partial(const DecodeArgs& a, u32 worker, int lane) {
    const u8* own = (const u8*)partial_of(a, worker, true);
    for (u32 at = 128 * lane; at < a.group * QUADS * sizeof(PartialQuad); at += 128 * 32) prefetch_to_l2(own + at);
}

// Ends a segment: writes the result, or a partial result if several blocks read the item. Returns
// the merge that this worker has to do later. Called by all readers.
DEVICE OwedMerge finish_segment(Shared& shared, const DecodeArgs& a, u32 row, u32 head_index, u32 worker, bool first_of_worker) {
    const int tid = threadIdx.x, quads = (int)a.group * QUADS;
    const ItemPlan readers = shared.readers;
    const bool alone = readers.count == 1;
    const OutputRows out(a, row, head_index);
    PartialQuad* own = partial_of(a, worker, first_of_worker);
#pragma unroll 1
    for (int e = tid; e < quads; e += THREADS) {
        const int head = e / QUADS, channel = e % QUADS * 4;
        const BlockSum sum(shared, column_of(head), channel);
        if (alone) {
            const float l = with_sink(a, row, head_index * a.group + head, shared.top[column_of(head)], sum.l);
            out.store(a, head, channel, scaled(sum.v, 1.f / l));
            continue;
        }
        hand_over(&own[e].v, sum.v);
        hand_over(&own[e].ml, make_float2(shared.top[column_of(head)], sum.l));
    }
    // The last readers of the item divide its heads among them, each as many as it has lanes for.
    // All readers except the first one start their range with this item, so a worker has at most
    // one merge, and it is for the first item of its range.
    constexpr u32 HEADS_AT_ONCE = THREADS / SHARERS > QUADS ? THREADS / SHARERS / QUADS : 1;
    const u32 enough = (a.group + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
    const u32 mergers = readers.count - 1 < enough ? readers.count - 1 : enough;
    const u32 later = readers.first + readers.count - 1 - worker;
    return {readers, row, head_index, later, first_of_worker && later < mergers ? mergers : 0};
}

// Merges the partial results of some heads of an item. Each lane sums every SHARERS-th reader,
// BATCH at a time; then the lanes are combined. The order depends only on the plan. Called by all
// readers.
template <int BATCH>
DEVICE void merge_item(const DecodeArgs& a, const OwedMerge& item) {
    const int sharer = threadIdx.x % SHARERS, mergers = (int)item.mergers, first_head = (int)item.first_head;
    const int quads = ((int)a.group - first_head + mergers - 1) / mergers * QUADS;
    const u32 count = item.readers.count;
    const OutputRows out(a, item.row, item.head);
    // A worker has two partial results: one for the first item of its range, one for the last. The
    // first reader of the item uses its second one, unless its range starts with the item.
    PartialQuad* const first = (PartialQuad*)a.partials + (u64)(2 * item.readers.first + item.readers.second) * PARTIAL;
    PartialQuad* const others = (PartialQuad*)a.partials + (u64)(2 * item.readers.first) * PARTIAL;
#pragma unroll 1
    for (int round = 0; round < quads; round += THREADS / SHARERS) {
        const int e = round + (int)threadIdx.x / SHARERS, head = first_head + e / QUADS * mergers;
        const int place = head * QUADS + e % QUADS;
        auto partial = [&](u32 k) { return (k == 0 ? first : others + (u64)k * (2 * PARTIAL)) + place; };
        float m = NEGATIVE_INFINITY, l = 0.f;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (u32 from = sharer; from < count && e < quads; from += SHARERS * BATCH) {
            float4 x[BATCH];
            float2 p[BATCH];
            bool missing = false;
            auto look_at = [&](bool again) {
                missing = false;
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    const u32 k = from + i * SHARERS;
                    if (k >= count || (again && is_full(x[i]) && is_full(p[i]))) continue;
                    look(&partial(k)->v, x[i]), look(&partial(k)->ml, p[i]);
                }
#pragma unroll
                for (int i = 0; i < BATCH; i++)
                    missing |= from + i * SHARERS < count && !(is_full(x[i]) && is_full(p[i]));
            };
            look_at(false);
            while (missing) look_at(true);
            float top = m;
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const u32 k = from + i * SHARERS;
                if (k < count) empty(&partial(k)->v), empty(&partial(k)->ml);
                // A reader without weight must not raise the reference.
                if (k >= count || p[i].y == 0.f) p[i] = make_float2(NEGATIVE_INFINITY, 0.f), x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
                top = fmaxf(top, p[i].x);
            }
            const float before = weight_of(m, top);
            l *= before, v = scaled(v, before), m = top;
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const float f = weight_of(p[i].x, top);
                l = fmaf(p[i].y, f, l), add_to(v, x[i], f);
            }
        }
        float top = m;
#pragma unroll
        for (int step = 1; step < SHARERS; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
        const float f = weight_of(m, top);
        l *= f, v = scaled(v, f);
#pragma unroll
        for (int step = 1; step < SHARERS; step *= 2) {
            auto other = [&](float x) { return __shfl_xor_sync(0xffffffffu, x, step); };
            l += other(l), v.x += other(v.x), v.y += other(v.y), v.z += other(v.z), v.w += other(v.w);
        }
        if (e < quads && sharer == 0) {
            l = with_sink(a, item.row, item.head * a.group + head, top, l);
            out.store(a, head, e % QUADS * 4, scaled(v, 1.f / l));
        }
    }
}
