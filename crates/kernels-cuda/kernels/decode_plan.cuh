// Decode attention: how the work of a step is divided among thread blocks.
//
//   item    a (sequence, KV head) pair. Items are ordered by sequence, then by head.
//   unit    the smallest piece of an item: a 16-token BF16 tile (sink first, then recent window),
//           then coded pages, whole or in halves if a page does not fit a slot.
//   worker  a thread block. It reads a range of consecutive units, from its own begin (item, unit)
//           to the begin of the next worker. All ranges have about the same number of bytes.
//
// If several workers read an item, the last ones merge it (decode_merge.cuh).
#pragma once
#include "common.cuh"

// Units per coded page: a 2-bit page fits one slot, others come in halves. Zero-width heads have
// none.
DEVICE u32 pieces_of(const HeadPages& head) {
    return !head.keeps_history() ? 0 : head.key_bits == 2 && head.value_bits == 2 ? 1 : 2;
}

// The units of one sequence.
struct ContextShape {
    u32 length;       // positions 0..length are read
    u32 sink_tiles;   // BF16 tiles of the sink: 0 .. sink_tiles
    u32 recent_tile;  // first BF16 tile of the recent window
    u32 near_units;   // number of BF16 tiles
    u32 first_page;   // coded pages first_page .. first_page + pages
    u32 pages;
    History history;

    // End of the run of units, starting at `first`, that no kernel of this step writes. They may be
    // read before wait_for_previous_kernel. If only the new token is new (old_codes reaches the
    // boundary), these are all units except the last BF16 tile; otherwise only the coded pages
    // below old_codes.
    DEVICE u32 old_until(const HeadPages& head, u32 first, u32 old_codes, u32 boundary) const {
        const bool all_old = old_codes >= boundary;
        // Without codes early loads gain nothing (measured on an H200).
        if (first < near_units) return all_old && pages > 0 ? near_units - 1 : 0;
        if (all_old) return 0xffffffffu;
        const u32 old_pages = old_codes / PAGE_TOKENS;
        return near_units + (old_pages > first_page ? old_pages - first_page : 0) * pieces_of(head);
    }
};

DEVICE void set_pages(ContextShape& c, const StepTables& step, u32 boundary, u32 view, u32 view_end, u32 head) {
    c.history = history_of(step, view, view_end, head);
    c.first_page = c.history.first;
    c.pages = boundary > step.sink ? (boundary + PAGE_TOKENS - 1) / PAGE_TOKENS - c.first_page : 0;
}

// Sequences with more than one row belong to prefill attention and have no units here. Heads of a
// view differ in their coded pages alone.
DEVICE ContextShape context_of(const StepTables& step, const SequenceInfo& s, u32 head) {
    ContextShape c = {};
    if (s.rows != 1) return c;
    c.length = s.first_position + 1;
    u32 sink_end = step.sink < c.length ? step.sink : c.length;
    bool coded = s.boundary > step.sink;
    u32 recent = coded ? s.boundary : sink_end;
    c.sink_tiles = (sink_end + TILE_TOKENS - 1) / TILE_TOKENS;
    c.recent_tile = recent / TILE_TOKENS;
    c.near_units = c.sink_tiles + (recent < c.length ? (c.length + TILE_TOKENS - 1) / TILE_TOKENS - c.recent_tile : 0);
    set_pages(c, step, s.boundary, s.view, s.view_end, head);
    return c;
}

// The BF16 tile of a unit below near_units.
DEVICE u32 near_tile(const ContextShape& c, u32 unit) {
    return unit < c.sink_tiles ? unit : c.recent_tile + unit - c.sink_tiles;
}

// The id of the page that holds a unit.
DEVICE u32 page_of(const ContextShape& c, const HeadPages& head, const StepTables& step, u32 table, u32 unit) {
    return unit < c.near_units ? step.full[table + near_tile(c, unit) / (PAGE_TOKENS / TILE_TOKENS)]
                               : c.history.page(step, table, c.first_page + (unit - c.near_units) / pieces_of(head));
}

DEVICE u32 units_of(const ContextShape& c, const HeadPages& head) { return c.near_units + c.pages * pieces_of(head); }

// A position in the sequence of all units.
struct Place {
    u32 sequence, head, unit;

    DEVICE bool before(const Place& b) const {
        return sequence != b.sequence ? sequence < b.sequence : head != b.head ? head < b.head : unit < b.unit;
    }
};

constexpr u32 FIRST_PAGES = 64;

// The range of a worker: begin up to end; empty if the worker is idle. A copy of its first sequence
// saves a look-up.
struct alignas(16) WorkerRange {
    Place begin, end;
    SequenceInfo first;
};

// The range, and the page ids of its first units.
struct WorkerPlan : WorkerRange {
    u32 pages[FIRST_PAGES];
};

// The workers that read an item: first .. first + count.
struct ItemPlan {
    u32 first, count;
    u32 second;  // 1 if the range of worker `first` starts before this item, 0 if it starts with it
    u32 unused;
};
CHECK_LAYOUT(WorkerPlan);
CHECK_LAYOUT(ItemPlan);

// The plan in global memory: a WorkerPlan per worker, then an ItemPlan per item.
struct DecodePlan {
    u8* memory;
    u32 workers;

    DEVICE WorkerPlan* worker(u32 w) const { return (WorkerPlan*)memory + w; }
    // The range of a worker. Bypasses L1, which may hold the plan of an earlier step.
    DEVICE WorkerRange range(u32 w) const {
        static_assert(sizeof(WorkerRange) == 64, "four quads");
        const uint4* p = (const uint4*)worker(w);
        const uint4 x = __ldcg(p), y = __ldcg(p + 1), z = __ldcg(p + 2), v = __ldcg(p + 3);
        return {{x.x, x.y, x.z}, {x.w, y.x, y.y}, {y.z, y.w, z.x, z.y, z.z, z.w, v.x, v.y}};
    }
    DEVICE ItemPlan* item(u32 i) const { return (ItemPlan*)((WorkerPlan*)memory + workers) + i; }
};
CHECK_LAYOUT(DecodePlan);
