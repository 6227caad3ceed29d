// How one step's decode attention is shared out.
//
// The context of a (sequence, KV head) pair, an *item*, is a row of units: first the 16-token tiles read in BF16 (sink, then
// recent), then the coded pages (whole, or in halves where a page is too large for a slot). Items follow one another,
// sequences outside, heads inside, and every worker (thread block) takes a range of units of about equal bytes: a worker
// begins at (item, unit) and ends where the next one begins. An item read by several workers is merged by the last of them.
#pragma once
#include "common.cuh"

// Two-bit pages fit a slot; the others come in halves, or not at all where a head keeps no history.
DEVICE u32 pieces_of(const HeadPages& head) {
    return !head.keeps_history() ? 0 : head.key_bits == 2 && head.value_bits == 2 ? 1 : 2;
}

// The units of one sequence.
struct ContextShape {
    u32 length;       // positions 0..length are read
    u32 sink_tiles;   // tiles 0..sink_tiles in BF16
    u32 recent_tile;  // tiles recent_tile.. too
    u32 near_units;   // all BF16 tiles
    u32 first_page;   // coded pages first_page..first_page + pages
    u32 pages;

    // How far the units go, from `first` on, that no kernel of this step writes. Where all is old but the new token: BF16 tiles but
    // the last, and all pages, of which nothing but codes up to the boundary is read. Else codes that were made before.
    DEVICE u32 old_until(const HeadPages& head, u32 first, u32 old_codes, u32 boundary) const {
        const bool all_old = old_codes >= boundary;
        if (first < near_units) return all_old && pages > 0 ? near_units - 1 : 0;  // without codes it gains nothing (H200)
        if (all_old) return 0xffffffffu;
        const u32 old_pages = old_codes / PAGE_TOKENS;
        return near_units + (old_pages > first_page ? old_pages - first_page : 0) * pieces_of(head);
    }
};

// Sequences that bring more than one row are not decoded here: they have no units.
DEVICE ContextShape context_of(const StepTables& step, const SequenceInfo& s) {
    ContextShape c = {};
    if (s.rows != 1) return c;
    c.length = s.first_position + 1;
    u32 sink_end = step.sink < c.length ? step.sink : c.length;
    bool coded = s.boundary > step.sink;
    u32 recent = coded ? s.boundary : sink_end;
    c.sink_tiles = (sink_end + TILE_TOKENS - 1) / TILE_TOKENS;
    c.recent_tile = recent / TILE_TOKENS;
    c.near_units = c.sink_tiles + (recent < c.length ? (c.length + TILE_TOKENS - 1) / TILE_TOKENS - c.recent_tile : 0);
    c.first_page = step.sink / PAGE_TOKENS;
    c.pages = coded ? (s.boundary + PAGE_TOKENS - 1) / PAGE_TOKENS - c.first_page : 0;
    return c;
}

// Tile of a unit below near_units.
DEVICE u32 near_tile(const ContextShape& c, u32 unit) {
    return unit < c.sink_tiles ? unit : c.recent_tile + unit - c.sink_tiles;
}

// Id of the page that holds a unit.
DEVICE u32 page_of(const ContextShape& c, const HeadPages& head, const u32* full, const u32* coded, u32 unit) {
    return unit < c.near_units ? full[near_tile(c, unit) / (PAGE_TOKENS / TILE_TOKENS)]
                               : coded[c.first_page + (unit - c.near_units) / pieces_of(head)];
}

DEVICE u32 units_of(const ContextShape& c, const HeadPages& head) { return c.near_units + c.pages * pieces_of(head); }

// A place in the row of units.
struct Place {
    u32 sequence, head, unit;

    DEVICE bool before(const Place& b) const {
        return sequence != b.sequence ? sequence < b.sequence : head != b.head ? head < b.head : unit < b.unit;
    }
};

constexpr u32 FIRST_PAGES = 64;

// What a worker reads, begin up to end; nothing where it is idle. The first sequence comes along, to save a look-up.
struct alignas(16) WorkerRange {
    Place begin, end;
    SequenceInfo first;
};

// The same, and the page ids of the first units.
struct WorkerPlan : WorkerRange {
    u32 pages[FIRST_PAGES];
};

// The workers that read an item: `count` of them from `first` on.
struct ItemPlan {
    u32 first, count;
    u32 second;  // is the item the first worker's last rather than its first?
    u32 unused;
};

// The plan in memory: the workers, then the items (sequences outside, heads inside).
struct DecodePlan {
    u8* memory;
    u32 workers;

    DEVICE WorkerPlan* worker(u32 w) const { return (WorkerPlan*)memory + w; }
    // A worker's range past the first-level cache, which may hold an earlier step's.
    DEVICE WorkerRange range(u32 w) const {
        static_assert(sizeof(WorkerRange) == 48, "three quads");
        const uint4* p = (const uint4*)worker(w);
        const uint4 x = __ldcg(p), y = __ldcg(p + 1), z = __ldcg(p + 2);
        return {{x.x, x.y, x.z}, {x.w, y.x, y.y}, {y.z, y.w, z.x, z.y, z.z, z.w}};
    }
    DEVICE ItemPlan* item(u32 i) const { return (ItemPlan*)((WorkerPlan*)memory + workers) + i; }
};
