// Decode attention over pages: one launch a layer for every sequence, BF16 and coded tokens together.
//
// A persistent block of WARPS warps works through its range of the plan (decode_plan.cuh), segment by segment, a segment
// being what it reads of one item. Its warps claim the segment's units one by one, each loads through a ring of its own, and
// they do not wait for one another until the segment ends; the first pages of the next segment are on their way while one
// is merged. An item that several blocks read is merged by the last of them to arrive, in the order of the plan.
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
constexpr int THREADS = 32 * WARPS;
constexpr int SUMS_STRIDE = HEAD_DIM + 4;  // keeps the lanes' heads in different banks
constexpr int SUMS_BYTES = 4 * HEADS * SUMS_STRIDE;
// A warp puts its result down in the one slot that the next segment's loads leave free, where it fits.
constexpr bool SUMS_IN_SLOTS = SUMS_BYTES <= SLOT_BYTES;
constexpr u32 KNOWN_FACTORS = 32;

constexpr u32 NO_UNIT = 0xffffffffu;
// Units a warp takes in turn before it claims any: those it starts with.
constexpr u32 FIRST_CLAIMS = STAGES + 1;

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
    alignas(16) float m[HEADS][WARPS];
    alignas(16) float l[HEADS][WARPS];
    float item_m[HEADS], item_scale[HEADS];
    float2 to_codes[STEPS], from_codes[STEPS];  // units of the result
    u64 barriers[WARPS][STAGES];
    float factors[HEADS][KNOWN_FACTORS];
    u32 slot_unit[WARPS][STAGES];  // what each slot holds
    u32 spare[WARPS];              // the slot that holds the warp's result
    Segment segments[WARPS];       // each warp's own copy: warps go on to the next segment at different times
    u32 claims[2];                 // units claimed of this segment and of the next
    u32 last;

    DEVICE u8* sum_room(int warp) {
        if constexpr (SUMS_IN_SLOTS) return slots[warp][spare[warp]];
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

using SlotRing = Ring<STAGES, SLOT_BYTES>;

// A warp's loads of a segment, STAGES ahead of their use: both sides of every BF16 tile it claims, then coded units.
struct Loader {
    u32 claimed;  // units so far
    u32 unit;     // next to load
    u32 page;     // its page id, read ahead
    u32 side;     // of the BF16 tile

    DEVICE void claim(const Segment& g, u32* claims, int lane, int warp) {
        u32 index = claimed * WARPS + warp;
        if (claimed++ >= FIRST_CLAIMS) {
            if (lane == 0) index = atomicAdd(claims, 1);
            index = __shfl_sync(0xffffffffu, index, 0);
        }
        unit = g.begin + index;
        if (unit < g.end)
            page = g.first_pages && index < FIRST_PAGES ? g.first_pages[index] : page_of(g.context, g.head, g.full, g.coded, unit);
    }

    // One side of a BF16 tile.
    DEVICE void start_near(const Segment& g, const SlotRing& ring, u32 slot, int lane) const {
        u32 row = near_tile(g.context, unit) % (PAGE_TOKENS / TILE_TOKENS) * TILE_TOKENS;
        const u8* at_page = (const u8*)g.head.full + (u64)page * (4 * PAGE_TOKENS * HEAD_DIM) +
                            side * (2 * PAGE_TOKENS * HEAD_DIM) + row * 128;
        const u8* from[PANELS];
        u32 at[PANELS], bytes[PANELS];
#pragma unroll
        for (int p = 0; p < PANELS; p++)
            from[p] = at_page + p * PAGE_TOKENS * 128, at[p] = p * TILE_TOKENS * 128, bytes[p] = TILE_TOKENS * 128;
        ring.fill(slot, from, at, bytes, lane);
    }

    DEVICE void start_page(const Segment& g, const SlotRing& ring, u32 slot, int lane) const {
        const u8* const from[1] = {(const u8*)g.head.coded + (u64)page * SLOT_BYTES};
        ring.fill(slot, from, {0}, {SLOT_BYTES}, lane);
    }

    // Half a page: its two tiles of key codes, value codes, key pairs and value pairs.
    DEVICE void start_half_page(const Segment& g, const SlotRing& ring, u32 slot, int lane) const {
        u32 keys = 4 * HEAD_DIM * g.head.key_bits, values = 4 * HEAD_DIM * g.head.value_bits;
        const u8* at_page = (const u8*)g.head.coded + (u64)page * (2 * (keys + values) + 8 * PAGE_TOKENS);
        u32 half = (unit - g.context.near_units) & 1;
        const u8* params = at_page + 2 * (keys + values) + half * 128;
        const u8* const from[4] = {at_page + half * keys, at_page + 2 * keys + half * values, params, params + 256};
        ring.fill(slot, from, {0, keys, keys + values, keys + values + 128}, {keys, values, 128, 128}, lane);
    }

    // Fills a slot with the next load, if there is one.
    DEVICE void refill(const Segment& g, const SlotRing& ring, u32 slot, u32* slot_unit, u32* claims, int lane, int warp) {
        bool any = unit < g.end;
        if (lane == 0) slot_unit[slot] = any ? unit : NO_UNIT;
        if (any) {
            bool whole = true;
            if (unit < g.context.near_units) {
                start_near(g, ring, slot, lane);
                whole = side == 1;
                side ^= 1;
            } else if (pieces_of(g.head) == 1) {
                start_page(g, ring, slot, lane);
            } else {
                start_half_page(g, ring, slot, lane);
            }
            if (whole) claim(g, claims, lane, warp);
        }
        ring.end_fill();
    }

    // Fills the ring from the slot at hand on: first all slots but one, then that one.
    DEVICE void start(const Segment& g, const SlotRing& ring, u32* slot_unit, u32* claims, bool rest, int lane, int warp) {
        if (!rest) {
            claimed = 0, side = 0;
            claim(g, claims, lane, warp);
        }
#pragma unroll 1
        for (u32 s = rest ? STAGES - 1 : 0; s < (rest ? STAGES : STAGES - 1); s++) {
            u32 slot = ring.slot + s;
            refill(g, ring, slot < STAGES ? slot : slot - STAGES, slot_unit, claims, lane, warp);
        }
        __syncwarp();
    }

    // The slot at hand has been read by every lane: fill it again and go to the next.
    DEVICE void turn(const Segment& g, SlotRing& ring, u32* slot_unit, u32* claims, int lane, int warp) {
        __syncwarp();
        refill(g, ring, ring.slot, slot_unit, claims, lane, warp);
        ring.advance();
        __syncwarp();
    }

    // The same where only two-bit pages are left.
    DEVICE void turn_page(const Segment& g, SlotRing& ring, u32* slot_unit, u32* claims, int lane, int warp) {
        __syncwarp();
        bool any = unit < g.end;
        if (lane == 0) slot_unit[ring.slot] = any ? unit : NO_UNIT;
        if (any) {
            start_page(g, ring, ring.slot, lane);
            u32 index = claimed * WARPS + warp;
            if (claimed++ >= FIRST_CLAIMS) {
                if (lane == 0) index = atomicAdd(claims, 1);
                index = __shfl_sync(0xffffffffu, index, 0);
            }
            unit = g.begin + index;
            if (unit < g.end) page = g.coded[g.context.first_page + unit - g.context.near_units];
        }
        ring.end_fill();
        ring.advance();
        __syncwarp();
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
    __syncthreads();
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
    __syncthreads();
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

// What a warp reads with.
struct Reader {
    Loader loader;
    SlotRing ring;
    u32* claims;  // of this segment

    DEVICE void turn(Shared& shared, int lane, int warp) {
        loader.turn(shared.segments[warp], ring, shared.slot_unit[warp], claims, lane, warp);
    }
};

DEVICE void read_near(State& state, Reader& reader, Shared& shared, int lane, int warp) {
    const Segment& g = shared.segments[warp];
#pragma unroll 1
    while (true) {
        u32 unit = shared.slot_unit[warp][reader.ring.slot];
        if (unit >= g.context.near_units) break;
        int tokens = (int)(g.context.length - near_tile(g.context, unit) * TILE_TOKENS);
        float s[QUERY_TILES][4];
        u32 p[QUERY_TILES][4];
        reader.ring.wait();
        near_scores(s, reader.ring.data + reader.ring.slot * SLOT_BYTES, shared.near_query, lane);
        reader.turn(shared, lane, warp);
        near_weights(state, s, tokens, p, lane);
        reader.ring.wait();
        near_values(state, p, reader.ring.data + reader.ring.slot * SLOT_BYTES, tokens, lane);
        reader.turn(shared, lane, warp);
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
DEVICE void read_two_bit(State& state, const Query& query, Reader& reader, Shared& shared, u32 sink, int lane, int warp) {
    constexpr int TILES = PAGE_TOKENS / TILE_TOKENS;
    constexpr u32 VALUES_AT = 16 * HEAD_DIM, KEY_PARAMS_AT = 32 * HEAD_DIM, VALUE_PARAMS_AT = KEY_PARAMS_AT + 4 * PAGE_TOKENS;
    const Segment& g = shared.segments[warp];
    bool settle = true, move = true;
#pragma unroll 1
    while (true) {
        u32 unit = shared.slot_unit[warp][reader.ring.slot];
        if (unit == NO_UNIT) break;
        u32 first = (g.context.first_page + unit - g.context.near_units) * PAGE_TOKENS;
        reader.ring.wait();
        u8* slot = shared.slots[warp][reader.ring.slot];
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
        reader.loader.turn_page(g, reader.ring, shared.slot_unit[warp], reader.claims, lane, warp);
    }
}

// Halves of pages of any widths, which are the head's.
DEVICE void read_any_width(State& state, const CodedQuery& query, Reader& reader, Shared& shared, u32 sink, int lane, int warp) {
    constexpr int TILES = PAGE_TOKENS / TILE_TOKENS / 2;
    const Segment& g = shared.segments[warp];
    const u32 kb = g.head.key_bits, vb = g.head.value_bits;
    const u32 values_at = 4 * HEAD_DIM * kb, key_params_at = 4 * HEAD_DIM * (kb + vb), value_params_at = key_params_at + TILES * 64;
    bool settle = true, move = true;
#pragma unroll 1
    while (true) {
        u32 unit = shared.slot_unit[warp][reader.ring.slot];
        if (unit == NO_UNIT) break;
        u32 first = g.context.first_page * PAGE_TOKENS + (unit - g.context.near_units) * (TILES * TILE_TOKENS);
        reader.ring.wait();
        u8* slot = shared.slots[warp][reader.ring.slot];
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
        reader.turn(shared, lane, warp);
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
    __syncthreads();
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
    writes_before_bulk_copies();
    __syncthreads();
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
    __syncthreads();
    if (tid == 0) {
        u32 before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(a.arrived + item) : "memory");
        shared.last = before + 1 == readers.count;
    }
    __syncthreads();
    if (!shared.last) return;
    // The first reader holds the item in its second partial unless it begins with it; the others begin with it.
    const float* const first = a.partials + (u64)(2 * readers.first + readers.second) * PARTIAL;
    const float* const others = a.partials + (u64)(2 * readers.first) * PARTIAL;
    auto partial = [&](u32 k) { return k == 0 ? first : others + (u64)k * (2 * PARTIAL); };
    // The block's parts take every parts-th partial; channels beyond the threads' number go round by round. The first
    // loads need not wait for the factors.
    const int columns = quads < THREADS ? quads : THREADS, parts = THREADS / columns, part = tid / columns;
    const u32 known = readers.count < KNOWN_FACTORS ? readers.count : KNOWN_FACTORS;
    float4 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        u32 k = part + i * parts;
        if (part < parts && k < known) x[i] = __ldcg((const float4*)partial(k) + tid % columns);
    }
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
        shared.factors[head][lane] = f;
#pragma unroll 1
        for (u32 k = lane + 32; k < readers.count; k += 32) {
            float2 p = pair(k);
            if (p.y > 0.f) l = fmaf(p.y, exp2_fast(p.x - m), l);
        }
        l = warp_sum(l);
        if (lane == 0) shared.item_m[head] = m, shared.item_scale[head] = 1.f / l;
    }
    __syncthreads();
    auto part_sum = [&](int t) { return (float4*)shared.sum_room(t >> 5) + (t & 31); };
#pragma unroll 1
    for (int round = 0; round < quads; round += columns) {
        const int e = round + tid % columns, head = e / QUADS;
        const bool takes = part < parts && e < quads;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (takes) {
            u32 k = part;
            if (round == 0) {
#pragma unroll
                for (int i = 0; i < 4; i++, k += parts)
                    if (k < known) add_to(v, x[i], shared.factors[head][k]);
            }
#pragma unroll 1
            for (; k < readers.count; k += parts) {
                float2 p = __ldcg((const float2*)(partial(k) + HEADS * HEAD_DIM) + head);
                add_to(v, __ldcg((const float4*)partial(k) + e), p.y > 0.f ? exp2_fast(p.x - shared.item_m[head]) : 0.f);
            }
            *part_sum(tid) = v;
        }
        __syncthreads();
        if (takes && part == 0) {
            for (int p = 1; p < parts; p++) add_to(v, *part_sum(tid + p * columns), 1.f);
            out.store(a, head, e % QUADS * 4, scaled(v, shared.item_scale[head]));
        }
        __syncthreads();
    }
    writes_before_bulk_copies();
    if (tid == 0) a.arrived[item] = 0;
}

#ifdef PROFILE
#define STAMP(i) \
    if (threadIdx.x == 0) { \
        u64 now; \
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); \
        ((u64*)a.step.demoted)[blockIdx.x * 16 + (i)] = now; \
    }
#else
#define STAMP(i)
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode_attention(const __grid_constant__ DecodeArgs a) {
    extern __shared__ u8 memory[];
    Shared& shared = *(Shared*)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 worker = blockIdx.x;
    allow_next_kernel();
    STAMP(0)
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
    Reader reader;
    reader.ring.init(shared_address(shared.slots[warp]), shared_address(shared.barriers[warp]), lane);
    Place at = plan.begin;
    SequenceInfo sequence = plan.first;
    auto next_item = [&]() {
        if (++at.head == a.kv_heads) {
            at.head = 0;
            if (++at.sequence < a.step.sequence_count) sequence = a.step.sequences[at.sequence];
        }
        at.unit = 0;
    };
    State state;
    u32 last_row = 0, last_head = 0, last_item = 0, segments = 0;
    if (threadIdx.x < 2) shared.claims[threadIdx.x] = FIRST_CLAIMS * WARPS;
    STAMP(1)
    while (true) {
        // The next item of the range that has something to read; its first loads start before the last one is merged.
        bool more = false;
        __syncwarp();
        for (; at.before(plan.end); next_item()) {
            bool ends = at.sequence == plan.end.sequence && at.head == plan.end.head;
            const u32* pages = segments == 0 && at.head == plan.begin.head && at.sequence == plan.begin.sequence
                                   ? a.plan.worker(worker)->pages
                                   : nullptr;
            if ((more = set_segment(g, a, sequence, at.head, at.unit, ends ? plan.end.unit : 0xffffffffu, pages))) break;
        }
        __syncwarp();
        reader.claims = &shared.claims[segments & 1];
        QueryRows rows;
        if (more) {
            rows.load(a, g.row, at.head, lane, warp);
            reader.loader.start(g, reader.ring, shared.slot_unit[warp], reader.claims, false, lane, warp);
        }
        STAMP(2)
        if (segments > 0) {
            if (lane == 0) shared.spare[warp] = reader.ring.slot == 0 ? STAGES - 1 : reader.ring.slot - 1;
            __syncwarp();
            merge_warps(shared, state, lane, warp);
            STAMP(6)
            if (threadIdx.x == 0) shared.claims[~segments & 1] = FIRST_CLAIMS * WARPS;  // every warp is done with it
            finish_segment(shared, a, last_item, last_row, last_head, worker, segments == 1);
            STAMP(7)
        }
        if (!more) return;
        segments++;
        last_item = at.sequence * a.kv_heads + at.head, last_row = g.row, last_head = at.head;
        __syncthreads();
        reader.loader.start(g, reader.ring, shared.slot_unit[warp], reader.claims, true, lane, warp);
        float down = prepare_query(shared, a, rows, g.head.key_bits, g.head.value_bits);
        state.clear();
        STAMP(3)
        read_near(state, reader, shared, lane, warp);
        STAMP(4)
        if (shared.slot_unit[warp][reader.ring.slot] != NO_UNIT) {
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
                read_two_bit(state, query, reader, shared, a.step.sink, lane, warp);
            } else {
                CodedQuery query;
                load_query(query, shared, down, lane);
                read_any_width(state, query, reader, shared, a.step.sink, lane, warp);
            }
            state.to_units(shared.from_codes);
        }
        STAMP(5)
        next_item();
    }
}
