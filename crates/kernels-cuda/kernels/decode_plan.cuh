// How one step's decode attention is shared out.
//
// The context of a (sequence, KV head) pair, an *item*, is a row of units: first the 16-token tiles read in BF16 (sink, then
// recent), then the coded pages (whole, or in halves where a page is too large for a slot). Items follow one another,
// sequences outside, heads inside, and every worker (thread block) takes a range of units of about equal bytes: a worker
// begins at (item, unit) and ends where the next one begins. An item read by several workers is merged by the last of them.
#pragma once
#include "common.cuh"

// The units of one sequence.
struct ContextShape {
    u32 length;       // positions 0..length are read
    u32 sink_tiles;   // tiles 0..sink_tiles in BF16
    u32 recent_tile;  // tiles recent_tile.. too
    u32 near_units;   // all BF16 tiles
    u32 first_page;   // coded pages first_page..first_page + pages
    u32 pages;
};

DEVICE ContextShape context_of(const StepTables& step, const SequenceInfo& s) {
    ContextShape c;
    c.length = s.first_position + s.rows;
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

// Two-bit pages fit a slot; the others come in halves.
DEVICE u32 pieces_of(const HeadPages& head) { return head.key_bits == 2 && head.value_bits == 2 ? 1 : 2; }

DEVICE u32 units_of(const ContextShape& c, const HeadPages& head) { return c.near_units + c.pages * pieces_of(head); }

// The plan in memory: [active workers, 0, 0, 0] [start of each worker and the end: (item, unit)] [items: (first worker, workers)].
struct DecodePlan {
    u32* words;
    u32 workers;  // room for starts

    DEVICE u32 active() const { return words[0]; }
    DEVICE uint2* starts() const { return (uint2*)(words + 4); }
    DEVICE uint2* items() const { return starts() + workers + 1; }
};
