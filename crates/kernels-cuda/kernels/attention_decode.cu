// Attention of the decode phase over paged KV: one launch per layer for all sequences, BF16 and
// quantized tokens together.
//
// Work is split along the context (as in FlashDecoding). One persistent thread block per
// multiprocessor works through its range of the plan (decode_plan.cuh). A *segment* is the part of
// one item (sequence and KV head) that the block reads. WARPS warps read; one more warp, the
// filler, assigns the units of the segment to the warps' rings as slots become free, and starts the
// copies. The readers synchronize only at the end of a segment; meanwhile the filler already copies
// the first pages of the next one. If several blocks read an item, each writes a partial result.
// The last of these blocks merge the results, some heads each, after they have read the rest of
// their ranges. Blocks may wait for one another because all are resident: there are no more blocks
// than multiprocessors.
//
// Early loads. A block finds its pages before wait_for_previous_kernel. This is safe for the
// tables, the plan, and codes made before the plan kernel: the plan kernel is launched without
// overlap, so it starts after the kernels before it have finished, and attention starts after the
// plan kernel has finished. Each warp also fills one slot before the wait, if its pages are older
// than the step. More early copies would compete for memory with the kernels that attention waits
// for. With FROM_PROJECTIONS only a matrix product comes before, and two slots are better (both
// measured on an H200).
//
// Compiled with
//   HEAD_DIM          64, 128 or 256
//   QUERY_TILES       tiles of 8 query heads per KV head: 1 or 2
//   WARPS, STAGES     reading warps, slots per ring
//   SPLIT_QUERY       see decode_state.cuh
//   FROM_PROJECTIONS  this kernel also appends the new token to the cache (decode_heads.cuh).
//                     The plan then gives every item its own blocks.
//   BLOCKS            thread blocks per multiprocessor
//   SHARED_BYTES      dynamic shared memory
//   SINKS             the layer has attention sinks; not together with FROM_PROJECTIONS
//   RACECHECK         adds synchronization for the racecheck tool of compute-sanitizer
#include "decode_filler.cuh"
#include "decode_heads.cuh"
#include "decode_merge.cuh"
#include "decode_query.cuh"
#include "decode_readers.cuh"

// One lane of each warp initializes the barriers of the warp's ring. This comes before all loads,
// because the fence would wait for them.
DEVICE void make_barriers(Shared& shared, int lane, int warp) {
    if (warp >= WARPS || lane != 0) return;
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        barrier_init(shared_address(&shared.full[warp][i]), FULL_ARRIVALS);
        barrier_init(shared_address(&shared.empty[warp][i]), EMPTY_ARRIVALS);
    }
    barriers_before_bulk_copies();
}

DEVICE Ring ring_of(Shared& shared, int warp) {
    Ring ring;
    ring.full = shared_address(shared.full[warp]), ring.empty = shared_address(shared.empty[warp]), ring.slot = ring.phase = 0;
    return ring;
}

// Reads the units of a segment in the order in which the filler delivers them. Called by all
// readers.
DEVICE void read_segment(State& state, Ring& ring, Shared& shared, const DecodeArgs& a, float down, int lane, int warp) {
    const Segment& g = shared.segments[warp];
    state.clear();
    read_near(state, ring, shared, lane, warp);
    if (shared.slot_unit[warp][ring.slot] != NO_UNIT) {
        if (state.fresh) {
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++) state.m[n][0] = state.m[n][1] = 0.f;
        } else {
            state.scale_channels(shared.to_codes);
        }
        if (pieces_of(g.head) != 1) {
            CodedQuery query;
            load_query(query, shared, down, lane);
            read_any_width(state, query, ring, shared, a.step.sink, lane, warp);
        } else {
#if SPLIT_QUERY
            SplitQuery query;
            load_query(query, shared, lane);
#else
            CodedQuery query;
            load_query(query, shared, down, lane);
#endif
            read_two_bit(state, query, ring, shared, a.step.sink, lane, warp);
        }
        state.scale_channels(shared.from_codes);
    }
    if (lane == 0) shared.last_slot[warp] = ring.slot;
    __syncwarp();
}

DEVICE void merge_owed(const DecodeArgs& a, const OwedMerge& owed) {
    if (owed.mergers == 0) return;
    if (owed.readers.count <= 2 * SHARERS) merge_item<2>(a, owed);
    else merge_item<6>(a, owed);
}

#if FROM_PROJECTIONS
constexpr int EARLY_SLOTS = 2;  // slots per warp that are filled before wait_for_previous_kernel

// Each block reads one item. The critical path from the end of the previous kernel to the first
// score is: load the projections, make queries from them. These loads are issued first; everything
// else is done while they are in flight.
extern "C" __global__ void __launch_bounds__(THREADS + 32, BLOCKS) decode_attention(const __grid_constant__ DecodeArgs a) {
    extern __shared__ u8 memory[];
    Shared& shared = *(Shared*)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 worker = blockIdx.x;
    allow_next_kernel();
    make_barriers(shared, lane, warp);
    fetch_rotations(a, worker, lane, warp);
    const WorkerRange plan = a.plan.range(worker);
    Filler filler;
    LayerHeads heads;
    if (warp == WARPS) {
        filler.load_pages(a.plan.worker(worker)->pages, lane);
        heads.load(a, lane);
        wait_for_barriers();
    } else {
        barriers_are_made();
    }
    if (!plan.begin.before(plan.end)) {
        wait_for_previous_kernel();
        return;
    }
    Segment& g = shared.segments[warp];
    const u32 item = plan.begin.sequence * a.kv_heads + plan.begin.head;
    auto describe = [&](const HeadPages& head) {
        const bool ends = plan.begin.sequence == plan.end.sequence && plan.begin.head == plan.end.head;
        set_sequence(g, a, plan.first);
        __syncwarp();
        set_item(g, a.step, plan.begin.head, head, plan.begin.unit, ends ? plan.end.unit : 0xffffffffu);
        __syncwarp();
    };
    if (warp == WARPS) {
        describe(heads.of(a, plan.begin.head));
        filler.begin(lane);
        // These units hold nothing of this step: the new token's row is inserted into its tile
        // later.
        for (int i = 0; i < EARLY_SLOTS; i++) filler.hand_out(shared, a.step, g, lane, true);
        fetch_partial(a, worker, lane);
        wait_for_previous_kernel();
        filler.serve(shared, a.step, g, lane, true);
        return;
    }
    NewToken token(a, plan, lane, warp);
    wait_for_previous_kernel();
    token.load();
    uint4 readers = {};
    if (threadIdx.x == 0) readers = __ldcg((const uint4*)a.plan.item(item));
    describe(a.heads[plan.begin.head]);
    put_channel_scales(shared, g.head.value_bits);
    QueryRows rows;
    token.make(shared, a, rows, lane, warp);
    float down = prepare_query(shared, a, rows, readers, g.head.key_bits, g.head.value_bits);
    Ring ring = ring_of(shared, warp);
    State state;
    read_segment(state, ring, shared, a, down, lane, warp);
    put_down(shared, state, lane, warp);
    merge_owed(a, finish_segment(shared, a, g.row, plan.begin.head, worker, true));
}
#else
extern "C" __global__ void __launch_bounds__(THREADS + 32, BLOCKS) decode_attention(const __grid_constant__ DecodeArgs a) {
    extern __shared__ u8 memory[];
    Shared& shared = *(Shared*)memory;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 worker = blockIdx.x;
    allow_next_kernel();
    make_barriers(shared, lane, warp);
    if (threadIdx.x < a.kv_heads * (sizeof(HeadPages) / 16) && threadIdx.x < NEAR_HEADS * (sizeof(HeadPages) / 16))
        copy_to_shared(shared_address((uint4*)shared.heads + threadIdx.x), (const uint4*)a.heads + threadIdx.x);
    const WorkerRange plan = a.plan.range(worker);
    Filler filler;
    if (warp == WARPS) filler.load_pages(a.plan.worker(worker)->pages, lane);
    if (!plan.begin.before(plan.end)) {
        wait_for_previous_kernel();
        return;
    }
    Segment& g = shared.segments[warp];
    Place at = plan.begin;
    set_sequence(g, a, plan.first);
    auto next_item = [&]() {
        if (++at.head == a.kv_heads) {
            at.head = 0;
            __syncwarp();
            if (++at.sequence < a.step.sequence_count) set_sequence(g, a, a.step.sequences[at.sequence]);
            __syncwarp();
        }
        at.unit = 0;
    };
    // Sets `g` to the next item of the range, from `at` on, that has units.
    auto find = [&]() {
        __syncwarp();
        bool found = false;
        while (at.before(plan.end)) {
            bool ends = at.sequence == plan.end.sequence && at.head == plan.end.head;
            found = set_item(g, a.step, at.head, head_pages(shared, a, at.head), at.unit, ends ? plan.end.unit : 0xffffffffu);
            if (found) break;
            next_item();
        }
        __syncwarp();
        return found;
    };
    wait_for_copied_bytes();
    __syncthreads();
    if (warp == WARPS) {
        // The first item of a worker's range always has units.
        find();
        filler.begin(lane);
        const u32 old = g.context.old_until(g.head, g.begin, g.old_codes, g.boundary);
        if (g.begin < old) filler.hand_out(shared, a.step, g, lane, true, old);
        fetch_partial(a, worker, lane);
        wait_for_previous_kernel();
        filler.serve(shared, a.step, g, lane, true);
        for (next_item(); find(); next_item()) {
            filler_ends_segment();
            filler.begin(lane);
            filler.serve(shared, a.step, g, lane, false);
        }
        return;
    }
    Ring ring = ring_of(shared, warp);
    State state;
    OwedMerge owed;
    bool first = true, more = find();
    while (more) {
        const u32 row = g.row, head = at.head, item = at.sequence * a.kv_heads + at.head;
        // Needed at the end of the segment.
        uint4 readers = {};
        if (threadIdx.x == 0) readers = __ldcg((const uint4*)a.plan.item(item));
        put_channel_scales(shared, g.head.value_bits);
        QueryRows rows(a, row, head, lane, warp);
        if (first) wait_for_previous_kernel();
        rows.load();
        float down = prepare_query(shared, a, rows, readers, g.head.key_bits, g.head.value_bits);
        read_segment(state, ring, shared, a, down, lane, warp);
        put_down(shared, state, lane, warp);
        const OwedMerge owes = finish_segment(shared, a, row, head, worker, first);
        if (first) owed = owes;
        first = false;
        next_item();
        more = find();
        if (more) {
            // Return the slots that held the result to the filler.
            readers_end_segment();
            writes_before_bulk_copies();
            ring.release();
        }
    }
    merge_owed(a, owed);
}
#endif
