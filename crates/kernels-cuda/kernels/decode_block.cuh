// What a block of decode attention is given and shares: the launch's arguments, shared memory, the segment at hand.
#pragma once
#include "decode_plan.cuh"
#include "decode_state.cuh"
#include "heads.cuh"
#include "pipeline.cuh"

struct DecodeArgs {
    StepTables step;
    DecodePlan plan;
    const HeadPages* heads;  // of this layer
    const float* queries;    // [rows][query heads][HEAD_DIM], in the cache's basis
    const float* qkv;        // FROM_PROJECTIONS: instead, rows of [queries | keys | values]
    HeadConstants new_heads;
    float* out;              // [rows][query heads][HEAD_DIM], or null
    u16* rounded;            // the same in BF16, or null
    float* partials;         // [2 * workers] partial results (decode_merge.cuh), EMPTY before and after every launch
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
constexpr u32 NO_UNIT = 0xffffffffu;
constexpr int KEY_ROW = COLUMNS;  // of vectors to rotate, behind the query heads
constexpr u32 NEAR_HEADS = 32;  // KV heads beyond these are looked up in memory

#ifndef FROM_PROJECTIONS
#define FROM_PROJECTIONS 0
#endif
static_assert(!FROM_PROJECTIONS || (QUERY_TILES == 1 && HEAD_DIM <= 128 && WARPS >= 10),
              "a warp for every vector and for every 16 channels, and room for the rotation in registers");

// What a block reads of an item. Kept in shared memory, for the registers' sake.
struct Segment {
    ContextShape context;
    HeadPages head;
    const u32 *full, *coded;  // page ids of the sequence
    u32 begin, end;           // units of the item
    u32 boundary, old_codes, row;
};

// An item some of whose heads the worker merges when its range is read: its readers, where the result goes, which heads.
struct OwedMerge {
    ItemPlan readers;
    u32 row, head;
    u32 first_head, mergers;  // every mergers-th head from the first on; none where there are no mergers
};

struct alignas(128) Shared {
    u8 slots[WARPS][STAGES][SLOT_BYTES];
    u8 sums[SUMS_IN_SLOTS ? 1 : WARPS][SUMS_IN_SLOTS ? 16 : SUMS_BYTES];
    uint4 near_query[QUERY_TILES * STEPS * 32];
    uint2 coded_query[QUERY_TILES * STEPS * 32];  // in fp16, or split into bytes for two-bit codes
    float query_sums[QUERY_TILES * STEPS][8];
    float largest[WARPS];
    alignas(16) float m[HEADS][WARPS_ROUNDED], l[HEADS][WARPS_ROUNDED];
    float top[HEADS];  // largest m
    float split_step;
    float2 to_codes[STEPS], from_codes[STEPS];  // units of the result
    u64 full[WARPS][STAGES], empty[WARPS][STAGES];
    u32 slot_unit[WARPS][STAGES];  // what each slot holds
    alignas(16) u32 last_slot[WARPS_ROUNDED];  // the slot that held NO_UNIT
    Segment segments[WARPS + 1];   // each warp's own copy: warps go on to the next segment at different times
    ItemPlan readers;              // of the segment's item
    alignas(16) HeadPages heads[NEAR_HEADS];  // of the layer, fetched beside the plan
#if FROM_PROJECTIONS
    SplitVectors<COLUMNS + 1> new_vectors;           // before their rotation: query heads by column, the key
    alignas(16) float new_queries[COLUMNS][SUMS_STRIDE];
    alignas(16) u16 new_rows[2][HEAD_DIM];           // the token's key and value as they are stored
#endif

    DEVICE u8* sum_room(int warp) {
        if constexpr (SUMS_IN_SLOTS) return slots[warp][last_slot[warp]];
        else return sums[warp];
    }
};

// What the host launches with.
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES is too small");

// Describes a sequence.
DEVICE void set_sequence(Segment& g, const DecodeArgs& a, const SequenceInfo& s) {
    g.context = context_of(a.step, s);
    g.full = a.step.full + s.table;
    g.coded = a.step.coded + s.table;
    g.boundary = s.boundary;
    g.old_codes = s.old_codes;
    g.row = s.first_row;
}

DEVICE HeadPages head_pages(const Shared& shared, const DecodeArgs& a, u32 head_index) {
    return head_index < NEAR_HEADS ? shared.heads[head_index] : a.heads[head_index];
}

// Describes units begin..end of an item of the sequence; false where there are none.
DEVICE bool set_item(Segment& g, const HeadPages& head, u32 begin, u32 end) {
    u32 all = units_of(g.context, head);
    end = end < all ? end : all;
    if (begin >= end) return false;
    g.head = head;
    g.begin = begin;
    g.end = end;
    return true;
}

#if FROM_PROJECTIONS
// The first heads of a layer over the lanes of a warp: asked for before it is known which one is needed.
struct LayerHeads {
    static constexpr u32 HELD = 16;
    uint4 half;

    DEVICE void load(const DecodeArgs& a, u32 lane) {
        static_assert(sizeof(HeadPages) == 2 * sizeof(uint4), "two lanes a head");
        half = make_uint4(0, 0, 0, 0);
        if (lane < 2 * a.kv_heads) half = ((const uint4*)a.heads)[lane];
    }
    // The whole warp, for one head.
    DEVICE HeadPages of(const DecodeArgs& a, u32 head) const {
        if (head >= HELD) return a.heads[head];
        auto word = [&](u32 x, u32 lane) { return __shfl_sync(0xffffffffu, x, lane); };
        auto both = [&](u32 low, u32 high, u32 lane) { return (u64)word(high, lane) << 32 | word(low, lane); };
        const u32 first = 2 * head, second = first + 1;
        return {both(half.x, half.y, first), both(half.z, half.w, first),
                word(half.x, second), word(half.y, second), word(half.z, second), word(half.w, second)};
    }
};
#endif

// Readers say that they have made their barriers, and go on; the filling warp waits for it.
DEVICE void barriers_are_made() { asm volatile("bar.arrive 2, %0;" ::"n"(THREADS + 32) : "memory"); }
DEVICE void wait_for_barriers() { asm volatile("bar.sync 2, %0;" ::"n"(THREADS + 32) : "memory"); }

// All reading threads.
DEVICE void sync_readers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Between segments: everyone has read the results that lie in slots. The filler learns it slot by slot, as readers then empty
// them, and begins with others meanwhile. Racecheck does not follow an order that is made of the readers' barrier and a
// ring's: for it the filler waits too.
#ifdef RACECHECK
DEVICE void filler_ends_segment() { asm volatile("bar.sync 3, %0;" ::"n"(THREADS + 32) : "memory"); }
#else
DEVICE void filler_ends_segment() {}
#endif
DEVICE void readers_end_segment() {
    sync_readers();
    filler_ends_segment();
}
