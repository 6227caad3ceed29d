// Decode attention over pages: one launch a layer for every sequence, BF16 and coded tokens together.
//
// A persistent block works through its range of the plan (decode_plan.cuh), segment by segment, a segment being what it reads
// of one item. WARPS warps read; one more hands them the segment's units, one by one as their rings have room, and starts
// the copies. Readers do not wait for one another until the segment ends; the next segment's first pages are on their way
// while one is merged. An item that several blocks read is merged by the last of them to arrive, in the order of the plan.
//
// Compiled with HEAD_DIM (64, 128, 256), QUERY_TILES (1: up to 8 query heads to a KV head, 2: up to 16), WARPS, STAGES,
// BLOCKS (blocks that share a multiprocessor) and SHARED_BYTES (of dynamic shared memory).
#include "decode_plan.cuh"
#include "decode_state.cuh"
#include "pipeline.cuh"

struct DecodeArgs {
    StepTables step;
    DecodePlan plan;
    const HeadPages* heads;  // of this layer
    const float* queries;    // [rows][query heads][HEAD_DIM], in the cache's basis
    float* out;              // [rows][query heads][HEAD_DIM], or null
    u16* rounded;            // the same in BF16, or null
    float* partials;         // [2 * workers][HEADS][HEAD_DIM + 2]
    u32* arrived;            // [items], zero before and after every launch
    u32 kv_heads;
    u32 group;    // query heads to a KV head
    float scale;  // of the scores, times log2 e
};

constexpr int HEADS = COLUMNS;  // room for query heads, a column each
constexpr int THREADS = 32 * WARPS;  // that read
constexpr int WARPS_ROUNDED = (WARPS + 3) / 4 * 4;
static_assert(WARPS <= 32, "a lane of the filling warp for each ring");
constexpr int SUMS_STRIDE = HEAD_DIM + 4;  // keeps the lanes' heads in different banks
constexpr int SUMS_BYTES = 4 * HEADS * SUMS_STRIDE;
// A warp puts its result down in the slot that told it of the segment's end, where it fits.
constexpr bool SUMS_IN_SLOTS = SUMS_BYTES <= SLOT_BYTES;
constexpr u32 KNOWN_FACTORS = 32;

constexpr u32 NO_UNIT = 0xffffffffu;

// What a block reads of an item. Kept in shared memory, for the registers' sake.
struct Segment {
    ContextShape context;
    HeadPages head;
    const u32 *full, *coded;  // page ids of the sequence
    const u32* first_pages;   // of the units from `begin` on, or null
    u32 begin, end;           // units of the item
    u32 boundary, row;
};

struct alignas(128) Shared {
    u8 slots[WARPS][STAGES][SLOT_BYTES];
    u8 sums[SUMS_IN_SLOTS ? 1 : WARPS][SUMS_IN_SLOTS ? 16 : SUMS_BYTES];
    uint4 near_query[QUERY_TILES * STEPS * 32];
    uint2 coded_query[QUERY_TILES * STEPS * 32];  // in fp16, or split into bytes for two-bit codes
    float query_sums[QUERY_TILES * STEPS][8];
    float split_step;
    float largest[WARPS];
    alignas(16) float m[HEADS][WARPS_ROUNDED], l[HEADS][WARPS_ROUNDED];
    float item_m[HEADS], item_scale[HEADS];
    float2 to_codes[STEPS], from_codes[STEPS];  // units of the result
    u64 full[WARPS][STAGES], empty[WARPS][STAGES];
    u32 slot_unit[WARPS][STAGES];  // what each slot holds
    u32 last_slot[WARPS];          // the slot that held NO_UNIT
    Segment segments[WARPS + 1];   // each warp's own copy: warps go on to the next segment at different times
    u32 last;

    // Factors of partial results, in the room of a query that has been read.
    DEVICE float& factor(int head, u32 partial) { return ((float*)near_query)[head * KNOWN_FACTORS + partial]; }

    DEVICE u8* sum_room(int warp) {
        if constexpr (SUMS_IN_SLOTS) return slots[warp][last_slot[warp]];
        else return sums[warp];
    }
};

// What the host launches with.
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES is too small");

// Describes units begin..end of an item; false where there are none.
DEVICE bool set_segment(Segment& g, const DecodeArgs& a, const SequenceInfo& s, u32 head_index, u32 begin, u32 end,
                        const u32* first_pages) {
    const HeadPages head = a.heads[head_index];
    const ContextShape context = context_of(a.step, s);
    u32 all = units_of(context, head);
    end = end < all ? end : all;
    if (begin >= end) return false;
    g.head = head;
    g.context = context;
    g.full = a.step.full + s.table;
    g.coded = a.step.coded + s.table;
    g.first_pages = first_pages;
    g.begin = begin;
    g.end = end;
    g.boundary = s.boundary;
    g.row = s.first_row;
    return true;
}

// All reading threads.
DEVICE void sync_readers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// The filling warp: lane w serves ring w.
struct Filler {
    u32 slot, parity;  // next slot of the ring, and the parity at which it is empty
    u32 unit, side;    // the BF16 tile whose keys (side 0) or values (1) come next

    // The copies of a load: where from, where to in the slot, how many bytes. Returns their number.
    DEVICE static int copies(const Segment& g, u32 unit, u32 side, u32 page, const u8* (&from)[4], u32 (&at)[4], u32 (&bytes)[4]) {
        if (unit < g.context.near_units) {
            u32 row = near_tile(g.context, unit) % (PAGE_TOKENS / TILE_TOKENS) * TILE_TOKENS;
            const u8* start = (const u8*)g.head.full + (u64)page * (4 * PAGE_TOKENS * HEAD_DIM) +
                              side * (2 * PAGE_TOKENS * HEAD_DIM) + row * 128;
#pragma unroll
            for (int p = 0; p < PANELS; p++)
                from[p] = start + p * PAGE_TOKENS * 128, at[p] = p * TILE_TOKENS * 128, bytes[p] = TILE_TOKENS * 128;
            return PANELS;
        }
        u32 keys = 4 * HEAD_DIM * g.head.key_bits, values = 4 * HEAD_DIM * g.head.value_bits;
        const u8* start = (const u8*)g.head.coded + (u64)page * (2 * (keys + values) + 8 * PAGE_TOKENS);
        if (pieces_of(g.head) == 1) {
            from[0] = start, at[0] = 0, bytes[0] = SLOT_BYTES;
            return 1;
        }
        // Half a page: its two tiles of key codes, value codes, key pairs and value pairs.
        u32 half = (unit - g.context.near_units) & 1;
        from[0] = start + half * keys, at[0] = 0, bytes[0] = keys;
        from[1] = start + 2 * keys + half * values, at[1] = keys, bytes[1] = values;
        from[2] = start + 2 * (keys + values) + half * 128, at[2] = keys + values, bytes[2] = 128;
        from[3] = from[2] + 256, at[3] = at[2] + 128, bytes[3] = 128;
        return 4;
    }

    // Starts the copies of a load into a slot of a ring.
    DEVICE static void fill(Shared& shared, const Segment& g, u32 ring, u32 slot, u32 unit, u32 side, u32 page, int lane) {
        const u8* from[4];
        u32 at[4], bytes[4];
        const int n = copies(g, unit, side, page, from, at, bytes);
        const u32 to = shared_address(shared.slots[ring][slot]), full = shared_address(&shared.full[ring][slot]);
#if BULK_COPIES
        u32 all = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) all += i < n ? bytes[i] : 0;
        expect_bytes(full, all);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < n) copy_bulk(to + at[i], from[i], bytes[i], full);
#else
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < n) copy_by_lanes(to + at[i], from[i], bytes[i], lane);
        arrive_after_copies(full);
#endif
    }

    // Hands out a segment's units until every ring has been told of its end.
    DEVICE void serve(Shared& shared, const Segment& g, int lane) {
        const u32 empty = shared_address(shared.empty[lane < WARPS ? lane : 0]);
        bool open = lane < WARPS;
        u32 next = 0;
        side = 0;
        while (__any_sync(0xffffffffu, open)) {
            const bool ready = open && barrier_passed_now(empty + 8 * slot, parity);
            const u32 takers = __ballot_sync(0xffffffffu, ready && side == 0);
            if (!__any_sync(0xffffffffu, ready)) {
                __nanosleep(40);
                continue;
            }
            u32 page = 0;
            if (ready && side == 0) unit = g.begin + next + __popc(takers & ((1u << lane) - 1));
            next += __popc(takers);
            const bool any = ready && unit < g.end;
            if (any) {
                u32 index = unit - g.begin;
                page = g.first_pages && index < FIRST_PAGES ? g.first_pages[index] : page_of(g.context, g.head, g.full, g.coded, unit);
            }
            if (ready) shared.slot_unit[lane][slot] = any ? unit : NO_UNIT;
#if BULK_COPIES
            if (any) fill(shared, g, lane, slot, unit, side, page, lane);
            else if (ready) barrier_arrive(shared_address(&shared.full[lane][slot]));
#else
            __syncwarp();
            for (u32 left = __ballot_sync(0xffffffffu, ready); left; left &= left - 1) {
                const int ring = __ffs(left) - 1;
                const u32 to = __shfl_sync(0xffffffffu, slot, ring), what = __shfl_sync(0xffffffffu, unit, ring);
                const u32 of = __shfl_sync(0xffffffffu, side, ring), from = __shfl_sync(0xffffffffu, page, ring);
                if (what < g.end) fill(shared, g, ring, to, what, of, from, lane);
                else barrier_arrive(shared_address(&shared.full[ring][to]));
            }
#endif
            if (ready) {
                open = any;
                side = any && unit < g.context.near_units ? side ^ 1 : 0;
                if (++slot == STAGES) slot = 0, parity ^= 1;
            }
        }
    }
};

// An item's query heads, spread over the block: fragment f of warp f mod WARPS.
struct QueryRows {
    static constexpr int FRAGMENTS = QUERY_TILES * STEPS, ROUNDS = (FRAGMENTS + WARPS - 1) / WARPS;
    float2 v[ROUNDS][2];

    DEVICE void load(const DecodeArgs& a, u32 row, u32 head_index, int lane, int warp) {
        const float* rows = a.queries + ((u64)row * a.kv_heads + head_index) * a.group * HEAD_DIM;
#pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
            int f = warp + k * WARPS, column = f / STEPS * 8 + (lane >> 2), channel = f % STEPS * 16 + (lane & 3) * 2;
            int head = head_of(column);
            bool used = f < FRAGMENTS && head < a.group;
#pragma unroll
            for (int b = 0; b < 2; b++) {
                v[k][b] = make_float2(0.f, 0.f);
                if (used) v[k][b] = *(const float2*)(rows + head * HEAD_DIM + channel + 8 * b);
            }
        }
#if SPLIT_QUERY
        const int job = split_job(warp), plane = job % PLANES, head = 4 * (job / PLANES) + (lane >> 3);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            split[k] = make_float2(0.f, 0.f);
            if (job < SPLIT_QUERY * PLANES && head < a.group)
                split[k] = *(const float2*)(rows + head * HEAD_DIM + 16 * (4 * (k & 1) + plane) + 2 * (lane & 3) + 8 * (k >> 1));
        }
#endif
    }
#if SPLIT_QUERY
    float2 split[4];  // by step (k & 1) and half (k >> 1)

    static_assert(WARPS >= SPLIT_QUERY * PLANES, "a warp for each plane of four heads");
    // The plane and the four heads of the split query that a warp makes; the last warps have no other fragments.
    DEVICE static int split_job(int warp) { return WARPS - 1 - warp; }

    // Rounds the channels of a plane to steps and splits them into high and low bytes: a lane keeps its column's.
    DEVICE void put_split(Shared& shared, float scale, float step, int lane, int warp) const {
        const int job = split_job(warp), plane = job % PLANES;
        if (job >= SPLIT_QUERY * PLANES) return;
        const float plane_step = plane & 1 ? 4.f * step : step, inverse = scale / plane_step;
        u32 b[2] = {0, 0};
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int whole = __float2int_rn((h ? split[k].y : split[k].x) * inverse);
                int high = (whole + 64) >> 7, low = whole - 128 * high;
                sum += (float)whole * plane_step;
                b[k >> 1] |= ((lane & 4 ? low : high) & 0xff) << (8 * (2 * h + (k & 1)));
            }
        }
        shared.coded_query[job * 32 + lane] = make_uint2(b[0], b[1]);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if ((lane & 3) == 0) shared.query_sums[job][lane >> 2] = sum;
    }
#endif
};

// Puts the query down as fragments, in BF16 pairs and in fp16 with the planes' exponents taken off. All threads.
DEVICE float prepare_query(Shared& shared, const DecodeArgs& a, QueryRows& rows, u32 key_bits, u32 value_bits) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    constexpr int FRAGMENTS = QueryRows::FRAGMENTS, ROUNDS = QueryRows::ROUNDS;
    if (tid < 2 * STEPS) {
        int exponent = plane_exponent(value_bits, tid / 2, tid & 1);
        (&shared.to_codes[0].x)[tid] = __uint_as_float((u32)(127 - 24 + exponent) << 23);
        (&shared.from_codes[0].x)[tid] = __uint_as_float((u32)(127 + 24 - exponent) << 23);
    }
    auto& v = rows.v;
    float largest = 0.f;
#pragma unroll
    for (int k = 0; k < ROUNDS; k++)
#pragma unroll
        for (int b = 0; b < 2; b++) {
            v[k][b].x *= a.scale, v[k][b].y *= a.scale;
            largest = fmaxf(largest, fmaxf(fabsf(v[k][b].x), fabsf(v[k][b].y)));
        }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    if (lane == 0) shared.largest[warp] = largest;
    sync_readers();
#pragma unroll
    for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, shared.largest[w]);
#if SPLIT_QUERY
    const float step = largest > 0.f ? largest / SPLIT_RANGE : 1.f;
    const bool split = key_bits == 2 && value_bits == 2;
    if (split) rows.put_split(shared, a.scale, step, lane, warp);
    if (tid == 0) shared.split_step = step;
#else
    constexpr bool split = false;
#endif
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
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (!split) shared.coded_query[f * 32 + lane] = make_uint2(coded[0], coded[1]);
            if (!split && (lane & 3) == 0) shared.query_sums[f][lane >> 2] = sum;
        }
    }
    sync_readers();
    return 1.f / up;
}

#if SPLIT_QUERY
DEVICE void load_query(SplitQuery& q, const Shared& shared, int lane) {
    q.factor = shared.split_step;
#pragma unroll
    for (int k = 0; k < SPLIT_QUERY; k++) {
        q.sum[k] = 0.f;
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            uint2 b = shared.coded_query[(k * PLANES + p) * 32 + lane];
            q.b[k][p][0] = b.x, q.b[k][p][1] = b.y;
            q.sum[k] += shared.query_sums[k * PLANES + p][2 * (lane & 3)];
        }
    }
}
#endif

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

using Ring = ReadRing<STAGES>;

DEVICE void read_near(State& state, Ring& ring, Shared& shared, int lane, int warp) {
    const Segment& g = shared.segments[warp];
#pragma unroll 1
    while (true) {
        ring.wait();
        u32 unit = shared.slot_unit[warp][ring.slot];
        if (unit >= g.context.near_units) break;
        int tokens = (int)(g.context.length - near_tile(g.context, unit) * TILE_TOKENS);
        float s[QUERY_TILES][4];
        u32 p[QUERY_TILES][4];
        near_scores(s, shared_address(shared.slots[warp][ring.slot]), shared.near_query, lane);
        ring.release(lane);
        near_weights(state, s, tokens, p, lane);
        ring.wait();
        near_values(state, p, shared_address(shared.slots[warp][ring.slot]), tokens, lane);
        ring.release(lane);
    }
}

// Masks the tiles of a unit that lie outside the coded range, which may hold anything; false where all do. `mask(t)` takes
// a tile's scores to minus infinity.
template <int TILES, class F>
DEVICE bool mask_ends(u32 first, u32 sink, u32 boundary, u8* value_params, F&& mask, int lane) {
    bool any = false;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        u32 position = first + t * TILE_TOKENS;
        if (position < sink || position >= boundary) {
            mask(t);
            if (lane < TILE_TOKENS) *(u32*)(value_params + t * 64 + lane * 4) = 0;
        } else {
            any = true;
        }
    }
    writes_before_bulk_copies();
    __syncwarp();
    return any;
}

// Whole pages of two-bit codes.
template <class Query>
DEVICE void read_two_bit(State& state, const Query& query, Ring& ring, Shared& shared, u32 sink, int lane, int warp) {
    constexpr int TILES = PAGE_TOKENS / TILE_TOKENS;
    constexpr u32 VALUES_AT = 16 * HEAD_DIM, KEY_PARAMS_AT = 32 * HEAD_DIM, VALUE_PARAMS_AT = KEY_PARAMS_AT + 4 * PAGE_TOKENS;
    const Segment& g = shared.segments[warp];
    bool settle = true, move = true;
#pragma unroll 1
    while (true) {
        ring.wait();
        u32 unit = shared.slot_unit[warp][ring.slot];
        if (unit == NO_UNIT) break;
        u32 first = (g.context.first_page + unit - g.context.near_units) * PAGE_TOKENS;
        u8* slot = shared.slots[warp][ring.slot];
        bool any = true;
        u32 w[TILES][QUERY_TILES][2];
        float s[TILES][QUERY_TILES][4];
#if SPLIT_QUERY
        split_scores(s, state, query, slot, slot + KEY_PARAMS_AT, lane);
#else
        coded_scores<2, TILES>(s, state, query, slot, slot + KEY_PARAMS_AT, lane);
#endif
        if (first < sink || first + PAGE_TOKENS > g.boundary)
            any = mask_ends<TILES>(first, sink, g.boundary, slot + VALUE_PARAMS_AT, [&](int t) { clear_scores(s[t]); }, lane);
        if (any) {
            if (move) move_reference<LANE_COLUMNS>(state, s, slot + VALUE_PARAMS_AT, settle, lane), move = settle = false;
            if (!coded_weights<LANE_COLUMNS>(w, state, s, slot + VALUE_PARAMS_AT, lane)) {
                move = true;
                continue;  // the same unit again
            }
            coded_values<2, TILES>(state, w, slot + VALUES_AT, lane);
        }
        ring.release(lane);
    }
}

// Halves of pages of any widths, which are the head's.
DEVICE void read_any_width(State& state, const CodedQuery& query, Ring& ring, Shared& shared, u32 sink, int lane, int warp) {
    constexpr int TILES = PAGE_TOKENS / TILE_TOKENS / 2;
    const Segment& g = shared.segments[warp];
    const u32 kb = g.head.key_bits, vb = g.head.value_bits;
    const u32 values_at = 4 * HEAD_DIM * kb, key_params_at = 4 * HEAD_DIM * (kb + vb), value_params_at = key_params_at + TILES * 64;
    bool settle = true, move = true;
#pragma unroll 1
    while (true) {
        ring.wait();
        u32 unit = shared.slot_unit[warp][ring.slot];
        if (unit == NO_UNIT) break;
        u32 first = g.context.first_page * PAGE_TOKENS + (unit - g.context.near_units) * (TILES * TILE_TOKENS);
        u8* slot = shared.slots[warp][ring.slot];
        float s[TILES][QUERY_TILES][4];
        switch (kb) {
            case 1: coded_scores<1, TILES>(s, state, query, slot, slot + key_params_at, lane); break;
            case 2: coded_scores<2, TILES>(s, state, query, slot, slot + key_params_at, lane); break;
            case 3: coded_scores<3, TILES>(s, state, query, slot, slot + key_params_at, lane); break;
            default: coded_scores<4, TILES>(s, state, query, slot, slot + key_params_at, lane);
        }
        bool any = true;
        if (first < sink || first + TILES * TILE_TOKENS > g.boundary)
            any = mask_ends<TILES>(first, sink, g.boundary, slot + value_params_at, [&](int t) { clear_scores(s[t]); }, lane);
        if (any) {
            u32 w[TILES][QUERY_TILES][2];
            if (move) move_reference<2>(state, s, slot + value_params_at, settle, lane), move = settle = false;
            if (!coded_weights<2>(w, state, s, slot + value_params_at, lane)) {
                move = true;
                continue;  // the same unit again
            }
            switch (vb) {
                case 1: coded_values<1, TILES>(state, w, slot + values_at, lane); break;
                case 2: coded_values<2, TILES>(state, w, slot + values_at, lane); break;
                case 3: coded_values<3, TILES>(state, w, slot + values_at, lane); break;
                default: coded_values<4, TILES>(state, w, slot + values_at, lane);
            }
        }
        ring.release(lane);
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
                shared.m[n * 8 + 2 * lane + i][warp] = state.fresh ? NEGATIVE_INFINITY : state.m[n][i];
                shared.l[n * 8 + 2 * lane + i][warp] = l;
            }
#pragma unroll
            for (int j = 0; j < STEPS; j++) state.o[n][j][i] += z, state.o[n][j][2 + i] += z;
        }
    }
    sync_readers();
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int head = n * 8 + 2 * (lane & 3) + i;
            float m = NEGATIVE_INFINITY;
#pragma unroll
            for (int w = 0; w < WARPS; w++) m = fmaxf(m, shared.m[head][w]);
            factor[i] = state.fresh ? 0.f : exp2_fast(state.m[n][i] - m);
        }
        state.rescale(n, factor[0], factor[1]);
    }
    if (threadIdx.x < HEADS) {
        int head = threadIdx.x;
        float m = NEGATIVE_INFINITY, l = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) m = fmaxf(m, shared.m[head][w]);
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            if (shared.l[head][w] > 0.f) l = fmaf(shared.l[head][w], exp2_fast(shared.m[head][w] - m), l);
        shared.item_m[head] = m, shared.item_scale[head] = l;
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

DEVICE float4 summed(Shared& shared, int head, int channel) {
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        add_to(v, *(const float4*)((const float*)shared.sum_room(w) + head * SUMS_STRIDE + channel), 1.f);
    return v;
}

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
    const ItemPlan readers = *a.plan.item(item);
    const OutputRows out(a, row, head_index);
    if (readers.count == 1) {
#pragma unroll 1
        for (int e = tid; e < quads; e += THREADS) {
            int head = e / QUADS, channel = e % QUADS * 4;
            out.store(a, head, channel, scaled(summed(shared, column_of(head), channel), 1.f / shared.item_scale[column_of(head)]));
        }
        return;
    }
    float* own = a.partials + (u64)(2 * worker + (first_of_worker ? 0 : 1)) * PARTIAL;
#pragma unroll 1
    for (int e = tid; e < quads; e += THREADS)
        __stcg((float4*)own + e, summed(shared, column_of(e / QUADS), e % QUADS * 4));
    if (tid < a.group) __stcg((float2*)(own + HEADS * HEAD_DIM) + tid, make_float2(shared.item_m[column_of(tid)], shared.item_scale[column_of(tid)]));
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

extern "C" __global__ void __launch_bounds__(THREADS + 32, BLOCKS) decode_attention(const __grid_constant__ DecodeArgs a) {
    extern __shared__ u8 memory[];
    Shared& shared = *(Shared*)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 worker = blockIdx.x;
    allow_next_kernel();
    wait_for_previous_kernel();
    const WorkerPlan& in_memory = *a.plan.worker(worker);
    // Brings the first page ids near while the rest of the plan is on its way.
    asm volatile("prefetch.global.L1 [%0];" ::"l"(in_memory.pages + 2 * lane));
    const struct {
        Place begin, end;
        SequenceInfo first;
    } plan = {in_memory.begin, in_memory.end, in_memory.first};
    if (!plan.begin.before(plan.end)) return;
    Segment& g = shared.segments[warp];
    if (threadIdx.x < WARPS * STAGES) {
        barrier_init(shared_address(&shared.full[0][0] + threadIdx.x), FULL_ARRIVALS);
        barrier_init(shared_address(&shared.empty[0][0] + threadIdx.x), 1);
#if BULK_COPIES
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    Place at = plan.begin;
    SequenceInfo sequence = plan.first;
    auto next_item = [&]() {
        if (++at.head == a.kv_heads) {
            at.head = 0;
            if (++at.sequence < a.step.sequence_count) sequence = a.step.sequences[at.sequence];
        }
        at.unit = 0;
    };
    // Describes the next item of the range, from `at` on, that has something to read.
    auto find = [&](bool first) {
        __syncwarp();
        bool found = false;
        while (at.before(plan.end)) {
            bool ends = at.sequence == plan.end.sequence && at.head == plan.end.head;
            const u32* pages = first && at.unit == plan.begin.unit ? in_memory.pages : nullptr;
            found = set_segment(g, a, sequence, at.head, at.unit, ends ? plan.end.unit : 0xffffffffu, pages);
            if (found) break;
            first = false;
            next_item();
        }
        __syncwarp();
        return found;
    };
    __syncthreads();
    if (warp == WARPS) {
        Filler filler;
        filler.slot = 0, filler.parity = 1;
        for (bool first = true; find(first); first = false, next_item()) filler.serve(shared, g, lane);
        return;
    }
    Ring ring;
    ring.full = shared_address(shared.full[warp]), ring.empty = shared_address(shared.empty[warp]), ring.slot = ring.phase = 0;
    State state;
    u32 worker_segments = 0;
    while (find(worker_segments == 0)) {
        const u32 row = g.row, head = at.head, item = at.sequence * a.kv_heads + at.head;
        QueryRows rows;
        rows.load(a, row, head, lane, warp);
        float down = prepare_query(shared, a, rows, g.head.key_bits, g.head.value_bits);
        state.clear();
        read_near(state, ring, shared, lane, warp);
        if (shared.slot_unit[warp][ring.slot] != NO_UNIT) {
            if (state.fresh) {
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++) state.m[n][0] = state.m[n][1] = 0.f;
            }
            state.to_units(shared.to_codes);
            if (pieces_of(g.head) == 1) {
#if SPLIT_QUERY
                SplitQuery query;
                load_query(query, shared, lane);
#else
                CodedQuery query;
                load_query(query, shared, down, lane);
#endif
                read_two_bit(state, query, ring, shared, a.step.sink, lane, warp);
            } else {
                CodedQuery query;
                load_query(query, shared, down, lane);
                read_any_width(state, query, ring, shared, a.step.sink, lane, warp);
            }
            state.to_units(shared.from_codes);
        }
        if (lane == 0) shared.last_slot[warp] = ring.slot;
        __syncwarp();
        merge_warps(shared, state, lane, warp);
        finish_segment(shared, a, item, row, head, worker, worker_segments == 0);
        sync_readers();
        writes_before_bulk_copies();
        ring.release(lane);
        worker_segments++;
        next_item();
    }
}
