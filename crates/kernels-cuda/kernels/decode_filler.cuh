// Decode attention: the filler (producer) warp, which assigns units to rings and starts their
// copies.
#pragma once
#include "decode_block.cuh"

// State of the filler. Lane w serves ring w.
struct Filler {
    u32 slot = 0, parity = 1;  // next slot of the ring, and the parity of its `empty` barrier
    u32 unit, side;            // the ring's unit; a BF16 tile takes two slots: keys (0), values (1)
    u32 next;                  // units of the segment assigned so far
    bool open;                 // the end of the segment has not been announced to the ring
    u32 first_pages[FIRST_PAGES / 32];  // page ids of the worker's first units, over the lanes

    DEVICE void load_pages(const u32* pages, int lane) {
#pragma unroll
        for (int i = 0; i < FIRST_PAGES / 32; i++) first_pages[i] = __ldcg(pages + 32 * i + lane);
    }

    // The copies that fill a slot with a unit: sources, offsets in the slot, sizes. Returns their
    // number.
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
        // Half a page: two tiles of key codes, value codes, key parameters and value parameters.
        u32 half = (unit - g.context.near_units) & 1;
        from[0] = start + half * keys, at[0] = 0, bytes[0] = keys;
        from[1] = start + 2 * keys + half * values, at[1] = keys, bytes[1] = values;
        from[2] = start + 2 * (keys + values) + half * 128, at[2] = keys + values, bytes[2] = 128;
        from[3] = from[2] + 256, at[3] = at[2] + 128, bytes[3] = 128;
        return 4;
    }

    // Starts the copies of a unit into a slot of a ring.
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

    // Starts a segment.
    DEVICE void begin(int lane) {
        open = lane < WARPS;
        next = side = 0;
    }

    // Gives every ring with a free slot its next unit, or announces the end of the segment. Units
    // from `limit` on are held back; `limit` is greater than the next unit. `first`: this is the
    // worker's first segment, whose page ids are in first_pages.
    DEVICE void hand_out(Shared& shared, const StepTables& step, const Segment& g, int lane, bool first, u32 limit = 0xffffffffu) {
        const u32 empty = shared_address(shared.empty[lane < WARPS ? lane : 0]);
        const bool has_room = open && barrier_passed_now(empty + 8 * slot, parity);
        const u32 takers = __ballot_sync(0xffffffffu, has_room && side == 0);
        if (!__any_sync(0xffffffffu, has_room)) {
            __nanosleep(40);
            return;
        }
        if (has_room && side == 0) unit = g.begin + next + __popc(takers & ((1u << lane) - 1));
        next += min((u32)__popc(takers), limit - (g.begin + next));
        const bool ready = has_room && unit < limit;
        const bool any = ready && unit < g.end;
        const u32 index = unit - g.begin;
        u32 page = 0;
#pragma unroll
        for (int i = 0; i < FIRST_PAGES / 32; i++) {
            u32 known = __shfl_sync(0xffffffffu, first_pages[i], index & 31);
            if (index / 32 == i) page = known;
        }
        if (any && !(first && index < FIRST_PAGES)) page = page_of(g.context, g.head, step, g.table, unit);
        if (ready) shared.slot_unit[lane][slot] = any ? unit : NO_UNIT;
#if BULK_COPIES
#ifdef RACECHECK
        // Racecheck attributes the copies of all lanes to the first active lane, which has not seen
        // the other lanes' slots empty. Issue them one lane at a time.
        for (int turn = 0; turn < WARPS; turn++) {
            if (any && lane == turn) fill(shared, g, lane, slot, unit, side, page, lane);
            __syncwarp();
        }
#else
        if (any) fill(shared, g, lane, slot, unit, side, page, lane);
#endif
        if (ready && !any) barrier_arrive(shared_address(&shared.full[lane][slot]));
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

    // Assigns the remaining units of the segment.
    DEVICE void serve(Shared& shared, const StepTables& step, const Segment& g, int lane, bool first) {
        while (__any_sync(0xffffffffu, open)) hand_out(shared, step, g, lane, first);
    }
};
