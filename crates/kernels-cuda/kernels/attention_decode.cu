// Decode attention over pages: one launch a layer for every sequence, BF16 and coded tokens together.
//
// A persistent block of WARPS warps works through its range of the plan (decode_plan.cuh), segment by segment, a segment
// being what it reads of one item. Warps take the segment's units in turn, each through a ring of its own, and never wait
// for one another until the segment ends; the first pages of the next segment are on their way while one is merged. An
// item that several blocks read is merged by the last of them to arrive, in the order of the plan.
//
// Compiled with HEAD_DIM (64, 128, 256), QUERY_TILES (1: up to 8 query heads to a KV head, 2: up to 16), WARPS, STAGES and
// BLOCKS (blocks that share a multiprocessor).
#include "decode_plan.cuh"
#include "decode_state.cuh"
#include "pipeline.cuh"

struct DecodeArgs {
    StepTables step;
    DecodePlan plan;
    const HeadPages* heads;  // of this layer
    const float* queries;    // [rows][query heads][HEAD_DIM], in the cache's basis
    void* out;               // [rows][query heads][HEAD_DIM]
    float* partials;         // [2 * workers][HEADS][HEAD_DIM + 2]
    u32* arrived;            // [items], zero before and after every launch
    u32 kv_heads;
    u32 group;        // query heads to a KV head
    float scale;      // of the scores, times log2 e
    u32 out_is_bf16;  // else f32
};

constexpr int HEADS = 8 * QUERY_TILES;
constexpr int THREADS = 32 * WARPS;
constexpr int SUMS_STRIDE = HEAD_DIM + 4;  // keeps the lanes' heads in different banks
constexpr int SUMS = WARPS > 1 ? WARPS / 2 : 1;

// What one warp reads of a segment: BF16 tiles near_first, near_first + WARPS, …, then coded units likewise. Kept in shared
// memory, for the registers' sake.
struct Segment {
    ContextShape context;
    HeadPages head;
    const u32 *full, *coded;  // page ids of the sequence
    u32 near_first, near_count;
    u32 coded_first, coded_count;  // counted from the item's first coded unit
    u32 boundary;

    DEVICE u32 loads() const { return 2 * near_count + coded_count; }
    DEVICE u32 near_tile(u32 i) const {
        u32 unit = near_first + i * WARPS;
        return unit < context.sink_tiles ? unit : context.recent_tile + unit - context.sink_tiles;
    }
};

struct alignas(128) Shared {
    u8 slots[WARPS][STAGES][SLOT_BYTES];
    float sums[SUMS][HEADS][SUMS_STRIDE];
    uint4 near_query[QUERY_TILES * STEPS * 32];
    uint2 coded_query[QUERY_TILES * STEPS * 32];
    float query_sums[QUERY_TILES * STEPS][8];
    float largest[WARPS];
    float m[WARPS][HEADS], l[WARPS][HEADS];
    float item_m[HEADS], item_scale[HEADS];
    u64 barriers[WARPS][STAGES];
    Segment segments[WARPS];
    u32 last;
};

extern "C" __global__ void decode_shared_bytes(u32* bytes) { *bytes = sizeof(Shared); }

// Fills in this warp's share of units begin..end of an item; false where there are none for anyone.
DEVICE bool set_segment(Segment& g, const DecodeArgs& a, u32 item, u32 begin, u32 end, int warp) {
    const SequenceInfo s = a.step.sequences[item / a.kv_heads];
    const HeadPages head = a.heads[item % a.kv_heads];
    const ContextShape context = context_of(a.step, s);
    u32 near = context.near_units, all = units_of(context, head);
    end = end < all ? end : all;
    if (begin >= end) return false;
    g.head = head;
    g.context = context;
    g.full = a.step.full + s.table;
    g.coded = a.step.coded + s.table;
    g.boundary = s.boundary;
    u32 near_end = end < near ? end : near;
    g.near_first = begin + warp;
    g.near_count = g.near_first < near_end ? (near_end - g.near_first + WARPS - 1) / WARPS : 0;
    // Coded units go first to the warps that had fewer BF16 tiles.
    u32 coded_begin = begin > near ? begin : near, tiles = near_end > begin ? near_end - begin : 0;
    u32 turn = (warp + WARPS - tiles % WARPS) % WARPS;
    g.coded_first = coded_begin - near + turn;
    u32 coded_end = end > near ? end - near : 0;
    g.coded_count = g.coded_first < coded_end ? (coded_end - g.coded_first + WARPS - 1) / WARPS : 0;
    return true;
}

using SlotRing = Ring<STAGES, SLOT_BYTES>;

// A segment's loads in order, STAGES ahead of their use: both sides of every BF16 tile, then the coded units.
struct Loader {
    u32 next;       // next load to start
    u32 count;
    u32 next_page;  // page id of the next load, read ahead

    DEVICE u32 page_of(const Segment& g, u32 i) const {
        if (i < 2 * g.near_count) return g.full[g.near_tile(i / 2) / (PAGE_TOKENS / TILE_TOKENS)];
        u32 unit = g.coded_first + (i - 2 * g.near_count) * WARPS;
        return g.coded[g.context.first_page + unit / pieces_of(g.head)];
    }

    // One side of a BF16 tile.
    DEVICE void start_near(const Segment& g, const SlotRing& ring, u32 slot, int lane) const {
        u32 row = g.near_tile(next / 2) % (PAGE_TOKENS / TILE_TOKENS) * TILE_TOKENS;
        const u8* page = (const u8*)g.head.full + (u64)next_page * (4 * PAGE_TOKENS * HEAD_DIM) +
                         (next & 1) * (2 * PAGE_TOKENS * HEAD_DIM) + row * 128;
        const u8* from[PANELS];
        u32 at[PANELS], bytes[PANELS];
#pragma unroll
        for (int p = 0; p < PANELS; p++)
            from[p] = page + p * PAGE_TOKENS * 128, at[p] = p * TILE_TOKENS * 128, bytes[p] = TILE_TOKENS * 128;
        ring.fill(slot, from, at, bytes, lane);
    }

    DEVICE void start_page(const Segment& g, const SlotRing& ring, u32 slot, u32 page, int lane) const {
        const u8* const from[1] = {(const u8*)g.head.coded + (u64)page * SLOT_BYTES};
        ring.fill(slot, from, {0}, {SLOT_BYTES}, lane);
    }

    // Half a page: its two tiles of key codes, value codes, key pairs and value pairs.
    DEVICE void start_half_page(const Segment& g, const SlotRing& ring, u32 slot, int lane) const {
        u32 keys = 4 * HEAD_DIM * g.head.key_bits, values = 4 * HEAD_DIM * g.head.value_bits;
        const u8* page = (const u8*)g.head.coded + (u64)next_page * (2 * (keys + values) + 8 * PAGE_TOKENS);
        u32 half = (g.coded_first + (next - 2 * g.near_count) * WARPS) & 1;
        const u8* params = page + 2 * (keys + values) + half * 128;
        const u8* const from[4] = {page + half * keys, page + 2 * keys + half * values, params, params + 256};
        ring.fill(slot, from, {0, keys, keys + values, keys + values + 128}, {keys, values, 128, 128}, lane);
    }

    // Fills the ring from the slot at hand on.
    DEVICE void start(const Segment& g, const SlotRing& ring, int lane) {
        count = g.loads(), next = 0;
        next_page = count > 0 ? page_of(g, 0) : 0;
#pragma unroll 1
        for (u32 s = 0, slot = ring.slot; s < STAGES; s++, slot = slot + 1 == STAGES ? 0 : slot + 1) refill(g, ring, slot, lane);
    }

    DEVICE void refill(const Segment& g, const SlotRing& ring, u32 slot, int lane) {
        if (next < count) {
            if (next < 2 * g.near_count) start_near(g, ring, slot, lane);
            else if (pieces_of(g.head) == 1) start_page(g, ring, slot, next_page, lane);
            else start_half_page(g, ring, slot, lane);
            if (++next < count) next_page = page_of(g, next);
        }
        ring.end_fill();
    }

    // The slot at hand has been read by every lane: fill it again and go to the next.
    DEVICE void turn(const Segment& g, SlotRing& ring, int lane) {
        __syncwarp();
        refill(g, ring, ring.slot, lane);
        ring.advance();
    }

};

// The query heads of an item as fragments, in BF16 pairs and in fp16 with the planes' exponents taken off. All threads.
DEVICE float prepare_query(Shared& shared, const DecodeArgs& a, u32 row, u32 head_index, u32 key_bits) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const float* rows = a.queries + ((u64)row * a.kv_heads + head_index) * a.group * HEAD_DIM;
    constexpr int FRAGMENTS = QUERY_TILES * STEPS, ROUNDS = (FRAGMENTS + WARPS - 1) / WARPS;
    float2 v[ROUNDS][2];
    float largest = 0.f;
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        int f = warp + k * WARPS, head = f / STEPS * 8 + (lane >> 2), channel = f % STEPS * 16 + (lane & 3) * 2;
#pragma unroll
        for (int b = 0; b < 2; b++) {
            v[k][b] = make_float2(0.f, 0.f);
            if (f < FRAGMENTS && head < a.group) v[k][b] = *(const float2*)(rows + head * HEAD_DIM + channel + 8 * b);
            v[k][b].x *= a.scale, v[k][b].y *= a.scale;
            largest = fmaxf(largest, fmaxf(fabsf(v[k][b].x), fabsf(v[k][b].y)));
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    if (lane == 0) shared.largest[warp] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, shared.largest[w]);
    // One power of two for the group brings the largest channel to 2^14..2^15.
    int power = 14 + 127 - (int)(__float_as_uint(largest) >> 23);
    power = largest == 0.f ? 0 : power < -100 ? -100 : power > 100 ? 100 : power;
    const float up = __uint_as_float((u32)(127 + power) << 23);
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        int f = warp + k * WARPS, j = f % STEPS;
        if (f < FRAGMENTS) {
            u32 high[2], low[2], coded[2];
            float sum = 0.f;
#pragma unroll
            for (int b = 0; b < 2; b++) {
                float x = v[k][b].x, y = v[k][b].y;
                high[b] = pack_bf16(x, y);
                low[b] = pack_bf16(x - low_bf16(high[b]), y - high_bf16(high[b]));
                int exponent = plane_exponent(key_bits, j, b);
                float down = __uint_as_float((u32)(127 - exponent) << 23), back = __uint_as_float((u32)(127 + exponent) << 23);
                coded[b] = pack_f16(x * up * down, y * up * down);
                sum += (low_f16(coded[b]) + high_f16(coded[b])) * back;
            }
            shared.near_query[f * 32 + lane] = make_uint4(high[0], high[1], low[0], low[1]);
            shared.coded_query[f * 32 + lane] = make_uint2(coded[0], coded[1]);
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if ((lane & 3) == 0) shared.query_sums[f][lane >> 2] = sum;
        }
    }
    __syncthreads();
    return 1.f / up;
}

DEVICE void load_query(CodedQuery& q, const Shared& shared, float down, int lane) {
    q.shared = shared.coded_query;
    q.factor = down * 16777216.f;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                uint2 b = shared.coded_query[(n * STEPS + j) * 32 + lane];
                q.b[n][j][0] = b.x, q.b[n][j][1] = b.y;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < STEPS; j++) sum += shared.query_sums[n * STEPS + j][2 * (lane & 3) + i];
            q.sum[n][i] = sum * down;
        }
    }
}

DEVICE void read_near(State& state, const Segment& g, Loader& loader, SlotRing& ring, const Shared& shared, int lane) {
    for (u32 i = 0; i < g.near_count; i++) {
        int tokens = (int)(g.context.length - g.near_tile(i) * TILE_TOKENS);
        float s[QUERY_TILES][4];
        u32 p[QUERY_TILES][4];
        ring.wait();
        near_scores(s, ring.data + ring.slot * SLOT_BYTES, shared.near_query, lane);
        loader.turn(g, ring, lane);
        near_weights(state, s, tokens, p, lane);
        ring.wait();
        near_values(state, p, ring.data + ring.slot * SLOT_BYTES, tokens, lane);
        loader.turn(g, ring, lane);
    }
}

// Coded units of a segment. Two-bit pages come whole; other widths, chosen by the head's table entry, in halves.
template <bool TWO_BIT>
DEVICE void read_coded(State& state, const CodedQuery& query, const Segment& g, Loader& loader, SlotRing& ring, u8* slots,
                       u32 sink, int lane) {
    constexpr int TILES = TWO_BIT ? 4 : 2;
    const u32 kb = g.head.key_bits, vb = g.head.value_bits;
    const u32 values_at = TWO_BIT ? 16 * HEAD_DIM : 4 * HEAD_DIM * kb;
    const u32 key_params_at = TWO_BIT ? 32 * HEAD_DIM : 4 * HEAD_DIM * (kb + vb);
    const u32 value_params_at = key_params_at + TILES * 64;
    const u32 boundary = g.boundary;
    u32 first = g.context.first_page * PAGE_TOKENS + g.coded_first * (TILES * TILE_TOKENS);
    u32 page = loader.next_page;
    bool settle = true;
#pragma unroll 1
    for (u32 left = g.coded_count; left > 0;) {
        ring.wait();
        u8* slot = slots + ring.slot * SLOT_BYTES;
        float s[TILES][QUERY_TILES][4];
        if constexpr (TWO_BIT) {
            coded_scores<2, TILES>(s, state, query, slot, slot + key_params_at, lane);
        } else {
            switch (kb) {
                case 1: coded_scores<1, TILES>(s, state, query, slot, slot + key_params_at, lane); break;
                case 2: coded_scores<2, TILES>(s, state, query, slot, slot + key_params_at, lane); break;
                case 3: coded_scores<3, TILES>(s, state, query, slot, slot + key_params_at, lane); break;
                default: coded_scores<4, TILES>(s, state, query, slot, slot + key_params_at, lane);
            }
        }
        bool none = false;
        if (first < sink || first + TILES * TILE_TOKENS > boundary) {
            // The ends of the coded range: tiles outside it hold anything.
            none = true;
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                u32 position = first + t * TILE_TOKENS;
                if (position < sink || position >= boundary) {
#pragma unroll
                    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
                        for (int k = 0; k < 4; k++) s[t][n][k] = NEGATIVE_INFINITY;
                    if (lane < TILE_TOKENS) *(u32*)(slot + value_params_at + t * 64 + lane * 4) = 0;
                } else {
                    none = false;
                }
            }
            writes_before_bulk_copies();
            __syncwarp();
        }
        if (!none) {
            u32 w[TILES][QUERY_TILES][2];
            if (!coded_weights<TILES>(w, state, s, slot + value_params_at, settle, lane)) {
                move_reference<TILES>(state, s, slot + value_params_at, settle, lane);
                settle = false;
                continue;  // the same unit again
            }
            if constexpr (TWO_BIT) {
                coded_values<2, TILES>(state, w, slot + values_at, lane);
            } else {
                switch (vb) {
                    case 1: coded_values<1, TILES>(state, w, slot + values_at, lane); break;
                    case 2: coded_values<2, TILES>(state, w, slot + values_at, lane); break;
                    case 3: coded_values<3, TILES>(state, w, slot + values_at, lane); break;
                    default: coded_values<4, TILES>(state, w, slot + values_at, lane);
                }
            }
        }
        if constexpr (TWO_BIT) {
            // As loader.turn, from fewer registers: the load to start is that of STAGES units on.
            __syncwarp();
            if (left > STAGES) {
                loader.start_page(g, ring, ring.slot, page, lane);
                if (left > STAGES + 1) page = g.coded[first / PAGE_TOKENS + (STAGES + 1) * WARPS];
            }
            ring.end_fill();
            ring.advance();
        } else {
            loader.turn(g, ring, lane);
        }
        left--, first += WARPS * TILES * TILE_TOKENS;
    }
}

// Adds up the warps' states in shared memory: afterwards `sums[0..]` add up to the block's result relative to item_m, and
// item_scale is the sum of weights. All threads.
DEVICE void merge_warps(Shared& shared, State& state, int lane, int warp) {
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float l = sum_over_tokens(state.l[n][i]), z = sum_over_tokens(state.z[n][i]);
            if (lane < 4) {
                shared.m[warp][n * 8 + 2 * lane + i] = state.m[n][i];
                shared.l[warp][n * 8 + 2 * lane + i] = l;
            }
#pragma unroll
            for (int j = 0; j < STEPS; j++) state.o[n][j][i] += z, state.o[n][j][2 + i] += z;
        }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int head = n * 8 + 2 * (lane & 3) + i;
            float m = NEGATIVE_INFINITY;
#pragma unroll
            for (int w = 0; w < WARPS; w++) m = fmaxf(m, shared.m[w][head]);
            factor[i] = state.fresh ? 0.f : exp2_fast(state.m[n][i] - m);
        }
        state.rescale(n, factor[0], factor[1]);
    }
    if (threadIdx.x < HEADS) {
        int head = threadIdx.x;
        float m = NEGATIVE_INFINITY, l = 0.f;
        for (int w = 0; w < WARPS; w++) m = fmaxf(m, shared.m[w][head]);
        for (int w = 0; w < WARPS; w++)
            if (shared.l[w][head] > 0.f) l = fmaf(shared.l[w][head], exp2_fast(shared.m[w][head] - m), l);
        shared.item_m[head] = m, shared.item_scale[head] = l;
    }
    // The upper half of the warps put their sums down, the lower half add theirs to them.
    auto each = [&](auto&& f) {
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
            for (int j = 0; j < STEPS; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    f(shared.sums[warp % SUMS][n * 8 + 2 * (lane & 3) + (i & 1)][16 * j + (lane >> 2) + 8 * (i >> 1)],
                      state.o[n][j][i]);
    };
    if (warp >= WARPS - SUMS) each([](float& at, float o) { at = o; });
    __syncthreads();
    if (warp < WARPS - SUMS) each([](float& at, float o) { at += o; });
    __syncthreads();
}

DEVICE float4 summed(const Shared& shared, int head, int channel) {
    float4 v = *(const float4*)&shared.sums[0][head][channel];
#pragma unroll
    for (int s = 1; s < SUMS; s++) {
        float4 w = *(const float4*)&shared.sums[s][head][channel];
        v.x += w.x, v.y += w.y, v.z += w.z, v.w += w.w;
    }
    return v;
}

// Where an item's result goes.
struct OutputRows {
    u64 first;  // element

    DEVICE OutputRows(const DecodeArgs& a, u32 row, u32 head) : first(((u64)row * a.kv_heads + head) * a.group * HEAD_DIM) {}
    DEVICE void store(const DecodeArgs& a, int head, int channel, float4 v) const {
        u64 at = first + head * HEAD_DIM + channel;
        if (a.out_is_bf16) *(uint2*)((u16*)a.out + at) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
        else *(float4*)((float*)a.out + at) = v;
    }
};

DEVICE float4 scaled(float4 v, float f) { return make_float4(v.x * f, v.y * f, v.z * f, v.w * f); }

constexpr int PARTIAL = HEADS * (HEAD_DIM + 2);  // floats: results, then (m, l) of each head
constexpr int QUADS = HEAD_DIM / 4;

// A block's share of an item is done: writes the result, or a partial one that the last block merges. All threads.
DEVICE void finish_segment(Shared& shared, const DecodeArgs& a, u32 item, u32 worker, bool first_of_worker) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, quads = (int)a.group * QUADS;
    const uint2 readers = a.plan.items()[item];
    const OutputRows out(a, a.step.sequences[item / a.kv_heads].first_row, item % a.kv_heads);
    if (readers.y == 1) {
        for (int e = tid; e < quads; e += THREADS) {
            int head = e / QUADS, channel = e % QUADS * 4;
            out.store(a, head, channel, scaled(summed(shared, head, channel), 1.f / shared.item_scale[head]));
        }
        return;
    }
    float* own = a.partials + (u64)(2 * worker + (first_of_worker ? 0 : 1)) * PARTIAL;
    for (int e = tid; e < quads; e += THREADS)
        __stcg((float4*)own + e, summed(shared, e / QUADS, e % QUADS * 4));
    if (tid < a.group) __stcg((float2*)(own + HEADS * HEAD_DIM) + tid, make_float2(shared.item_m[tid], shared.item_scale[tid]));
    __threadfence();
    __syncthreads();
    if (tid == 0) shared.last = atomicAdd(&a.arrived[item], 1) + 1 == readers.y;
    __syncthreads();
    if (!shared.last) return;
    __threadfence();
    // Worker readers.x holds the item in its second partial unless it begins with it; the others begin with it.
    auto partial = [&](u32 k) {
        u32 w = readers.x + k;
        bool second = k == 0 && a.plan.starts()[w].x != item;
        return (const float*)a.partials + (u64)(2 * w + (second ? 1 : 0)) * PARTIAL;
    };
    for (int head = warp; head < a.group; head += WARPS) {
        float m = NEGATIVE_INFINITY, l = 0.f;
        for (u32 k = lane; k < readers.y; k += 32) {
            float2 ml = __ldcg((const float2*)(partial(k) + HEADS * HEAD_DIM) + head);
            float larger = fmaxf(m, ml.x);
            l = (m > NEGATIVE_INFINITY ? l * exp2_fast(m - larger) : 0.f) + (ml.y > 0.f ? ml.y * exp2_fast(ml.x - larger) : 0.f);
            m = larger;
        }
        float all = m;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, step));
        l = m > NEGATIVE_INFINITY ? l * exp2_fast(m - all) : 0.f;
        l = warp_sum(l);
        if (lane == 0) shared.item_m[head] = all, shared.item_scale[head] = 1.f / l;
    }
    __syncthreads();
    for (int e = tid; e < quads; e += THREADS) {
        int head = e / QUADS;
        float m = shared.item_m[head];
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
        for (u32 k = 0; k < readers.y; k++) {
            const float* p = partial(k);
            float2 ml = __ldcg((const float2*)(p + HEADS * HEAD_DIM) + head);
            float4 x = __ldcg((const float4*)p + e);
            float f = ml.y > 0.f ? exp2_fast(ml.x - m) : 0.f;
            v.x = fmaf(x.x, f, v.x), v.y = fmaf(x.y, f, v.y), v.z = fmaf(x.z, f, v.z), v.w = fmaf(x.w, f, v.w);
        }
        out.store(a, head, e % QUADS * 4, scaled(v, shared.item_scale[head]));
    }
    if (tid == 0) a.arrived[item] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode_attention(const __grid_constant__ DecodeArgs a) {
    extern __shared__ u8 memory[];
    Shared& shared = *(Shared*)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 worker = blockIdx.x;
    Segment& g = shared.segments[warp];
    SlotRing ring;
    ring.init(shared_address(shared.slots[warp]), shared_address(shared.barriers[warp]), lane);
    if (worker >= a.plan.active()) return;
    const uint2 start = a.plan.starts()[worker], stop = a.plan.starts()[worker + 1];
    u32 item = start.x, begin = start.y;
    // Goes on to the next item of the range that has something to read.
    auto find = [&]() {
        __syncwarp();
        bool found = false;
        for (; item < stop.x || (item == stop.x && stop.y > 0); item++, begin = 0)
            if ((found = set_segment(g, a, item, begin, item == stop.x ? stop.y : 0xffffffffu, warp))) break;
        __syncwarp();
        return found;
    };
    if (!find()) return;
    Loader loader;
    loader.start(g, ring, lane);
    wait_for_previous_kernel();
    bool first_of_worker = true;
    while (true) {
        float down = prepare_query(shared, a, a.step.sequences[item / a.kv_heads].first_row, item % a.kv_heads, g.head.key_bits);
        State state;
        state.clear();
        read_near(state, g, loader, ring, shared, lane);
        if (g.coded_count > 0) {
            CodedQuery query;
            load_query(query, shared, down, lane);
            if (state.fresh) {
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++) state.m[n][0] = state.m[n][1] = 0.f;
            }
            state.to_code_units(g.head.value_bits, 1);
            u8* slots = shared.slots[warp][0];
            if (pieces_of(g.head) == 1) read_coded<true>(state, query, g, loader, ring, slots, a.step.sink, lane);
            else read_coded<false>(state, query, g, loader, ring, slots, a.step.sink, lane);
            state.to_code_units(g.head.value_bits, -1);
        }
        const u32 done = item++;
        begin = 0;
        const bool more = find();
        if (more) loader.start(g, ring, lane);
        merge_warps(shared, state, lane, warp);
        finish_segment(shared, a, done, worker, first_of_worker);
        if (!more) return;
        first_of_worker = false;
        __syncthreads();
    }
}
