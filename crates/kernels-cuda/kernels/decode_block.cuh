// Decode attention: kernel arguments, shared memory, and the segment that a warp works on.
#pragma once
#include "decode_plan.cuh"
#include "decode_state.cuh"
#include "heads.cuh"
#include "pipeline.cuh"

struct DecodeArgs {
    StepTables step;
    DecodePlan plan;
    const HeadPages* heads;  // of this layer, by KV head
    const float* queries;    // [rows][query heads][HEAD_DIM], in the cache's basis
    const float* qkv;        // FROM_PROJECTIONS: rows of [queries | keys | values]
    HeadConstants new_heads;
    float* out;              // [rows][query heads][HEAD_DIM], or null
    u16* rounded;            // the same in BF16, or null
    float* partials;         // [2 * workers] partial results, EMPTY between launches
    u32 kv_heads;
    u32 group;    // query heads per KV head
    float scale;  // of the scores, times log2(e)
    Sinks sinks;
};
CHECK_LAYOUT(DecodeArgs);

constexpr int HEADS = COLUMNS;  // query heads that fit, one per column
constexpr int THREADS = 32 * WARPS;  // of the reading warps
constexpr int WARPS_ROUNDED = (WARPS + 3) / 4 * 4;
static_assert(WARPS <= 32, "the filler has one lane per ring");
constexpr int SUMS_STRIDE = HEAD_DIM + 4;  // padding: the heads of the lanes lie in different banks
constexpr int SUMS_BYTES = 4 * HEADS * SUMS_STRIDE;
// If it fits, a warp stores its result in the slot that announced the end of the segment.
constexpr bool SUMS_IN_SLOTS = SUMS_BYTES <= SLOT_BYTES;
constexpr u32 NO_UNIT = 0xffffffffu;
constexpr int KEY_ROW = COLUMNS;  // row of the key in `new_vectors`, behind the query heads
constexpr u32 NEAR_HEADS = 32;  // KV heads whose HeadPages are kept in shared memory

#ifndef FROM_PROJECTIONS
#define FROM_PROJECTIONS 0
#endif
static_assert(!FROM_PROJECTIONS || (QUERY_TILES == 1 && HEAD_DIM <= 128 && WARPS >= 10),
              "needs a warp per vector and per 16 channels, and registers for the rotation");

// The part of an item that a block reads. Kept in shared memory to save registers.
struct Segment {
    ContextShape context;
    HeadPages head;
    u32 table;                // of the sequence
    u32 view, view_end;
    u32 begin, end;           // units of the item
    u32 boundary, old_codes, row;
};

// A merge that this worker does after it has read its range.
struct OwedMerge {
    ItemPlan readers;         // the workers that read the item
    u32 row, head;            // row and KV head of the result
    u32 first_head, mergers;  // this worker merges heads first_head, first_head + mergers, ...
                              // mergers == 0: nothing to merge
};

struct alignas(128) Shared {
    u8 slots[WARPS][STAGES][SLOT_BYTES];
    u8 sums[SUMS_IN_SLOTS ? 1 : WARPS][SUMS_IN_SLOTS ? 16 : SUMS_BYTES];
    uint4 near_query[QUERY_TILES * STEPS * 32];
    uint2 coded_query[QUERY_TILES * STEPS * 32];  // in fp16, or split into bytes for 2-bit codes
    float query_sums[QUERY_TILES * STEPS][8];
    float largest[WARPS];
    alignas(16) float m[HEADS][WARPS_ROUNDED], l[HEADS][WARPS_ROUNDED];
    float top[HEADS];  // largest m over the warps
    float split_step;
    float2 to_codes[STEPS], from_codes[STEPS];  // factors of the result (State::scale_channels)
    u64 full[WARPS][STAGES], empty[WARPS][STAGES];
    u32 slot_unit[WARPS][STAGES];  // the unit that each slot holds; NO_UNIT: end of the segment
    alignas(16) u32 last_slot[WARPS_ROUNDED];  // the slot that held NO_UNIT
    // One copy per warp, because warps reach the next segment at different times.
    Segment segments[WARPS + 1];
    ItemPlan readers;              // of the segment's item
    alignas(16) HeadPages heads[NEAR_HEADS];  // of the layer
#if FROM_PROJECTIONS
    SplitVectors<COLUMNS + 1> new_vectors;  // before rotation: query heads by column, then the key
    alignas(16) float new_queries[COLUMNS][SUMS_STRIDE];
    alignas(16) u16 new_rows[2][HEAD_DIM];  // the new token's key and value, as stored
#endif

    DEVICE u8* sum_room(int warp) {
        if constexpr (SUMS_IN_SLOTS) return slots[warp][last_slot[warp]];
        else return sums[warp];
    }
};

// The host computes SHARED_BYTES (Variant::shared_bytes).
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES is too small");

// Sets the fields of a segment that depend on its sequence.
DEVICE void set_sequence(Segment& g, const DecodeArgs& a, const SequenceInfo& s) {
    g.context = context_of(a.step, s, 0);
    g.table = s.table;
    g.view = s.view;
    g.view_end = s.view_end;
    g.boundary = s.boundary;
    g.old_codes = s.old_codes;
    g.row = s.first_row;
}

DEVICE HeadPages head_pages(const Shared& shared, const DecodeArgs& a, u32 head_index) {
    return head_index < NEAR_HEADS ? shared.heads[head_index] : a.heads[head_index];
}

// Sets the segment to units begin .. end of a head of its sequence; false if there are none. All lanes
// write the same values.
DEVICE bool set_item(Segment& g, const StepTables& step, u32 head_index, const HeadPages& head, u32 begin, u32 end) {
    if (g.view != NO_VIEW && g.context.length > 0) {
        set_pages(g.context, step, g.boundary, g.view, g.view_end, head_index);
        __syncwarp();
    }
    u32 all = units_of(g.context, head);
    end = end < all ? end : all;
    if (begin >= end) return false;
    g.head = head;
    g.begin = begin;
    g.end = end;
    return true;
}

#if FROM_PROJECTIONS
// The HeadPages of the first KV heads of the layer, spread over the lanes of a warp. They are
// loaded before the block knows which head it needs.
struct LayerHeads {
    static constexpr u32 HELD = 16;
    uint4 half;

    DEVICE void load(const DecodeArgs& a, u32 lane) {
        static_assert(sizeof(HeadPages) == 2 * sizeof(uint4), "two lanes per head");
        half = make_uint4(0, 0, 0, 0);
        if (lane < 2 * a.kv_heads) half = ((const uint4*)a.heads)[lane];
    }
    // Called by the whole warp, for one head.
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

// The readers signal that their barriers are initialized and continue; the filler waits for them.
DEVICE void barriers_are_made() { asm volatile("bar.arrive 2, %0;" ::"n"(THREADS + 32) : "memory"); }
DEVICE void wait_for_barriers() { asm volatile("bar.sync 2, %0;" ::"n"(THREADS + 32) : "memory"); }

// Synchronizes all reading threads.
DEVICE void sync_readers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// End of a segment: all readers have read the results that lie in slots. The filler learns it slot
// by slot, when the readers release them. Racecheck cannot follow an order that results from two
// different barriers, so for it the filler waits here too.
#ifdef RACECHECK
DEVICE void filler_ends_segment() { asm volatile("bar.sync 3, %0;" ::"n"(THREADS + 32) : "memory"); }
#else
DEVICE void filler_ends_segment() {}
#endif
DEVICE void readers_end_segment() {
    sync_readers();
    filler_ends_segment();
}
