// Decode attention: the loops of a reading warp, first over BF16 tiles, then over coded pages.
#pragma once
#include "decode_heads.cuh"

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
#if FROM_PROJECTIONS
        const bool newest = unit + 1 == g.context.near_units;
        if (newest) put_new_row(shared.slots[warp][ring.slot], shared.new_rows[KEY], tokens - 1, lane);
#endif
        near_scores(s, shared_address(shared.slots[warp][ring.slot]), shared.near_query, lane);
        __syncwarp();  // ldmatrix: lanes read rows for one another
        ring.release();
        near_weights(state, s, tokens, p, lane);
        ring.wait();
#if FROM_PROJECTIONS
        if (newest) put_new_row(shared.slots[warp][ring.slot], shared.new_rows[VALUE], tokens - 1, lane);
#endif
        near_values(state, p, shared_address(shared.slots[warp][ring.slot]), tokens, lane);
        __syncwarp();
        ring.release();
    }
}

// Masks the tiles of a unit that lie outside the coded range; they may hold anything. Returns false
// if all tiles do. `mask(t)` sets the scores of tile t to -infinity.
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

// Masks the rows of a view's last page from row `end` on: they hold nothing. Returns false if all
// rows of the unit do.
template <int TILES>
DEVICE bool mask_hole(float (&s)[TILES][QUERY_TILES][4], int end, int lane) {
    const int r = lane >> 2;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            if (TILE_TOKENS * t + r >= end) s[t][n][0] = s[t][n][1] = NEGATIVE_INFINITY;
            if (TILE_TOKENS * t + r + 8 >= end) s[t][n][2] = s[t][n][3] = NEGATIVE_INFINITY;
        }
    return end > 0;
}

// Reads whole pages of 2-bit codes.
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
        else if (g.context.history.has_hole(first, first + PAGE_TOKENS))
            any = mask_hole(s, (int)(g.context.history.hole - first), lane);
        if (any) {
            if (move) move_reference<LANE_COLUMNS>(state, s, slot + VALUE_PARAMS_AT, settle, lane), move = settle = false;
            if (!coded_weights<LANE_COLUMNS>(w, state, s, slot + VALUE_PARAMS_AT, lane)) {
                move = true;
                continue;  // repeat this unit with a new reference
            }
            coded_values<2, TILES>(state, w, slot + VALUES_AT, lane);
        }
        ring.release();
    }
}

// Reads half pages of any widths.
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
        else if (g.context.history.has_hole(first, first + TILES * TILE_TOKENS))
            any = mask_hole(s, (int)(g.context.history.hole - first), lane);
        if (any) {
            u32 w[TILES][QUERY_TILES][2];
            if (move) move_reference<2>(state, s, slot + value_params_at, settle, lane), move = settle = false;
            if (!coded_weights<2>(w, state, s, slot + value_params_at, lane)) {
                move = true;
                continue;  // repeat this unit with a new reference
            }
            switch (vb) {
                case 1: coded_values<1, TILES>(state, w, slot + values_at, lane); break;
                case 2: coded_values<2, TILES>(state, w, slot + values_at, lane); break;
                case 3: coded_values<3, TILES>(state, w, slot + values_at, lane); break;
                default: coded_values<4, TILES>(state, w, slot + values_at, lane);
            }
        }
        ring.release();
    }
}
